// Every memory call of the runtime API, with the ledger after each. Argument: the way in which functions are reached.
#include "client.h"

static void plain_memory(void) {
    void *a, *b, *c;
    size_t pitch = 0;
    pitched block = {0};
    handle_t flat, deep;
    channels_t four_floats = {32, 32, 32, 32, 2};
    CALL(cudaMalloc, &a, 1000);
    device[0].device_bytes += 1000;
    step("cudaMalloc");
    CALL(cudaMallocPitch, &b, &pitch, 100, 7);
    device[0].device_bytes += (long)pitch * 7;
    step("cudaMallocPitch");
    CALL(cudaMalloc3D, &block, (extent_t){100, 5, 3});
    device[0].device_bytes += (long)block.pitch * 5 * 3;
    step("cudaMalloc3D");
    CALL(cudaMallocManaged, &c, 5000, 1);
    device[0].managed += 5000;
    step("cudaMallocManaged");
    CALL(cudaMallocArray, &flat, &four_floats, 100, 10, 0);
    device[0].arrays += 100 * 10 * 16;
    step("cudaMallocArray");
    CALL(cudaMalloc3DArray, &deep, &four_floats, (extent_t){8, 4, 2}, 0);
    device[0].arrays += 8 * 4 * 2 * 16;
    step("cudaMalloc3DArray");
    if (TRY(cudaMalloc, &c, 1ul << 45) != 2) fail("cudaMalloc", "32 TiB are there");
    step("a failure takes nothing");
    CALL(cudaFree, a);
    CALL(cudaFree, b);
    CALL(cudaFree, NULL);
    device[0].device_bytes = (long)block.pitch * 5 * 3;
    step("cudaFree");
    CALL(cudaFreeArray, flat);
    CALL(cudaFreeArray, deep);
    device[0].arrays = 0;
    step("cudaFreeArray");
    CALL(cudaFree, block.at);
    device[0].device_bytes = 0;
    step("cudaFree of slices");
}

static void host_memory(void) {
    void *a, *b;
    static char own[10000];
    CALL(cudaMallocHost, &a, 3000);
    pinned += 3000;
    step("cudaMallocHost");
    CALL(cudaHostAlloc, &b, 4000, 0);
    pinned += 4000;
    step("cudaHostAlloc");
    CALL(cudaHostRegister, own, sizeof own, 0);
    registered += sizeof own;
    step("cudaHostRegister");
    CALL(cudaFreeHost, a);
    CALL(cudaFreeHost, b);
    CALL(cudaHostUnregister, own);
    pinned = registered = 0;
    step("cudaFreeHost, cudaHostUnregister");
}

static void stream_order(void) {
    void *a, *b, *c;
    handle_t pool, usual, stream;
    uint64_t kept = 0;
    pool_properties on_1 = {.kind = 1, .where = {1, 1}};
    CALL(cudaMallocAsync, &a, 700, NULL);
    device[0].pool_used += 700;
    step("cudaMallocAsync");
    CALL(cudaMallocAsync_ptsz, &b, 800, NULL);
    device[0].pool_used += 800;
    step("cudaMallocAsync for a default stream per thread");
    CALL(cudaMemPoolCreate, &pool, &on_1);
    CALL(cudaMallocFromPoolAsync, &c, 900, pool, NULL);
    device[1].pool_used += 900;
    step("cudaMallocFromPoolAsync, on the pool's device");
    CALL(cudaFreeAsync, c, NULL);
    device[1].pool_used -= 900;
    CALL(cudaMemPoolDestroy, pool);
    CALL(cudaDeviceGetDefaultMemPool, &usual, 1);
    CALL(cudaMallocFromPoolAsync, &c, 950, usual, NULL);
    device[1].pool_used += 950;
    step("cudaDeviceGetDefaultMemPool says whose pool it is");
    CALL(cudaMemPoolGetAttribute, usual, 5, &kept);
    printf("{\"pool\": %llu, \"device\": 1, \"reserved\": %llu}\n", (addr_t)(uintptr_t)usual, (addr_t)kept);
    step("cudaMemPoolGetAttribute");
    CALL(cudaFree, c);
    CALL(cudaFreeAsync, a, NULL);
    CALL(cudaFreeAsync_ptsz, b, NULL);
    device[1].pool_used = device[0].pool_used = 0;
    step("cudaFree, cudaFreeAsync");
    CALL(cudaSetDevice, 1);
    CALL(cudaStreamCreate, &stream);
    CALL(cudaSetDevice, 0);
    CALL(cudaMallocAsync, &a, 300, stream);
    device[1].pool_used += 300;
    step("on the device of the stream");
    CALL(cudaFreeAsync, a, stream);
    CALL(cudaStreamDestroy, stream);
    device[1].pool_used = 0;
    step("cudaStreamDestroy");
}

static void objects(void) {
    handle_t graph, node, run, library;
    graph_allocation wanted = {.pool = {.kind = 1, .where = {1, 0}}, .size = 6000};
    CALL(cudaGraphCreate, &graph, 0);
    CALL(cudaGraphAddMemAllocNode, &node, graph, NULL, 0, &wanted);
    device[0].graph_nodes += 6000;
    step("cudaGraphAddMemAllocNode");
    CALL(cudaGraphAddMemFreeNode, &node, graph, &node, 1, (void *)wanted.at);
    device[0].graph_nodes = 0;
    CALL(cudaGraphInstantiate, &run, graph, 0);
    device[0].graph_executables++;
    step("cudaGraphAddMemFreeNode, cudaGraphInstantiate");
    CALL(cudaGraphExecDestroy, run);
    device[0].graph_executables = 0;
    CALL(cudaLibraryLoadData, &library, ".version 7.0\n.target sm_80\n.address_size 64\n", NULL, NULL, 0, NULL, NULL, 0);
    device[0].modules++;
    step("cudaGraphExecDestroy, cudaLibraryLoadData");
    CALL(cudaLibraryUnload, library);
    device[0].modules = 0;
    step("cudaLibraryUnload");
}

static void several_devices(void) {
    void *a, *b;
    CALL(cudaSetDevice, 1);
    CALL(cudaMalloc, &a, 100);
    device[1].device_bytes += 100;
    step("cudaSetDevice");
    CALL(cudaSetDevice, 0);
    CALL(cudaMalloc, &b, 200);
    device[0].device_bytes += 200;
    CALL(cudaFree, a);
    device[1].device_bytes = 0;
    step("freed with another device chosen: off the device that it was on");
    CALL(cudaDeviceReset, );
    device[0].device_bytes = device[0].managed = 0;
    step("cudaDeviceReset");
}

int main(int argc, char **argv) {
    if (argc > 1) way = argv[1];
    plain_memory();
    host_memory();
    stream_order();
    objects();
    several_devices();
    return 0;
}
