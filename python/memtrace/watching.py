"""Phases and modules by themselves: `memtrace.watch(model, optimizer)`.

Two hooks on each module, PyTorch's public ones, say which module's forward is running; nothing is put into the graph. Whose
work a backward node undoes is found by the library from the node's own number, and optimizers name their steps
themselves. So a step costs two short calls per module call, and the backward pass none.

In code that `torch.compile` compiles the hooks vanish: what a compiled region allocates has the label of whoever called it.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable

from ._native import Native, native

if TYPE_CHECKING:
    import torch


class Watch:
    """What `watch` put in place; `remove()`, or the end of a `with` block, takes it away."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def watch(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, *, name: str = "") -> Watch:
    """Labels what the model's modules allocate, by phase and module: `forward/layers.0.attention`, `backward/head`.

    `name` stands before the modules' names, for programs with several models. The optimizer's phases, `optimizer_step` and
    `zero_grad`, PyTorch says itself, so `optimizer` may be left out; given, it is checked. Where memtrace is not in
    the process nothing is done.
    """
    if optimizer is not None and not hasattr(optimizer, "step"):
        raise TypeError(f"watch() takes a model and an optimizer; {type(optimizer).__name__} has no step()")
    placed = Watch()
    known = native()
    if known is None:
        return placed
    before, after = _root_hooks(known, name)
    placed._handles.append(model.register_forward_pre_hook(before, prepend=True))
    placed._handles.append(model.register_forward_hook(after, always_call=True))
    for path, module in model.named_modules():
        path = _own_name(path)
        if path == "" or not _is_called(module):
            continue
        before, after = _module_hooks(known, f"{name}.{path}" if name else path)
        placed._handles.append(module.register_forward_pre_hook(before, prepend=True))
        placed._handles.append(module.register_forward_hook(after, always_call=True))
    return placed


# What wrappers put into the names of the modules inside them: DDP, torch.compile, checkpoint wrappers, FSDP.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def _own_name(path: str) -> str:
    """The name that the module has in the model as it was written."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _is_called(module: torch.nn.Module) -> bool:
    """Containers such as `ModuleList` have no forward of their own, and nobody calls them."""
    import torch

    return type(module).forward is not torch.nn.Module.forward


def _root_hooks(known: Native, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    from torch.compiler import is_dynamo_compiling

    module = name.encode()
    depths: list[int] = []

    def before(module_: Any, args: Any) -> None:
        if is_dynamo_compiling():
            return
        depths.append(known.push_phase(b"forward"))
        if module:
            known.push_module(module)

    def after(module_: Any, args: Any, output: Any) -> None:
        if is_dynamo_compiling() or not depths:
            return
        known.unwind(depths.pop())

    return before, after


def _module_hooks(known: Native, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
    from torch.compiler import is_dynamo_compiling

    name = path.encode()
    push, pop = known.push_module, known.pop

    def before(module: Any, args: Any) -> None:
        if not is_dynamo_compiling():
            push(name)

    def after(module: Any, args: Any, output: Any) -> None:
        if not is_dynamo_compiling():
            pop()

    return before, after
