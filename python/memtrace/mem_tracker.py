"""Memory by what it is for: what PyTorch's
`torch.distributed._tools.mem_tracker.MemTracker` offers, by the same names.

The library writes down every block that is handed out or taken back, and every change of a thread's
label. Nothing runs in Python while the model does. The ledger (`_ledger.py`) is made from that when
somebody asks, or when two million records have come together. So totals, and the beginning and end
of each block, are the allocator's own, to the byte. Only what a block is for is worked out here:

- a block has the category of the tensor in it: parameter, buffer, gradient, optimizer state, input.
  It has that from its beginning, also in the peak, however late it was known;
- what a backward pass takes and leaves behind is a *gradient*, too, of whatever it is, and
  also if it is gone before anybody asks;
- what PyTorch's FSDP and its collectives take, inside the ranges that they
  name themselves, is *communication*;
- what is no such tensor's is an *activation* if it was taken outside a backward pass, or inside one
  by a module's forward (a checkpoint computes it again). It is *temporary* if a backward pass took
  it and gave it back, or an optimizer step took it;
- what was there before and is nobody's is *other*, and so is a workspace
  that PyTorch takes for cuBLAS.

Known limits: a gradient that the program puts in place itself (`p.grad = ...`) is known at the next
snapshot. One of a tensor subclass is known at the next optimizer step, too. Modules must be handed
to `track_external`, or their parameters are unknown. DDP's buckets have no range of their own, so
they are activations, or other if they were there before.
"""

from __future__ import annotations

import array
import ctypes
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Iterable, Iterator

from ._ledger import BUFFER, CATEGORIES, GRADIENT, INPUT, OPTIMIZER_STATE, OTHER, PARAMETER, TOTAL, WORDS
from ._ledger import Block, Ledger, Life, Moment, Place, Sums
from ._library import MemtraceError
from ._native import Native, native
from .watching import Watch, watch

if TYPE_CHECKING:
    import torch

_BATCH = 1 << 14
_MOST_UNREAD = 1 << 21
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_PHASES = ("forward", "backward", "optimizer_step", "zero_grad")
# How PyTorch names its ranges: FSDP2, process groups, functional collectives.
_COMMUNICATION = ("FSDP::all_gather", "FSDP::all_reduce", "FSDP::reduce_scatter", "nccl:", "c10d::")

Snapshot = dict["torch.device", Sums]

_running: set[MemTracker] = set()


class ModuleStats:
    """What was allocated when a module's forward and backward began,
    ended, and were at their peak."""

    def __init__(self, name: str, parameters: int, buffers: int) -> None:
        self.mod_fqn = name
        self.parameter_mem = parameters
        self.buffer_mem = buffers
        self._moments: dict[str, list[Moment]] = {}

    @property
    def snapshots(self) -> dict[str, list[Snapshot]]:
        """State (`Pre-Forward`, `Post-Backward`, ...) → one snapshot for each call."""
        return {state: [_public(m.sums) for m in moments] for state, moments in self._moments.items()}


class MemTracker:
    """Divides what is allocated by category and module.

        tracker = memtrace.MemTracker()
        tracker.track_external(model, optimizer, batch)
        with tracker:
            model(batch).sum().backward()
            optimizer.step()
        tracker.display_snapshot("peak", units="MiB")
        tracker.display_modulewise_snapshots(depth=2, units="MiB")

    With `history=True` blocks that are gone are kept in the ledger, for `plot()`.
    The process must run under memtrace (`memtrace run -- python train.py`).
    """

    def __init__(self, *, history: bool = False) -> None:
        # All records, for a reader that wants more of them than the ledger has.
        self._history: array.array[int] | None = array.array("Q") if history else None
        self._begun = 0
        self.memory_tracking: dict[str, ModuleStats] = {}
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._inputs: list[weakref.ref[torch.Tensor]] = []
        self._native: Native | None = None
        self._watches: list[Watch] = []
        self._handles: list[Any] = []
        self._states_seen: dict[int, int] = {}
        self._named: dict[str, torch.nn.Module] = {}
        self._subclasses: list[torch.nn.Parameter] = []
        self._places: dict[int, Place] = {}
        self._lost = 0
        self._ledger = Ledger(self._place, self._note, 0)

    # --- what is tracked ---

    def track_external(self, *external: Any) -> None:
        """Makes models, optimizers and input tensors known, also in lists, tuples and
        dicts, before or in the `with` block."""
        import torch

        for thing in external:
            if isinstance(thing, torch.nn.Module):
                self._models.append(thing)
                if self in _running:
                    self._watch(len(self._models) - 1)
                    self._say(self._of_model(thing))
            elif isinstance(thing, torch.optim.Optimizer):
                self._optimizers.append(thing)
                if self in _running:
                    self._say(_states(thing))
            elif isinstance(thing, torch.Tensor):
                self._inputs.append(weakref.ref(thing))
                if self in _running:
                    self._say(_blocks(thing, INPUT))
            elif isinstance(thing, (list, tuple)):
                self.track_external(*thing)
            elif isinstance(thing, dict):
                self.track_external(*thing.values())
            elif thing is not None:
                raise TypeError(f"track_external() takes models, optimizers and tensors, not {type(thing).__name__}")

    def __enter__(self) -> MemTracker:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        if self in _running:
            raise MemtraceError("this MemTracker is running already")
        known = native()
        if known is None:
            raise MemtraceError("MemTracker needs memtrace in the process: start it as `memtrace run -- python ...`")
        self._native = known
        self._states_seen.clear()
        self._places.clear()
        self._named.clear()
        self._subclasses.clear()
        known.changes_ask(1)
        self._lost = self._count_lost()
        self._ledger = ledger = Ledger(self._place, self._note, known.changes_count(None))
        self._begun = ledger.next
        if self._history is not None:
            self._history, ledger.gone = array.array("Q"), []
        _running.add(self)
        for segment in torch.cuda.memory_snapshot():
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found = Block(segment["device"], block["size"], OTHER, ledger.next - 1)
                    ledger.born(block["address"], found)
        ledger.peaks = {device: Moment(ledger.next - 1, {device: sums}) for device, sums in ledger.now.items()}
        for i in range(len(self._models)):
            self._watch(i)
        self._say_all()
        self._handles += [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._before_step()),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._stepped(optimizer)),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self not in _running:
            return
        try:
            self._sync()
        finally:
            _running.discard(self)
            if self._native is not None:
                self._native.changes_ask(0)
                _release(self._native)
            for each in (*self._watches, *self._handles):
                each.remove()
            self._watches.clear()
            self._handles.clear()

    def _watch(self, i: int) -> None:
        import torch

        model, name = self._models[i], f"model{i}" if i else ""
        self._named.update(model.named_modules(prefix=name))
        plain = (torch.nn.Parameter, torch.Tensor)
        self._subclasses.extend(p for p in model.parameters() if type(p) not in plain)
        self._watches.append(watch(model, name=name))

        def called(module: Any, args: Any, output: Any) -> None:
            if not torch.compiler.is_dynamo_compiling():
                self._bound()

        self._handles.append(model.register_forward_hook(called))

    # --- whose is which block ---

    def _say(self, whose: Iterable[tuple[int, str]]) -> None:
        if self._native is not None:
            self._ledger.say(self._native.changes_count(None), list(whose))

    def _of_model(self, model: torch.nn.Module) -> Iterator[tuple[int, str]]:
        for tensor in model.buffers():
            yield from _blocks(tensor, BUFFER)
        for tensor in model.parameters():
            yield from _blocks(tensor, PARAMETER)
        yield from _gradients(model.parameters())

    def _say_all(self) -> None:
        def everything() -> Iterator[tuple[int, str]]:
            for known in self._inputs:
                tensor = known()
                if tensor is not None:
                    yield from _blocks(tensor, INPUT)
            for model in self._models:
                yield from self._of_model(model)
            for optimizer in self._optimizers:
                yield from _states(optimizer)

        self._say(everything())

    def _before_step(self) -> None:
        if self._subclasses:  # whose gradients PyTorch's wrappers put in place
            self._say(_gradients(self._subclasses))

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        # States come with the first step and stay; a snapshot looks again in any case.
        entries = sum(map(len, optimizer.state.values()))
        if self._states_seen.get(id(optimizer)) != entries:
            self._states_seen[id(optimizer)] = entries
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            self._say(_states(optimizer))
        self._bound()

    def _bound(self) -> None:
        if self._native is not None and self._native.changes_count(None) - self._ledger.next > _MOST_UNREAD:
            self._sync()

    # --- the ledger ---

    def _sync(self) -> None:
        known, ledger = self._native, self._ledger
        if known is None or self not in _running:
            return
        self._say_all()
        total = known.changes_count(None)
        words = (ctypes.c_uint64 * (_BATCH * WORDS))()
        waited = 0
        while ledger.next < total:
            if self._count_lost() != self._lost:
                raise MemtraceError(
                    "more happened than MemTracker can hold: ask it for a snapshot from time to time, as "
                    "optimizer steps make it do by themselves"
                )
            got = known.changes_read(ledger.next, min(_BATCH, total - ledger.next), words)
            ledger.read(words[: got * WORDS])
            if self._history is not None:
                self._history.frombytes(memoryview(words).cast("B")[: got * WORDS * 8])
            if not got:  # another thread is just writing the next one
                waited += 1
                if waited > 10_000:
                    raise MemtraceError("a thread was lost while it wrote a record for MemTracker")
                time.sleep(0.001)
        ledger.settle(in_backward=self._place(known.current()).phase == "backward")
        _release(known)

    def _count_lost(self) -> int:
        lost = ctypes.c_uint64()
        if self._native is not None:
            self._native.changes_count(ctypes.byref(lost))
        return lost.value

    def _place(self, label: int) -> Place:
        found = self._places.get(label)
        if found is None:
            assert self._native is not None
            parts = self._native.label_path(label).split("/") if label else []
            phase = next((part for part in reversed(parts) if part in _PHASES), "")
            inner = next((part for part in reversed(parts) if part in self._named), "")
            names = inner.split(".") if inner else []
            chain = [".".join(names[: i + 1]) for i in range(len(names))]
            modules = ["", *(name for name in chain if name in self._named)] if phase in ("forward", "backward") else []
            found = Place(phase, modules, any(part.startswith(_COMMUNICATION) for part in parts))
            self._places[label] = found
        return found

    def _note(self, name: str, state: str, moment: Moment) -> None:
        self._stats(name)._moments.setdefault(state, []).append(moment)

    def _stats(self, name: str) -> ModuleStats:
        if name not in self.memory_tracking:
            module = self._named.get(name)
            sizes = [0, 0]
            if module is not None:
                for i, tensors in enumerate((module.parameters(), module.buffers())):
                    whole = {address: size for t in tensors for address, size in _storages(t)}
                    sizes[i] = sum(whole.values())
            shown = name or (type(module).__name__ if module is not None else "")
            self.memory_tracking[name] = ModuleStats(shown, *sizes)
        return self.memory_tracking[name]

    # --- answers ---

    def get_tracker_snapshot(self, type: str = "current") -> Snapshot:
        """Device → category → bytes, now (`"current"`) or when most was
        allocated on that device (`"peak"`)."""
        if type not in ("current", "peak"):
            raise ValueError(f"a snapshot is 'current' or 'peak', not {type!r}")
        self._sync()
        if type == "current":
            return _public(self._ledger.now)
        return _public({device: moment.sums[device] for device, moment in self._ledger.peaks.items()})

    def display_snapshot(self, type: str = "current", units: str = "B", tabulate: bool = False) -> None:
        """Prints a snapshot, in `B`, `KiB`, `MiB` or `GiB`; as a table on request."""
        print(_text({type: [self.get_tracker_snapshot(type)]}, units, tabulate))

    def display_modulewise_snapshots(self, depth: int = 2, units: str = "B", tabulate: bool = False) -> None:
        """Prints the snapshots of every module that was called, down to a depth of names."""
        self._sync()
        for name, stats in sorted(self.memory_tracking.items()):
            if not name or name.count(".") < depth:
                print(f"{stats.mod_fqn}:")
                print(_text(stats.snapshots, units, tabulate))

    def reset_mod_stats(self) -> None:
        """Forgets what is known of modules; the ledger goes on."""
        self._sync()
        self.memory_tracking.clear()
        self._ledger.forget_moments()

    def plot(self, device: int = 0) -> Any:
        """What a device had over time, stacked by category; matplotlib's
        figure. Needs `history=True`."""
        from ._plots import stacked

        begun, lives = self._begun, [life for life in self._lives() if life.device == device]
        spans = [(b.born - begun, None if b.died is None else b.died - begun, b.size, b.category) for b in lives]
        return stacked(spans, CATEGORIES)

    def _lives(self) -> list[Life]:
        if self._history is None:
            raise MemtraceError("blocks that are gone were not kept: make it MemTracker(history=True)")
        self._sync()
        return self._ledger.lives()

    def plot_modules(self, state: str = "Peak-Forward") -> Any:
        """A bar for each module, by category, in its last call's state; matplotlib's figure."""
        from ._plots import bars

        self._sync()
        rows: dict[str, Sums] = {}
        for stats in self.memory_tracking.values():
            for snapshot in stats.snapshots.get(state, [])[-1:]:
                parts = {c: sum(sums[c] for sums in snapshot.values()) for c in CATEGORIES}
                rows[stats.mod_fqn] = {c: n for c, n in parts.items() if n}
        return bars(rows)


def _release(known: Native) -> None:
    """Gives back the records that every tracker has read."""
    known.changes_release(min((t._ledger.next for t in _running), default=known.changes_count(None)))


def _storages(tensor: Any) -> Iterator[tuple[int, int]]:
    """Address and bytes of what a tensor is stored in; of its parts, if it is made of others."""
    if hasattr(tensor, "__tensor_flatten__"):
        # A sharded tensor names its mesh among them, which has no memory.
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif getattr(tensor, "is_cuda", False):
        storage = tensor.untyped_storage()
        if storage.size():
            yield storage.data_ptr(), storage.nbytes()


def _blocks(tensor: torch.Tensor, category: str) -> Iterator[tuple[int, str]]:
    for address, _ in _storages(tensor):
        yield address, category


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[tuple[int, str]]:
    for parameter in parameters:
        if parameter.grad is not None:
            yield from _blocks(parameter.grad, GRADIENT)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str]]:
    import torch

    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield from _blocks(value, OPTIMIZER_STATE)


def _public(sums: dict[int, Sums]) -> Snapshot:
    import torch

    return {torch.device("cuda", device): dict(parts) for device, parts in sums.items()}


def _text(snapshots: dict[str, list[Snapshot]], units: str, tabulate: bool) -> str:
    if units not in _UNITS:
        raise ValueError(f"units are {', '.join(_UNITS)}, not {units!r}")
    scale = _UNITS[units]

    def number(n: int) -> str:
        return str(n) if scale == 1 else f"{n / scale:.2f}"

    columns = (*CATEGORIES, TOTAL)
    lines = []
    if tabulate:
        lines.append(" ".join(f"{c:>12}" for c in columns) + f"  ({units})")
    for state, calls in snapshots.items():
        for i, snapshot in enumerate(calls, 1):
            for device, sums in snapshot.items():
                where = f"{state} #{i} {device}"
                if tabulate:
                    lines.append(" ".join(f"{number(sums[c]):>12}" for c in columns) + f"  {where}")
                else:
                    parts = ", ".join(f"{c} {number(sums[c])}" for c in columns if sums[c])
                    lines.append(f"  {where}: {parts} {units}")
    return "\n".join(lines)
