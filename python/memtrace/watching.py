"""Phases and modules by themselves: `memtrace.watch(model, optimizer)`.

Each call of a module passes through the library (`_calls.py`), which then knows which forward is
running. Nothing is put into the graph or the modules. Whose work a backward node undoes is found by
the library from the node's own number, and optimizers name their steps themselves. So a step costs
some 200 nanoseconds per module call, and the backward pass nothing.

In code that `torch.compile` compiles nobody is called: what a compiled region allocates
has the label of whoever called it.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from ._calls import FORWARD, MODULE, Calls
from ._native import native

if TYPE_CHECKING:
    import torch


class Watch:
    """What `watch` put in place; `remove()`, or the end of a `with` block, takes it away."""

    def __init__(self) -> None:
        self._calls: Calls | None = None

    def remove(self) -> None:
        """Ends it."""
        if self._calls is not None:
            self._calls.remove()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def watch(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, *, name: str = "") -> Watch:
    """Labels what the model's modules allocate, by phase and module:
    `forward/layers.0.attention`, `backward/head`.

    `name` is put before the modules' names, for programs with several models. The optimizer's
    phases, `optimizer_step` and `zero_grad`, PyTorch says itself, so `optimizer` may be left out;
    given, it is checked. Where memtrace is not in the process nothing is done.
    """
    if optimizer is not None and not hasattr(optimizer, "step"):
        raise TypeError(f"watch() takes a model and an optimizer; {type(optimizer).__name__} has no step()")
    placed = Watch()
    known = native()
    if known is None:
        return placed
    calls = placed._calls = Calls(known)
    calls.add(model, FORWARD)
    if name:
        calls.add(model, MODULE, name)
    for path, module in model.named_modules():
        path = _own_name(path)
        if path and _is_called(module):
            calls.add(module, MODULE, f"{name}.{path}" if name else path)
    return placed


# What wrappers put into the names of the modules inside them: DDP,
# torch.compile, checkpoint wrappers, FSDP.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def _own_name(path: str) -> str:
    """The name that the module has in the model as it was written."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _is_called(module: torch.nn.Module) -> bool:
    """Containers such as `ModuleList` have no forward of their own, and nobody calls them."""
    import torch

    return type(module).forward is not torch.nn.Module.forward
