"""memtrace as PyTorch's CUDA allocator: `memtrace.install()`."""

from __future__ import annotations

from ._library import MemtraceError


def install() -> None:
    """Makes memtrace PyTorch's CUDA allocator, before the first CUDA call of the process."""
    raise MemtraceError("memtrace.install() is not built yet in this version")


def is_installed() -> bool:
    """Is memtrace the allocator of this process?"""
    return False
