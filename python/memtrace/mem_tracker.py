"""Memory by what it is for: what PyTorch's `torch.distributed._tools.mem_tracker.MemTracker` offers, by the same names.

The library writes down every block that is handed out or taken back and every change of a thread's label; nothing runs in
Python but `watch`'s hooks, and a look at gradients and optimizer states around each optimizer step. The books are made
from that when somebody asks. So totals are the allocator's own, to the byte, and the first and last word on a block is
the allocator's; only what it is for is ours to say:

- a block has the category of the tensor in it: parameter, buffer, gradient, optimizer state, input. It has that from its
  beginning, also in the peak, however late it was known;
- what is no such tensor's is an *activation* if it was taken outside a backward pass, or inside one by a module's forward
  (a checkpoint computes it again), and *temporary* if it was taken by a backward pass or an optimizer step;
- what was there before and is nobody's is *other*.

Known limits: a gradient that is gone before the next optimizer step or snapshot counts as temporary; modules must be handed
to `track_external`, or their parameters are unknown; what a collective needs is not told apart.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import TYPE_CHECKING, Any, Iterator

from ._library import MemtraceError
from ._native import Native, native
from .watching import Watch, watch

if TYPE_CHECKING:
    import torch

PARAMETER, BUFFER, GRADIENT, ACTIVATION = "Parameter", "Buffer", "Gradient", "Activation"
TEMPORARY, OPTIMIZER_STATE, INPUT, OTHER = "Temp", "Optstate", "Input", "Other"
CATEGORIES = (PARAMETER, BUFFER, GRADIENT, ACTIVATION, TEMPORARY, OPTIMIZER_STATE, INPUT, OTHER)
TOTAL = "Total"

_WORDS, _BATCH = 4, 1 << 14
_ALLOCATED, _FREED, _LABELLED = 1, 2, 3
_BACKWARD, _AGAIN = 1, 2
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

Sums = dict[str, int]
Snapshot = dict["torch.device", Sums]


class _Moment:
    """The sums of each device at a position of the journal."""

    __slots__ = ("at", "sums")

    def __init__(self, at: int, sums: dict[int, Sums]) -> None:
        self.at = at
        self.sums = {device: dict(parts) for device, parts in sums.items()}


class ModuleStats:
    """What was allocated when a module's forward and backward began, ended, and were at their peak."""

    def __init__(self, name: str, parameters: int, buffers: int) -> None:
        self.mod_fqn = name
        self.parameter_mem = parameters
        self.buffer_mem = buffers
        self._moments: dict[str, list[_Moment]] = {}

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

    The process must run under memtrace (`memtrace run -- python train.py`).
    """

    def __init__(self) -> None:
        self.memory_tracking: dict[str, ModuleStats] = {}
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._inputs: list[torch.Tensor] = []
        self._native: Native | None = None
        self._is_on = False
        self._watches: list[Watch] = []
        self._handles: list[Any] = []
        self._states_seen: dict[int, int] = {}
        self._named: dict[str, torch.nn.Module] = {}
        self._forget()

    def _forget(self) -> None:
        self._live: dict[int, tuple[int, int, str, int]] = {}  # address → device, bytes, category, born at
        self._now: dict[int, Sums] = {}
        self._peaks: dict[int, _Moment] = {}
        self._moments: list[_Moment] = []
        self._known: list[tuple[int, list[tuple[int, str]]]] = []  # position, and whose block each address is
        self._next = 0
        self._paths: dict[int, tuple[str, list[str]]] = {}
        self._open: dict[tuple[int, str], list[str]] = {}  # thread and kind of work → modules that are open
        self._module_peak: dict[tuple[str, str], tuple[int, _Moment]] = {}

    # --- what is tracked ---

    def track_external(self, *external: Any) -> None:
        """Makes models, optimizers and input tensors known (also in lists, tuples and dicts); before the `with` block."""
        import torch

        for thing in external:
            if isinstance(thing, torch.nn.Module):
                self._models.append(thing)
            elif isinstance(thing, torch.optim.Optimizer):
                self._optimizers.append(thing)
            elif isinstance(thing, torch.Tensor):
                self._inputs.append(thing)
            elif isinstance(thing, (list, tuple)):
                self.track_external(*thing)
            elif isinstance(thing, dict):
                self.track_external(*thing.values())
            elif thing is not None:
                raise TypeError(f"track_external() takes models, optimizers and tensors, not {type(thing).__name__}")

    def __enter__(self) -> MemTracker:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        if self._is_on:
            raise MemtraceError("this MemTracker is running already")
        known = native()
        if known is None:
            raise MemtraceError("MemTracker needs memtrace in the process: start it as `memtrace run -- python ...`")
        self._native, self._is_on = known, True
        self._forget()
        self._states_seen.clear()
        self._named = {
            name: module
            for i, model in enumerate(self._models)
            for name, module in model.named_modules(prefix=f"model{i}" if i else "")
        }
        known.changes_ask(1)
        for segment in torch.cuda.memory_snapshot():
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    self._born(block["address"], segment["device"], block["size"], OTHER, -1)
        self._peaks = {device: _Moment(-1, {device: sums}) for device, sums in self._now.items()}
        self._say_all()
        for i, model in enumerate(self._models):
            self._watches.append(watch(model, name=f"model{i}" if i else ""))
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._say(self._gradients())),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._stepped(optimizer)),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sync()
        self._is_on = False
        if self._native is not None:
            self._native.changes_ask(0)
        for each in (*self._watches, *self._handles):
            each.remove()
        self._watches.clear()
        self._handles.clear()

    # --- whose is which block ---

    def _say(self, whose: Iterator[tuple[int, str]]) -> None:
        if self._native is not None:
            self._known.append((self._native.changes_count(), list(whose)))

    def _say_all(self) -> None:
        def everything() -> Iterator[tuple[int, str]]:
            for tensor in self._inputs:
                yield from _blocks(tensor, INPUT)
            for model in self._models:
                for tensor in model.buffers():
                    yield from _blocks(tensor, BUFFER)
                for tensor in model.parameters():
                    yield from _blocks(tensor, PARAMETER)
            yield from self._gradients()
            for optimizer in self._optimizers:
                yield from _states(optimizer)

        self._say(everything())

    def _gradients(self) -> Iterator[tuple[int, str]]:
        for model in self._models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    yield from _blocks(parameter.grad, GRADIENT)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        # States come with the first step and stay; a snapshot looks again in any case.
        entries = sum(map(len, optimizer.state.values()))
        if self._states_seen.get(id(optimizer)) != entries:
            self._states_seen[id(optimizer)] = entries
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            self._say(_states(optimizer))

    # --- the books ---

    def _sync(self) -> None:
        known = self._native
        if known is None or not self._is_on:
            return
        self._say_all()
        total = known.changes_count()
        words = (ctypes.c_uint64 * (_BATCH * _WORDS))()
        while self._next < total:
            got = known.changes_read(self._next, min(_BATCH, total - self._next), words)
            if not got:
                raise MemtraceError("more happened than MemTracker can hold: leave its `with` block more often")
            flat = words[: got * _WORDS]
            for i in range(0, len(flat), _WORDS):
                self._happened(flat[i], flat[i + 1], flat[i + 2], flat[i + 3])
                self._next += 1
        self._learn(self._next)

    def _learn(self, position: int) -> None:
        while self._known and self._known[0][0] <= position:
            for address, category in self._known.pop(0)[1]:
                self._becomes(address, category)

    def _happened(self, first: int, label: int, address: int, size: int) -> None:
        if self._known:
            self._learn(self._next)
        sort, work, device, thread = first & 0xFF, first >> 8 & 0xFF, first >> 16 & 0xFF, first >> 32
        if sort == _ALLOCATED:
            optimizing = self._path(label)[0] == "optimizer_step"
            temporary = work == _BACKWARD or optimizing
            self._born(address, device, size, TEMPORARY if temporary else ACTIVATION, self._next)
            self._look_for_peaks(device)
        elif sort == _FREED:
            block = self._live.pop(address, None)
            if block is not None:
                device, size, category, _ = block
                self._now[device][category] -= size
                self._now[device][TOTAL] -= size
        elif sort == _LABELLED:
            self._labelled(thread, work, *self._path(label))

    def _born(self, address: int, device: int, size: int, category: str, at: int) -> None:
        if address in self._live:  # taken while the list of what was there before was made
            return
        self._live[address] = (device, size, category, at)
        sums = self._now.setdefault(device, dict.fromkeys((*CATEGORIES, TOTAL), 0))
        sums[category] += size
        sums[TOTAL] += size

    def _look_for_peaks(self, device: int) -> None:
        total = self._now[device][TOTAL]
        peak = self._peaks.get(device)
        if peak is None or total > peak.sums[device][TOTAL]:
            self._peaks[device] = _Moment(self._next, {device: self._now[device]})
        everything = sum(sums[TOTAL] for sums in self._now.values())
        for key, (most, moment) in self._module_peak.items():
            if everything > most:
                moment.at = self._next
                moment.sums = {d: dict(sums) for d, sums in self._now.items()}
                self._module_peak[key] = (everything, moment)

    def _becomes(self, address: int, category: str) -> None:
        block = self._live.get(address)
        if block is None or block[2] == category:
            return
        device, size, before, born = block
        self._live[address] = (device, size, category, born)
        past = [m.sums[device] for m in (*self._moments, *self._peaks.values()) if m.at >= born and device in m.sums]
        for sums in (self._now[device], *past):
            sums[before] -= size
            sums[category] += size

    # --- modules ---

    def _path(self, label: int) -> tuple[str, list[str]]:
        """Phase of a label, and its module with those around it, outermost first."""
        found = self._paths.get(label)
        if found is None:
            assert self._native is not None
            parts = self._native.label_path(label).split("/") if label else []
            phases = [part for part in parts if part in ("forward", "backward", "optimizer_step", "zero_grad")]
            phase = phases[-1] if phases else ""
            modules = self._named
            inner = next((part for part in reversed(parts) if part in modules), "")
            names = inner.split(".") if inner else []
            chain = [".".join(names[: i + 1]) for i in range(len(names))]
            inside = [name for name in chain if name in modules]
            found = self._paths[label] = (phase, ["", *inside] if phase in ("forward", "backward") else [])
        return found

    def _labelled(self, thread: int, work: int, phase: str, chain: list[str]) -> None:
        kind = "Forward-AC" if work == _AGAIN else "Backward" if work == _BACKWARD else "Forward"
        if kind == "Backward" and phase != "backward":
            chain = []
        elif kind == "Forward" and phase != "forward":
            chain = []
        if kind == "Forward" and phase in ("forward", "optimizer_step"):
            # Autograd's threads do not say that they are done.
            for other, what in [key for key in self._open if key[1] == "Backward"]:
                self._move(other, what, [])
        if kind != "Forward-AC":
            self._move(thread, "Forward-AC", [])
        self._move(thread, kind, chain)

    def _move(self, thread: int, kind: str, chain: list[str]) -> None:
        before = self._open.get((thread, kind), [])
        common = 0
        while common < min(len(before), len(chain)) and before[common] == chain[common]:
            common += 1
        for name in reversed(before[common:]):
            self._note(name, f"Post-{kind}")
            self._module_peak.pop((name, kind), None)
        for name in chain[common:]:
            moment = self._note(name, f"Pre-{kind}")
            if kind != "Forward-AC":
                peak = _Moment(moment.at, moment.sums)
                self._moments.append(peak)
                self._stats(name)._moments.setdefault(f"Peak-{kind}", []).append(peak)
                self._module_peak[name, kind] = (sum(s[TOTAL] for s in moment.sums.values()), peak)
        if chain:
            self._open[thread, kind] = chain
        else:
            self._open.pop((thread, kind), None)

    def _note(self, name: str, state: str) -> _Moment:
        moment = _Moment(self._next, self._now)
        self._moments.append(moment)
        self._stats(name)._moments.setdefault(state, []).append(moment)
        return moment

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
        """Device → category → bytes, now (`"current"`) or when most was allocated on that device (`"peak"`)."""
        if type not in ("current", "peak"):
            raise ValueError(f"a snapshot is 'current' or 'peak', not {type!r}")
        self._sync()
        if type == "current":
            return _public(self._now)
        return _public({device: moment.sums[device] for device, moment in self._peaks.items()})

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
        """Forgets what is known of modules; the books go on."""
        self._sync()
        self.memory_tracking.clear()
        self._moments.clear()
        self._module_peak.clear()

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


def _storages(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Address and bytes of what a tensor is stored in; of its parts, if it is made of others."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif tensor.is_cuda:
        storage = tensor.untyped_storage()
        if storage.size():
            yield storage.data_ptr(), storage.nbytes()


def _blocks(tensor: torch.Tensor, category: str) -> Iterator[tuple[int, str]]:
    for address, _ in _storages(tensor):
        yield address, category


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
