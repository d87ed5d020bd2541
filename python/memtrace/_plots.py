"""Pictures, by matplotlib, which is optional: imported when the first one is asked for.

Figures are returned, not shown, so that they work in notebooks, in scripts without a
screen (`figure.savefig`), and in tests.
"""

from __future__ import annotations

import itertools
from typing import Any, Mapping, Sequence

from ._library import MemtraceError

_MIB = 1024 * 1024.0


def _figure() -> tuple[Any, Any]:
    try:
        import matplotlib.pyplot as pyplot  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MemtraceError("pictures need matplotlib: pip install matplotlib") from error
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    return figure, axes


def operator_curves(curves: Mapping[str, Sequence[float]], markers: Mapping[str, int]) -> Any:
    """MiB over the number of the operator, one line for each name, and a
    vertical line for each marker."""
    figure, axes = _figure()
    for name, values in curves.items():
        axes.plot(range(len(values)), values, label=name)
    for i, (name, at) in enumerate(markers.items()):
        axes.axvline(at, color=f"C{len(curves) + i}", linestyle="--", label=name)
    axes.set(xlabel="operator", ylabel="MiB")
    axes.legend()
    return figure


def bars(rows: Mapping[str, Mapping[str, int]]) -> Any:
    """A bar for each row, made of its parts."""
    figure, axes = _figure()
    left = [0.0] * len(rows)
    for part in {part: None for row in rows.values() for part in row}:
        widths = [row.get(part, 0) / _MIB for row in rows.values()]
        axes.barh(list(rows), widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths)]
    axes.invert_yaxis()
    axes.set(xlabel="MiB")
    axes.legend()
    return figure


def stacked(spans: Sequence[tuple[int, int | None, int, str]], order: Sequence[str]) -> Any:
    """MiB over the number of the change, what there is of each name on top of the one before. A
    span is of a block. It has the change that began it (below zero: it was there), the one that
    ended it (or `None`), its bytes, and its name."""
    figure, axes = _figure()
    times = sorted({max(at, 0) for begin, end, _, _ in spans for at in (begin, end) if at is not None})
    times = times or [0]
    which = {at: i for i, at in enumerate(times)}
    changes = {name: [0] * len(times) for name in order if any(span[3] == name for span in spans)}
    for begin, end, size, name in spans:
        changes[name][which[max(begin, 0)]] += size
        if end is not None:
            changes[name][which[end]] -= size
    heights = [[n / _MIB for n in itertools.accumulate(row)] for row in changes.values()]
    if heights:
        axes.stackplot(times, heights, labels=list(changes), step="post")
        axes.legend(loc="upper left")
    axes.set(xlabel="change of what is allocated", ylabel="MiB")
    return figure
