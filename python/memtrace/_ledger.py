"""The ledger that `MemTracker` keeps: which block is what, how much of each there
is, and how it was at certain moments.

It is made from the library's records in their order, and from statements about addresses in between
("at this position that block is a parameter"). A block's category counts from its birth, however
late it is known. Sums of the moments since are corrected.

What a backward pass takes and leaves behind is a gradient. So is what it took and a hook gives back
while the node that puts a gradient into its place is running.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

PARAMETER, BUFFER, GRADIENT, ACTIVATION = "Parameter", "Buffer", "Gradient", "Activation"
TEMPORARY, OPTIMIZER_STATE, INPUT, COMMUNICATION, OTHER = "Temp", "Optstate", "Input", "Communication", "Other"
CATEGORIES = (
    PARAMETER,
    BUFFER,
    GRADIENT,
    ACTIVATION,
    TEMPORARY,
    OPTIMIZER_STATE,
    INPUT,
    COMMUNICATION,
    OTHER,
)
TOTAL = "Total"
Sums = dict[str, int]

WORDS = 4
_ALLOCATED, _FREED, _LABELLED, _WORKSPACE = 1, 2, 3, 4
_FORWARD, _BACKWARD, _AGAIN, _ACCUMULATE = 0, 1, 2, 3


def unpack(first: int) -> tuple[int, int, int, int]:
    """Sort, work, thread and label, of a record's first word."""
    return first & 0xF, first >> 4 & 0xF, first >> 16 & 0xFFFFFF, first >> 40


class Place(NamedTuple):
    """What a label says."""

    phase: str
    modules: list[str]
    """The module with those around it, outermost first."""
    communicates: bool


class Block:
    """A block that is handed out."""

    __slots__ = ("device", "size", "category", "born", "thread", "work")

    def __init__(self, device: int, size: int, category: str, born: int, thread: int = 0, work: int = _FORWARD) -> None:
        self.device, self.size, self.category, self.born = device, size, category, born
        self.thread, self.work = thread, work


class Life(NamedTuple):
    """A block, from when the allocator handed it out until it was taken back."""

    born: int
    """The number of the record that began it; below the first: it was there before."""
    died: int | None
    """And that ended it; `None`: it is still there."""
    device: int
    address: int
    size: int
    category: str


class Moment:
    """The sums of each device at a position of the records."""

    __slots__ = ("at", "sums")

    def __init__(self, at: int, sums: dict[int, Sums]) -> None:
        self.at = at
        self.sums = {device: dict(parts) for device, parts in sums.items()}


class Ledger:
    """See the module. `note` is called with a module's name, a state and the moment;
    `place` says what a label means."""

    def __init__(self, place: Callable[[int], Place], note: Callable[[str, str, Moment], None], at: int) -> None:
        self._place, self._note = place, note
        self.next = at
        # Blocks that are gone, if they are to be kept.
        self.gone: list[Life] | None = None
        self.now: dict[int, Sums] = {}
        self.peaks: dict[int, Moment] = {}
        self._live: dict[int, Block] = {}
        self._said: list[tuple[int, list[tuple[int, str]]]] = []
        # Moments by when they were fixed; a peak may be before that.
        self._moments: list[tuple[int, Moment]] = []
        self._open: dict[tuple[int, str], list[str]] = {}  # thread and kind of work → modules that are open
        self._open_peaks: dict[tuple[str, str], tuple[int, Moment]] = {}
        self._resumed = at  # when something was last done outside backward passes

    def say(self, position: int, whose: list[tuple[int, str]]) -> None:
        """At that position these addresses are known to be that."""
        self._said.append((position, whose))

    def forget_moments(self) -> None:
        """What was noted of modules is no longer wanted."""
        self._moments.clear()
        self._open_peaks.clear()

    def born(self, address: int, block: Block) -> None:
        """A block is handed out."""
        if address in self._live:  # taken while the list of what was there before was made
            return
        self._live[address] = block
        device, size, category = block.device, block.size, block.category
        sums = self.now.get(device)
        if sums is None:
            sums = self.now[device] = dict.fromkeys((*CATEGORIES, TOTAL), 0)
        sums[category] += size
        sums[TOTAL] += size

    def lives(self) -> list[Life]:
        """Every block, in order of birth; those that are gone if they are kept."""
        alive = [Life(b.born, None, b.device, address, b.size, b.category) for address, b in self._live.items()]
        return sorted((*(self.gone or ()), *alive), key=lambda life: life.born)

    def read(self, words: list[int]) -> None:
        """The next records."""
        for i in range(0, len(words), WORDS):
            first, address, size, _ = words[i : i + WORDS]
            if self._said and self._said[0][0] <= self.next:
                self.learn()
            sort, work, thread, label = unpack(first)
            if sort == _FREED:
                self._freed(address, thread, work)
            elif sort == _ALLOCATED:
                self._allocated(address, Block(first >> 8 & 0xFF, size, "", self.next, thread, work), self._place(label))
            elif sort == _LABELLED:
                self._labelled(thread, work, self._place(label))
            elif sort == _WORKSPACE:
                self._becomes(address, OTHER)
            self.next += 1

    def settle(self, in_backward: bool) -> None:
        """Takes in all that was said; `in_backward`: a backward pass is under way."""
        self.learn()
        if not in_backward:
            for address, block in self._live.items():
                if block.category == TEMPORARY and block.work in (_BACKWARD, _ACCUMULATE):
                    self._becomes(address, GRADIENT)

    def learn(self) -> None:
        """Takes in what was said up to here."""
        said = 0
        while said < len(self._said) and self._said[said][0] <= self.next:
            for address, category in self._said[said][1]:
                self._becomes(address, category)
            said += 1
        del self._said[:said]

    # --- blocks ---

    def _allocated(self, address: int, block: Block, place: Place) -> None:
        device, work, optimizes = block.device, block.work, place.phase == "optimizer_step"
        if place.communicates:
            block.category = COMMUNICATION
        elif optimizes:
            block.category, block.work = TEMPORARY, _FORWARD
        else:
            block.category = TEMPORARY if work in (_BACKWARD, _ACCUMULATE) else ACTIVATION
        if work == _FORWARD:
            self._resumed = self.next
        self.born(address, block)
        total = self.now[device][TOTAL]
        peak = self.peaks.get(device)
        if peak is None or total > peak.sums[device][TOTAL]:
            self.peaks[device] = Moment(self.next, {device: self.now[device]})
        if self._open_peaks:
            everything = total if len(self.now) == 1 else sum(sums[TOTAL] for sums in self.now.values())
            for key, (most, moment) in self._open_peaks.items():
                if everything > most:
                    moment.at = self.next
                    moment.sums = {d: dict(sums) for d, sums in self.now.items()}
                    self._open_peaks[key] = (everything, moment)

    def _freed(self, address: int, thread: int, work: int) -> None:
        block = self._live.get(address)
        if block is None:
            return
        if block.category == TEMPORARY:
            given_back = work == _ACCUMULATE and block.work == _BACKWARD
            # Autograd may work on the program's own thread, which then frees what
            # a node took after the node is done.
            left = block.thread != thread or block.born < self._resumed
            if given_back or work == _FORWARD and block.work != _FORWARD and left:
                self._becomes(address, GRADIENT)
        del self._live[address]
        if self.gone is not None:
            self.gone.append(Life(block.born, self.next, block.device, address, block.size, block.category))
        sums = self.now[block.device]
        sums[block.category] -= block.size
        sums[TOTAL] -= block.size

    def _becomes(self, address: int, category: str) -> None:
        block = self._live.get(address)
        if block is None or block.category == category:
            return
        device, size, before, born = block.device, block.size, block.category, block.born
        block.category = category
        self._move_sums(self.now[device], before, category, size)
        open_peaks = (moment for _, moment in self._open_peaks.values())
        for moment in (*self.peaks.values(), *open_peaks):
            if moment.at >= born and device in moment.sums:
                self._move_sums(moment.sums[device], before, category, size)
        for fixed, moment in reversed(self._moments):
            if fixed < born:
                break
            if moment.at >= born and device in moment.sums:
                self._move_sums(moment.sums[device], before, category, size)

    @staticmethod
    def _move_sums(sums: Sums, before: str, after: str, size: int) -> None:
        sums[before] -= size
        sums[after] += size

    # --- modules ---

    def _labelled(self, thread: int, work: int, place: Place) -> None:
        kind = "Forward-AC" if work == _AGAIN else "Forward" if work == _FORWARD else "Backward"
        if work == _FORWARD and place.phase in ("forward", "optimizer_step", "zero_grad"):
            self._resumed = self.next
        modules = place.modules
        if kind == "Backward" and place.phase != "backward" or kind == "Forward" and place.phase != "forward":
            modules = []
        if kind == "Forward" and place.phase in ("forward", "optimizer_step"):
            # Autograd's threads do not say that they are done.
            for other, what in [key for key in self._open if key[1] == "Backward"]:
                self._enter(other, what, [])
        if kind != "Forward-AC":
            self._enter(thread, "Forward-AC", [])
        self._enter(thread, kind, modules)

    def _enter(self, thread: int, kind: str, modules: list[str]) -> None:
        before = self._open.get((thread, kind), [])
        if before == modules:
            return
        common = 0
        while common < min(len(before), len(modules)) and before[common] == modules[common]:
            common += 1
        for name in reversed(before[common:]):
            peak = self._open_peaks.pop((name, kind), None)
            if peak is not None:
                self._moments.append((self.next, peak[1]))
            self._moment(name, f"Post-{kind}")
        for name in modules[common:]:
            moment = self._moment(name, f"Pre-{kind}")
            if kind != "Forward-AC":
                most = Moment(moment.at, moment.sums)
                self._note(name, f"Peak-{kind}", most)
                self._open_peaks[name, kind] = (sum(s[TOTAL] for s in most.sums.values()), most)
        if modules:
            self._open[thread, kind] = modules
        else:
            self._open.pop((thread, kind), None)

    def _moment(self, name: str, state: str) -> Moment:
        moment = Moment(self.next, self.now)
        self._moments.append((self.next, moment))
        self._note(name, state, moment)
        return moment
