"""The library's functions for labels and numbers, as quick as Python can call them.

`ctypes.PyDLL` keeps the interpreter's lock during a call. These functions take a few nanoseconds
and wait for nothing, so giving the lock up and taking it again would be most of the cost.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any, Callable

from . import _library

# Sorts of labels, and of points, as in `include/memtrace.h`.
RANGE, PHASE, MODULE, OPERATOR = range(4)
MOMENT, STEP, BEGIN, END = range(1, 5)


class Native:
    """The functions, typed."""

    def __init__(self, path: str | None) -> None:
        library = _library.declare(ctypes.PyDLL(path))
        self.push: Callable[[bytes], int] = library.memtrace_push
        self.push_module: Callable[[bytes], int] = library.memtrace_push_module
        self.push_phase: Callable[[bytes], int] = library.memtrace_push_phase
        self.pop: Callable[[], int] = library.memtrace_pop
        self.unwind: Callable[[int], None] = library.memtrace_unwind
        self.label: Callable[[int, int, bytes], int] = library.memtrace_label
        self.enter: Callable[[int], int] = library.memtrace_enter
        self.current: Callable[[], int] = library.memtrace_current
        self.mark: Callable[[bytes, int, int], None] = library.memtrace_mark
        self.restart_peak: Callable[[int], None] = library.memtrace_restart_peak
        self.raise_peak: Callable[[int, int, int], None] = library.memtrace_raise_peak
        self.label_sort: Callable[[int], int] = library.memtrace_label_sort
        self.label_parent: Callable[[int], int] = library.memtrace_label_parent
        self.operators_learn: Callable[[bytes], None] = library.memtrace_operators_learn
        self.operators_prepare: Callable[[int, int, int, int, int], None] = library.memtrace_operators_prepare
        self.operators_start: Callable[[], int] = library.memtrace_operators_start
        self.operators_stop: Callable[[], None] = library.memtrace_operators_stop
        self.operators_module: Callable[[int], None] = library.memtrace_operators_module
        self.operators_count: Callable[[Any], int] = library.memtrace_operators_count
        self.operators_read: Callable[[int, int, Any], int] = library.memtrace_operators_read
        self.operators_release: Callable[[int], None] = library.memtrace_operators_release
        self.changes_ask: Callable[[int], None] = library.memtrace_changes_ask
        self.changes_count: Callable[[Any], int] = library.memtrace_changes_count
        self.changes_release: Callable[[int], None] = library.memtrace_changes_release
        self.changes_read: Callable[[int, int, Any], int] = library.memtrace_changes_read
        self.calls_begin: Callable[[int, int], None] = library.memtrace_calls_begin
        self.calls_add: Callable[[int, int, int, bytes, int], None] = library.memtrace_calls_add
        self.calls_remove: Callable[[int], None] = library.memtrace_calls_remove
        self.calls_forget: Callable[[int], None] = library.memtrace_calls_forget
        self.module_called = ctypes.cast(library.memtrace_module_called, ctypes.c_void_p).value or 0
        self._path = library.memtrace_label_path
        self._memory = library.memtrace_memory
        self._stats = library.memtrace_stats

    def label_path(self, label: int) -> str:
        """The names of a label, outermost first."""
        return _text(lambda buffer, size: self._path(label, buffer, size))

    def memory(self, device: int) -> tuple[int, int, int, int]:
        """Allocated, reserved, and the most of each, bytes."""
        numbers = (ctypes.c_uint64 * 4)()
        self._memory(device, numbers)
        return (numbers[0], numbers[1], numbers[2], numbers[3])

    def stats(self) -> dict[str, Any]:
        """How recording goes."""
        known: dict[str, Any] = json.loads(_text(self._stats))
        return known


def _text(write: Callable[[Any, int], int]) -> str:
    size = 4096
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = write(buffer, size)
        if needed < size:
            return buffer.value.decode("utf-8", "replace")
        size = needed + 256


_native: Native | None = None


def native() -> Native | None:
    """The functions, if the library is in this process; else `None`, and
    labels do nothing."""
    global _native
    if _native is None and _library.is_loaded():
        _native = Native(_library.load()._name)
    return _native
