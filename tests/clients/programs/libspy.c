// Another tool's library: it has functions of CUDA's names, counts the calls, and passes them on to whoever is next, by a
// call. At the end it writes what it counted into the file that SPY names, with its own name, if that is given.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef uintptr_t word;
enum { MOST = 32 };
static struct { const char *name; long calls; } counted[MOST];
static int rows;

static int row(const char *name) {
    int n = __atomic_fetch_add(&rows, 1, __ATOMIC_RELAXED);
    counted[n].name = name;
    return n;
}

// Every argument of these functions is a word, in registers or on the stack.
#define SPY(name) \
    int name(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k) { \
        static int (*next)(word, word, word, word, word, word, word, word, word, word, word); \
        static int place = -1; \
        if (place < 0) place = row(#name); \
        if (!next && !(next = dlsym(RTLD_NEXT, #name))) abort(); \
        __atomic_fetch_add(&counted[place].calls, 1, __ATOMIC_RELAXED); \
        int code = next(a, b, c, d, e, f, g, h, i, j, k); \
        __asm__ volatile(""); /* no tail call */ \
        return code; \
    }

SPY(cudaMalloc) SPY(cudaFree) SPY(cudaMallocAsync) SPY(cudaFreeAsync) SPY(cudaHostAlloc)
SPY(cudaSetDevice) SPY(cudaGetDeviceCount) SPY(cudaMemcpyAsync) SPY(cudaMemsetAsync)
SPY(cudaStreamSynchronize) SPY(cudaEventRecord) SPY(cudaEventQuery) SPY(cudaGetDriverEntryPointByVersion)
SPY(cuMemAlloc_v2) SPY(cuMemFree_v2) SPY(cuMemCreate) SPY(cuMemMap) SPY(cuMemUnmap) SPY(cuMemRelease)

__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("SPY");
    if (!path || !rows) return;
    FILE *file = fopen(path, "a");
    for (int i = 0; file && i < rows; i++) fprintf(file, "%s %ld\n", counted[i].name, counted[i].calls);
    if (file) fclose(file);
}
