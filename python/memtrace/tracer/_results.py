"""What a tracer reports, worked out from what the library wrote down.

Nothing here runs while the program does. The journal of changes says, in order, which
block was handed out or taken back. It has the thread, the label and the operator of
each. `MemTracker` says what each block was for. One pass over both gives each device,
phase, module and operator its numbers.

A phase is a stretch of the process's life, whatever thread something happens on, because a backward
pass runs on autograd's threads. Those that the program names begin and end where it says so. Those
that it doesn't name are found: `forward`, `optimizer_step` and `zero_grad` by a thread's label,
`backward` from the first to the last change that autograd's nodes made.
"""

from __future__ import annotations

import array
import bisect
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator, NamedTuple

from .._ledger import WORDS, Life, unpack
from .._native import MODULE, PHASE, Native
from ..memory_tracker import shown_operators
from ._report import NO_OPERATOR, DeviceUse, Lifetime, PhaseCall, PhaseUse, Share

_LABELLED = 3
# In the word that says which operators were open: the innermost has that very record.
_BEGUN = 1 << 15
_FORWARD, _AGAIN = 0, 2
_FOUND = ("forward", "optimizer_step", "zero_grad")
_OF_MODULES = ("forward", "backward")


# Operator → how often it ran; those inside others that count are not counted.
OperatorCalls = dict[str, int]


class Label(NamedTuple):
    """What a label says."""

    phase: str
    module: str | None
    """`""` is the model itself, `None` none."""


@dataclass
class Stretch:
    """A phase that the program named: from one position of the journal to another."""

    name: str
    begin: int
    end: int | None = None


class Saved(NamedTuple):
    """Autograd kept a tensor for the backward pass."""

    position: int
    address: int
    label: int


@dataclass
class Record:
    """What happened while a tracer was on."""

    native: Native
    first: int
    """The number of the first change."""
    changes: array.array[int]
    blocks: list[Life]
    stretches: list[Stretch]
    saved: list[Saved]
    first_operator: int
    operators: list[tuple[int, ...]] | None
    """The records of operators, if they were asked for."""


@dataclass
class Results:
    """The answers."""

    devices: dict[int, DeviceUse] = field(default_factory=dict)
    phases: dict[str, dict[int, PhaseUse]] = field(default_factory=dict)
    modules: dict[str, dict[int, Share]] = field(default_factory=dict)
    operators: dict[str, dict[int, Share]] = field(default_factory=dict)
    lifetimes: list[Lifetime] = field(default_factory=list)
    calls: OperatorCalls = field(default_factory=dict)


class _Journal:
    """The changes, by position."""

    def __init__(self, native: Native, first: int, words: array.array[int]) -> None:
        self._native = native
        self.first, self.end = first, first + len(words) // WORDS
        self._words = words
        self._labels: dict[int, Label] = {}

    def __getitem__(self, position: int) -> tuple[int, int, int, int, int]:
        """Sort, work, thread, label, operator."""
        at = (position - self.first) * WORDS
        sort, work, thread, label = unpack(self._words[at])
        return sort, work, thread, label, self._words[at + WORDS - 1]

    def label(self, number: int) -> Label:
        """Of a position's label."""
        found = self._labels.get(number)
        if found is None:
            native, at, phase = self._native, number, ""
            module: str | None = None
            while at:
                parent, sort = native.label_parent(at), native.label_sort(at)
                if (sort == MODULE and module is None) or (sort == PHASE and not phase):
                    path, around = native.label_path(at), native.label_path(parent) if parent else ""
                    name = path[len(around) + 1 :] if around else path
                    module, phase = (name, phase) if sort == MODULE else (module, name)
                at = parent
            if module is None and phase in _OF_MODULES:
                module = ""
            found = self._labels[number] = Label(phase, module)
        return found

    def found_stretches(self) -> Iterator[Stretch]:
        """The phases that nobody named."""
        open_: dict[int, Stretch] = {}
        backward: Stretch | None = None
        for position in range(self.first, self.end):
            sort, work, thread, label, _ = self[position]
            if work != _FORWARD:
                if backward is None:
                    backward = Stretch("backward", position)
                backward.end = position + 1
                continue
            if sort != _LABELLED:
                continue
            phase = self.label(label).phase
            now = open_.get(thread)
            if now is not None and now.name != phase:
                now.end = position
                yield open_.pop(thread)
            if phase in _FOUND and thread not in open_:
                open_[thread] = Stretch(phase, position)
                if backward is not None:
                    yield backward
                    backward = None
        yield from open_.values()
        if backward is not None:
            yield backward


class _Operators:
    """Which operator asked for a block."""

    def __init__(self, native: Native, first: int, records: list[tuple[int, ...]]) -> None:
        self._native = native
        self._first, self._records = first, records
        self._shown = set(shown_operators(native, records))
        self._ends: dict[tuple[int, int], list[int]] = defaultdict(list)  # thread, depth → positions of records
        for position, (word, *_) in enumerate(records):
            self._ends[word >> 48, word >> 32 & 0x1FFF].append(position)

    def of(self, context: int) -> str:
        """Of those that were open, the one that a dispatch mode would have
        seen; else the outermost."""
        depth, thread, at = context & 0x7FFF, context >> 16 & 0xFFFF, (context >> 32) - self._first
        open_ = []
        for level in range(depth):
            ends = self._ends.get((thread, level), [])
            which = bisect.bisect_left(ends, at)
            if which < len(ends):
                open_.append(ends[which])
        if context & _BEGUN and 0 <= at < len(self._records):
            open_.append(at)
        which = next((number for number in open_ if number in self._shown), open_[0] if open_ else -1)
        return self._name(which) if open_ else NO_OPERATOR

    def calls(self) -> OperatorCalls:
        """How often each was called."""
        counts = Counter(self._records[number][0] & 0xFFFFFFFF for number in self._shown)
        return {self._native.label_path(label): count for label, count in counts.items()}

    def _name(self, number: int) -> str:
        return self._native.label_path(self._records[number][0] & 0xFFFFFFFF)


def _without_doubles(named: list[Stretch], found: Iterable[Stretch], end: int) -> list[Stretch]:
    """All of the named ones, and of those found what is not in one of the same name; in order."""
    spans = defaultdict(list)
    for stretch in named:
        spans[stretch.name].append((stretch.begin, end if stretch.end is None else stretch.end))
    others = [s for s in found if not any(b < (s.end or end) and s.begin < e for b, e in spans[s.name])]
    return sorted((*named, *others), key=lambda s: s.begin)


def modules_around(module: str) -> list[str]:
    """A module and those it is inside of: `""` is the model."""
    names = module.split(".") if module else []
    return ["", *(".".join(names[: i + 1]) for i in range(len(names)))]


class _Pass:
    """The pass over everything, in order."""

    def __init__(self, record: Record) -> None:
        self.journal = _Journal(record.native, record.first, record.changes)
        self.operators = _Operators(record.native, record.first_operator, record.operators or [])
        self.results = Results()
        end = self.journal.end
        self.stretches = _without_doubles(record.stretches, self.journal.found_stretches(), end)
        self.open: list[tuple[Stretch, dict[int, PhaseCall]]] = []
        self.totals: dict[int, int] = {}
        self.alive: dict[int, Lifetime] = {}
        self.record = record

    def run(self) -> Results:
        blocks = self.record.blocks
        for block in blocks:
            self.totals.setdefault(block.device, 0)
            if block.born < self.record.first:
                self.totals[block.device] += block.size
                self._keep(block, self._before(block))
        for device, total in self.totals.items():
            self.results.devices[device] = DeviceUse(start=total, current=total, max=total)
        events: list[tuple[float, Any]] = [(b.born, b) for b in blocks if b.born >= self.record.first]
        events += [(b.died, b) for b in blocks if b.died is not None]
        events += [(s.begin - 0.5, s) for s in self.stretches]
        events += [(s.position - 0.5, s) for s in self.record.saved]
        events.sort(key=lambda event: event[0])
        for position, what in events:
            self._leave(position)
            if isinstance(what, Stretch):
                self._enter(what)
            elif isinstance(what, Saved):
                self._saved(what)
            elif what.died == position:
                self._freed(what, int(position))
            else:
                self._born(what)
        self._leave(self.journal.end + 1)
        self.results.calls = self.operators.calls()
        return self.results

    # --- phases ---

    def _enter(self, stretch: Stretch) -> None:
        calls = {d: PhaseCall(start=n, end=n, max=n) for d, n in self.totals.items()}
        for device, call in calls.items():
            use = self.results.phases.setdefault(stretch.name, {}).setdefault(device, PhaseUse())
            use.calls.append(call)
        self.open.append((stretch, calls))

    def _leave(self, position: float) -> None:
        done = [(s, calls) for s, calls in self.open if s.end is not None and s.end - 0.5 <= position]
        for stretch, calls in done:
            for device, call in calls.items():
                call.end = self.totals[device]
        if done:
            self.open = [one for one in self.open if one not in done]

    def _phase(self) -> str:
        return "/".join(dict.fromkeys(stretch.name for stretch, _ in self.open))

    # --- blocks ---

    def _at(self, position: int) -> int:
        """A position as it is shown."""
        return position - self.record.first

    def _before(self, block: Life) -> Lifetime:
        """A block that was there when the tracer began."""
        return Lifetime(block.device, block.address, block.size, block.category, -1, "", None, NO_OPERATOR, False)

    def _keep(self, block: Life, life: Lifetime) -> None:
        self.results.lifetimes.append(life)
        self.alive[block.address] = life

    def _born(self, block: Life) -> None:
        _, work, _, label, context = self.journal[block.born]
        known = self.journal.label(label)
        operator = self.operators.of(context) if context else NO_OPERATOR
        # Between two nodes that run on the caller's thread only the label says it.
        in_backward = work != _AGAIN if work else known.phase == "backward"
        born = self._at(block.born)
        life = Lifetime(
            block.device, block.address, block.size, block.category, born, self._phase(), known.module, operator, in_backward
        )
        self._keep(block, life)
        self._count(block, life, block.size)
        for _, calls in self.open:
            call = calls.get(block.device)
            if call is not None:
                call.blocks += 1
                call.allocated += block.size

    def _freed(self, block: Life, position: int) -> None:
        life = self.alive.pop(block.address)
        _, _, _, label, _ = self.journal[position]
        life.freed = self._at(position)
        life.freed_in_phase = self._phase()
        life.freed_in_module = self.journal.label(label).module
        self._count(block, life, -block.size)

    def _saved(self, saved: Saved) -> None:
        life = self.alive.get(saved.address)
        if life is not None and life.saved is None:
            life.saved = self._at(saved.position)
            life.saved_in_module = self.journal.label(saved.label).module

    def _count(self, block: Life, life: Lifetime, change: int) -> None:
        device = block.device
        self.totals[device] += change
        total = self.totals[device]
        use = self.results.devices[device]
        use.current = total
        use.max = max(use.max, total)
        for _, calls in self.open:
            call = calls[device]
            call.end, call.max = total, max(call.max, total)
        if life.created < 0:
            return
        results = self.results
        if life.module is not None:
            for name in modules_around(life.module):
                results.modules.setdefault(name, {}).setdefault(device, Share()).add(change)
        if self.record.operators is not None:
            results.operators.setdefault(life.operator, {}).setdefault(device, Share()).add(change)


def work_out(record: Record) -> Results:
    """Everything about what a tracer has seen."""
    return _Pass(record).run()
