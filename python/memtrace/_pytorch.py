"""Statistics, history and snapshots, in PyTorch's shape.

The state comes from the allocator itself. The history is what the recorder has written
down, which is always on. What PyTorch calls "record memory history" only decides which
part of it a snapshot shows. So turning it on costs nothing that was not paid before, and
turning it off loses nothing but the view.
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


@dataclass(frozen=True)
class _Period:
    """What the program has asked to see, from a moment on: what happens then is kept,
    and shown later, as was asked then."""

    since_us: int
    enabled: bool
    context: str | None = None
    stacks: str = "all"
    most: int = 1
    skipped: frozenset[str] = frozenset()
    # What was shown before is forgotten.
    clears: bool = False
    # Blocks that were there when it began: for those whose allocation the record has forgotten.
    before: frozenset[int] = field(default_factory=frozenset)

    def seen(self, frames: list[dict[str, Any]] | None, native: frozenset[str]) -> list[dict[str, Any]] | None:
        """Of a stack, what is kept with a block. `native` is what frames
        that aren't Python's are in."""
        if not self.enabled or self.context is None or frames is None:
            return None
        return frames if self.stacks == "all" else [f for f in frames if f["filename"] not in native]


class View:
    """What `torch._C` would say."""

    def __init__(self, torch: Any, library: ctypes.CDLL) -> None:
        self._torch = torch
        self._library = library
        self._periods: list[_Period] = []

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

    def stats_of_any_accelerator(self, device: int) -> dict[str, Any]:
        """`torch._C._accelerator_getDeviceStats`, which leaves out what only CUDA has."""
        stats = self.stats(device)
        stats.pop("num_oom_rejections", None)
        return stats

    # PyTorch's compiler keeps these functions in tables: they must be
    # hashable, which those of ctypes aren't.

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
        _one_of(enabled, (None, "state", "all"), "expected state to be 'state', 'all', or None")
        _one_of(context, (None, "state", "alloc", "all"), "expected context to be 'state', 'alloc', 'all', or None")
        _one_of(stacks, ("python", "all"), "expected stacks to be 'python', or 'all'")
        for action in skip_actions:
            _one_of(action, _ACTIONS, f"Unknown TraceEntry action: {action}")
        if record_pinned_host_memory or not record_cuda:
            raise MemtraceError(
                "under memtrace.install() PyTorch can't record its pinned memory apart; `memtrace run` records it as well"
            )
        self._torch.cuda._lazy_init()
        now = self._library.memtrace_now_us()
        if enabled is None:
            self._periods.append(_Period(now, enabled=False, clears=True))
            return
        known = self._periods[-1] if self.is_history_enabled() and not clear_history else None
        self._periods.append(
            _Period(
                now,
                enabled=True,
                context=context,
                stacks=stacks,
                most=1 if enabled == "state" else max(max_entries, 1),
                skipped=frozenset(skip_actions),
                clears=clear_history,
                before=known.before if known else frozenset(self._active()),
            )
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
        return bool(self._periods) and self._periods[-1].enabled

    def traceback(self, address: int) -> list[dict[str, Any]] | None:
        """`torch._C._cuda_allocationTraceback`."""
        record, segments = self._record(), self._segments((0, 0), quiet=True)
        if record:
            self._add_frames(record, segments)
        for segment in segments:
            for block in segment["blocks"]:
                if block["address"] == address and block["state"] == "active_allocated" and block["frames"]:
                    frames: list[dict[str, Any]] = block["frames"]
                    return frames
        return None

    def snapshot(self, which: tuple[int, int, bool] | tuple[int, int] | None = None) -> dict[str, Any]:
        """`torch._C._cuda_memorySnapshot`."""
        pool = (which[0], which[1]) if which else (0, 0)
        traces = which is None or len(which) < 3 or which[2]
        now = self._periods[-1] if self.is_history_enabled() else None
        # The record first: PyTorch's note that somebody looked belongs to the next snapshot.
        record = self._record() if self._periods or which is None else None
        segments = self._segments(pool, quiet=now is None or "snapshot" in now.skipped)
        if record and self._periods:
            self._add_frames(record, segments)
        shown: list[list[dict[str, Any]]] = []
        if traces and self._torch.cuda.is_initialized():
            if record and now:
                native = _native(record)
                shown = [_trace(self._periods, entries, native) for entries in record["device_traces"]]
            shown += [[] for _ in range(self._torch.cuda.device_count() - len(shown))]
        return {
            "segments": segments,
            "device_traces": shown,
            "allocator_settings": self._settings() if record else {},
            "external_annotations": [],
            "host_segments": [],
            "host_traces": [],
        }

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(_library.text(self._library.memtrace_allocator_settings()) or "{}")
        return settings

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

    def _add_frames(self, record: dict[str, Any], segments: list[dict[str, Any]]) -> None:
        """What was asked for when a block, or a segment, was allocated is kept with it."""
        began = {
            (e["action"], e["addr"]): e["time_us"]
            for entries in record["device_traces"]
            for e in entries
            if e["action"] in ("alloc", "segment_alloc") and not _of_the_driver(e)
        }
        native = _native(record)
        frames: dict[int, Any] = {}
        of_segment: dict[int, Any] = {}
        for segment in record["segments"]:
            since = began.get(("segment_alloc", segment["address"]))
            period = since and _at(self._periods, since)
            of_segment[segment["address"]] = period and period.seen(segment["frames"], native)
            for block in segment["blocks"]:
                period = self._of(block["address"], began.get(("alloc", block["address"])))
                frames[block["address"]] = period and period.seen(block["frames"], native)
        for segment in segments:
            if len(segment["blocks"]) == 1 and not segment["is_expandable"]:
                segment["frames"] = of_segment.get(segment["address"]) or []
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    block["frames"] = frames.get(block["address"]) or []

    def _of(self, address: int, since_us: int | None) -> _Period | None:
        """When a block was allocated."""
        if since_us is not None:
            return _at(self._periods, since_us)
        return next((p for p in reversed(self._periods) if p.enabled and address not in p.before), None)


def _one_of(value: str | None, allowed: Sequence[str | None], words: str) -> None:
    if value not in allowed:
        raise RuntimeError(words)


def _at(periods: list[_Period], time_us: int) -> _Period | None:
    return next((p for p in reversed(periods) if p.since_us < time_us), None)


def _of_the_driver(entry: dict[str, Any]) -> bool:
    return str(entry.get("user_metadata", "")).startswith("driver: ")


def _native(record: dict[str, Any]) -> frozenset[str]:
    """What native frames are in: libraries, what has no name, and what isn't
    code. A script may have any name."""
    return frozenset(record["memtrace"]["libraries"]) | {"??", "memtrace"}


def _trace(
    periods: list[_Period], entries: list[dict[str, Any]], native: frozenset[str]
) -> list[dict[str, Any]]:
    """A device's trace as PyTorch would show it: a ring, whose size each period may change."""
    ring: list[dict[str, Any]] = []
    oldest = 0
    coming = iter(periods)
    following = next(coming, None)
    period: _Period | None = None
    allocated: dict[int, Any] = {}  # the stacks that are kept with blocks
    # Periods that nothing happened in, too.
    for entry in [*entries, None]:
        while following and (entry is None or following.since_us < entry["time_us"]):
            period, following = following, next(coming, None)
            if period.clears:
                ring, oldest = [], 0
        if entry is None or period is None or not period.enabled or _of_the_driver(entry):
            continue
        frames = period.seen(entry.pop("frames", None), native)
        if entry["action"] == "alloc":
            allocated[entry["addr"]] = frames
        elif entry["action"] in _FREES and period.context != "all":
            frames = allocated.get(entry["addr"])
        if frames and period.context in ("alloc", "all"):
            entry["frames"] = frames
        if entry["action"] in period.skipped:
            continue
        if len(ring) < period.most:
            ring.append(entry)
        else:
            ring[oldest] = entry
            oldest = (oldest + 1) % period.most
    return ring[oldest:] + ring[:oldest]
