"""Memory after each operator: what PyTorch's
`torch.distributed._tools.memory_tracker.MemoryTracker` offers, by the same names.

The library writes a record at the end of every operator, in C++ and without Python. Two module
hooks say which module's forward ran last. Which records become a line is worked out when tracking
stops. An operator counts if it runs on the device by itself. It doesn't if it is only made of
others (`linear` of `addmm`), nor if it was called inside one that counts. That is what a dispatch
mode would have seen, so names and numbers are PyTorch's, and either class reads the other's files.
What each of them had on top, the step's markers `bw_end` and `optimizer_step`, is ours alone.

Left out, as PyTorch does: `aten::detach`. Known differences: operators made of others that run in
inference mode are shown as the others. And an operator that was seen as it began, and fails for
another reason than memory, has a line here but not in PyTorch.
"""

from __future__ import annotations

import ctypes
import pickle
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _files
from ._calls import NUMBER, Calls
from ._library import MemtraceError
from ._native import Native, native

if TYPE_CHECKING:
    import torch

_MIB = 1024 * 1024.0
_WORDS = 5
_BATCH = 1 << 14
_FAILED = 1 << 45  # a recomputation under a checkpoint ends by an exception in its last operator
_SHUT_OUT = 1 << 46
# The first PyTorch's tracker leaves out; the second ends in autograd's part
# and never comes to a dispatch mode.
_NOT_SHOWN = ("aten::detach.default", "aten::detach_.default")


class OperatorCall(NamedTuple):
    """One operator of a run."""

    name: str
    """As in the tables: module, `.forward.`, operator, and how many of it there were before."""
    operator: str
    """`aten::addmm.default`"""
    label: str
    """The label of the thread: under `memtrace.watch`, phase and module."""
    in_backward: bool
    allocated: int
    reserved: int
    active: int


class MemoryTracker:
    """Records what is allocated, active and reserved after each operator of the model's steps.

        tracker = memtrace.MemoryTracker()
        tracker.start_monitor(model)
        model(batch).sum().backward()
        tracker.stop()
        tracker.summary()

    The process must run under memtrace (`memtrace run -- python train.py`).
    """

    def __init__(self) -> None:
        self.memories_allocated: dict[int, tuple[str, float]] = {}
        self.memories_active: dict[int, tuple[str, float]] = {}
        self.memories_reserved: dict[int, tuple[str, float]] = {}
        self.calls: list[OperatorCall] = []
        self._markers: dict[str, int] = {}
        self._num_alloc_retries = 0
        self._hooks: list[Any] = []
        self._native: Native | None = None
        self._calls: Calls | None = None
        self._modules: list[str] = []
        self._first = self._lost = 0

    @property
    def markers(self) -> dict[str, int]:
        """Name → how many operators came before."""
        return self._markers

    @property
    def num_alloc_retries(self) -> int:
        """How often the allocator had to give back what it kept and try again."""
        return self._num_alloc_retries

    def start_monitor(self, root_module: torch.nn.Module) -> None:
        """Begins, for the current device. PyTorch's cache is emptied, as its own tracker does."""
        import torch

        if self._native is not None:
            raise MemtraceError("this MemoryTracker is running already: call stop() first")
        known = native()
        if known is None:
            raise MemtraceError(
                "MemoryTracker needs memtrace in the process: start it as `memtrace run -- python ...`"
            )
        torch.cuda.empty_cache()
        begin_operators(known, quickly=True)
        self._native = known
        self._first, self._lost = count_operators(known)
        self._modules = [""]
        self._markers = {}
        self._calls = Calls(known)
        for name, module in root_module.named_modules():
            self._modules.append(f"{name}.forward")
            self._calls.add(module, NUMBER, number=len(self._modules) - 1)
        self._hooks.append(root_module.register_forward_pre_hook(self._entered))
        self._hooks.append(root_module.register_forward_hook(self._left))
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._hooks.append(register_optimizer_step_pre_hook(self._steps))

    def stop(self) -> None:
        """Ends, and makes the tables."""
        import torch

        known = self._native
        if known is None:
            raise MemtraceError("this MemoryTracker is not running: call start_monitor() first")
        end_operators(known)
        if self._calls is not None:
            self._calls.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._native = None
        self._num_alloc_retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        self._tabulate(known)

    # --- while it runs ---

    def _entered(self, module: Any, args: Any) -> None:
        if self._native is not None:
            self._markers["fw_start"] = self._native.operators_count(None) - self._first

    def _left(self, module: Any, args: Any, output: Any) -> None:
        if self._native is not None:
            self._markers["fw_bw_boundary"] = self._native.operators_count(None) - self._first

    def _steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._native is not None:
            self._markers["optimizer_step"] = self._native.operators_count(None) - self._first

    # --- afterwards ---

    def _tabulate(self, known: Native) -> None:
        upto, lost = count_operators(known)
        records = read_operators(known, self._first, upto) if lost == self._lost else []
        known.operators_release(upto)
        if lost != self._lost:
            raise MemtraceError(f"{lost - self._lost} operators found no room: stop() more often")
        shown = shown_operators(known, records)
        names: dict[str, int] = defaultdict(int)
        self.calls = []
        paths: dict[int, str] = {}
        for at in shown:
            first, second, allocated, reserved, waiting = records[at]
            operator = known.label_path(first & 0xFFFFFFFF)
            short = operator.partition("::")[2]
            label = second >> 32
            if label not in paths:
                paths[label] = known.label_path(label)
            name = f"{self._modules[second & 0xFFFFFFFF]}.{short}_{names[short]}"
            names[short] += 1
            in_backward = bool(first >> 47 & 1)
            self.calls.append(
                OperatorCall(name, operator, paths[label], in_backward, allocated, reserved, allocated + waiting)
            )
        calls = range(len(self.calls))
        self.memories_allocated = {i: (self.calls[i].name, self.calls[i].allocated / _MIB) for i in calls}
        self.memories_active = {i: (self.calls[i].name, self.calls[i].active / _MIB) for i in calls}
        self.memories_reserved = {i: (self.calls[i].name, self.calls[i].reserved / _MIB) for i in calls}
        # A marker is a number of records, until here.
        self._markers = {name: sum(at < count for at in shown) for name, count in self._markers.items()}
        last = max((i for i in calls if self.calls[i].in_backward), default=None)
        if last is not None:
            self._markers["bw_end"] = last + 1

    def summary(self, top: int = 20) -> None:
        """Prints the operators after which most more was allocated than before."""
        print(f"allocation retries: {self._num_alloc_retries}")
        print(f"the {top} operators that added most:")
        for name, added in self._added()[:top]:
            print(f"  {added:12.3f} MiB  {name}")

    def _added(self) -> list[tuple[str, float]]:
        rows = list(self.memories_allocated.values())
        added = [(name, after - before) for (_, before), (name, after) in zip(rows, rows[1:])]
        return sorted(added, key=lambda row: -row[1])

    def show_traces(self, path: str = "") -> Any:
        """Draws the three curves over the operators, with the markers; returns matplotlib's figure.
        `path`: a file that `save_stats` wrote, read first."""
        if path:
            self.load(path)
        from ._plots import operator_curves

        curves = {
            "allocated": self.memories_allocated,
            "active": self.memories_active,
            "reserved": self.memories_reserved,
        }
        return operator_curves({name: [row[1] for row in rows.values()] for name, rows in curves.items()}, self._markers)

    def save_stats(self, path: str | Path) -> None:
        """Writes the tables to a file, in PyTorch's form."""
        stats = {
            "memories_allocated": self.memories_allocated,
            "memories_active": self.memories_active,
            "memories_reserved": self.memories_reserved,
            "markers": self._markers,
            "num_alloc_retries": self._num_alloc_retries,
            "op_index": len(self.memories_allocated),
        }
        with _files.replacing(path) as file:
            pickle.dump(stats, file, protocol=4)

    def load(self, path: str | Path) -> None:
        """Reads a file that `save_stats` wrote, ours or PyTorch's. It is a
        pickle: load only files that you trust."""
        with open(path, "rb") as file:
            stats = pickle.load(file)
        self.memories_allocated = dict(stats["memories_allocated"])
        self.memories_active = dict(stats["memories_active"])
        self.memories_reserved = dict(stats["memories_reserved"])
        self._markers = dict(stats["markers"])
        self._num_alloc_retries = stats["num_alloc_retries"]
        self.calls = []


_recorded = False


def begin_operators(known: Native, *, quickly: bool = False) -> None:
    """Operators leave records from here on, with what the current device has. Each does so when it
    ends, or, `quickly`, most when they begin and only those that can matter to a line."""
    global _recorded
    import torch

    if _recorded:
        raise MemtraceError("operators are recorded for one tracker at a time; another MemoryTracker or Tracer is running")
    if not _begin(known, torch.cuda.current_device(), quickly):
        raise MemtraceError("this PyTorch does not say its operators: 2.6 or later does")
    _recorded = True


def end_operators(known: Native) -> None:
    """No more records."""
    global _recorded
    known.operators_stop()
    _recorded = False


_NOT_SEEN, _BY_CALLBACKS, _QUICKLY = range(3)
_COMPOSITE, _GUARDED, _CASTS = 1, 2, 4
_learned = False


def _begin(known: Native, device: int, quickly: bool) -> int:
    """From here on operators leave records; how they are seen."""
    import torch

    global _learned
    c: Any = torch._C
    if not _learned:
        known.operators_learn(_what_operators_are().encode())
        _learned = True

    def bits(*keys: str) -> int:
        found = [getattr(c.DispatchKey, key) for key in keys if hasattr(c.DispatchKey, key)]
        return sum({c.DispatchKeySet(key).raw_repr() for key in found})

    usual = c._dispatch_tls_local_exclude_set().raw_repr()
    with c._AutoDispatchBelowAutograd():
        below = c._dispatch_tls_local_exclude_set().raw_repr() & ~usual
    views, casts = bits("ADInplaceOrView"), bits("AutocastCUDA", "AutocastCPU")
    known.operators_prepare(device, int(c.DispatchKey.Python), below if quickly else 0, views, casts)
    torch.empty(0)
    return known.operators_start()


def _what_operators_are() -> str:
    """PyTorch's operators, as the library wants to know them."""
    import torch

    c: Any = torch._C
    has = c._dispatch_has_kernel_for_dispatch_key
    lines = []
    for qualified in c._dispatch_get_all_op_names():
        namespace, _, operator = qualified.partition("::")
        name, _, overload = operator.partition(".")
        if namespace != "aten":
            continue
        kind = _COMPOSITE if _is_composite(qualified) else 0
        if not kind and has(qualified, "Autograd") and _takes_tensors(qualified):
            kind = _GUARDED
        if kind and has(qualified, "AutocastCUDA"):
            kind |= _CASTS
        structure = f"{name}_{overload}" if overload else name
        lines.append(f"{structure}\taten::{name}.{overload or 'default'}\t{kind}")
    return "\n".join(lines)


def _is_composite(operator: str) -> bool:
    """Is it made of others, and taken apart before a dispatch mode sees it? That is done where
    autograd's kernels are, by which an operator that takes no tensor does not come."""
    import torch

    try:
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CompositeImplicitAutograd")
    except RuntimeError:  # no longer registered
        return False
    return bool(composite) and _takes_tensors(operator)


def _takes_tensors(operator: str) -> bool:
    """Without one, an operator goes past its autograd kernel."""
    import torch

    c: Any = torch._C
    name, _, overload = operator.partition(".")
    try:
        schema = c._get_schema(name, overload)
    except RuntimeError:
        return False
    return any(str(argument.type) in ("Tensor", "List[Tensor]") for argument in schema.arguments)


def count_operators(known: Native) -> tuple[int, int]:
    """The number of the next record, and how many found no room so far."""
    lost = ctypes.c_uint64()
    return known.operators_count(ctypes.byref(lost)), lost.value


def read_operators(known: Native, first: int, upto: int) -> list[tuple[int, ...]]:
    records: list[tuple[int, ...]] = []
    words = (ctypes.c_uint64 * (_BATCH * _WORDS))()
    while first < upto:
        got = known.operators_read(first, min(_BATCH, upto - first), words)
        flat = words[: got * _WORDS]
        records.extend(tuple(flat[i : i + _WORDS]) for i in range(0, len(flat), _WORDS))
        first += got
        if not got:  # another thread was lost in the middle of it
            records.append((0,) * _WORDS)
            first += 1
    return records


def shown_operators(known: Native, records: list[tuple[int, ...]]) -> list[int]:
    """The positions of the operators that a dispatch mode would have seen.

    Records are in the order in which operators ended. Backwards, an operator comes before all that
    ran inside it. So one pass with a stack for each thread knows what each record is inside of.
    """
    kinds: dict[int, _Kind] = {}
    stacks: dict[int, list[tuple[int, bool]]] = defaultdict(list)  # depth, and whether its insides are looked at
    shown: list[int] = []
    wraps = _wrappers(records)
    for at in range(len(records) - 1, -1, -1):
        first = records[at][0]
        if not first or first & _SHUT_OUT:
            continue
        operator, depth, thread = first & 0xFFFFFFFF, first >> 32 & 0x1FFF, first >> 48
        stack = stacks[thread]
        while stack and stack[-1][0] >= depth:
            stack.pop()
        visible = stack[-1][1] if stack else True
        if operator not in kinds:
            kinds[operator] = _kind(known.label_path(operator))
        kind = kinds[operator]
        opens = visible and (kind.composite or at in wraps)
        stack.append((depth, opens))
        if visible and not opens and not kind.hidden and not first & _FAILED:
            shown.append(at)
    shown.reverse()
    return shown


def _wrappers(records: list[tuple[int, ...]]) -> set[int]:
    """Operators whose last act was to call themselves: autocast, and dispatch modes,
    call the operator a second time."""
    found = set()
    inner: dict[int, tuple[int, int]] = {}  # thread -> operator and depth of what ended last
    for at, (first, *_) in enumerate(records):
        operator, depth, thread = first & 0xFFFFFFFF, first >> 32 & 0x1FFF, first >> 48
        if first & _SHUT_OUT:
            continue
        if inner.get(thread) == (operator, depth + 1):
            found.add(at)
        inner[thread] = (operator, depth)
    return found


class _Kind(NamedTuple):
    composite: bool
    """Made of other operators, which are seen in its place."""
    hidden: bool


def _kind(operator: str) -> _Kind:
    name, _, overload = operator.rpartition(".")
    qualified = name if overload == "default" else operator
    return _Kind(_is_composite(qualified), operator in _NOT_SHOWN)
