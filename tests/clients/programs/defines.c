// A program that defines one of CUDA's functions for everybody, and passes calls on.
#include "client.h"

static int calls;

int cudaMalloc(void **at, size_t size) {
    int (*next)(void **, size_t) = dlsym(RTLD_NEXT, "cudaMalloc");
    calls++;
    return next ? next(at, size) : -1;
}

int main(void) {
    void *at;
    int first = cudaMalloc(&at, 1000), (*named)(void **, size_t) = dlsym(RTLD_DEFAULT, "cudaMalloc"), second = named(&at, 2000);
    printf("%d %d, %d calls\n", first, second, calls);
    return 0;
}
