"""Exponential moving average of weights, on shards: each rank averages the part of every parameter that it owns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from shardlight.strategies.checkpoint.parts import SHARDED, OwnedPart, StoredParts, replica_share
from shardlight.strategies.errors import StrategyError
from shardlight.strategies.notices import notify
from torch import Tensor, nn

if TYPE_CHECKING:
    from shardlight.strategies.base import ShardedStrategy

PREFIX = "ema/"
"""What a checkpoint calls the averages: `ema/NAME`."""


class ShardedEMA(pl.Callback):
    """Keeps `average = decay * average + (1 - decay) * weights`, and evaluates with it.

    The average costs memory for one shard of the trainable parameters, in fp32 at least, and no collective per step.
    While the module is validated, tested or used for prediction its weights are the average; afterwards they are again
    what they were, bit by bit. Checkpoints hold both: the training weights, and the average in sharded pieces that any
    strategy and number of ranks can go on with. `shardlight export --ema` writes the average to one file.

    Policies: parameters that are frozen have no average until they are unfrozen. Buffers (BatchNorm statistics) are not
    averaged: evaluation uses the current ones. A step that changed nothing (a gradient was not finite) does not count.
    After `fit` the module has its training weights.

    Args:
        decay: between 0 and 1; part of the old average that stays at each update.
        every_n_steps: optimizer steps between two updates.
        start_step: the average begins as the weights after this many optimizer steps.
        evaluate: evaluate with the average; False: only keep and save it.
    Raises: StrategyError: an argument is impossible, or the Trainer's strategy is none of shardlight's.
    Example: decay 0.9, a weight that goes from 0 to 1 in the first step and stays there: 0.1, then 0.19.
    """

    def __init__(
        self, decay: float = 0.999, every_n_steps: int = 1, start_step: int = 0, evaluate: bool = True
    ) -> None:
        if not 0 <= decay <= 1:
            raise StrategyError(f"ShardedEMA: decay={decay!r} must be between 0 and 1.")
        if every_n_steps < 1 or start_step < 0:
            raise StrategyError(
                f"ShardedEMA: every_n_steps={every_n_steps!r} must be at least 1, and start_step={start_step!r} at "
                "least 0."
            )
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.evaluate = evaluate
        self.updates = 0
        """How many times the average was updated."""
        self._step = 0
        self._averages: dict[str, Tensor] = {}
        """By name of the parameter: (n,) average of this rank's part, which may be empty."""
        self._engine: Any = None
        self._held: dict[str, Tensor] | None = None
        """While the average is swapped in: this rank's parts of the training weights."""

    # --- what users call

    @contextmanager
    def averaged(self, trainer: pl.Trainer) -> Iterator[None]:
        """Context in which the module's weights are the average; nothing happens before there is one. Collective."""
        self._swap_in(trainer)
        try:
            yield
        finally:
            self._swap_out(trainer)

    def average(self, name: str) -> Tensor:
        """Returns the (n,) average of this rank's part of a parameter. Raises: KeyError: it has none."""
        return self._averages[name]

    # --- keeping the average

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses strategies of other packages."""
        if not hasattr(trainer.strategy, "plan"):
            raise StrategyError(
                f"ShardedEMA works with shardlight's strategies only, not with {type(trainer.strategy).__name__}: use "
                "strategy='ddp' after `import shardlight.strategies`, or Lightning's EMAWeightAveraging."
            )

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Begins the average of parameters that have none yet."""
        if trainer.global_step < self.start_step:
            return
        for name, parameter, part in self._parts(trainer):
            if name not in self._averages and parameter.requires_grad:
                self._averages[name] = part.to(_wide(part.dtype), copy=True)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Updates the average after an optimizer step."""
        before, self._step = self._step, trainer.global_step
        due = self._step // self.every_n_steps > before // self.every_n_steps and self._step > self.start_step
        if not due or _strategy(trainer).last_step_skipped:
            return
        self.updates += 1
        held = [(self._averages[name], part) for name, _, part in self._parts(trainer) if name in self._averages]
        same = [(average, part) for average, part in held if part.dtype == average.dtype]
        with torch.no_grad():
            if same:
                torch._foreach_lerp_([a for a, _ in same], [p for _, p in same], 1 - self.decay)
            for average, part in held:
                if part.dtype != average.dtype:
                    average.lerp_(part.to(average.dtype), 1 - self.decay)

    def _parts(self, trainer: pl.Trainer) -> list[tuple[str, nn.Parameter, Tensor]]:
        """Returns (name, parameter, this rank's live part of it) of all floating point parameters."""
        engine = _strategy(trainer).engine
        if engine is not self._engine:
            # Other shards: averages of before, and what was held, belong to another model or Trainer.
            self._engine, self._averages, self._held = engine, {}, None
            self._step, self.updates = trainer.global_step, 0
        found = []
        for parameter in engine.table.parameters:
            piece = engine.owned_piece(parameter)
            if piece is not None and (parameter.is_floating_point() or parameter.is_complex()):
                found.append((engine.table.names[engine.table.number[parameter]], parameter, piece[1]))
        return found

    # --- evaluating with it

    def _swap_in(self, trainer: pl.Trainer) -> None:
        parts = self._parts(trainer)
        if self._held is not None or not self._averages:
            return
        self._held = {}
        with _plain_tensors():
            for name, _, part in parts:
                if name in self._averages:
                    self._held[name] = part.clone()
                    part.copy_(self._averages[name])
            _strategy(trainer).engine.weights_changed()

    def _put_back(self, trainer: pl.Trainer) -> bool:
        parts = self._parts(trainer)
        held, self._held = self._held, None
        with _plain_tensors():
            for name, _, part in parts:
                if held is not None and name in held:
                    part.copy_(held[name])
        return held is not None

    def _swap_out(self, trainer: pl.Trainer) -> None:
        if self._put_back(trainer):
            with _plain_tensors():
                _strategy(trainer).engine.weights_changed()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Swaps the average in."""
        if self.evaluate:
            self._swap_in(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the training weights back."""
        self._swap_out(trainer)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Puts this rank's part of the training weights back; without a collective, which must not follow an error."""
        if self._held is not None:
            self._put_back(trainer)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters."""
        return {"updates": self.updates, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the counters."""
        self.updates, self._step = int(state_dict["updates"]), int(state_dict["step"])

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds this rank's pieces of the average.

        Raises: StrategyError: the weights are the average now.
        """
        if self._held is not None:
            raise StrategyError(
                "ShardedEMA: a checkpoint during an evaluation would hold the averaged weights as the training "
                "weights: save it after the evaluation (on_validation_end), or use ShardedEMA(evaluate=False)."
            )
        engine = _strategy(trainer).engine
        parts = checkpoint.setdefault(SHARDED, {})
        for name, parameter, _ in self._parts(trainer):
            piece = engine.owned_piece(parameter)
            if name in self._averages and piece is not None:
                of, average = engine.slice_of(parameter), self._averages[name]
                start, part = replica_share(engine, parameter, piece[0], average)
                parts[PREFIX + name] = OwnedPart(part, of, start)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Reads this rank's pieces of the average, from a checkpoint of any strategy and number of ranks."""
        stored: StoredParts = checkpoint[SHARDED]
        engine = _strategy(trainer).engine
        parts = self._parts(trainer)
        self._averages = {}
        for name, parameter, part in parts:
            piece = engine.owned_piece(parameter)
            if stored.has(PREFIX + name) and piece is not None:
                of, stop = engine.slice_of(parameter), piece[0] + part.numel()
                average = stored.read(PREFIX + name, piece[0], stop, of)
                self._averages[name] = average.to(part.device, _wide(part.dtype), copy=True)
        if not self._averages and checkpoint.get("global_step"):
            notify(
                "ShardedEMA: the checkpoint has no average; it begins with the checkpoint's weights. If it should have "
                "one: it was saved without ShardedEMA, or before start_step."
            )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an average: a step of 0.001 is lost in 16 bits."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """No gradients; and no inference mode, whose tensors training cannot use afterwards."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _strategy(trainer: pl.Trainer) -> "ShardedStrategy":
    return trainer.strategy  # type: ignore[return-value]
