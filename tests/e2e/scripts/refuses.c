// A device that has failed, as far as cudaMalloc shows: requests of 64 MiB are answered with the error in REFUSES.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>

int cudaMalloc(void **addr, size_t size) {
    const char *error = getenv("REFUSES");
    if (error && size == 64 << 20)
        return atoi(error);
    int (*real)(void **, size_t) = (int (*)(void **, size_t))dlsym(RTLD_NEXT, "cudaMalloc");
    return real(addr, size);
}
