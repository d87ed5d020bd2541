// Many callers of one function, and callers that go. The first argument says which.
#include "client.h"
#include <time.h>

static void *open_library(const char *name, int how) {
    void *library = dlopen(name, RTLD_NOW | how);
    if (!library) fail("dlopen", dlerror());
    return library;
}

static int ask(void *library) { return ((int (*)(void))dlsym(library, "ask"))(); }

// One library where another one was, each with an NCCL of its own; closed in a way that memtrace sees or not.
static const char *second;
static void *later;
static void ask_second(void) { printf("%d ", ask(later = open_library(second, 0))); }

static void go(const char *how, char **files) {
    int (*closes)(void *) = dlclose;
    void (**meanwhile)(void) = dlsym(RTLD_DEFAULT, "meanwhile");
    if (strcmp(how, "libc") == 0) closes = dlsym(open_library("libc.so.6", 0), "dlclose");
    if (strcmp(how, "deep") == 0) closes = dlsym(open_library("libcloses.so", RTLD_DEEPBIND), "closes");
    for (int i = 0; i < 4; i++) {
        void *first = open_library(files[0], 0);
        printf("%d ", ask(first));
        second = files[1];
        if (strcmp(how, "meanwhile") == 0) *meanwhile = ask_second;
        closes(first);
        if (!later) ask_second();
        closes(later), later = NULL;
    }
    puts("");
}

// Nanoseconds of a call, where several libraries take turns; the best of some rounds.
static void turns(int count, char **files) {
    enum { ROUNDS = 50, CALLS = 20 };
    int (*asks[64])(void), sum = 0;
    long best = 1L << 40;
    for (int i = 0; i < count; i++) asks[i] = dlsym(open_library(files[i], 0), "ask"), sum += asks[i]();
    for (int round = 0; round < ROUNDS; round++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int call = 0; call < CALLS; call++)
            for (int i = 0; i < count; i++) sum += asks[i]();
        clock_gettime(CLOCK_MONOTONIC, &b);
        long took = ((b.tv_sec - a.tv_sec) * 1000000000L + b.tv_nsec - a.tv_nsec) / (CALLS * count);
        if (took < best) best = took;
    }
    printf("%d %ld\n", sum, best);
}

// By a weak symbol, which memtrace's own fills, again and again; then there is a library that has it.
extern int ncclGroupStart(void) __attribute__((weak));
static void weak(const char *file) {
    long sum = 0;
    for (int i = 0; i < 1000; i++) sum += ncclGroupStart() + (i % 2 ? cudaFree(0) : 0);
    printf("%ld", sum);
    open_library(file, RTLD_GLOBAL);
    for (int i = 0; i < 3; i++) printf(" %d", ncclGroupStart());
    puts("");
}

// A library that is bound as it is used, or while it is being opened.
static void binds(int count, char **files) {
    for (int i = 0; i < count - 1; i++) open_library(files[i], 0);
    void *library = dlopen(files[count - 1], RTLD_LAZY);
    if (!library) fail("dlopen", dlerror());
    printf("%d", ask(library));
    printf(" %d\n", ((int (*)(void))dlsym(library, "other"))());
}

// Two drivers without memory, one after the other.
static void drivers(char **files) {
    for (int i = 0; i < 2; i++) {
        addr_t at;
        void *driver = open_library(files[i], i ? 0 : RTLD_GLOBAL);
        int (*alloc)(addr_t *, size_t) = dlsym(driver, "cuMemAlloc_v2");
        printf("%d\n", alloc(&at, 1000));
        fflush(stdout);
        dlclose(driver);
    }
}

int main(int argc, char **argv) {
    if (argc > 4 && strcmp(argv[1], "go") == 0) go(argv[2], argv + 3);
    if (argc > 2 && strcmp(argv[1], "turns") == 0) turns(argc - 2, argv + 2);
    if (argc > 2 && strcmp(argv[1], "weak") == 0) weak(argv[2]);
    if (argc > 2 && strcmp(argv[1], "binds") == 0) binds(argc - 2, argv + 2);
    if (argc > 3 && strcmp(argv[1], "drivers") == 0) drivers(argv + 2);
    return 0;
}
