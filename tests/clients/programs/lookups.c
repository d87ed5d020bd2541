// Looks functions up in ways that are easy to get wrong. The argument says which.
#include "client.h"

static void context(void) {
    handle_t first;
    if (cuInit(0)) fail("cuInit", "no device");
    cuDevicePrimaryCtxRetain(&first, 0);
    cuCtxSetCurrent(first);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "next") == 0) {
        // Two libraries are preloaded, the asking one before memtrace and the answering one behind it.
        void *asks = dlopen("libnext.so", RTLD_NOW);
        if (!asks) fail("dlopen", dlerror());
        const char *(*whose)(void) = dlsym(asks, "whose"), *(*cu)(void) = dlsym(asks, "cuWhose");
        printf("%s, %s\n", whose(), cu());
    } else if (strcmp(what, "errors") == 0) {
        void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
        if (!dlsym(cuda, "cuMemAlloc_v2") || dlerror()) fail("dlerror", "after success");
        if (dlsym(cuda, "cuNoSuchFunction")) fail("dlsym", "found anything");
        const char *said = dlerror();
        if (!said || !strstr(said, "cuNoSuchFunction")) fail("dlerror", said ? said : "says nothing");
        if (!dlsym(cuda, "cuInit") || dlerror()) fail("dlerror", "after success again");
        if (dlsym(RTLD_DEFAULT, "no_such_function")) fail("dlsym", "found anything");
        if (!strstr(dlerror(), "no_such_function")) fail("dlerror", "another name");
        // Whoever asks a library for dlsym gets one that knows us, too.
        void *c = dlopen("libc.so.6", RTLD_NOW);
        void *(*look)(void *, const char *) = dlsym(c, "dlsym");
        if (look(cuda, "cuMemAlloc_v2") != dlsym(cuda, "cuMemAlloc_v2")) fail("dlsym", "of a library");
        puts("as it should be");
    } else if (strcmp(what, "bundled") == 0) {
        void *at;
        context();
        device[0].contexts++;
        int (*own)(void **, size_t) = dlsym(dlopen("libbundled.so", RTLD_NOW), "cudaMalloc");
        if (own(&at, 3000)) fail("cudaMalloc", "the bundled one");
        device[0].device_bytes += 3000;
        if (own(&at, 1ul << 45) != 1002) fail("cudaMalloc", "not its own answer");
        step("bundled");
    } else if (strncmp(what, "deep", 4) == 0) {
        context();
        device[0].contexts++;
        int when = strcmp(what, "deep-lazy") == 0 ? RTLD_LAZY : RTLD_NOW;
        int (*run)(void) = dlsym(dlopen("libdeep.so", when | RTLD_DEEPBIND), "run");
        if (!run || run()) fail("libdeep.so", "can't run");
        device[0].device_bytes += 3000;
        step("deep");
    } else if (strcmp(what, "nested") == 0) {
        void *at, *kept;
        device[0].contexts++;
        if (cudaMalloc(&at, 500) || cudaMalloc(&kept, 600) || cudaFree(at)) fail("cudaMalloc", "through the driver");
        device[0].device_bytes += 600;
        step("nested");
    } else if (strcmp(what, "calls") == 0) {
        void *a;
        addr_t b;
        context();
        device[0].contexts++;
        if (cudaMalloc(&a, 1000) || cuMemAlloc_v2(&b, 2000)) fail("calls", "by symbol");
        device[0].device_bytes += 3000;
        way = "dlsym";
        CALL(cuMemAlloc_v2, &b, 4000);
        device[0].device_bytes += 4000;
        step("calls");
    } else if (strcmp(what, "old") == 0) {
        int (*old)(unsigned *, unsigned) = named("cuMemAlloc");
        unsigned at;
        context();
        printf("%d %d\n", old(&at, 100), old(&at, 100));
    }
    return 0;
}
