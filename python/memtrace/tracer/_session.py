"""`memtrace.Tracer`: see the package's documentation."""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType
from typing import Any, Iterator, Sequence

from .. import logs
from .._library import MemtraceError
from .._native import Native, native
from .._ledger import CATEGORIES
from ..mem_tracker import MemTracker
from ..memory_tracker import begin_operators, count_operators, end_operators, read_operators
from ..recording import peak
from ._results import Record, Saved, Stretch, work_out
from ._device import Place, place
from ._report import DeviceUse, Devices, Lifetimes, Report, Table
from .plugins import Plugin, chosen

log = logs.get("tracer")

# Of the four million records of operators for which there is room.
_MOST_UNREAD = 1 << 20


class Tracer:
    """Traces PyTorch's memory by device, phase, module and operator, and the life of every block.

        with memtrace.Tracer(model, optimizer, batch, device="virtual:h100") as tracer:
            with tracer.track_phase("forward"):
                loss = model(batch).sum()
            with tracer.track_phase("backward"):
                loss.backward()
        tracer.report().print()

    What is given is tracked as by `MemTracker`: models, optimizers, input tensors; what is made
    inside the block, `track` takes. `device`: `"cuda"` or `None` for the card at hand,
    `"virtual:NAME"` for a virtual GPU, on which the process must run
    (`memtrace run --virtual NAME -- python …`, or `memtrace.ensure_device` in its first lines).
    `operators=False` leaves out which operator asked. `saved_tensors=True` puts a hook of PyTorch's
    on everything that this thread's autograd keeps. `plugins`: `"auto"`, or names and objects
    (`from memtrace.tracer import Plugin`).
    """

    def __init__(
        self,
        *tracked: Any,
        device: str | None = None,
        operators: bool = True,
        saved_tensors: bool = False,
        plugins: str | Sequence[str | Plugin] = "auto",
    ) -> None:
        self._tracked = tracked
        self._device = device
        self._operators = operators
        self._saved_tensors = saved_tensors
        self._plugins = chosen(plugins)
        self._active: list[Plugin] = []
        self._place: Place | None = None
        self._native: Native | None = None
        self._stack = contextlib.ExitStack()
        self._categories = MemTracker(history=True)
        self._first_operator = self._lost_operators = 0
        self._records: list[tuple[int, ...]] = []
        self._peaks: dict[int, peak] = {}
        self._stretches: list[Stretch] = []
        self._saved: list[Saved] = []
        self._report: Report | None = None

    # --- its life ---

    def __enter__(self) -> Tracer:
        if self._place is not None:
            raise MemtraceError("a Tracer traces once: make another one")
        self._place = place(self._device)
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        known = self._native = native()
        assert known is not None  # place() has looked
        with contextlib.ExitStack() as stack:
            torch.cuda.init()
            if self._place.number is not None:
                stack.enter_context(torch.cuda.device(self._place.number))
            self._categories.track_external(*self._tracked)
            stack.enter_context(self._categories)
            if self._operators:
                begin_operators(known, quickly=True)
                stack.callback(end_operators, known)
                self._first_operator, self._lost_operators = count_operators(known)
                stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
            for device in range(torch.cuda.device_count()):
                self._peaks[device] = stack.enter_context(peak(device))
            for plugin in self._plugins:
                self._begin(plugin, stack)
            if self._saved_tensors:
                keep = self._keep
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
            # Last in, first out: the report is made while everything is still there.
            stack.callback(self._finish)
            self._stack = stack.pop_all()
        logs.say(log, logging.INFO, "tracer begins", device=self._place.name, virtual=self._place.virtual)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _begin(self, plugin: Plugin, stack: contextlib.ExitStack) -> None:
        if not plugin.is_wanted():
            logs.say(log, logging.DEBUG, "plugin has nothing to do", plugin=plugin.name)
            return
        plugin.begin(self)
        stack.callback(plugin.end)
        self._active.append(plugin)
        logs.say(log, logging.INFO, "plugin begins", plugin=plugin.name)

    def _finish(self) -> None:
        self._report = self._make()
        for name, use in self._report.devices.items():
            logs.say(log, logging.INFO, "tracer ends", device=name, max=use.max, current=use.current)

    # --- while it is on ---

    def track(self, *things: Any) -> None:
        """Makes models, optimizers and input tensors known inside the block,
        such as those that were made there."""
        self._running()
        self._categories.track_external(*things)

    @contextlib.contextmanager
    def track_phase(self, name: str) -> Iterator[None]:
        """What happens in the block, on any thread, is part of this phase; it is a
        label, too. As a decorator as well."""
        known = self._running()
        stretch = Stretch(name, known.changes_count(None))
        self._stretches.append(stretch)
        logs.say(log, logging.DEBUG, "phase begins", phase=name)
        depth = known.push_phase(name.encode())
        try:
            yield
        finally:
            known.unwind(depth)
            stretch.end = known.changes_count(None)
            logs.say(log, logging.DEBUG, "phase ends", phase=name)

    def _keep(self, tensor: Any) -> Any:
        known = self._native
        if known is not None and tensor.is_cuda:
            try:
                address = tensor.untyped_storage().data_ptr()
            except (NotImplementedError, RuntimeError):  # made of other tensors, or of none
                return tensor
            self._saved.append(Saved(known.changes_count(None), address, known.current()))
        return tensor

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._native is not None:
            upto, _ = count_operators(self._native)
            if upto - self._first_operator - len(self._records) > _MOST_UNREAD:
                self._read_operators(self._native)

    def _read_operators(self, known: Native) -> None:
        upto, lost = count_operators(known)
        if lost != self._lost_operators:
            raise MemtraceError(
                f"{lost - self._lost_operators} operators found no room: call report() from time to time, as optimizer steps make "
                "it read them by themselves, or use Tracer(operators=False)"
            )
        self._records += read_operators(known, self._first_operator + len(self._records), upto)
        known.operators_release(upto)

    def _running(self) -> Native:
        if self._native is None or self._report is not None:
            raise MemtraceError("this Tracer is not running: use it inside its `with` block")
        return self._native

    # --- answers ---

    def report(self) -> Report:
        """What is known until now; after the block, of all of it."""
        return self._report if self._report is not None else self._make()

    def _make(self) -> Report:
        known = self._running()
        assert self._place is not None
        blocks = self._categories._lives()
        changes = self._categories._history
        assert changes is not None  # it was made with a history
        if self._operators:
            self._read_operators(known)
        operators = self._records if self._operators else None
        first = self._categories._begun
        results = work_out(
            Record(known, first, changes, blocks, self._stretches, self._saved, self._first_operator, operators)
        )
        most = {device.index: sums for device, sums in self._categories.get_tracker_snapshot("peak").items()}
        for device, use in results.devices.items():
            self._add_reserved(device, use)
            use.categories = {c: most[device][c] for c in CATEGORIES} if device in most else {}
        return Report(
            self._place.name,
            self._place.virtual,
            Devices({f"cuda:{device}": use for device, use in sorted(results.devices.items())}),
            Table("phase", results.phases),
            Table("module", results.modules),
            Table("operator", results.operators),
            Lifetimes(results.lifetimes),
            {plugin.name: plugin.report(results.calls) for plugin in self._active},
        )

    def _add_reserved(self, device: int, use: DeviceUse) -> None:
        assert self._native is not None
        use.reserved = self._native.memory(device)[1]
        measured = self._peaks.get(device)
        use.max_reserved = max(use.reserved, measured.peak_reserved if measured is not None else 0)
