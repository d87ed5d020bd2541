// Another tool's library, whose functions of CUDA's names call each other by symbol. Who calls `cudaMalloc` from elsewhere goes
// to whoever is next.
#include <dlfcn.h>
#include <stddef.h>

int cudaMalloc(void **at, size_t size) {
    static int (*next)(void **, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "cudaMalloc");
    return next(at, size);
}
int cudaMallocManaged(void **at, size_t size, unsigned flags) { return flags ? cudaMalloc(at, size) : 1; }
