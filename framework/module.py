"""TrainingModule: a LightningModule with optimizer and schedule from the config and token-exact losses.

Nothing is taken away: every hook of LightningModule can be overridden, and it runs under any Lightning strategy.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from shardlight.framework.build_optim import build_optimizer, build_schedule
from shardlight.framework.faults import ConfigError
from shardlight.framework.optim import OptimizerConfig, ScheduleConfig
from shardlight.framework.source import read_yaml
from shardlight.strategies import load_module
from shardlight.strategies.errors import ShardlightError
from shardlight.strategies.logged_values import LOSS_WEIGHT
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override


def _from_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    tree, faults = read_yaml(path)
    if faults:
        raise ConfigError(faults)
    return tree.plain()


class TrainingModule(LightningModule):
    """Base class of modules to train.

    [Note: weighted losses] A mean over an accumulation window must be a mean over the window's tokens, on all ranks
    and micro-batches, and not a mean of means. `weighted` returns the local mean, so that a training step reads as
    usual, and tells the strategy the weight behind it; the strategy turns the gradients into those of
    (sum of loss sums) / (sum of weights). Strategies without `weigh_loss` (Lightning's own) use the local mean.
    The weight stays with the returned tensor: `log` takes it as batch size, so that epoch means are exact as well.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizer_config: OptimizerConfig | None = None
        """Set from `optimizer:` before fit; used by `configure_optimizers`."""
        self.schedule_config: ScheduleConfig | None = None
        """Set from `schedule:` before fit; None keeps the learning rate constant."""

    @classmethod
    @override
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Makes the module from a checkpoint folder of any strategy, or from a .ckpt file of Lightning; without ranks.

        Args:
            checkpoint_path: of the folder or file.
            map_location: the device of the module.
            hparams_file: a YAML file with the arguments of `__init__`, instead of the saved hyper-parameters.
            strict: whether all names have to fit; None: as `strict_loading` says.
            weights_only: always as if true.
            kwargs: arguments of `__init__`; they win.
        Raises: CheckpointError: it is not whole, or holds more than tensors and plain containers.
        """
        hparams = None if hparams_file is None else _from_yaml(hparams_file)
        return load_module(cls, checkpoint_path, map_location=map_location, strict=strict, hparams=hparams, **kwargs)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Builds optimizer and schedule from the two configs; override it to build your own.

        Raises: ShardlightError: there is no optimizer config.
        """
        if self.optimizer_config is None:
            raise ShardlightError(
                f"{type(self).__name__} has no optimizer: set optimizer in the config, e.g. "
                "optimizer: {name: adamw, lr: 3e-4}, or override configure_optimizers."
            )
        optimizer = build_optimizer(self, self.optimizer_config)
        if self.schedule_config is None:
            return {"optimizer": optimizer}
        total_steps: int | float = float("inf")
        if self.schedule_config.name != "constant" and self.schedule_config.total_steps is None:
            total_steps = self.trainer.estimated_stepping_batches
        schedule = build_schedule(optimizer, self.schedule_config, total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def token_loss(
        self, logits: Tensor, labels: Tensor, ignore_index: int = -100, unit: Literal["nats", "bits"] = "nats"
    ) -> Tensor:
        """Mean cross entropy per valid label, through `weighted`.

        Args:
            logits: (..., V), any float dtype; computed in at least float32.
            labels: (...), int64 in [0, V), or `ignore_index` where a position does not count.
            unit: nats to train on; bits (nats / ln 2) to report bits per byte where a label is a byte.
        Returns: 0-dim; 0, still attached to the graph, when no label is valid.
        Raises: ValueError: the shapes do not belong together.
        """
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"token_loss: logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not belong together: "
                "logits must have the shape of labels plus one last dim of classes"
            )
        flat = logits.reshape(-1, logits.shape[-1])
        flat = flat if flat.dtype == torch.float64 else flat.float()
        loss_sum = F.cross_entropy(flat, labels.reshape(-1), ignore_index=ignore_index, reduction="sum")
        if unit == "bits":
            loss_sum = loss_sum / math.log(2)
        return self.weighted(loss_sum, (labels != ignore_index).sum())

    def weighted(self, loss_sum: Tensor, weight: float | Tensor) -> Tensor:
        """Returns `loss_sum / weight`, exact over ranks and micro-batches: see [Note: weighted losses].

        In a training step: once per step, for the loss that the step returns.

        Args:
            loss_sum: 0-dim, the sum of the losses of this rank's micro-batch.
            weight: what was summed over, such as the number of tokens; 0-dim or a number, at least 0.
        Returns: 0-dim, dtype of `loss_sum`; `loss_sum` itself (0, with its graph) when the weight is 0.
        Example: two ranks with loss sums 6 and 2 over 3 and 1 tokens: each returns 2; gradients are those of 8 / 4.
        """
        exact = torch.float32 if loss_sum.device.type == "mps" else torch.float64
        weight = torch.as_tensor(weight, dtype=exact, device=loss_sum.device).detach()
        trainer = self._trainer
        if trainer is not None and trainer.training and hasattr(trainer.strategy, "weigh_loss"):
            trainer.strategy.weigh_loss(weight)
        mean = loss_sum / torch.where(weight > 0, weight, 1.0).to(loss_sum.dtype)
        setattr(mean, LOSS_WEIGHT, weight)
        return mean

    @override
    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """As LightningModule.log, with two other defaults for a tensor returned by `weighted` or `token_loss`.

        batch_size: the weight of the loss, so that an epoch mean is the mean over tokens, not over batches.
        sync_dist: True where only an epoch mean is logged (validation, test), so that it is the mean over the tokens
            of all ranks; False where a step value is logged, which would cost a collective in every step.
        """
        weight = getattr(value, LOSS_WEIGHT, None) if isinstance(value, Tensor) else None
        if batch_size is None and weight is not None:
            # As a float tensor: Lightning would average an integer count over ranks by integer division.
            batch_size = weight
        if sync_dist is None:
            logs_step = on_step or (on_step is None and self._trainer is not None and self._trainer.training)
            sync_dist = weight is not None and not logs_step and not rank_zero_only
        super().log(
            name,
            value,
            prog_bar=prog_bar,
            logger=logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            enable_graph=enable_graph,
            sync_dist=sync_dist,
            sync_dist_group=sync_dist_group,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            metric_attribute=metric_attribute,
            rank_zero_only=rank_zero_only,
        )

    @override
    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        **options: Any,
    ) -> None:
        """As LightningModule.log_dict, with the defaults of `log` for weighted losses."""
        super().log_dict(dictionary, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, **options)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Logs `loss` and `grad_norm` of the accumulation window, where the strategy offers them.

        `loss` is the mean over ranks and micro-batches and costs nothing; `grad_norm` is the norm before clipping,
        which clipping then uses again. With manual optimization there are no windows, and nothing is logged.
        """
        strategy: Strategy = self.trainer.strategy
        if self.automatic_optimization and hasattr(strategy, "window_loss"):
            self.log("loss", strategy.window_loss, prog_bar=True, batch_size=1)
            self.log("grad_norm", strategy.gradient_norm(), batch_size=1)
