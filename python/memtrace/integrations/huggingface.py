"""Hugging Face: `Trainer(callbacks=[MemtraceCallback()])` labels phases, modules and steps."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..labels import step
from ..watching import Watch, watch

if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = importlib.import_module("transformers").TrainerCallback


class MemtraceCallback(_Callback):
    """See the module."""

    def __init__(self) -> None:
        self._watch: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None:
            self._watch = watch(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.remove()
