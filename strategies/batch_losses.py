"""The losses of a batch's micro-batches, and their mean."""

from collections.abc import Sequence
from typing import Any

from shardlight.strategies.errors import PipelineError
from shardlight.strategies.replayed_logs import BatchLoss
from torch import Tensor


class BatchLosses:
    """Takes the losses as they come.

    Args:
        sizes: samples of each micro-batch.
        under: what cuts batches, for messages.
    """

    def __init__(self, sizes: Sequence[int], under: str) -> None:
        self._sizes = sizes
        self._under = under
        self._found: dict[int, tuple[Tensor, float, bool]] = {}
        self.last: tuple[Tensor | None, float] = None, 0.0
        """What the last step returned as its loss, and what that was taken over: its weight, or samples."""

    def add(self, number: int, result: Any, weight: float | None) -> tuple[Tensor, float]:
        """Takes what a step returned.

        Returns: the loss, and by what it is multiplied before backward.
        Raises: PipelineError: there is no loss in it, or only some losses of the batch are weighted.
        """
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PipelineError(
                f"training_step returned {type(loss).__name__ if not isinstance(loss, Tensor) else tuple(loss.shape)} "
                "as its loss: return a tensor of one element, or a dict with it as 'loss'. None, to leave a batch out, "
                f"is not possible under {self._under}: return a loss of 0 (`logits.sum() * 0`)."
            )
        weighted = weight is not None
        if any(other != weighted for _, _, other in self._found.values()):
            raise PipelineError(
                "some micro-batches of one batch have weighted losses and others plain ones: use `token_loss` or "
                "`weighted` in every step, or in none."
            )
        size = float(self._sizes[number]) if weight is None else weight
        self._found[number] = loss.detach(), size, weighted
        self.last = loss, size
        return loss, size if weighted else size / sum(self._sizes)

    def total(self) -> BatchLoss:
        """Returns the batch's mean."""
        found = [self._found[number] for number in sorted(self._found)]
        losses = [(float(loss), size) for loss, size, _ in found]
        weight = sum(size for _, size in losses)
        mean = sum(loss * size for loss, size in losses if size) / weight if weight else 0.0
        return BatchLoss(mean, weight if found[0][2] else None, found[0][0].dtype)
