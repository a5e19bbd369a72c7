"""`order: layer`: each unit serves all micro-batches of a batch before the next one is gathered.

See [Note: layer order], engine/interleave.py. A batch is cut into micro-batches as under pipeline, and what their steps
log is logged once, as the batch's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from shardlight.strategies.base import ShardedStrategy
from shardlight.strategies.batch_losses import BatchLosses
from shardlight.strategies.engine.interleave import Interleaver
from shardlight.strategies.engine.own_state import DefaultDtype, Fields, ModuleAttributes, RandomNumbers
from shardlight.strategies.errors import StrategyError
from shardlight.strategies.micro_batches import batch_rows, split_batch
from shardlight.strategies.replayed_logs import BatchLoss, ReplayedLogs
from torch import Tensor
from torch.optim import Optimizer


@dataclass
class _Forwards:
    """What the forwards of a batch leave for its backwards."""

    interleaver: Interleaver
    losses: list[tuple[Tensor, float]]
    """Of each micro-batch, with what it is multiplied by."""
    total: BatchLoss


class LayerOrder(ShardedStrategy):
    """What the strategies share whose units are gathered for use."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._forwards: _Forwards | None = None
        self._logs: ReplayedLogs | None = None

    def _refuse(self, trainer: pl.Trainer) -> None:
        super()._refuse(trainer)
        module = self.lightning_module
        assert module is not None
        if self.options.order == "layer" and not module.automatic_optimization:
            raise StrategyError(
                f"{type(module).__name__} uses manual optimization: with strategy.order: layer the backwards of all "
                "micro-batches of a batch run together. Use automatic optimization, or order: batch."
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward; with `order: layer` those of the batch's micro-batches, unit by unit."""
        if self.options.order == "batch":
            return super().training_step(*args, **kwargs)
        module, engine = self.lightning_module, self.engine
        assert module is not None
        batch, *rest = args
        parts, sizes = self._cut_batch(batch)
        self._before_batch = engine.window, engine.window.micro_batches
        if self._logs is None:
            self._logs = ReplayedLogs(module, engine.ranks.pipeline, lambda value, what: None)
        logs, losses = self._logs, BatchLosses(sizes, "order: layer")
        drawn = int(torch.randint(1 << 60, (1,)))
        owned = (
            RandomNumbers([drawn + number for number in range(len(parts))], self.root_device),
            DefaultDtype(),
            ModuleAttributes(module),
            Fields(self, "_weight"),
            Fields(logs, "_samples", "_calls"),
        )
        interleaver = Interleaver(len(parts), owned)

        def step(number: int) -> tuple[Tensor, float]:
            self._weight = None
            logs.begin(sizes[number], last=True)
            result = self._plain_training_step(parts[number], *rest, **kwargs)
            found = losses.add(number, result, self._weight)
            logs.end(*losses.last)
            return found

        with logs.kept(), engine.forward():
            found = engine.weights.run_in_turns(interleaver, [partial(step, number) for number in range(len(parts))])
        total = logs.replay(losses.total())
        assert total is not None
        self._forwards = _Forwards(interleaver, found, total)
        return torch.tensor(total.mean, dtype=total.dtype, device=self.root_device)

    def _cut_batch(self, batch: Any) -> tuple[list[Any], list[int]]:
        own = getattr(self.lightning_module, "split_batch", None)
        parts = self.options.micro_batches or 1
        if own is None:
            rows = batch_rows(batch)
            # No fewer than one sample each; other ranks may have more.
            split = split_batch(batch, rows, max(1, min(parts, rows)))
        else:
            split = list(own(batch, parts))
        return split, [batch_rows(part) for part in split]

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward; with `order: layer` those of the batch's micro-batches, unit by unit."""
        forwards, self._forwards = self._forwards, None
        if forwards is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module, engine = self.lightning_module, self.engine
        assert module is not None
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        if module.trainer.fit_loop.epoch_loop.batch_idx == 0 and not self._keeps_gradients(module):
            engine.gradients.drop_open_window()
        loss_scale = self.precision_plugin.loss_scale
        engine.gradients.begin(loss_scale.scale if loss_scale is not None else 1.0)
        total, scale = forwards.total, engine.window.loss_scale or 1.0
        engine.window.add_loss(torch.tensor(total.mean, dtype=torch.float64), total.weight, 1.0)
        backward: Callable[..., None] = self.precision_plugin.backward
        works = [
            partial(backward, part if share * scale == 1.0 else part * (share * scale), module, optimizer)
            for part, share in forwards.losses
        ]
        with engine.gradients.running_backward():
            engine.weights.run_in_turns(forwards.interleaver, [partial(w, *args, **kwargs) for w in works])
        forwards.interleaver.finish()
        if not self._blocked:
            engine.close_window()
        return self.precision_plugin.post_backward(loss, module)
