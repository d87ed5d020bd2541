// A library that is opened with RTLD_DEEPBIND: its own dependencies, the driver and the C library, come first. It calls
// the driver by symbol and by name.
#include <dlfcn.h>
#include <stddef.h>

int cuMemAlloc_v2(unsigned long long *at, size_t size);

int run(void) {
    unsigned long long at;
    int code = cuMemAlloc_v2(&at, 1000);
    int (*alloc)(unsigned long long *, size_t) = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemAlloc_v2");
    return code ? code : alloc(&at, 2000);
}
