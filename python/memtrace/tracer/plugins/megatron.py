"""megatron-core: pipeline stages that send each other the shapes of what
they send (`variable_seq_lengths`).

They do it through the GPU, and a virtual one moves no data between processes: every tensor received
would be of size 0. On a virtual GPU, and only there, the shapes go another way (`_exchange.py`);
the tensors themselves are sent as they were. Everything else of megatron-core's needs nothing: its
modules, optimizers and collectives are PyTorch's.

Tried with megatron-core 0.16.1.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .._device import virtual_gpu
from . import Plugin, _exchange

if TYPE_CHECKING:
    from .._session import Tracer

_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
_METHOD = "_communicate_shapes"


class Megatron(Plugin):
    """See the module's documentation."""

    name = "megatron-core"
    library = _MODULE

    def __init__(self) -> None:
        self._original: Any = None

    def is_wanted(self) -> bool:
        """Is there a release of it that we know, on a virtual GPU?"""
        if not super().is_wanted() or virtual_gpu() is None:
            return False
        return hasattr(getattr(sys.modules[_MODULE], "P2PCommunicator", None), _METHOD)

    def begin(self, tracer: Tracer) -> None:
        """Sends shapes another way."""
        communicator = sys.modules[_MODULE].P2PCommunicator
        self._original = getattr(communicator, _METHOD)
        setattr(communicator, _METHOD, _communicate_shapes)

    def end(self) -> None:
        """Puts it back."""
        setattr(sys.modules[_MODULE].P2PCommunicator, _METHOD, self._original)


def _communicate_shapes(
    self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
) -> tuple[list[int], list[int]]:
    """Megatron's method of this name: the shapes of what comes from the
    previous and from the next stage."""
    import torch.distributed as dist

    me = dist.get_rank()
    for tensor, to in ((tensor_send_prev, self.prev_rank), (tensor_send_next, self.next_rank)):
        if tensor is not None:
            _exchange.send(list(tensor.shape), f"shape-{me}-{to}")
    nothing = [0, 0, 0]
    previous = _exchange.take(f"shape-{self.prev_rank}-{me}") if recv_prev else nothing
    following = _exchange.take(f"shape-{self.next_rank}-{me}") if recv_next else nothing
    return previous, following
