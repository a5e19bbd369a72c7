"""What a rank measures of its own training, without a collective: tokens per second, loss of a step, peak memory."""

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

RECENT_STEPS = 20


def count_tokens(batch: Any) -> int | Tensor:
    """Tokens of a batch: labels that count (>= 0) of a dict with "labels", else all "tokens", else samples.

    Returns: a number, or a 0-dim tensor on the batch's device, so that nothing waits for a GPU.
    Example: {"labels": [[3, -100], [1, 2]]} has 3; a (4, 10) tensor has 4 samples.
    """
    if isinstance(batch, Mapping):
        labels, tokens = batch.get("labels"), batch.get("tokens")
        if isinstance(labels, Tensor) and labels.ndim > 0 and not labels.is_floating_point():
            return (labels >= 0).sum()
        if isinstance(tokens, Tensor):
            return tokens.numel()
        batch = list(batch.values())
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, list | tuple) and batch:
        return count_tokens(batch[0])
    return 1


def token_unit(batch: Any) -> str:
    """What `count_tokens` counts: "tokens" or "samples"."""
    return "tokens" if isinstance(batch, Mapping) and ({"labels", "tokens"} & batch.keys()) else "samples"


def data_world_size(trainer: Trainer) -> int:
    """Ranks that train on different batches: the strategy's number where it tells, else all."""
    return getattr(trainer.strategy, "data_world_size", trainer.world_size)


def step_loss(trainer: Trainer, outputs: Any) -> float | Tensor | None:
    """The loss of the optimizer step that `on_train_batch_end` follows, without a collective.

    Returns: the mean over ranks and micro-batches where the strategy offers it (`window_loss`), else the loss of
        this rank's last micro-batch as a 0-dim tensor, else None.
    """
    if (loss := getattr(trainer.strategy, "window_loss", None)) is not None:
        return loss
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    # Lightning divides what a training step returned by the length of the window.
    return loss.detach() * trainer.accumulate_grad_batches if isinstance(loss, Tensor) else None


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: device memory for CUDA, else resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss: on Linux a process starts with that of the process that started it.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Meter:
    """Tokens and seconds of training, without the pauses for validation.

    Args:
        clock: seconds, only going up; another one in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s: float | None = None
        self._seconds = 0.0
        self._step_tokens: int | Tensor = 0
        self._tokens: int | Tensor = 0
        self._recent: deque[tuple[float, int | Tensor]] = deque(maxlen=RECENT_STEPS)
        self._step_start_s = 0.0

    def resume(self) -> None:
        """Starts, or goes on after `pause`."""
        self._last_s = self._clock()

    def pause(self) -> None:
        """Lets time pass that is not training."""
        self._advance()
        self._last_s = None

    def _advance(self) -> None:
        if self._last_s is not None:
            now = self._clock()
            self._seconds += now - self._last_s
            self._last_s = now

    def add(self, tokens: int | Tensor) -> None:
        """Counts the tokens of one micro-batch of this rank."""
        self._step_tokens = self._step_tokens + tokens

    def step(self) -> None:
        """Ends an optimizer step."""
        self._advance()
        self._tokens = self._tokens + self._step_tokens
        self._recent.append((self._seconds - self._step_start_s, self._step_tokens))
        self._step_tokens, self._step_start_s = 0, self._seconds

    @property
    def tokens(self) -> int:
        """Tokens of this rank in all finished steps."""
        return int(self._tokens)

    @property
    def seconds(self) -> float:
        """Seconds of training up to the last step or pause."""
        return self._seconds

    @property
    def recent_tokens_per_s(self) -> float:
        """Tokens a second of this rank over the last 20 steps; 0 before the first."""
        seconds = sum(seconds for seconds, _ in self._recent)
        return float(sum(tokens for _, tokens in self._recent)) / seconds if seconds > 0 else 0.0

    @property
    def recent_step_s(self) -> float:
        """Seconds a step over the last 20 steps; 0 before the first."""
        return sum(seconds for seconds, _ in self._recent) / max(1, len(self._recent))
