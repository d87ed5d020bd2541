"""Small objects from rank to rank, through the store by which the ranks of a job found each other.

On a virtual GPU a collective moves no data between processes: what a rank receives is what it would
have sent. For memory that is right, as long as the program does not take a size out of what it
received. Where it does, as pipeline stages that send each other their shapes, the plugins send
these few bytes this way. So what is allocated then is what would be on a card.

Every rank must be inside a tracer when it sends or receives, at the same points of the program.
"""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

# Number of messages so far by their key: it goes on from one tracer to the next.
_sent: Counter[str] = Counter()
_taken: Counter[str] = Counter()


def send(value: Any, to: str) -> None:
    """Puts a value down for whoever takes the same name; each name is a queue."""
    import torch

    data = io.BytesIO()
    torch.save(value, data)
    _store().set(f"memtrace/{to}/{_sent[to]}", data.getvalue())
    _sent[to] += 1


def take(sent_to: str, weights_only: bool = False) -> Any:
    """The next value of this name, waited for."""
    import torch

    key = f"memtrace/{sent_to}/{_taken[sent_to]}"
    _taken[sent_to] += 1
    data = _store().get(key)
    _store().delete_key(key)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
