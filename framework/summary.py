"""What is left of a training for a reader: summary.json with its figures, and loss.png with its curve."""

import json
import math
import os
import platform
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from shardlight.framework.loss_plot import draw_losses
from shardlight.framework.meter import Meter, count_tokens, peak_memory_bytes, step_loss
from shardlight.strategies import ShardedStrategy
from torch import Tensor

VALIDATION_METRICS = ("val/bpb", "val_bpb", "val/loss", "val_loss")
"""Logged names that make the validation curve; the first that is there."""


class RunSummary(Callback):
    """Writes summary.json and loss.png into the run folder on rank 0 when a fit has ended well.

    summary.json: wall_s, steps, loss (of the last step), val_bpb, unigram_bpb (where the data module has that
    attribute), tokens_per_s (all ranks, validation left out), peak_memory_bytes (one per rank), world_size, strategy,
    metrics (everything logged, last values), versions. What there is not, or is not finite, is null.

    Costs one gather of two numbers per rank at the end, and nothing in a step.

    Args:
        run_dir: the run folder; it exists.
        started: time.time() when the run started, for wall_s; by default when the callback is made.
    """

    def __init__(self, run_dir: Path | str, started: float | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.started = time.time() if started is None else started
        self._meter = Meter()
        self._step = 0
        self._losses: list[tuple[int, float | Tensor]] = []
        self._validation: list[tuple[int, float]] = []
        self._validation_name: str | None = None
        self._summary: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._step = trainer.global_step
        self._meter.resume()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the loss of every optimizer step."""
        self._meter.add(count_tokens(batch))
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._meter.step()
        if trainer.is_global_zero and (loss := step_loss(trainer, outputs)) is not None:
            self._losses.append((self._step, loss))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._meter.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the validation result."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        name = next((name for name in VALIDATION_METRICS if name in metrics), None)
        if name is not None:
            self._validation_name = name
            self._validation.append((trainer.global_step, float(metrics[name])))
        self._meter.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the figures of all ranks, while they are all there."""
        self._meter.pause()
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        strategy = trainer.strategy
        mine = torch.tensor(
            [peak_memory_bytes(strategy.root_device), self._meter.tokens],
            dtype=torch.int64,
            device=strategy.root_device,
        )
        peaks, tokens = _of_all_ranks(strategy, mine).T.tolist()
        # Ranks that train on the same data count its tokens once.
        replicas = trainer.world_size / getattr(strategy, "data_world_size", trainer.world_size)
        seconds = self._meter.seconds
        self._summary = {
            "wall_s": None,
            "steps": trainer.global_step,
            "loss": float(self._losses[-1][1]) if self._losses else None,
            "val_bpb": metrics.get("val/bpb", metrics.get("val_bpb")),
            "unigram_bpb": getattr(getattr(trainer, "datamodule", None), "unigram_bpb", None),
            "tokens_per_s": sum(tokens) / replicas / seconds if seconds > 0 else None,
            "peak_memory_bytes": peaks,
            "world_size": trainer.world_size,
            "strategy": _strategy_name(strategy),
            "metrics": metrics,
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "lightning", "omegaconf", "shardlight")},
            },
        }

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes both files on rank 0."""
        if self._summary is None or not trainer.is_global_zero:
            return
        draw_losses(
            self.run_dir / "loss.png",
            [(step, float(loss)) for step, loss in self._losses],
            self._validation,
            self._validation_name or "",
            self._summary["unigram_bpb"],
        )
        self._summary["wall_s"] = time.time() - self.started
        write_json(self.run_dir / "summary.json", self._summary)


def _of_all_ranks(strategy: Strategy, mine: Tensor) -> Tensor:
    """Returns the numbers of every rank, (world_size, n). Collective."""
    if isinstance(strategy, ShardedStrategy) and strategy.world_size > 1:
        # Not by its all_gather, which is over the ranks of a pipeline's stage alone.
        return strategy.engine.everyone.gather_small(mine, "figures of the run")
    with warnings.catch_warnings():
        # Lightning's all_gather calls a function of torch that is deprecated since 2.13.
        warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_gather is deprecated", FutureWarning)
        return strategy.all_gather(mine).reshape(-1, len(mine))


def _strategy_name(strategy: Strategy) -> str:
    if isinstance(strategy, ShardedStrategy):
        return strategy.plan.name
    return getattr(strategy, "strategy_name", type(strategy).__name__)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON, complete or not at all; numbers that are not finite become null."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")
    os.replace(partial, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
