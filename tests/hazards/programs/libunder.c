// A driver without a lock or an allocation, for `libover.c`.
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

static _Atomic uint64_t next = 0x700000000000;

static uint64_t take(size_t size) { return atomic_fetch_add(&next, (size + 511) & ~(size_t)511); }

int cuMemAlloc_v2(unsigned long long *out, size_t size) {
    *out = take(size);
    return 0;
}

int cuMemFree_v2(unsigned long long at) {
    (void)at;
    return 0;
}

int cuMemCreate(unsigned long long *out, size_t size, const void *properties, unsigned long long flags) {
    (void)properties, (void)flags;
    *out = take(size);
    return 0;
}

int cuMemAddressReserve(unsigned long long *out, size_t size, size_t align, unsigned long long at, unsigned long long flags) {
    (void)align, (void)at, (void)flags;
    *out = take(size);
    return 0;
}

int cuMemMap(unsigned long long at, size_t size, size_t offset, unsigned long long handle, unsigned long long flags) {
    (void)at, (void)size, (void)offset, (void)handle, (void)flags;
    return 0;
}
