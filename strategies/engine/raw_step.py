"""A step that user code makes on its optimizer itself, past the strategy: it is collective all the same."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from weakref import ref

import torch
from shardlight.strategies.engine.window import StepResult
from torch.optim import Optimizer

if TYPE_CHECKING:
    from shardlight.strategies.engine.engine import Engine


class RawStep:
    """Makes `optimizer.step()` do what `Engine.step` does, where it is called on the user's optimizer itself."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = ref(engine)
        self._context: AbstractContextManager[None] | None = None
        self._used: list[int] | StepResult = []

    def before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Runs the closure, and puts this rank's parts with their gradients in."""
        engine = self._engine()
        if engine is None or engine.stepping:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        with torch.enable_grad():
            result = None if closure is None else closure()
        self._used = engine.prepare_step(optimizer)
        self._context = engine.local_parameters.stepping(optimizer)
        self._context.__enter__()
        if isinstance(self._used, list):
            engine.give_gradients(optimizer, self._used)
        else:
            engine.local_parameters.hide_gradients(optimizer)
        return (optimizer,) if closure is None else (optimizer, lambda: result), {}

    def after(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Takes them out again, and makes the new weights everyone's."""
        engine, context = self._engine(), self._context
        if engine is None or context is None:
            return
        self._context = None
        if isinstance(self._used, list):
            engine.local_parameters.clear_gradients(optimizer, self._used)
        context.__exit__(None, None, None)
        if isinstance(self._used, list):
            engine.finish_step(optimizer, self._used)
        told = engine.on_raw_step()
        if told is not None:
            told(optimizer, self._used if isinstance(self._used, StepResult) else StepResult.STEPPED)
