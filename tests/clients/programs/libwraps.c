// Wraps a function of the driver, which it needs: asks who is next.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

int cuInit(unsigned); // so that it needs the driver
int wrapped;

int cuMemAlloc_v2(uint64_t *at, size_t size) {
    int (*next)(uint64_t *, size_t) = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    if (!next || cuInit(0)) return 999;
    wrapped++;
    return next(at, size + 1);
}
