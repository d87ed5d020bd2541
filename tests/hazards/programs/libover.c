// A runtime over a driver (`libunder.c`), as NVIDIA's is: what it is asked for it asks of the driver, whose functions it has by name.
// A signal comes before and after that, inside the call.
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>

static int (*driver_alloc)(unsigned long long *, size_t);
static int (*driver_free)(unsigned long long);
static __thread int inside;

static void interrupt(void) {
    if (inside == 1) raise(SIGUSR1);
}

int cudaMalloc(void **out, size_t size) {
    if (!driver_alloc) {
        void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        driver_free = (int (*)(unsigned long long))dlsym(driver, "cuMemFree_v2");
        driver_alloc = (int (*)(unsigned long long *, size_t))dlsym(driver, "cuMemAlloc_v2");
    }
    inside++;
    interrupt();
    int code = driver_alloc((unsigned long long *)out, size);
    interrupt();
    inside--;
    return code;
}

int cudaFree(void *at) {
    inside++;
    interrupt();
    int code = driver_free((unsigned long long)at);
    interrupt();
    inside--;
    return code;
}
