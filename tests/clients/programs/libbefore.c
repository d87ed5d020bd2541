// An interposer of somebody else's: sees calls, passes them on to whoever is next, and says at the end how many it saw.
// It has a constructor that looks things up before anything of memtrace's has run.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef NAME
#define NAME "before"
#endif

static int seen;

int cudaMalloc(void **at, size_t size) {
    int (*next)(void **, size_t) = dlsym(RTLD_NEXT, "cudaMalloc");
    if (next == cudaMalloc) abort(); // endless recursion
    seen++;
    return next(at, size);
}

int cuMemAlloc_v2(unsigned long long *at, size_t size) {
    int (*next)(unsigned long long *, size_t) = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    if (next == cuMemAlloc_v2) abort();
    seen++;
    return next(at, size);
}

#ifdef OWN_DLSYM
// Forwards by a call, as many do. Whoever comes to it by a jump is answered as if the question were this library's.
void *dlsym(void *handle, const char *name) {
    static void *(*next)(void *, const char *);
    if (!next) next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *found = next(handle, name);
    __asm__ volatile(""); // no tail call
    return found;
}
#endif

__attribute__((constructor)) static void early(void) {
    if (!dlsym(RTLD_DEFAULT, "malloc")) abort();
    if (!dlvsym(RTLD_DEFAULT, "dlopen", "GLIBC_2.2.5")) abort();
}

__attribute__((destructor)) static void late(void) { fprintf(stderr, NAME " saw %d\n", seen); }
