"""torch.distributed: how often each collective and each send and receive was called.

Counting patches nothing. A process group's functions are operators of PyTorch's dispatcher
(`c10d::allreduce_`), so they are among those that the library records, with what they took. What
NCCL takes beside PyTorch's allocator is in `memtrace report`, by communicator.

PyTorch's pipeline stages send each other their shapes by functions that hand Python objects
from rank to rank (`torch.distributed.send_object_list` and its like). A virtual GPU moves
no data between processes. So on a virtual GPU, and only there, these functions are replaced
for the time of the tracer (`_exchange.py`). The few hundred bytes that PyTorch would take
for such a message are not taken then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from .._device import virtual_gpu
from . import Plugin, _exchange

if TYPE_CHECKING:
    from .._results import OperatorCalls
    from .._session import Tracer


class Distributed(Plugin):
    """See the module's documentation."""

    name = "torch.distributed"
    library = "torch.distributed"

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def is_wanted(self) -> bool:
        """Is there a process group? The module alone PyTorch itself imports."""
        if not super().is_wanted():
            return False
        import torch.distributed

        return bool(torch.distributed.is_available() and torch.distributed.is_initialized())

    def begin(self, tracer: Tracer) -> None:
        """Replaces what a virtual GPU can't do."""
        if virtual_gpu() is None:
            return
        import torch.distributed
        from torch.distributed import distributed_c10d

        for function in (send_object_list, recv_object_list, broadcast_object_list, all_gather_object):
            name = function.__name__
            original = getattr(distributed_c10d, name)
            replacement = _on_nccl(function, original)
            for module in (torch.distributed, distributed_c10d):
                self._replaced.append((module, name, original))
                setattr(module, name, replacement)

    def end(self) -> None:
        """Puts it back."""
        for module, name, original in self._replaced:
            setattr(module, name, original)
        self._replaced.clear()

    def report(self, operators: OperatorCalls) -> dict[str, Any]:
        """Rank, number of ranks, and the calls by operator."""
        import torch.distributed as dist

        calls = {name: count for name, count in sorted(operators.items()) if name.startswith("c10d::")}
        # The program may have taken its process group down inside the block.
        ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()} if dist.is_initialized() else {}
        return {**ranks, "calls": calls}


def _on_nccl(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement for groups whose data would go through the GPU;
    others carry it themselves."""
    import functools

    import torch.distributed as dist

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[2] if len(args) > 2 else None)
        answer = replacement(*args, **kwargs) if "nccl" in dist.get_backend(group) else NotImplemented
        return original(*args, **kwargs) if answer is NotImplemented else answer

    return call


def _peer(rank: int | None, group: Any, in_group: int | None) -> int | None:
    """A rank among all, given so or within a group."""
    import torch.distributed as dist

    return rank if in_group is None else dist.get_global_rank(group or dist.group.WORLD, in_group)


def _ranks(group: Any) -> list[int]:
    import torch.distributed as dist

    ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
    return ranks


def send_object_list(
    objects: list[Any], dst: int | None = None, group: Any = None, *_: Any, group_dst: int | None = None, **__: Any
) -> Any:
    """See PyTorch's."""
    import torch.distributed as dist

    _exchange.send(list(objects), f"{dist.get_rank()}-{_peer(dst, group, group_dst)}")
    return None


def recv_object_list(
    objects: list[Any],
    src: int | None = None,
    group: Any = None,
    *_: Any,
    group_src: int | None = None,
    weights_only: bool = False,
    **__: Any,
) -> Any:
    """See PyTorch's."""
    import torch.distributed as dist

    source = _peer(src, group, group_src)
    if source is None:  # from anybody
        return NotImplemented
    objects[:] = _exchange.take(f"{source}-{dist.get_rank()}", weights_only)
    return source


def broadcast_object_list(
    objects: list[Any],
    src: int | None = None,
    group: Any = None,
    *_: Any,
    group_src: int | None = None,
    weights_only: bool = False,
    **__: Any,
) -> Any:
    """See PyTorch's."""
    import torch.distributed as dist

    source = _peer(src, group, group_src)
    source = 0 if source is None else source
    for rank in _ranks(group):
        if source == dist.get_rank() != rank:
            _exchange.send(list(objects), f"broadcast-{source}-{rank}")
    if source != dist.get_rank():
        objects[:] = _exchange.take(f"broadcast-{source}-{dist.get_rank()}", weights_only)
    return None


def all_gather_object(objects: list[Any], value: Any, group: Any = None, *_: Any, weights_only: bool = False, **__: Any) -> Any:
    """See PyTorch's."""
    import torch.distributed as dist

    ranks, me = _ranks(group), dist.get_rank()
    for rank in ranks:
        _exchange.send(value, f"gather-{me}-{rank}")
    objects[:] = [_exchange.take(f"gather-{rank}-{me}", weights_only) for rank in ranks]
    return None
