"""memtrace as PyTorch's CUDA allocator: `memtrace.install()`.

PyTorch lets two C functions take its allocator's place. It then refuses statistics, snapshots,
history, limits and pools. memtrace's allocator is PyTorch's own algorithm and can answer all of
that. PyTorch's Python code asks through functions of `torch._C`. Those that refuse are replaced
here by ones that ask memtrace. Everything above them (`torch.cuda.memory_summary()`,
`torch.cuda.memory._dump_snapshot()`, …) works as it always did.

Some things stay impossible, because PyTorch's C++ asks the allocator itself. These are sharing
CUDA tensors with other processes, storage at an exact address, and cuDNN's benchmark mode. So is
saving and restoring the state of a pool (CUDA graph trees of
`torch.compile(mode="reduce-overhead")`). PyTorch raises there, and says what it does not support.
The process group `nccl2`, PyTorch's newer one for NCCL, needs a tracker of segments in C++, so
`install()` chooses the older one (`TORCH_DIST_USE_NCCL2=0`).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Callable

from . import _interface, _library
from ._library import MemtraceError

# PyTorch's setter -> our C function. Older releases lack some; they call nothing there then.
_HOOKS = {
    "set_init_fn": "memtrace_init",
    "set_reset_fn": "memtrace_reset",
    "set_memory_fraction_fn": "memtrace_memory_fraction",
    "set_base_alloc_fn": "memtrace_base_alloc",
    "set_record_stream_fn": "memtrace_record_stream",
    "set_begin_allocate_to_pool": "memtrace_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "memtrace_end_allocate_to_pool",
    "set_release_pool": "memtrace_release_pool",
}

# PyTorch's variable, by its names in the order in which it looks at them. Set to nothing is set.
_CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NO_CACHING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")

_installed: Any = None  # PyTorch's object; it must live as long as the process
_observers: list[Any] = []


def is_installed() -> bool:
    """Is memtrace the allocator of this process?"""
    return _installed is not None


def install(*, stacks: str | None = None, out: str | os.PathLike[str] | None = None) -> None:
    """Makes memtrace PyTorch's CUDA allocator; to be called before the
    first CUDA call of the process.

    `stacks` ("none", "python" or "all") and `out`, the folder for snapshots, are what
    `MEMTRACE_STACKS` and `MEMTRACE_OUT` say otherwise; they count unless memtrace is recording
    already. Calling it again does nothing.

    Raises `MemtraceError` where that can't be, and says why.
    """
    global _installed
    if _installed is not None:
        return
    torch = _torch()
    _check(torch)
    library = _library.load()
    _, conf = _conf(torch)
    refused = _library.text(library.memtrace_allocator_configure(conf.encode()))
    if refused:
        raise ValueError(refused)
    _tell(library, "MEMTRACE_STACKS", stacks, _interface.STACKS)
    _tell(library, "MEMTRACE_OUT", None if out is None else os.fspath(out), None)
    allocator = torch._C._cuda_customAllocator(
        _library.address("memtrace_malloc"), _library.address("memtrace_free")
    )
    for setter, function in _HOOKS.items():
        if hasattr(allocator, setter):
            getattr(allocator, setter)(_library.address(function))
    try:
        torch._C._cuda_changeCurrentAllocator(allocator)
    except RuntimeError as error:
        raise MemtraceError(
            f"PyTorch's own allocator is in use already: call memtrace.install() before anything touches CUDA ({error})"
        ) from error
    _installed = allocator
    # The newer of PyTorch's two process groups for NCCL follows the allocator's segments in
    # C++. A pluggable allocator can't report them, and the process group ends the process
    # over that. The other one is as good.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    _answer(torch, library)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MemtraceError("memtrace.install() needs PyTorch, which can't be imported here") from error
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise MemtraceError(f"this PyTorch ({torch.__version__}) was built without CUDA: there is no allocator to replace")
    return torch


def _check(torch: Any) -> None:
    if torch.cuda.is_initialized():
        raise MemtraceError("CUDA is in use already: call memtrace.install() before anything touches CUDA")
    for name in _turned_off(torch):
        raise MemtraceError(
            f"{name} turns caching off, which is what memtrace.install() is for: unset it, or record with `memtrace run` instead"
        )
    name, conf = _conf(torch)
    if "backend:cudaMallocAsync" in conf.replace(" ", ""):
        raise MemtraceError(
            f"{name} asks for the backend cudaMallocAsync, which memtrace does not replace: unset it, or record with "
            "`memtrace run` instead"
        )


def _is_2_6(torch: Any) -> bool:
    """PyTorch 2.6 reads one name of the variable for settings, and turns
    caching off for any value."""
    return not hasattr(torch._C, "_accelerator_setAllocatorSettings")


def _conf(torch: Any) -> tuple[str, str]:
    """The variable that counts, and what it says."""
    names = _CONF[:1] if _is_2_6(torch) else _CONF
    return next(((name, os.environ[name]) for name in names if name in os.environ), (_CONF[0], ""))


def _turned_off(torch: Any) -> list[str]:
    """The variables that turn caching off: 2.6 takes any value for that, later releases 1 alone."""
    return [name for name in _NO_CACHING if name in os.environ and (_is_2_6(torch) or os.environ[name] == "1")]


def _tell(library: ctypes.CDLL, name: str, value: str | None, allowed: tuple[str, ...] | None) -> None:
    if value is None:
        return
    if allowed and value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
    if not library.memtrace_active():
        os.environ[name] = value


def _answer(torch: Any, library: ctypes.CDLL) -> None:
    """Replaces the functions of `torch._C` that refuse."""
    from . import _pools, _pytorch

    view = _pytorch.View(torch, library)
    answers: dict[str, Callable[..., Any]] = {
        "_cuda_memoryStats": view.stats,
        "_cuda_resetPeakMemoryStats": view.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": view.reset_accumulated,
        "_cuda_getMemoryFraction": view.fraction,
        "_cuda_memorySnapshot": view.snapshot,
        "_cuda_record_memory_history": view.record_history,
        "_cuda_record_memory_history_legacy": view.record_history_legacy,
        "_cuda_isHistoryEnabled": view.is_history_enabled,
        "_cuda_allocationTraceback": view.traceback,
        "_cuda_attach_out_of_memory_observer": _observe,
        "_cuda_cudaCachingAllocator_enable": _enable,
        "_cuda_checkPoolLiveAllocations": _no_graph_trees,
        "_cuda_getCheckpointState": _no_graph_trees,
        "_cuda_setCheckpointPoolState": _no_graph_trees,
        "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
        "_accelerator_getDeviceStats": view.stats_of_any_accelerator,
        "_accelerator_resetPeakStats": view.reset_peak,
        "_accelerator_resetAccumulatedStats": view.reset_accumulated,
    }
    for name, answer in answers.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, answer)
    for name in ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings"):
        if hasattr(torch._C, name):
            setattr(torch._C, name, _configuring(library, getattr(torch._C, name)))
    _pools.provide(torch, library)


def _configuring(library: ctypes.CDLL, original: Callable[[str], None]) -> Callable[[str], None]:
    def configure(conf: str) -> None:
        try:
            original(conf)  # host memory is still PyTorch's, and so are its errors
        finally:  # what stands before a mistake counts
            refused = _library.text(library.memtrace_allocator_configure(conf.encode()))
        if refused:
            raise ValueError(refused)

    return configure


def _enable(value: bool) -> None:
    if not value:
        raise MemtraceError(
            "caching can't be turned off while memtrace is the allocator; record with `memtrace run` instead"
        )


def _no_graph_trees(*_: Any) -> None:
    raise MemtraceError(
        "PyTorch saves and restores a pool's state in C++, and only its own allocator's: no CUDA graph trees "
        'under memtrace.install(). Compile with mode="max-autotune-no-cudagraphs" or set '
        "torch._inductor.config.triton.cudagraph_trees = False, or record with `memtrace run` instead"
    )


_Observer = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)


def _observe(observer: Callable[[int, int, int, int], None]) -> None:
    function = _Observer(observer)
    _observers.append(function)  # as long as the library may call it
    _library.load().memtrace_allocator_observe_oom(ctypes.cast(function, ctypes.c_void_p))
