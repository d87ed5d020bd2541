"""Statistics, history and snapshots, in PyTorch's shape.

The state comes from the allocator itself. The history is what the recorder has written down, which is always on; what PyTorch
calls "record memory history" only says from when on, and how much of it, a snapshot shows. So turning it on costs nothing
that was not paid before, and turning it off loses nothing but the view.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any, Sequence

from . import _library
from ._library import MemtraceError

_ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "annotate",
)
_BY_POOL = "reserved_bytes_by_private_pools"
_FREES = ("free_requested", "free_completed")


@dataclass
class _History:
    """What the program has asked to see."""

    context: str | None
    stacks: str
    most: int
    since_us: int
    skipped: frozenset[str] = frozenset()
    # Blocks that were there before: nobody has asked for their stacks.
    before: frozenset[int] = field(default_factory=frozenset)


class View:
    """What `torch._C` would say."""

    def __init__(self, torch: Any, library: ctypes.CDLL) -> None:
        self._torch = torch
        self._library = library
        self._history: _History | None = None

    def stats(self, device: int) -> dict[str, Any]:
        """`torch._C._cuda_memoryStats`: nested by the parts of each name."""
        flat = json.loads(_library.text(self._library.memtrace_allocator_stats(device)) or "{}")
        nested: dict[str, Any] = {_BY_POOL: {}}
        for name, value in flat.items():
            first, *middle, last = name.split(".") if "." in name else (name, name)
            if not middle and first == last:
                nested[first] = value
                continue
            at = nested.setdefault(first, {})
            for part in middle:
                key: Any = tuple(map(int, part.split("_"))) if first == _BY_POOL and part[0].isdigit() else part
                at = at.setdefault(key, {})
            at[last] = value
        return nested

    # PyTorch's compiler keeps these functions in tables: they must be hashable, which those of ctypes aren't.

    def reset_peak(self, device: int) -> None:
        """`torch._C._cuda_resetPeakMemoryStats`."""
        self._library.memtrace_allocator_reset_peak(device)

    def reset_accumulated(self, device: int) -> None:
        """`torch._C._cuda_resetAccumulatedMemoryStats`."""
        self._library.memtrace_allocator_reset_accumulated(device)

    def fraction(self, device: int) -> float:
        """`torch._C._cuda_getMemoryFraction`."""
        return float(self._library.memtrace_allocator_fraction(device))

    def record_history(
        self,
        enabled: str | None,
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Sequence[str] = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        """`torch._C._cuda_record_memory_history`."""
        _one_of("enabled", enabled, (None, "state", "all"))
        _one_of("context", context, (None, "state", "alloc", "all"))
        _one_of("stacks", stacks, ("python", "all"))
        for action in skip_actions:
            _one_of("skip_actions", action, _ACTIONS)
        if record_pinned_host_memory or not record_cuda:
            raise MemtraceError(
                "under memtrace.install() PyTorch can't record its pinned memory apart; `memtrace run` records it as well"
            )
        self._torch.cuda._lazy_init()
        if enabled is None:
            self._history = None
            return
        known = None if clear_history else self._history
        self._history = _History(
            context=context,
            stacks=stacks,
            most=1 if enabled == "state" else max_entries,
            skipped=frozenset(skip_actions),
            since_us=known.since_us if known else self._library.memtrace_now_us(),
            before=known.before if known else frozenset(self._active()),
        )

    def record_history_legacy(
        self,
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        record_context_cpp: bool = False,
        *rest: Any,
    ) -> None:
        """The same as it was called in 2.0."""
        context = None
        if record_context:
            context = "alloc" if trace_alloc_record_context else "state"
        stacks = "all" if record_context_cpp else "python"
        self.record_history("all" if enabled else None, context, stacks, trace_alloc_max_entries, *rest)

    def is_history_enabled(self) -> bool:
        """`torch._C._cuda_isHistoryEnabled`."""
        return self._history is not None

    def traceback(self, address: int) -> list[dict[str, Any]] | None:
        """`torch._C._cuda_allocationTraceback`."""
        for segment in self.snapshot(None)["segments"]:
            for block in segment["blocks"]:
                if block["address"] == address and block["state"] == "active_allocated" and block["frames"]:
                    frames: list[dict[str, Any]] = block["frames"]
                    return frames
        return None

    def snapshot(self, which: tuple[int, int, bool] | tuple[int, int] | None) -> dict[str, Any]:
        """`torch._C._cuda_memorySnapshot`."""
        pool = (which[0], which[1]) if which else (0, 0)
        traces = which is None or len(which) < 3 or which[2]
        history = self._history
        # The record first: PyTorch's note that somebody looked belongs to the next snapshot.
        record = self._record() if history or which is None else None
        segments = self._segments(pool, quiet=history is None or "snapshot" in history.skipped)
        shown: list[list[dict[str, Any]]] = []
        if history and record:
            self._add_frames(history, record, segments)
            if traces:
                shown = [_trace(history, entries) for entries in record["device_traces"]]
                shown += [[] for _ in range(self._torch.cuda.device_count() - len(shown))]
        elif traces and self._torch.cuda.is_initialized():
            shown = [[] for _ in range(self._torch.cuda.device_count())]
        return {
            "segments": segments,
            "device_traces": shown,
            "allocator_settings": record["allocator_settings"] if record else {},
            "external_annotations": [],
            "host_segments": [],
            "host_traces": [],
        }

    def _segments(self, pool: tuple[int, int], quiet: bool) -> list[dict[str, Any]]:
        answer = _library.text(self._library.memtrace_allocator_segments(*pool, int(quiet)))
        segments: list[dict[str, Any]] = json.loads(answer or "[]")
        for segment in segments:
            segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
        return segments

    def _active(self) -> list[int]:
        segments = self._segments((0, 0), quiet=True)
        return [b["address"] for s in segments for b in s["blocks"] if b["state"] != "inactive"]

    def _record(self) -> dict[str, Any] | None:
        """All that is recorded, as memtrace writes it into files."""
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryDirectory(prefix="memtrace-", dir=folder) as name:
            path = os.path.join(name, "snapshot.pickle")
            if self._library.memtrace_dump(path.encode()) != 0:
                return None
            with open(path, "rb") as file:
                record: dict[str, Any] = pickle.load(file)
                return record

    def _add_frames(self, history: _History, record: dict[str, Any], segments: list[dict[str, Any]]) -> None:
        if history.context is None:
            return
        # What was there when history began has no stack in PyTorch.
        since = {
            (e["action"], e["addr"])
            for entries in record["device_traces"]
            for e in entries
            if e["action"] in ("alloc", "segment_alloc") and e["time_us"] > history.since_us
        }
        frames: dict[int, Any] = {}
        of_segment: dict[int, Any] = {}
        for segment in record["segments"]:
            if ("segment_alloc", segment["address"]) in since:
                of_segment[segment["address"]] = segment["frames"]
            for block in segment["blocks"]:
                if block["address"] not in history.before or ("alloc", block["address"]) in since:
                    frames[block["address"]] = block["frames"]
        for segment in segments:
            if len(segment["blocks"]) == 1 and not segment["is_expandable"]:
                segment["frames"] = _wanted(history, of_segment.get(segment["address"], []))
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    block["frames"] = _wanted(history, frames.get(block["address"], []))


def _one_of(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        raise RuntimeError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}")


def _wanted(history: _History, frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if history.stacks == "all":
        return frames
    return [f for f in frames if _is_python(f["filename"])]


def _is_python(filename: str) -> bool:
    return filename.endswith(".py") or filename.startswith("<")


def _trace(history: _History, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The part of a device's trace that PyTorch would show."""
    shown = []
    allocated: dict[int, Any] = {}  # where blocks were allocated, if that is what frees show
    for entry in entries:
        if entry["time_us"] <= history.since_us or str(entry.get("user_metadata", "")).startswith("driver: "):
            continue
        if entry["action"] in history.skipped:
            continue
        frames = entry.pop("frames", None)
        if history.context == "alloc":
            if entry["action"] == "alloc":
                allocated[entry["addr"]] = frames
            elif entry["action"] in _FREES:
                frames = allocated.get(entry["addr"])
        if frames and history.context in ("alloc", "all"):
            entry["frames"] = _wanted(history, frames)
        shown.append(entry)
    return shown[-history.most :] if history.most < len(shown) else shown
