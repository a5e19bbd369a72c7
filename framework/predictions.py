"""Predictions of all ranks in one safetensors file: in the order of the dataset, every sample once, no pickle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from safetensors.torch import load_file, save_file
from shardlight.strategies.errors import ShardlightError
from torch import Tensor

_INDEX = "__index__"


class PredictionError(ShardlightError):
    """What predict_step returned cannot be written as tensors with one row per sample."""


class PredictionWriter(BasePredictionWriter):
    """Writes predictions.safetensors into the run folder at the end of `predict`.

    `predict_step` returns a tensor or a dict of tensors, whose first dim runs over the samples of the batch. Each
    rank writes a file of its own, rank 0 joins them. With several loaders: predictions-0, predictions-1, ...

    Args:
        run_dir: the run folder; rank 0's is used on all ranks.
    """

    def __init__(self, run_dir: Path):
        super().__init__(write_interval="epoch")
        self.run_dir = run_dir

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Collective: every rank writes, then rank 0 joins."""
        run_dir = Path(trainer.strategy.broadcast(str(self.run_dir)))
        loaders = [predictions] if len(batch_indices) == 1 else list(predictions)
        for number, (batches, indices) in enumerate(zip(loaders, batch_indices, strict=True)):
            name = "predictions" if len(loaders) == 1 else f"predictions-{number}"
            part = run_dir / f".{name}.rank{trainer.global_rank}.safetensors"
            # Of a pipeline, only ranks of the last stage have what predict_step returned.
            has_results = getattr(trainer.strategy, "has_results", True)
            save_file(joined(batches, indices) if has_results else joined((), ()), part)
            trainer.strategy.barrier("predictions written")
            if trainer.is_global_zero:
                parts = [run_dir / f".{name}.rank{rank}.safetensors" for rank in range(trainer.world_size)]
                save_file(merged([load_file(item) for item in parts]), run_dir / f"{name}.safetensors")
                for item in parts:
                    item.unlink()


def joined(batches: Sequence[Any], indices: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The batches of one rank as one tensor per name, with the dataset indices of its rows.

    Raises: PredictionError: a batch is not a tensor or dict of tensors with one row per sample.
    """
    columns: dict[str, list[Tensor]] = {}
    for batch, rows in zip(batches, indices, strict=False):
        named = batch if isinstance(batch, dict) else {"predictions": batch}
        for name, value in named.items():
            if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != len(rows):
                shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                text = f"predict_step returned {name} as {shape} for {len(rows)} samples"
                raise PredictionError(f"{text}. Return a tensor, or a dict of tensors, with one row per sample.")
            columns.setdefault(name, []).append(value.detach().cpu())
    try:
        made = {name: torch.cat(values).contiguous() for name, values in columns.items()}
    except RuntimeError as error:
        text = f"the batches of predict_step do not fit together: {error}"
        raise PredictionError(f"{text}. Pad them to one shape.") from None
    return made | {_INDEX: torch.tensor([row for rows in indices for row in rows], dtype=torch.int64)}


def merged(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of all ranks by dataset index; of a sample that was padded in, the first."""
    parts = [part for part in parts if len(part[_INDEX])]
    if not parts:
        return {}
    index = torch.cat([part[_INDEX] for part in parts])
    order = torch.argsort(index, stable=True)
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = index[order][1:] != index[order][:-1]
    order = order[first]
    return {name: torch.cat([part[name] for part in parts])[order].contiguous() for name in parts[0] if name != _INDEX}
