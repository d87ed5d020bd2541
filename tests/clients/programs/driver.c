// Every memory call of the driver API, with the ledger after each. Argument: the way in which functions are reached.
#include "client.h"

static const long MIB2 = 2 << 20;

static void plain_memory(void) {
    addr_t a, b, c;
    size_t pitch = 0;
    CALL(cuMemAlloc_v2, &a, 1000);
    device[0].device_bytes += 1000;
    step("cuMemAlloc");
    CALL(cuMemAllocPitch_v2, &b, &pitch, 100, 7, 4);
    device[0].device_bytes += (long)pitch * 7;
    step("cuMemAllocPitch");
    CALL(cuMemAllocManaged, &c, 5000, 1);
    device[0].managed += 5000;
    step("cuMemAllocManaged");
    if (TRY(cuMemAlloc_v2, &c, 1ul << 45) != 2) fail("cuMemAlloc", "32 TiB are there");
    step("a failure takes nothing");
    if (TRY(cuMemFreeHost, (void *)a) == 0) fail("cuMemFreeHost", "took device memory");
    step("a free that can't be changes nothing");
    CALL(cuMemFree_v2, a);
    device[0].device_bytes -= 1000;
    step("cuMemFree");
    CALL(cuMemFree_v2, b);
    device[0].device_bytes = 0;
    CALL(cuMemFree_v2, 0);
    step("cuMemFree of rows, and of nothing");
}

static void host_memory(void) {
    void *a, *b;
    static char own[10000];
    CALL(cuMemAllocHost_v2, &a, 3000);
    pinned += 3000;
    step("cuMemAllocHost");
    CALL(cuMemHostAlloc, &b, 4000, 0);
    pinned += 4000;
    step("cuMemHostAlloc");
    CALL(cuMemHostRegister_v2, own, sizeof own, 0);
    registered += sizeof own;
    step("cuMemHostRegister");
    CALL(cuMemFreeHost, a);
    pinned -= 3000;
    CALL(cuMemHostUnregister, own);
    registered = 0;
    step("cuMemFreeHost, cuMemHostUnregister");
    CALL(cuMemFreeHost, b);
    pinned = 0;
    step("cuMemFreeHost");
}

static void stream_order(void) {
    addr_t a, b, c;
    handle_t pool;
    uint64_t kept = 0;
    CALL(cuMemAllocAsync, &a, 700, NULL);
    device[0].pool_used += 700;
    step("cuMemAllocAsync");
    CALL(cuMemAllocAsync_ptsz, &b, 800, NULL);
    device[0].pool_used += 800;
    step("cuMemAllocAsync for a default stream per thread");
    pool_properties on_1 = {.kind = 1, .where = {1, 1}};
    CALL(cuMemPoolCreate, &pool, &on_1);
    CALL(cuMemAllocFromPoolAsync, &c, 900, pool, NULL);
    device[1].pool_used += 900;
    step("cuMemAllocFromPoolAsync, on the pool's device");
    CALL(cuMemPoolGetAttribute, pool, 5, &kept);
    printf("{\"pool\": %llu, \"device\": 1, \"reserved\": %llu}\n", (addr_t)(uintptr_t)pool, (addr_t)kept);
    step("cuMemPoolGetAttribute");
    CALL(cuMemFreeAsync, a, NULL);
    CALL(cuMemFreeAsync_ptsz, b, NULL);
    device[0].pool_used = 0;
    step("cuMemFreeAsync");
    CALL(cuMemFree_v2, c);
    device[1].pool_used = 0;
    step("cuMemFree of memory from a pool");
    CALL(cuMemPoolTrimTo, pool, 0);
    CALL(cuMemPoolDestroy, pool);
    step("cuMemPoolDestroy");
}

static void arrays(void) {
    handle_t a, b;
    array2 flat = {.width = 100, .height = 10, .format = 0x20, .channels = 4};
    array3 deep = {.width = 8, .height = 4, .depth = 2, .format = 0x10, .channels = 1};
    CALL(cuArrayCreate_v2, &a, &flat);
    device[0].arrays += 100 * 10 * 16;
    step("cuArrayCreate");
    CALL(cuArray3DCreate_v2, &b, &deep);
    device[0].arrays += 8 * 4 * 2 * 2;
    step("cuArray3DCreate");
    CALL(cuArrayDestroy, a);
    CALL(cuArrayDestroy, b);
    device[0].arrays = 0;
    step("cuArrayDestroy");
}

static void physical_and_virtual(void) {
    addr_t at;
    uint64_t handle, again, shared;
    int file = -1;
    memory_properties on_1 = {.kind = 1, .handles = 1, .where = {1, 1}};
    access_t both = {{1, 1}, 3};
    CALL(cuMemAddressReserve, &at, 8 * MIB2, 0, 0, 0);
    reserved += 8 * MIB2;
    step("cuMemAddressReserve");
    CALL(cuMemCreate, &handle, 2 * MIB2, &on_1, 0);
    device[1].physical += 2 * MIB2;
    step("cuMemCreate, on the device that it names");
    CALL(cuMemMap, at, 2 * MIB2, 0, handle, 0);
    device[1].mapped += 2 * MIB2;
    CALL(cuMemSetAccess, at, 2 * MIB2, &both, 1);
    step("cuMemMap");
    CALL(cuMemMap, at + 2 * MIB2, MIB2, MIB2, handle, 0);
    device[1].mapped += MIB2;
    step("the same memory a second time");
    CALL(cuMemRetainAllocationHandle, &again, (void *)at);
    CALL(cuMemRelease, handle);
    step("cuMemRetainAllocationHandle, cuMemRelease");
    CALL(cuMemExportToShareableHandle, &file, again, 1, 0);
    CALL(cuMemImportFromShareableHandle, &shared, (void *)(intptr_t)file, 1);
    step("exported and imported: not counted twice");
    CALL(cuMemRelease, again);
    CALL(cuMemRelease, shared);
    step("released, and kept by its mappings");
    if (TRY(cuMemUnmap, at, MIB2) == 0) fail("cuMemUnmap", "took half a mapping");
    step("half a mapping can't go");
    if (TRY(cuMemAddressFree, at, 8 * MIB2) == 0) fail("cuMemAddressFree", "took what is mapped");
    step("what is mapped stays reserved");
    CALL(cuMemUnmap, at, 3 * MIB2);
    device[1].mapped = device[1].physical = 0;
    step("cuMemUnmap of two mappings at once");
    CALL(cuMemAddressFree, at, 8 * MIB2);
    reserved = 0;
    step("cuMemAddressFree");
    CALL(cuMemCreate, &handle, MIB2, &on_1, 0);
    CALL(cuMemRelease, handle);
    step("never mapped");
}

static void objects(void) {
    handle_t graph, run, node, module;
    graph_allocation wanted = {.pool = {.kind = 1, .where = {1, 0}}, .size = 6000};
    CALL(cuGraphCreate, &graph, 0);
    CALL(cuGraphAddMemAllocNode, &node, graph, NULL, 0, &wanted);
    device[0].graph_nodes += 6000;
    step("cuGraphAddMemAllocNode");
    CALL(cuGraphAddMemFreeNode, &node, graph, &node, 1, wanted.at);
    device[0].graph_nodes = 0;
    step("cuGraphAddMemFreeNode");
    graph_node any = {.kind = 10, .memory = wanted};
    CALL(cuGraphAddNode_v2, &node, graph, NULL, NULL, 0, &any);
    device[0].graph_nodes += 6000;
    step("cuGraphAddNode, to allocate");
    graph_node free = {.kind = 11, .memory.pool = {.kind = (int)any.memory.at, .handles = (int)(any.memory.at >> 32)}};
    CALL(cuGraphAddNode_v2, &node, graph, &node, NULL, 1, &free);
    device[0].graph_nodes = 0;
    step("cuGraphAddNode, to free");
    CALL(cuGraphInstantiateWithFlags, &run, graph, 0);
    device[0].graph_executables++;
    step("cuGraphInstantiate");
    CALL(cuGraphExecDestroy, run);
    device[0].graph_executables = 0;
    static const char code[] = ".version 7.0\n.target sm_80\n.address_size 64\n";
    CALL(cuModuleLoadData, &module, code);
    device[0].modules++;
    step("cuGraphExecDestroy, cuModuleLoadData");
    CALL(cuModuleUnload, module);
    CALL(cuLibraryLoadData, &module, code, NULL, NULL, 0, NULL, NULL, 0);
    step("cuModuleUnload, cuLibraryLoadData");
    CALL(cuLibraryUnload, module);
    device[0].modules = 0;
    step("cuLibraryUnload");
}

static void several_contexts(handle_t first) {
    handle_t second, stream, popped;
    addr_t a, b, c;
    CALL_AT(3020, cuCtxCreate_v2, &second, 0, 1);
    device[1].contexts++;
    step("cuCtxCreate");
    CALL(cuMemAlloc_v2, &a, 100);
    device[1].device_bytes += 100;
    step("in the new context, which is current");
    CALL(cuStreamCreate, &stream, 1);
    CALL(cuCtxPopCurrent_v2, &popped);
    CALL(cuMemAlloc_v2, &b, 200);
    device[0].device_bytes += 200;
    step("cuCtxPopCurrent");
    CALL(cuMemAllocAsync, &c, 300, stream);
    device[1].pool_used += 300;
    step("on the device of the stream");
    CALL(cuMemFree_v2, a);
    device[1].device_bytes = 0;
    step("freed from another context: off the device that it was on");
    CALL(cuMemFreeAsync, c, stream);
    device[1].pool_used = 0;
    CALL(cuCtxPushCurrent_v2, second);
    CALL(cuMemAlloc_v2, &a, 400);
    CALL(cuMemAllocHost_v2, (void **)&c, 500);
    pinned += 500;
    device[1].device_bytes += 400;
    step("cuCtxPushCurrent");
    CALL(cuCtxDestroy_v2, second);
    device[1].device_bytes = pinned = 0;
    device[1].contexts--;
    step("cuCtxDestroy, with everything in it");
    CALL(cuCtxSetCurrent, first);
    CALL(cuMemAlloc_v2, &a, 600);
    device[0].device_bytes += 600;
    step("back in the first");
}

int main(int argc, char **argv) {
    handle_t first;
    if (argc > 1) way = argv[1];
    if (cuInit(0)) fail("cuInit", "no device");
    CALL(cuDevicePrimaryCtxRetain, &first, 0);
    device[0].contexts++;
    step("cuDevicePrimaryCtxRetain");
    CALL(cuCtxSetCurrent, first);
    plain_memory();
    host_memory();
    stream_order();
    arrays();
    physical_and_virtual();
    objects();
    several_contexts(first);
    CALL(cuDevicePrimaryCtxReset_v2, 0);
    device[0] = (columns){0};
    step("cuDevicePrimaryCtxReset");
    return 0;
}
