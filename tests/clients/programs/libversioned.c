// A library whose symbols have a version, as those of the CUDA runtime have: reached by dlvsym.
#include <dlfcn.h>
#include <stddef.h>

int cuMemAlloc_v2(unsigned long long *at, size_t size) {
    int (*next)(unsigned long long *, size_t) = dlsym(RTLD_DEFAULT, "cuMemAlloc_v2");
    return next(at, size);
}

int cuMemFree_v2(unsigned long long at) {
    int (*next)(unsigned long long) = dlsym(RTLD_DEFAULT, "cuMemFree_v2");
    return next(at);
}
