"""Names for what the program is doing: ranges, moments, steps.

What a thread allocates inside a range carries the range's name. It is in the snapshot
(`user_metadata`), in `memtrace report` (sub-totals at the peak), and after a crash in what
`memtrace recover` writes. Where memtrace is not recording, all of this does nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from types import TracebackType
from typing import Any

from ._native import MOMENT, RANGE, STEP, native


class annotate(contextlib.ContextDecorator):
    """A named range, as `with memtrace.annotate("evaluation"):` or
    `@memtrace.annotate("evaluation")`.

    Ranges nest, and belong to the thread. Facts given as keywords become part of the name, so each
    combination is a sub-total of its own: say few different things.
    """

    def __init__(self, name: str, **facts: Any) -> None:
        self.name = f"{name} {json.dumps(facts, separators=(',', ':'), default=str)}" if facts else name
        self._bytes = self.name.encode()
        self._before = 0

    def _recreate_cm(self) -> annotate:
        # A decorated function may call itself: each call has a range of its own.
        again = annotate.__new__(annotate)
        again.name, again._bytes, again._before = self.name, self._bytes, 0
        return again

    def __enter__(self) -> annotate:
        known = native()
        if known is not None:
            self._before = known.current()
            known.enter(known.label(self._before, RANGE, self._bytes))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        known = native()
        if known is not None:
            known.enter(self._before)


def mark(name: str, number: int = 0) -> None:
    """Writes down that the program has come to this point, with the memory
    in use at that moment."""
    known = native()
    if known is not None:
        known.mark(name.encode(), MOMENT, number)


_steps = itertools.count()


def step(number: int | None = None) -> int:
    """A step of the training loop begins. Returns its number: the one
    given, or one more than the last time."""
    global _steps
    if number is not None:
        _steps = itertools.count(number)
    number = next(_steps)
    known = native()
    if known is not None:
        known.mark(b"step", STEP, number)
    return number


def current_label() -> str:
    """The names of the ranges that this thread is in, outermost first, with `/` between them."""
    known = native()
    return known.label_path(known.current()) if known is not None else ""
