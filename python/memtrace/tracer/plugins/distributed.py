"""torch.distributed: how often each collective and each send and receive was called.

Nothing is patched. A process group's functions are operators of PyTorch's dispatcher (`c10d::allreduce_`), so they are among those
that the library records, with what they took. What NCCL takes beside PyTorch's allocator is in `memtrace report`, by communicator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import Plugin

if TYPE_CHECKING:
    from .._books import OperatorCalls


class Distributed(Plugin):
    """See the module's essay."""

    name = "torch.distributed"
    library = "torch.distributed"

    def is_wanted(self) -> bool:
        """Is there a process group? The module alone PyTorch itself imports."""
        if not super().is_wanted():
            return False
        import torch.distributed

        return bool(torch.distributed.is_available() and torch.distributed.is_initialized())

    def report(self, operators: OperatorCalls) -> dict[str, Any]:
        """Rank, number of ranks, and the calls by operator."""
        import torch.distributed as dist

        calls = {name: count for name, count in sorted(operators.items()) if name.startswith("c10d::")}
        # The program may have taken its process group down inside the block.
        ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()} if dist.is_initialized() else {}
        return {**ranks, "calls": calls}
