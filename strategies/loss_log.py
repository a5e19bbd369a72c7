"""The exact mean loss of every optimizer step since the start of training; goes into checkpoints, and goes on."""

from array import array
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from shardlight.strategies.notices import notify
from torch import Tensor

LOSSES = "losses"
"""The checkpoint's key."""


class LossLog:
    """Eight bytes a step, the same on every rank; NaN where a step was skipped."""

    def __init__(self) -> None:
        self._losses = array("d")
        """Grows by an eighth at a time."""

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, loss: float) -> None:
        """Appends the mean loss of the window that an optimizer has just used, NaN when the step was skipped."""
        self._losses.append(loss)

    def tensor(self) -> Tensor:
        """Returns (steps,) float64, a copy."""
        return torch.frombuffer(self._losses, dtype=torch.float64).clone() if self._losses else _empty()

    def put_into(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Puts the losses into a checkpoint, unless there are none, as in a Trainer that only evaluates."""
        if not self._losses:
            return
        if LOSSES in checkpoint:
            notify(
                f"the checkpoint's own log of losses is left out: its key '{LOSSES}' was taken in on_save_checkpoint. "
                "Choose another key there."
            )
            return
        checkpoint[LOSSES] = self.tensor()

    def take_from(self, checkpoint: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's losses; from none, where it has none."""
        losses = checkpoint.get(LOSSES)
        ours = isinstance(losses, Tensor) and losses.dtype == torch.float64 and losses.dim() == 1
        self._losses = array("d", losses.contiguous().numpy().tobytes() if ours else b"")


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.float64)
