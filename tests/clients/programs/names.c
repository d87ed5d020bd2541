// Functions of CUDA's names in libraries that aren't CUDA's. The first argument says how they are come to; what is printed is
// the same with memtrace and without.
#include "client.h"
#include <link.h>
#include <sys/mman.h>

extern int ncclGroupStart(void) __attribute__((weak)), cublasSetWorkspace_v2(handle_t, void *, size_t) __attribute__((weak));
typedef double (*product)(double, double, const char *);
static const char *const NAMES[] = {"cuMemAlloc_v2", "cuMemFree_v2", "cuArrayCreate_v2", "ncclGroupStart", "cublasSetWorkspace_v2",
                                    "cudaMalloc", "cuWhose"};

static void *open_library(const char *name, int how) {
    void *library = dlopen(name, RTLD_NOW | how);
    if (!library) fail("dlopen", dlerror());
    return library;
}

static void whose(const char *how, void *handle) {
    for (unsigned i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        Dl_info info = {0};
        dlerror();
        void *found = dlsym(handle, NAMES[i]);
        const char *error = dlerror();
        int named = error && strstr(error, "undefined symbol") && strstr(error, NAMES[i]);
        if (found) dladdr(found, &info);
        const char *file = info.dli_fname ? strrchr(info.dli_fname, '/') : NULL;
        printf("%s %s: %s%s\n", how, NAMES[i], file ? file + 1 : "none", error ? named ? ", as dlerror says" : error : "");
        if (!dlvsym(handle, NAMES[i], "NO_SUCH_VERSION") && !dlerror()) fail("dlvsym", "says nothing");
    }
}

static void use(const char *name, void *library) {
    product by_name = dlsym(library, "cuMemAlloc_v2"), given = ((product(*)(void))dlsym(library, "given"))();
    printf("%s: by name %g, by a table %g,", name, by_name(1, 1, "A"), given(1, 1, "B"));
    const char *const how[] = {"jumps", "calls", "others"};
    for (int i = 0; i < 3; i++) printf(" %s %g", how[i], ((double (*)(void))dlsym(library, how[i]))());
    puts("");
}

static void wrapper(const char *file) {
    handle_t context;
    addr_t at;
    cuInit(0), cuDevicePrimaryCtxRetain(&context, 0), cuCtxSetCurrent(context);
    void *driver = open_library("libcuda.so.1", 0), *library = open_library(file, 0);
    int (*real)(addr_t *, size_t) = dlsym(driver, "cuMemAlloc_v2"), (*wraps)(addr_t *, size_t) = dlsym(library, "cuMemAlloc_v2");
    int first = wraps(&at, 1000), second = real(&at, 2000), *wrapped = dlsym(library, "wrapped");
    printf("%d %d, wrapped %d\n", first, second, *wrapped);
    whose(file, library);
}

// Libraries come and go, one where the other was: each is called as long as it is there, and never after. Now and then that
// place is taken, and those that come are elsewhere.
static void again(const char *a, const char *b, const char *function) {
    long sum = 0;
    for (int i = 0; i < 300; i++) {
        void *library = open_library(i % 3 ? a : b, 0);
        struct link_map *map;
        if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) fail("dlinfo", dlerror());
        void *at = (void *)map->l_addr;
        sum += ((int (*)(void *, size_t))dlsym(library, function))(NULL, 0);
        dlclose(library);
        if (i % 30 == 0 && mmap(at, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != at) fail("mmap", "is not gone");
    }
    printf("%ld\n", sum);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "plugins") == 0) {
        void *a = open_library("libplugin_a.so", 0), *b = open_library("libplugin_b.so", argc > 2 ? RTLD_DEEPBIND : 0);
        for (int i = 0; i < 2; i++) use("a", a), use("b", b);
        whose("a's", a), whose("default", RTLD_DEFAULT), whose("next", RTLD_NEXT), whose("the program's", dlopen(NULL, RTLD_NOW));
    } else if (strcmp(what, "global") == 0) {
        void *a = open_library("libplugin_a.so", RTLD_GLOBAL), *b = open_library("libplugin_b.so", 0);
        use("a", a), use("b", b);
        whose("b's", b), whose("default", RTLD_DEFAULT), whose("next", RTLD_NEXT);
    } else if (strcmp(what, "apart") == 0) {
        use("apart", dlmopen(LM_ID_NEWLM, argv[2], RTLD_NOW));
    } else if (strcmp(what, "again") == 0) {
        again(argv[2], argv[3], argv[4]);
    } else if (strcmp(what, "wrapper") == 0) {
        wrapper(argv[2]);
    } else if (strcmp(what, "none") == 0) {
        void *at;
        whose("default", RTLD_DEFAULT), whose("next", RTLD_NEXT);
        if (argc > 2) printf("%d %d %d\n", cudaMalloc(&at, 1), ncclGroupStart(), cublasSetWorkspace_v2(0, 0, 0));
    }
    return 0;
}
