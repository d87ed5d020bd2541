"""Lightning: `Trainer(callbacks=[MemtraceCallback()])` labels phases, modules and steps.

Lightning calls a module's `training_step`, not the module, and does so inside the optimizer's step,
as its closure. So the forward pass is what these methods do, `validation_step` and its like
included, and they are wrapped while the trainer runs.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Callable

from .._native import native
from ..labels import step
from ..watching import Watch, watch

if TYPE_CHECKING:
    _Callback = object
else:
    try:
        _Callback = importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        _Callback = importlib.import_module("pytorch_lightning").Callback

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class MemtraceCallback(_Callback):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._watch: Watch | None = None
        self._wrapped: list[tuple[Any, str]] = []

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        if self._watch is not None:
            return
        self._watch = watch(pl_module)
        for name in _STEPS:
            method = getattr(pl_module, name, None)
            if method is not None and name not in vars(pl_module):
                setattr(pl_module, name, _forward(method))
                self._wrapped.append((pl_module, name))

    def _end(self, trainer: Any, pl_module: Any) -> None:
        if self._watch is None:
            return
        self._watch.remove()
        self._watch = None
        for module, name in self._wrapped:
            vars(module).pop(name, None)
        self._wrapped.clear()

    def _evaluated(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn != "fit":  # which validates in between
            self._end(trainer, pl_module)

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _begin
    on_fit_end = on_test_end = on_predict_end = _end
    on_validation_end = _evaluated

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step(trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(trainer, pl_module)


def _forward(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, as the phase `forward`."""

    @functools.wraps(method)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        known = native()
        if known is None:
            return method(*args, **kwargs)
        depth = known.push_phase(b"forward")
        try:
            return method(*args, **kwargs)
        finally:
            known.unwind(depth)

    return labelled
