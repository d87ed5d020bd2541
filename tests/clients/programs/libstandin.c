// Driver functions that the virtual GPU doesn't have. They succeed and give out numbers: what is tested is what a hook
// makes of the call, not the call.
#include "client.h"

static uint64_t next = 0x500000000000;
static uint64_t fresh(void) { return next += 64 << 20; }
#define GIVES(name, ...) \
    int name(__VA_ARGS__) { return *(uint64_t *)out = fresh(), 0; }
#define TAKES(name, ...) \
    int name(__VA_ARGS__) { return 0; }

TAKES(cuInit, unsigned flags)
GIVES(cuDevicePrimaryCtxRetain, handle_t *out, int device)
TAKES(cuDevicePrimaryCtxRelease_v2, int device)
TAKES(cuCtxSetCurrent, handle_t context)
GIVES(cuMemAlloc_v2, addr_t *out, size_t size)
TAKES(cuMemFree_v2, addr_t at)
GIVES(cuMipmappedArrayCreate, handle_t *out, const array3 *wanted, unsigned levels)
TAKES(cuMipmappedArrayDestroy, handle_t array)
GIVES(cuMemPoolImportPointer, addr_t *out, handle_t pool, void *data)
GIVES(cuMemCreate, uint64_t *out, size_t size, const memory_properties *wanted, unsigned long long flags)
TAKES(cuMemRelease, uint64_t handle)
TAKES(cuMemMap, addr_t at, size_t size, size_t offset, uint64_t handle, unsigned long long flags)
TAKES(cuMemUnmap, addr_t at, size_t size)
GIVES(cuMemImportFromShareableHandle, uint64_t *out, void *handle, int kind)
GIVES(cuMulticastCreate, uint64_t *out, const void *wanted)
GIVES(cuImportExternalMemory, handle_t *out, const external_memory *wanted)
TAKES(cuDestroyExternalMemory, handle_t memory)
GIVES(cuExternalMemoryGetMappedBuffer, addr_t *out, handle_t memory, const external_buffer *wanted)
