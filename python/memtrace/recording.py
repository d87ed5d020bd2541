"""Recording and what comes of it: `start`, `stop`, `snapshot`, `dump`,
`stats`, and the peak of a piece of code.

memtrace is a flight recorder: preloaded (`memtrace run -- python …`) it records from the
first CUDA call to the end, and nothing here is needed. `start()` is for programs that nobody
started that way, and for finding out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, TypeVar, overload

from . import _library, logs
from ._library import MemtraceError
from ._native import Native, native
from .labels import annotate, mark

F = TypeVar("F", bound=Callable[..., Any])

log = logs.get("recording")

HOW = (
    "start the program as `memtrace run -- python …` (or with LD_PRELOAD=libmemtrace.so), or call memtrace.start() before "
    "anything touches CUDA"
)


def is_recording() -> bool:
    """Is memtrace recording in this process by now? It begins at the first CUDA call."""
    return _library.is_loaded() and bool(_library.load().memtrace_active())


def start(*, stacks: str | None = None, out: str | os.PathLike[str] | None = None) -> str:
    """Makes sure that memtrace sees this process's GPU memory, and returns how.

    `"preload"`: the library was there before the program and sees everything. `"allocator"`: it
    was not, so memtrace became PyTorch's allocator (`memtrace.install()`), and sees PyTorch's
    blocks but not other libraries' memory. `"none"`: there is no CUDA here, so there is nothing
    to see. `stacks` and `out` are those of `install`; preloaded, the variables
    `MEMTRACE_STACKS` and `MEMTRACE_OUT` say them.

    Raises `MemtraceError` where CUDA is in use already and memtrace was not there: what
    was allocated before can't be known.
    """
    if _library.is_preloaded():
        mark("start")
        return "preload"
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        log.info("no CUDA in this process: nothing to record")
        return "none"
    from . import allocator

    if torch.cuda.is_initialized() and not allocator.is_installed():
        raise MemtraceError(f"CUDA is in use already and memtrace was not there: {HOW}")
    allocator.install(stacks=stacks, out=out)
    mark("start")
    return "allocator"


def stop(path: str | os.PathLike[str] | None = None) -> Path | None:
    """Marks the end of what `start` began and writes a snapshot; returns its
    path, `None` if nothing was recorded.

    Recording itself goes on: it costs little, and a history with a hole would
    be wrong about everything after it.
    """
    mark("stop")
    return dump(path) if is_recording() else None


def dump(path: str | os.PathLike[str] | None = None) -> Path:
    """Writes a snapshot of now and returns where: `path` (`.pickle` or `.json`), or the
    next free name in the output folder.

    Raises `MemtraceError` if nothing is recorded, or the file can't be written.
    """
    known = _recorded()
    target = Path(path) if path is not None else _free_name(Path(known.stats()["out"]))
    if _library.load().memtrace_dump(os.fsencode(target)) != 0:
        raise MemtraceError(f"memtrace could not write {target}; the reason is on stderr")
    return target


def snapshot() -> dict[str, Any]:
    """The snapshot of now as Python objects: what `torch.cuda.memory._snapshot()`
    returns, and the key `memtrace`."""
    _recorded()
    with tempfile.TemporaryDirectory(prefix="memtrace-") as folder:
        with open(dump(Path(folder) / "now.pickle"), "rb") as file:
            known: dict[str, Any] = pickle.load(file)
    return known


def stats() -> dict[str, Any]:
    """How recording goes, and what PyTorch's allocator has on each device; cheap, no CUDA call.

    `recording` is false where memtrace is not in the process, or nothing has called CUDA yet.
    """
    known = native()
    if known is None:
        return {"recording": False, "devices": []}
    found = known.stats()
    names = ("allocated", "reserved", "peak_allocated", "peak_reserved")
    devices = [(device, known.memory(device)) for device in range(64)]
    found["devices"] = [{"device": d, **dict(zip(names, numbers))} for d, numbers in devices if any(numbers)]
    return found


def _recorded() -> Native:
    known = native()
    if known is None or not is_recording():
        raise MemtraceError(f"memtrace is not recording in this process, or nothing has called CUDA yet: {HOW}")
    return known


def _torch() -> Any:
    """PyTorch, if the program uses it or could."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def _free_name(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    host = (socket.gethostname() or "localhost").replace("/", "_").replace(" ", "_")
    n = 0
    while True:
        path = folder / f"memtrace-{host}-{os.getpid()}-{n}.pickle"
        if not path.exists():
            return path
        n += 1


@dataclass(frozen=True)
class Usage:
    """Bytes of PyTorch's allocator on one device over a piece of code."""

    device: int
    before: int
    after: int
    peak: int
    peak_reserved: int

    @property
    def increase(self) -> int:
        """How far the peak rose above the beginning."""
        return self.peak - self.before

    @property
    def kept(self) -> int:
        """What is allocated more than at the beginning."""
        return self.after - self.before

    def __str__(self) -> str:
        return f"peak {size(self.peak)} (+{size(self.increase)}), {size(self.kept)} kept"


class peak:
    """The most memory that was allocated in a `with` block, exactly, whoever else looks at peaks.

        with memtrace.peak() as p:
            train_step()
        print(p.peak, p.increase, p.kept)

    PyTorch's own statistics are not touched, and blocks may be inside each other. `p.device` is
    the thread's current one unless named. Without CUDA all is 0; with CUDA but without memtrace it
    raises `MemtraceError`, which says what to do.
    """

    def __init__(self, device: int | None = None) -> None:
        self._asked = device
        self.device = device or 0
        self.usage: Usage | None = None
        self._known: Native | None = None
        self._begin = (0, 0, 0, 0)

    def __enter__(self) -> peak:
        self.device = _current_device() if self._asked is None else self._asked
        self._known = native()
        if self._known is None:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_available():
                raise MemtraceError(f"memtrace is not in this process and can't know its peak: {HOW}")
            return self
        self._begin = self._known.memory(self.device)
        self._known.restart_peak(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = (0, 0, 0, 0)
        if self._known is not None:
            end = self._known.memory(self.device)
            # Whoever counts around this block counts what was before it, too.
            self._known.raise_peak(self.device, self._begin[2], self._begin[3])
        self.usage = Usage(self.device, self._begin[0], end[0], end[2], end[3])

    def _so_far(self) -> Usage:
        if self.usage is not None:
            return self.usage
        now = self._known.memory(self.device) if self._known is not None else (0, 0, 0, 0)
        return Usage(self.device, self._begin[0], now[0], now[2], now[3])

    @property
    def peak(self) -> int:
        """The most that was allocated, bytes."""
        return self._so_far().peak

    @property
    def peak_reserved(self) -> int:
        """The most that PyTorch had from the driver, bytes."""
        return self._so_far().peak_reserved

    @property
    def increase(self) -> int:
        """How far the peak rose above the beginning, bytes."""
        return self._so_far().increase

    @property
    def kept(self) -> int:
        """What is allocated more than at the beginning, bytes."""
        return self._so_far().kept

    def __str__(self) -> str:
        return str(self._so_far())


def _current_device() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_device())


@overload
def profile(function: F) -> F: ...


@overload
def profile(*, name: str | None = None, to: Callable[[str], Any] | None = None) -> Callable[[F], F]: ...


def profile(
    function: F | None = None, *, name: str | None = None, to: Callable[[str], Any] | None = None
) -> F | Callable[[F], F]:
    """Says what each call of a function takes: `@memtrace.profile`, or
    with a name and where to say it.

    What the function allocates is labelled with its name. The last call's numbers are
    `function.usage`. `to` gets one line a call; by default it goes to stderr. Where memtrace is not
    in the process the function just runs.
    """

    def decorate(function: F) -> F:
        label = name or function.__qualname__

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if native() is None:
                return function(*args, **kwargs)
            with contextlib.ExitStack() as stack:
                stack.enter_context(annotate(label))
                measured = peak()
                stack.callback(lambda: _tell(call, label, measured, to))
                stack.enter_context(measured)
                return function(*args, **kwargs)

        call.usage = None  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate if function is None else decorate(function)


def _tell(call: Any, label: str, measured: peak, to: Callable[[str], Any] | None) -> None:
    call.usage = measured.usage
    line = f"memtrace: {label}: {measured}"
    if to is not None:
        to(line)
    else:
        print(line, file=sys.stderr)


def size(number: int) -> str:
    """Bytes for a screen."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?)B?|B)?\s*", re.ASCII)


def parse_size(text: str | float) -> int:
    """`"2 GiB"`, `"500 MB"` (millions), `"64k"` (of 1,024), or bytes."""
    if not isinstance(text, str):
        return int(text)
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no size: write bytes, or a number and a unit, such as '2 GiB' or '500 MB'")
    number, letter, binary = found.groups()
    power = " KMGT".index((letter or " ").upper())
    decimal = letter is not None and not binary and text.rstrip().endswith("B")
    return int(float(number) * (1000 if decimal else 1024) ** power)
