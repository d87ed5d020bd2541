"""`torch.cuda.MemPool` under `memtrace.install()`.

PyTorch's own class asks the allocator in C++ for things that a pluggable one is not asked for. This
one has the same face and asks memtrace. Ids come from PyTorch, so that they are unique beside those
of graphs; sending allocations to a pool (`torch.cuda.use_mem_pool`) is PyTorch's own.
"""

from __future__ import annotations

import ctypes
from typing import Any

from . import _library
from ._library import MemtraceError

# Allocators that were made while memtrace was installed: the object, and where its functions are.
_made: dict[int, tuple[Any, int, int]] = {}


def provide(torch: Any, library: ctypes.CDLL) -> None:
    """Gives PyTorch a `MemPool` that works."""
    custom = torch._C._cuda_customAllocator

    def custom_allocator(malloc: int, free: int) -> Any:
        made = custom(malloc, free)
        _made[id(made)] = (made, malloc, free)
        return made

    torch._C._cuda_customAllocator = custom_allocator

    def ask(device: int, pool: tuple[int, int], wish: str) -> None:
        refused = _library.text(library.memtrace_allocator_pool(device, *pool, wish.encode()))
        if refused:
            raise RuntimeError(refused)

    class MemPool:
        """A pool of memory of its own; see `torch.cuda.MemPool`."""

        def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
            torch.cuda._lazy_init()
            source = None
            if allocator is not None:
                if id(allocator) not in _made:
                    raise MemtraceError(
                        "the allocator of a MemPool must be made after memtrace.install(), by "
                        "torch.cuda.memory.CUDAPluggableAllocator(…).allocator()"
                    )
                source = _made[id(allocator)]
            self._device = torch.cuda.current_device()
            self._id = tuple(torch._C._graph_pool_handle())
            ask(self._device, self._id, "hold")
            if source:
                refused = _library.text(
                    library.memtrace_allocator_pool_source(self._device, *self._id, source[1], source[2])
                )
                if refused:
                    raise RuntimeError(refused)
            if use_on_oom:
                ask(self._device, self._id, "use_on_oom")
            if no_split:
                ask(self._device, self._id, "no_split")

        def __del__(self) -> None:
            pool = getattr(self, "_id", None)
            if pool is not None and library.memtrace_allocator_pool_uses(self._device, *pool) > 0:
                ask(self._device, pool, "release")
                ask(self._device, pool, "empty")

        @property
        def id(self) -> tuple[int, int]:
            """The pool's id, as in snapshots."""
            return self._id

        @property
        def allocator(self) -> None:
            """PyTorch's allocator of this pool: none."""
            return None

        def use_count(self) -> int:
            """How many hold the pool."""
            return int(library.memtrace_allocator_pool_uses(self._device, *self._id))

        def snapshot(self, include_traces: bool = True) -> Any:
            """The pool's segments."""
            return torch._C._cuda_memorySnapshot((*self._id, include_traces))["segments"]

    class MemPoolContext:
        """Of 2.6, where it says to PyTorch's own allocator which pool's it is:
        nothing that memtrace has to be told."""

        def __init__(self, pool: MemPool) -> None:
            self._pool = pool

    MemPool.__module__ = MemPoolContext.__module__ = "torch.cuda.memory"
    torch.cuda.MemPool = torch.cuda.memory.MemPool = MemPool
    if hasattr(torch.cuda.memory, "MemPoolContext"):
        torch.cuda.MemPoolContext = torch.cuda.memory.MemPoolContext = MemPoolContext
