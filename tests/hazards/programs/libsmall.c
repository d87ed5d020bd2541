// A CUDA runtime that does nothing but count addresses up, with next to no stack: for programs whose stacks have no room for
// more, and for those that call very often.
#include <stddef.h>
#include <stdint.h>

static uint64_t next = 0x700000000000;

int cudaMalloc(void **out, size_t size) {
    *out = (void *)__atomic_fetch_add(&next, (size + 511) & ~(uint64_t)511, __ATOMIC_RELAXED);
    return 0;
}

int cudaFree(void *at) {
    (void)at;
    return 0;
}

int cudaGetDevice(int *device) { return *device = 0; }
int cuInit(unsigned flags) { return flags != 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }

int cuCtxGetCurrent(void **context) {
    *context = (void *)0x1000;
    return 0;
}
