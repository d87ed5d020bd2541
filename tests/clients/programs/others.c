// Memory of other processes, other APIs and several devices, and memory of which nobody said where it is. Runs on
// `libstandin.so` instead of a driver.
#include "client.h"
#include <pthread.h>

static void *without_context(void *unused) {
    addr_t a, b;
    CALL(cuMemAlloc_v2, &a, 400);
    device[0].device_bytes += 400;
    step("in a thread that has chosen nothing");
    CALL(cuCtxSetCurrent, (handle_t)0x7777777);
    CALL(cuMemAlloc_v2, &b, 500);
    unknown.device_bytes += 500;
    step("in a context that nobody has seen made");
    CALL(cuMemFree_v2, a);
    CALL(cuMemFree_v2, b);
    device[0].device_bytes -= 400;
    unknown.device_bytes = 0;
    step("freed");
    return NULL;
}

int main(void) {
    handle_t context, mipmaps, external;
    uint64_t mine, theirs, together;
    addr_t view, pointer;
    pthread_t thread;
    const long mib2 = 2 << 20;
    cuInit(0);
    CALL(cuDevicePrimaryCtxRetain, &context, 1);
    CALL(cuCtxSetCurrent, context);
    device[1].contexts++;
    array3 wanted = {.width = 8, .height = 4, .format = 0x20, .channels = 1};
    CALL(cuMipmappedArrayCreate, &mipmaps, &wanted, 4);
    device[1].arrays += 4 * (8 * 4 + 4 * 2 + 2 + 1);
    step("cuMipmappedArrayCreate");
    CALL(cuMipmappedArrayDestroy, mipmaps);
    device[1].arrays = 0;
    step("cuMipmappedArrayDestroy");

    external_memory memory = {.kind = 1, .size = 70000};
    external_buffer buffer = {.size = 60000};
    CALL(cuImportExternalMemory, &external, &memory);
    device[1].imported += 70000;
    step("cuImportExternalMemory");
    CALL(cuExternalMemoryGetMappedBuffer, &view, external, &buffer);
    CALL(cuMemPoolImportPointer, &pointer, NULL, NULL);
    step("addresses of what others hold");
    CALL(cuMemFree_v2, view);
    CALL(cuMemFree_v2, pointer);
    CALL(cuDestroyExternalMemory, external);
    device[1].imported = 0;
    step("cuDestroyExternalMemory");

    memory_properties with_host = {.kind = 1, .where = {2, 0}}, on_0 = {.kind = 1, .where = {1, 0}};
    CALL(cuMemCreate, &mine, mib2, &with_host, 0);
    step("cuMemCreate with the host: on no device");
    CALL(cuMemRelease, mine);
    CALL(cuMemCreate, &mine, mib2, &on_0, 0);
    device[0].physical += mib2;
    CALL(cuMemImportFromShareableHandle, &theirs, NULL, 1);
    CALL(cuMulticastCreate, &together, NULL);
    const addr_t at = 0x600000000000;
    CALL(cuMemMap, at, mib2, 0, mine, 0);
    CALL(cuMemMap, at + mib2, mib2, 0, theirs, 0);
    CALL(cuMemMap, at + 2 * mib2, mib2, 0, together, 0);
    device[0].mapped += mib2;
    device[1].mapped += 2 * mib2;
    step("mapped: one's own, another process's, several devices'");
    CALL(cuMemRelease, theirs);
    CALL(cuMemRelease, together);
    CALL(cuMemRelease, mine);
    CALL(cuMemUnmap, at, 3 * mib2);
    device[0].mapped = device[1].mapped = device[0].physical = 0;
    step("unmapped");

    if (pthread_create(&thread, NULL, without_context, NULL) || pthread_join(thread, NULL)) fail("thread", "none");
    CALL(cuMemAlloc_v2, &view, 900);
    device[1].device_bytes += 900;
    step("before the last reference goes");
    CALL(cuDevicePrimaryCtxRelease_v2, 1);
    device[1] = (columns){0};
    step("cuDevicePrimaryCtxRelease");
    return 0;
}
