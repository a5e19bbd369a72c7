"""The same model under Lightning's Trainer: stock `ddp`, and this package's strategies."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from shardlight.framework.bench.contenders.gpt import fixed_gpt, loss_of, optimizer_of, rows_of
from shardlight.framework.bench.contenders.loop import CollectivesProbe, start_group
from shardlight.framework.bench.contenders.ours import count_so_far, state_of
from shardlight.framework.bench.contenders.trace import StepTrace
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from shardlight.strategies import STRATEGIES, ShardedStrategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

MAX_STEPS = 1 << 30


class GPTModule(pl.LightningModule):
    """The benchmark's model, its loss and its optimizer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = fixed_gpt(size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the rows' mean loss."""
        return loss_of(self.model, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns that of every contender."""
        return optimizer_of(self)


class TurnRows(IterableDataset):
    """This rank's rows of the steps that it is told to take; asking for more ends a step.

    It has a length, so that Lightning does not read one batch ahead.
    """

    def __init__(self, size: Size, turns: Turns, rank: int, world_size: int) -> None:
        self.size = size
        self.turns = turns
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _, step in self.turns:
            yield rows_of(self.size, step, self.rank, self.world_size)

    def __len__(self) -> int:
        return MAX_STEPS


class ReportLoss(pl.Callback):
    """Tells the benchmark the loss of each step."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reports it."""
        self.turns.report(outputs["loss"].item())


def run(job: dict[str, Any], turns: Turns) -> None:
    """Trains the one contender of a job, "trainer-ddp" or "trainer-shardlight-zero3" and the like; see loop.run."""
    (name,) = job["hosts"]
    size, rank, world_size = Size(**job["size"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    warnings.filterwarnings("ignore", message="The '.*' does not have many workers")
    warnings.filterwarnings("ignore", message="Your `IterableDataset` has `__len__` defined")  # a trap for workers
    start_group(world_size)
    who = name.removeprefix("trainer-")
    # Not "ddp" by name: that is ours, once it is imported.
    strategy = STRATEGIES[who.removeprefix("shardlight-")]() if who.startswith("shardlight-") else DDPStrategy()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_epochs=1,
        callbacks=[ReportLoss(turns)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if isinstance(strategy, ShardedStrategy):
        turns.counters = lambda _: count_so_far(strategy.engine)
        turns.gauges = lambda _: state_of(strategy.engine, strategy.optimizers[0])
    turns.probes["collectives"] = CollectivesProbe
    turns.tracer = StepTrace
    rows = TurnRows(size, turns, rank, world_size)
    trainer.fit(GPTModule(size), DataLoader(rows, batch_size=None))
