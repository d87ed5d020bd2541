// What the client programs share: NVIDIA's functions in their ways of being reached, and the ledger as it should be.
//
// The prototypes are those of NVIDIA's public headers, with handles as plain pointers. They are weak, so that no library
// of CUDA's is needed to link a program: they are bound at the start, to what was preloaded.
#pragma once
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long addr_t;
typedef void *handle_t;
typedef struct { int kind, id; } location;
typedef struct { int kind, handles; location where; uint64_t rest[9]; } pool_properties;    // CUmemPoolProps
typedef struct { int kind, handles; location where; uint64_t rest[2]; } memory_properties;  // CUmemAllocationProp
typedef struct { location where; int flags; } access_t;                                     // CUmemAccessDesc
typedef struct { pool_properties pool; void *access; size_t accesses, size; addr_t at; } graph_allocation;
typedef struct { int kind, reserved[3]; graph_allocation memory; char rest[120]; } graph_node; // CUgraphNodeParams
typedef struct { size_t width, height; int format; unsigned channels; } array2;
typedef struct { size_t width, height, depth; int format; unsigned channels, flags; } array3;
typedef struct { char bytes[64]; } ipc_handle;
typedef struct { size_t width, height, depth; } extent_t;
typedef struct { void *at; size_t pitch, x, y; } pitched;
typedef struct { int x, y, z, w, kind; } channels_t;
typedef struct { int kind; uint64_t handle[2]; uint64_t size; unsigned flags, reserved[16]; } external_memory;
typedef struct { uint64_t offset, size; unsigned flags, reserved[16]; } external_buffer;

_Static_assert(sizeof(pool_properties) == 88 && sizeof(memory_properties) == 32, "as in cuda.h");
_Static_assert(sizeof(graph_allocation) == 120 && sizeof(graph_node) == 256, "as in cuda.h");

#define PROTOTYPES(P) \
    P(cuInit, (unsigned)) \
    P(cuDevicePrimaryCtxRetain, (handle_t *, int)) P(cuDevicePrimaryCtxRelease_v2, (int)) \
    P(cuDevicePrimaryCtxReset_v2, (int)) \
    P(cuCtxCreate_v2, (handle_t *, unsigned, int)) P(cuCtxDestroy_v2, (handle_t)) P(cuCtxSetCurrent, (handle_t)) \
    P(cuCtxPushCurrent_v2, (handle_t)) P(cuCtxPopCurrent_v2, (handle_t *)) \
    P(cuMemAlloc_v2, (addr_t *, size_t)) P(cuMemFree_v2, (addr_t)) \
    P(cuMemAllocPitch_v2, (addr_t *, size_t *, size_t, size_t, unsigned)) \
    P(cuMemAllocManaged, (addr_t *, size_t, unsigned)) \
    P(cuMemAllocAsync, (addr_t *, size_t, handle_t)) P(cuMemFreeAsync, (addr_t, handle_t)) \
    P(cuMemAllocAsync_ptsz, (addr_t *, size_t, handle_t)) P(cuMemFreeAsync_ptsz, (addr_t, handle_t)) \
    P(cuMemAllocFromPoolAsync, (addr_t *, size_t, handle_t, handle_t)) \
    P(cuMemPoolCreate, (handle_t *, const pool_properties *)) P(cuMemPoolDestroy, (handle_t)) \
    P(cuMemPoolTrimTo, (handle_t, size_t)) P(cuMemPoolGetAttribute, (handle_t, int, void *)) \
    P(cuMemPoolImportPointer, (addr_t *, handle_t, void *)) \
    P(cuArrayCreate_v2, (handle_t *, const array2 *)) P(cuArray3DCreate_v2, (handle_t *, const array3 *)) \
    P(cuArrayDestroy, (handle_t)) \
    P(cuMipmappedArrayCreate, (handle_t *, const array3 *, unsigned)) P(cuMipmappedArrayDestroy, (handle_t)) \
    P(cuMemAllocHost_v2, (void **, size_t)) P(cuMemHostAlloc, (void **, size_t, unsigned)) P(cuMemFreeHost, (void *)) \
    P(cuMemHostRegister_v2, (void *, size_t, unsigned)) P(cuMemHostUnregister, (void *)) \
    P(cuMemAddressReserve, (addr_t *, size_t, size_t, addr_t, unsigned long long)) P(cuMemAddressFree, (addr_t, size_t)) \
    P(cuMemCreate, (uint64_t *, size_t, const memory_properties *, unsigned long long)) P(cuMemRelease, (uint64_t)) \
    P(cuMemRetainAllocationHandle, (uint64_t *, void *)) \
    P(cuMemMap, (addr_t, size_t, size_t, uint64_t, unsigned long long)) P(cuMemUnmap, (addr_t, size_t)) \
    P(cuMemSetAccess, (addr_t, size_t, const access_t *, size_t)) \
    P(cuMemExportToShareableHandle, (void *, uint64_t, int, unsigned long long)) \
    P(cuMemImportFromShareableHandle, (uint64_t *, void *, int)) \
    P(cuMulticastCreate, (uint64_t *, const void *)) \
    P(cuIpcGetMemHandle, (ipc_handle *, addr_t)) P(cuIpcOpenMemHandle_v2, (addr_t *, ipc_handle, unsigned)) \
    P(cuIpcCloseMemHandle, (addr_t)) \
    P(cuImportExternalMemory, (handle_t *, const external_memory *)) P(cuDestroyExternalMemory, (handle_t)) \
    P(cuExternalMemoryGetMappedBuffer, (addr_t *, handle_t, const external_buffer *)) \
    P(cuStreamCreate, (handle_t *, unsigned)) P(cuStreamDestroy_v2, (handle_t)) \
    P(cuGraphCreate, (handle_t *, unsigned)) P(cuGraphInstantiateWithFlags, (handle_t *, handle_t, unsigned long long)) \
    P(cuGraphExecDestroy, (handle_t)) \
    P(cuGraphAddMemAllocNode, (handle_t *, handle_t, const handle_t *, size_t, graph_allocation *)) \
    P(cuGraphAddMemFreeNode, (handle_t *, handle_t, const handle_t *, size_t, addr_t)) \
    P(cuGraphAddNode_v2, (handle_t *, handle_t, const handle_t *, const void *, size_t, graph_node *)) \
    P(cuModuleLoadData, (handle_t *, const void *)) P(cuModuleUnload, (handle_t)) \
    P(cuLibraryLoadData, (handle_t *, const void *, void *, void *, unsigned, void *, void *, unsigned)) \
    P(cuLibraryUnload, (handle_t)) \
    P(cuGetProcAddress, (const char *, void **, int, uint64_t)) \
    P(cuGetProcAddress_v2, (const char *, void **, int, uint64_t, int *)) \
    P(cudaSetDevice, (int)) P(cudaDeviceReset, (void)) \
    P(cudaMalloc, (void **, size_t)) P(cudaFree, (void *)) P(cudaMallocPitch, (void **, size_t *, size_t, size_t)) \
    P(cudaMalloc3D, (pitched *, extent_t)) P(cudaMallocManaged, (void **, size_t, unsigned)) \
    P(cudaMallocArray, (handle_t *, const channels_t *, size_t, size_t, unsigned)) P(cudaFreeArray, (handle_t)) \
    P(cudaMalloc3DArray, (handle_t *, const channels_t *, extent_t, unsigned)) \
    P(cudaMallocAsync, (void **, size_t, handle_t)) P(cudaFreeAsync, (void *, handle_t)) \
    P(cudaMallocAsync_ptsz, (void **, size_t, handle_t)) P(cudaFreeAsync_ptsz, (void *, handle_t)) \
    P(cudaMallocFromPoolAsync, (void **, size_t, handle_t, handle_t)) \
    P(cudaMemPoolCreate, (handle_t *, const pool_properties *)) P(cudaMemPoolDestroy, (handle_t)) \
    P(cudaDeviceGetDefaultMemPool, (handle_t *, int)) P(cudaMemPoolGetAttribute, (handle_t, int, void *)) \
    P(cudaMallocHost, (void **, size_t)) P(cudaHostAlloc, (void **, size_t, unsigned)) P(cudaFreeHost, (void *)) \
    P(cudaHostRegister, (void *, size_t, unsigned)) P(cudaHostUnregister, (void *)) \
    P(cudaIpcGetMemHandle, (ipc_handle *, void *)) P(cudaIpcOpenMemHandle, (void **, ipc_handle, unsigned)) \
    P(cudaIpcCloseMemHandle, (void *)) \
    P(cudaGraphCreate, (handle_t *, unsigned)) P(cudaGraphInstantiate, (handle_t *, handle_t, unsigned long long)) \
    P(cudaGraphExecDestroy, (handle_t)) \
    P(cudaGraphAddMemAllocNode, (handle_t *, handle_t, const handle_t *, size_t, graph_allocation *)) \
    P(cudaGraphAddMemFreeNode, (handle_t *, handle_t, const handle_t *, size_t, void *)) \
    P(cudaLibraryLoadData, (handle_t *, const void *, void *, void *, unsigned, void *, void *, unsigned)) \
    P(cudaLibraryUnload, (handle_t)) \
    P(cudaStreamCreate, (handle_t *)) P(cudaStreamDestroy, (handle_t)) \
    P(cudaGetDriverEntryPoint, (const char *, void **, unsigned long long, int *)) \
    P(cudaGetDriverEntryPointByVersion, (const char *, void **, unsigned, unsigned long long, int *))

#define DECLARE(name, arguments) extern int name arguments __attribute__((weak));
PROTOTYPES(DECLARE)

// Not every program uses all of this.
#define SHARED static __attribute__((unused))

_Noreturn SHARED void fail(const char *what, const char *why) {
    fprintf(stderr, "client: %s: %s\n", what, why);
    exit(9);
}

// --- ways of reaching a function -----------------------------------------------------------------------

SHARED const char *way = "symbol";
SHARED int is(const char *name) { return strcmp(way, name) == 0; }

SHARED void *opened(const char *symbol) {
    int deep = is("deepbind") ? RTLD_DEEPBIND : 0;
    const char *library = strncmp(symbol, "cuda", 4) == 0 ? "libcudart.so" : "libcuda.so.1";
    if (strncmp(symbol, "cuda", 4) == 0 && getenv("CLIENT_CUDART")) library = getenv("CLIENT_CUDART");
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL | deep);
    if (!handle) fail(library, dlerror());
    return handle;
}

SHARED void *named(const char *symbol) {
    dlerror();
    void *found = dlsym(opened(symbol), symbol);
    if (!found || dlerror()) fail(symbol, "not found by dlsym");
    return found;
}

// As a static runtime does: dlsym for the look-up, then the look-up for itself in both versions.
SHARED void *looked_up(const char *base, int version, int flags) {
    static int (*get)(const char *, void **, int, uint64_t);
    static int (*get2)(const char *, void **, int, uint64_t, int *);
    void *found = NULL;
    int status = 99;
    if (!get) {
        int (*first)(const char *, void **, int, uint64_t, int *) = named("cuGetProcAddress_v2");
        if (first("cuGetProcAddress", (void **)&get, 11030, 0, NULL)) fail("cuGetProcAddress", "11030");
        if (first("cuGetProcAddress", (void **)&get2, 12000, 0, &status) || status) fail("cuGetProcAddress", "12000");
        if ((void *)get == (void *)get2) fail("cuGetProcAddress", "its versions are the same function");
    }
    if (is("get-proc-address")) {
        if (get(base, &found, version, flags)) fail(base, "not found");
    } else {
        status = 99;
        if (get2(base, &found, version, flags, &status) || status != 0) fail(base, "not found");
        void *none = &status;
        if (get2("cuNoSuchFunction", &none, version, flags, &status) == 0 || none || !status) fail(base, "found anything");
    }
    return found;
}

SHARED void *entry_point(const char *base, int version, int flags) {
    void *found = NULL;
    int status = 99;
    int code = is("entry-point") ? cudaGetDriverEntryPoint(base, &found, flags, &status)
                                 : cudaGetDriverEntryPointByVersion(base, &found, version, flags, &status);
    if (code || status || !found) fail(base, "no entry point");
    return found;
}

// `symbol` without the suffixes that versions and flags stand for.
SHARED void *reach(const char *symbol, void *linked, int version) {
    if (is("symbol")) return linked;
    if (is("dlsym") || is("deepbind") || strncmp(symbol, "cuda", 4) == 0) return named(symbol);
    if (is("dlvsym")) {
        void *found = dlvsym(dlopen(getenv("CLIENT_VERSIONED"), RTLD_NOW), symbol, "CLIENT_1.0");
        return found ? found : named(symbol);
    }
    char base[100];
    int flags = strstr(symbol, "_ptsz") ? 2 : 0;
    snprintf(base, sizeof base, "%.*s", (int)(flags ? strstr(symbol, "_ptsz") - symbol : (long)strlen(symbol)), symbol);
    char *suffix = strstr(base, "_v");
    if (suffix) *suffix = 0;
    // Without a version this look-up means the newest interface, which has other arguments.
    if (is("entry-point") && strcmp(base, "cuCtxCreate") == 0) return named(symbol);
    return strncmp(way, "entry", 5) == 0 ? entry_point(base, version, flags) : looked_up(base, version, flags);
}

// The code of a call; the version is the newest one that has this interface, so the look-up has to choose.
#define TRY(name, ...) ((__typeof__(&name))reach(#name, (void *)name, 13020))(__VA_ARGS__)
#define CALL_AT(version, name, ...) \
    do { \
        int answer = ((__typeof__(&name))reach(#name, (void *)name, version))(__VA_ARGS__); \
        if (answer) fprintf(stderr, "client: %s: code %d\n", #name, answer), exit(9); \
    } while (0)
#define CALL(name, ...) CALL_AT(12080, name, __VA_ARGS__)

// --- the ledger as it should be -----------------------------------------------------------------------

typedef struct {
    long device_bytes, pool_used, arrays, physical, mapped, managed, imported, graph_nodes;
    long contexts, modules, graph_executables;
} columns;
SHARED columns device[2], unknown;
SHARED long pinned, registered, reserved;

SHARED void print(const char *name, const columns *c) {
    printf("\"%s\": [%ld, %ld, %ld, %ld, %ld, %ld, %ld, %ld, %ld, %ld, %ld]", name, c->device_bytes, c->pool_used, c->arrays,
           c->physical, c->mapped, c->managed, c->imported, c->graph_nodes, c->contexts, c->modules, c->graph_executables);
}

// A snapshot of now, and a line that says what must be in it.
SHARED void step(const char *name) {
    static int n;
    static int (*dump)(const char *);
    char path[300];
    if (!dump) dump = dlsym(RTLD_DEFAULT, "memtrace_dump");
    if (!dump) fail("memtrace_dump", "this program is not recorded");
    snprintf(path, sizeof path, "%s/step-%d.json", getenv("CLIENT_OUT"), n++);
    if (dump(path)) fail("memtrace_dump", path);
    printf("{\"step\": \"%s\", \"path\": \"%s\", ", name, path);
    print("0", &device[0]), printf(", "), print("1", &device[1]), printf(", "), print("-1", &unknown);
    printf(", \"host\": [%ld, %ld], \"reserved\": %ld}\n", pinned, registered, reserved);
}
