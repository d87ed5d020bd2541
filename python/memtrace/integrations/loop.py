"""A loop of one's own (torchtitan and its like):

    for batch in steps(loader, model, optimizer):
        loss = model(batch).loss
        …
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable, Iterator, TypeVar

from ..labels import step
from ..watching import watch

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def steps(
    batches: Iterable[T],
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    *,
    first: int = 0,
) -> Iterator[T]:
    """The same batches, each the beginning of a step; the model, if given, is
    watched as long as the loop runs."""
    watched = watch(model, optimizer) if model is not None else None
    try:
        for number, batch in enumerate(batches, first):
            step(number)
            yield batch
    finally:
        if watched is not None:
            watched.remove()
