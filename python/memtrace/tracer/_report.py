"""What a tracer answers: tables that are dictionaries, and can be printed and drawn.

All numbers are bytes of PyTorch's allocator, exact. Positions (`created`, `saved`, `freed`) count
the changes of what is allocated, over all devices and threads. They only give an order.
`to_dict()` gives plain dictionaries, lists, strings and numbers, whose fields stay: new ones may
come, and `version` says when one goes.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, Generic, Iterator, Mapping, Sequence, TextIO, TypeVar

from .. import _plots
from .._ledger import CATEGORIES, OTHER
from ..recording import size

VERSION = 1
NO_OPERATOR = "(no operator)"
NO_MODULE = "(no module)"


@dataclass
class DeviceUse:
    """A device while the tracer was on."""

    start: int = 0
    """Allocated when it began."""
    current: int = 0
    """Allocated now, or at its end."""
    max: int = 0
    """The most that was allocated at a time."""
    reserved: int = 0
    """What the allocator has from the driver now, or had at the end."""
    max_reserved: int = 0
    categories: dict[str, int] = field(default_factory=dict)
    """What `max` was for: `Parameter`, `Activation`, …; they add up to it."""


@dataclass
class PhaseCall:
    """One time that a phase was open."""

    start: int = 0
    end: int = 0
    max: int = 0
    """The most that the whole process had allocated meanwhile."""
    allocated: int = 0
    """What was taken meanwhile, whether given back or not."""
    blocks: int = 0


@dataclass
class PhaseUse:
    """A phase on one device, all its calls."""

    calls: list[PhaseCall] = field(default_factory=list)

    @property
    def current(self) -> int:
        """Allocated at the end of the last call."""
        return self.calls[-1].end if self.calls else 0

    @property
    def max(self) -> int:
        """The most of all calls."""
        return max((call.max for call in self.calls), default=0)

    @property
    def allocated(self) -> int:
        """What was taken in all calls."""
        return sum(call.allocated for call in self.calls)


@dataclass
class Share:
    """What a module or an operator took on one device."""

    current: int = 0
    """Of that, what is still there."""
    max: int = 0
    """The most of it that was there at a time."""
    allocated: int = 0
    """All that was taken, whether given back or not."""
    blocks: int = 0

    def add(self, change: int) -> None:
        """A block of so many bytes is taken; below zero: given back."""
        self.current += change
        if change > 0:
            self.max = max(self.max, self.current)
            self.allocated += change
            self.blocks += 1


@dataclass
class Lifetime:
    """A block of memory: what it was for, and what became of it."""

    device: int
    address: int
    bytes: int
    category: str
    created: int
    """Below zero: before the tracer began; then nothing is known of how."""
    created_in_phase: str
    """The phases that were open, outermost first, with `/` between them."""
    module: str | None
    """The innermost; `""`: the model itself; `None`: none."""
    operator: str
    in_backward: bool
    saved: int | None = None
    """When autograd first kept it for the backward pass, if it did: known with `saved_tensors=True`."""
    saved_in_module: str | None = None
    freed: int | None = None
    freed_in_phase: str = ""
    freed_in_module: str | None = None


_Use = TypeVar("_Use", PhaseUse, Share)


class Table(dict[str, dict[str, _Use]], Generic[_Use]):
    """Name → device (`cuda:0`) → numbers."""

    def __init__(self, title: str, rows: Mapping[str, Mapping[int, _Use]]) -> None:
        super().__init__()
        for name, devices in rows.items():
            self[name] = {f"cuda:{device}": use for device, use in devices.items()}
        self.title = title

    def to_dict(self) -> dict[str, Any]:
        """Name → device → field → number."""
        return {name: {d: _plain(use) for d, use in devices.items()} for name, devices in self.items()}

    def _lines(self, top: int | None) -> Iterator[tuple[str, str, _Use]]:
        rows = [(name, device, use) for name, devices in self.items() for device, use in devices.items()]
        rows.sort(key=lambda row: -row[2].max)
        yield from rows[:top]

    def print(self, top: int | None = 20, file: TextIO | None = None) -> None:
        """The `top` rows that had most, all with `None`."""
        rows = [(device, size(u.current), size(u.max), size(u.allocated), name) for name, device, u in self._lines(top)]
        _table(("device", "current", "max", "allocated", self.title), rows, file)

    def plot(self, top: int = 20) -> Any:
        """A bar for each of the `top` rows: what is there now, and the
        most there was; matplotlib's figure."""
        rows = {}
        for name, device, use in self._lines(top):
            key = f"{name or 'model'} ({device})" if len({d for ds in self.values() for d in ds}) > 1 else name or "model"
            rows[key] = {"current": use.current, "more at its most": use.max - use.current}
        return _plots.bars(rows)


class Lifetimes(list[Lifetime]):
    """Every block since the tracer began, those first that were there before; in order of birth."""

    def by_module(self) -> dict[str, dict[str, int]]:
        """Module → bytes taken there. Of them: kept for the backward pass, taken again by a
        backward pass, given back in a backward pass, given back elsewhere, and still there. A block
        counts for the module that it was taken in."""
        rows: dict[str, dict[str, int]] = {}
        for life in self:
            if life.created < 0:
                continue
            row = rows.setdefault(
                NO_MODULE if life.module is None else life.module,
                dict.fromkeys(("created", "saved", "in_backward", "freed_in_backward", "freed_elsewhere", "alive"), 0),
            )
            row["created"] += life.bytes
            row["saved"] += life.bytes if life.saved is not None else 0
            row["in_backward"] += life.bytes if life.in_backward else 0
            if life.freed is None:
                row["alive"] += life.bytes
            else:
                row["freed_in_backward" if "backward" in life.freed_in_phase.split("/") else "freed_elsewhere"] += life.bytes
        return rows

    def to_dict(self) -> dict[str, Any]:
        """`by_module`, and `blocks`: each with its fields."""
        return {"by_module": self.by_module(), "blocks": [dataclasses.asdict(life) for life in self]}

    def print(self, top: int | None = 20, file: TextIO | None = None) -> None:
        """The sums by module, those with most first."""
        rows = sorted(self.by_module().items(), key=lambda row: -row[1]["created"])[:top]
        names = ("created", "saved", "in_backward", "freed_in_backward", "freed_elsewhere", "alive")
        heads = (*(name.replace("_", " ") for name in names), "module")
        _table(heads, [(*(size(row[name]) for name in names), module) for module, row in rows], file)

    def plot(self, device: int = 0) -> Any:
        """What a device had over time, stacked by what it was for; matplotlib's figure."""
        spans = [(b.created, b.freed, b.bytes, b.category) for b in self if b.device == device]
        return _plots.stacked(spans, CATEGORIES)


class Devices(dict[str, DeviceUse]):
    """Device (`cuda:0`) → numbers."""

    def to_dict(self) -> dict[str, Any]:
        """Device → field → number; `categories` are a dictionary of their own."""
        return {name: dataclasses.asdict(use) for name, use in self.items()}

    def print(self, file: TextIO | None = None) -> None:
        """A line for each device, and one for what its most was for."""
        rows = [(size(u.start), size(u.current), size(u.max), size(u.max_reserved), name) for name, u in self.items()]
        _table(("start", "current", "max", "max reserved", "device"), rows, file)
        for name, use in self.items():
            parts = ", ".join(f"{c} {size(n)}" for c, n in use.categories.items() if n)
            print(f"  {name} at its most: {parts or 'nothing'}", file=file or sys.stdout)

    def plot(self) -> Any:
        """A bar for each device, by what its most was for; matplotlib's figure."""
        return _plots.bars({name: {c: n for c, n in u.categories.items() if n} or {OTHER: 0} for name, u in self.items()})


@dataclass
class Report:
    """All that a tracer has found. Each part can be printed, drawn and made plain on its own."""

    device_name: str
    virtual: str | None
    """The virtual GPU, whose numbers are an estimate; `None` on a real card."""
    devices: Devices
    phases: Table[PhaseUse]
    modules: Table[Share]
    operators: Table[Share]
    lifetimes: Lifetimes
    plugins: dict[str, dict[str, Any]]

    def to_dict(self, lifetimes: bool = True) -> dict[str, Any]:
        """Everything as plain values; without `lifetimes` much smaller."""
        return {
            "version": VERSION,
            "device_name": self.device_name,
            "virtual": self.virtual,
            "devices": self.devices.to_dict(),
            "phases": self.phases.to_dict(),
            "modules": self.modules.to_dict(),
            "operators": self.operators.to_dict(),
            "lifetimes": self.lifetimes.to_dict() if lifetimes else {"by_module": self.lifetimes.by_module()},
            "plugins": self.plugins,
        }

    def print(self, top: int | None = 10, file: TextIO | None = None) -> None:
        """Everything, `top` rows of each table."""
        out = file or sys.stdout
        estimate = f"; an estimate, on the virtual GPU {self.virtual}" if self.virtual else ""
        print(f"memtrace on {self.device_name}{estimate}", file=out)
        self.devices.print(out)
        for part in (self.phases, self.modules, self.operators, self.lifetimes):
            if part:
                print(file=out)
                part.print(top, out)
        for name, found in self.plugins.items():
            print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()), file=out)

    def plot(self, what: str = "time") -> Any:
        """`"time"` (stacked categories), `"phases"`, `"modules"`, `"operators"` or
        `"devices"`; matplotlib's figure."""
        pictures: dict[str, Callable[[], Any]] = {
            "time": self.lifetimes.plot,
            "phases": self.phases.plot,
            "modules": self.modules.plot,
            "operators": self.operators.plot,
            "devices": self.devices.plot,
        }
        if what not in pictures:
            raise ValueError(f"there are pictures of {', '.join(pictures)}, not {what!r}")
        return pictures[what]()


def _plain(use: PhaseUse | Share) -> dict[str, Any]:
    known = dataclasses.asdict(use)
    if isinstance(use, PhaseUse):
        known = {"current": use.current, "max": use.max, "allocated": use.allocated, **known}
    return known


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO | None) -> None:
    """Columns, the last one to the left."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads) - 1)]
    for row in (heads, *rows):
        print("  ".join(f"{c:>{w}}" for c, w in zip(row, widths)), row[-1] or "(the model)", sep="  ", file=file or sys.stdout)
