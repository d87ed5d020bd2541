"""Lightning: `Trainer(callbacks=[MemtraceCallback()])` labels phases, modules and steps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..labels import step
from ..watching import Watch, watch

if TYPE_CHECKING:
    _Callback = object
else:
    try:
        _Callback = importlib.import_module("lightning.pytorch").Callback
    except ImportError:
        _Callback = importlib.import_module("pytorch_lightning").Callback


class MemtraceCallback(_Callback):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._watch: Watch | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._watch = watch(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step(trainer.global_step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._watch is not None:
            self._watch.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)
