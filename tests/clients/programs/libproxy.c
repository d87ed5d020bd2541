// A library with a CUDA runtime of its own: it calls no symbol of CUDA's, opens the driver itself and asks it for its functions.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

int pin(int times, size_t bytes) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*look_up)(const char *, void **, int, uint64_t, int *) = dlsym(driver, "cuGetProcAddress_v2");
    int (*host_alloc)(void **, size_t, unsigned) = NULL;
    if (!look_up || look_up("cuMemHostAlloc", (void **)&host_alloc, 12000, 0, NULL)) return -1;
    for (int i = 0; i < times; i++) {
        void *at;
        int code = host_alloc(&at, bytes, 0);
        if (code) return code;
    }
    return 0;
}
