"""Everything that an allocator must not be asked, asked of memtrace's: nothing may crash, and what is right stays right.

    python abuse.py installed|alone [SEED]

`alone` calls the C functions without PyTorch's own part in front of them.
"""

import ctypes
import gc
import random
import sys

way, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
chance = random.Random(seed)

import torch  # noqa: E402

import memtrace  # noqa: E402
from memtrace import _library  # noqa: E402

if way == "installed":
    memtrace.install(stacks="none")
torch.cuda.init()
library = _library.load()
library.memtrace_malloc.restype = ctypes.c_void_p
library.memtrace_malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
library.memtrace_free.restype = None
library.memtrace_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
library.memtrace_record_stream.restype = None
library.memtrace_record_stream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
library.memtrace_base_alloc.restype = ctypes.c_void_p
library.memtrace_base_alloc.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
library.memtrace_reset.restype = None


def allocated():
    return torch._C._cuda_memoryStats(0)["allocated_bytes"]["all"]["current"] if way == "installed" else counted()


def counted():
    import json

    return json.loads(_library.text(library.memtrace_allocator_stats(0)))["allocated_bytes.all.current"]


# --- through the C functions ----------------------------------------------------------------------------

before = allocated()
host = ctypes.create_string_buffer(64)
side = torch.cuda.Stream().cuda_stream
held = {}
refused = 0
for _ in range(20_000):
    what = chance.random()
    if what < 0.45:
        size = chance.choice([0, 1, 511, 512, 513, 1 << 20, (1 << 20) + 1, 20 << 20, chance.randrange(1, 1 << 24)])
        if chance.random() < 0.02:
            size = chance.choice([1 << 40, 1 << 59, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 511])
        addr = library.memtrace_malloc(size, 0, chance.choice([None, None, side]))
        if addr is None:
            refused += size > 0
            assert size == 0 or size >= 1 << 24, size
        else:
            assert 0 < size < 1 << 40 and addr % 512 == 0 and addr not in held
            held[addr] = size
    elif what < 0.85 and held:
        addr = chance.choice(list(held))
        # The sizes, devices and streams that are passed are not trusted.
        library.memtrace_free(addr, chance.choice([held.pop(addr), 0, 1 << 63]), chance.choice([0, 0, 7, -1, 99]), None)
        if chance.random() < 0.2:
            library.memtrace_free(addr, 0, 0, None)  # twice
    elif what < 0.9 and held:
        addr = chance.choice(list(held))
        library.memtrace_record_stream(addr, side)
        size = ctypes.c_size_t()
        base = library.memtrace_base_alloc(addr, ctypes.byref(size))
        assert base <= addr and addr + held[addr] <= base + size.value and size.value % (2 << 20) == 0, "it lies in its segment"
    elif what < 0.96:
        bad = chance.choice([1, 511, 12345, ctypes.addressof(host), (1 << 64) - 1, *(a + 256 for a in list(held)[:1])])
        library.memtrace_free(bad, 64, 0, None)
        library.memtrace_record_stream(bad, side)
        size = ctypes.c_size_t(1)
        library.memtrace_base_alloc(bad, ctypes.byref(size))
    elif what < 0.965:
        library.memtrace_reset()
for device in (-1, 64, 1 << 20):
    assert library.memtrace_malloc(512, device, None) is None
for addr in held:
    library.memtrace_free(addr, 0, 0, None)
assert allocated() == before, "what was given back is not in use"
assert refused > 20

# --- through PyTorch ------------------------------------------------------------------------------------

if way == "installed":
    errors = []
    for wrong in (
        lambda: torch.cuda.caching_allocator_delete(12345),
        lambda: torch.cuda.caching_allocator_delete(ctypes.addressof(host)),
        lambda: torch.cuda.caching_allocator_alloc(-1),
        lambda: torch.empty(1 << 62, dtype=torch.uint8, device="cuda"),
        lambda: torch.empty(1 << 50, dtype=torch.uint8, device="cuda"),
        lambda: torch.cuda.caching_allocator_alloc((1 << 63) - 1),
        lambda: torch._C._cuda_setMemoryFraction(3.0, 0),
        lambda: torch._C._cuda_endAllocateToPool(0, (0, 77)),
        lambda: torch._C._cuda_releasePool(0, (0, 77)),
        lambda: torch._C._accelerator_setAllocatorSettings("max_split_size_mb:1"),
        lambda: torch.cuda.memory.caching_allocator_enable(False),
        lambda: torch.empty(4, device="cuda").untyped_storage()._share_cuda_(),
        lambda: torch.cuda.memory._record_memory_history("sometimes"),
        lambda: torch.cuda.MemPool(torch.cuda.memory._get_current_allocator().allocator()),
    ):
        try:
            wrong()
        except Exception as error:
            errors.append(error)
            print(f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
        else:
            raise SystemExit(f"no error from number {len(errors)}")
    assert torch.cuda.caching_allocator_alloc(0) in (0, None)
    twice = torch.cuda.caching_allocator_alloc(1000)
    torch.cuda.caching_allocator_delete(twice)
    try:
        torch.cuda.caching_allocator_delete(twice)
    except RuntimeError as error:
        print(error)
    else:
        raise SystemExit("a block was given back twice")
    del errors
    gc.collect()
    x = torch.ones(1000, device="cuda")
    assert torch.cuda.memory_allocated() == before + 4096
    torch.cuda.synchronize()
print("still standing")
