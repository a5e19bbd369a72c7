"""Optimizer and learning-rate schedule as plain data: the schema of `optimizer:` and `schedule:` in a config.

No torch in here, so that a config can be checked without importing it; the objects are built in `build_optim.py`.
"""

from dataclasses import dataclass
from typing import Literal

DEFAULT_WEIGHT_DECAY = {"adamw": 0.01, "adam": 0.0, "sgd": 0.0}
"""What `weight_decay: null` means for each optimizer: torch.optim's own defaults."""


def _raise_all(kind: str, faults: list[str]) -> None:
    if faults:
        raise ValueError(f"{kind}: " + "; ".join(faults))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which torch.optim optimizer trains the module, and which parameters it decays."""

    name: Literal["adamw", "adam", "sgd"]
    """adamw (decoupled weight decay), adam (weight decay as L2 in the gradient) or sgd; all from torch.optim."""
    lr: float
    """Learning rate at the top of the schedule, per optimizer step."""
    weight_decay: float | None = None
    """Weight decay of the parameters that are decayed. Unset: adamw 0.01, adam 0, sgd 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adamw, adam: decay rates of the two moments, per optimizer step."""
    eps: float = 1e-8
    """adamw, adam: added to the square root of the second moment."""
    momentum: float = 0.0
    """sgd: decay rate of the momentum buffer, per optimizer step; 0 keeps no buffer."""
    nesterov: bool = False
    """sgd: Nesterov momentum; needs momentum > 0."""
    decay: Literal["weights", "all"] = "weights"
    """weights: no decay for norm layers, biases and embeddings (with a head tied to one). all: no such exceptions."""
    no_decay: tuple[str, ...] = ()
    """Parameters that get no decay besides: shell patterns over full names, such as "*.gate" or "head.*"."""

    def __post_init__(self) -> None:
        faults = []
        if self.name not in DEFAULT_WEIGHT_DECAY:
            faults.append(f"name is {self.name!r}; choose one of {', '.join(DEFAULT_WEIGHT_DECAY)}")
        for field in ("lr", "eps"):
            if not getattr(self, field) >= 0:
                faults.append(f"{field} is {getattr(self, field)}; it must be at least 0")
        if self.weight_decay is not None and not self.weight_decay >= 0:
            faults.append(f"weight_decay is {self.weight_decay}; it must be at least 0, or null for the default")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            faults.append(f"betas is {list(self.betas)}; it must be two numbers from 0 up to but not including 1")
        if not 0 <= self.momentum < 1:
            faults.append(f"momentum is {self.momentum}; it must be from 0 up to but not including 1")
        if self.nesterov and self.momentum == 0:
            faults.append("nesterov needs momentum; set momentum to 0.9, say, or nesterov to false")
        if self.decay not in ("weights", "all"):
            faults.append(f"decay is {self.decay!r}; choose one of weights, all")
        _raise_all("optimizer", faults)

    @property
    def effective_weight_decay(self) -> float:
        """The decay used: `weight_decay`, or the default of the optimizer where it is unset."""
        return DEFAULT_WEIGHT_DECAY[self.name] if self.weight_decay is None else self.weight_decay


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves. Every count is in optimizer steps: neither ranks nor accumulation change it."""

    name: Literal["constant", "linear", "cosine"]
    """Shape after the warmup: constant, or falling to `min_lr_ratio` in a line or a half cosine."""
    warmup_steps: int = 0
    """Optimizer steps below the full rate at the start: step s (from 0) uses lr * (s + 1) / (warmup_steps + 1)."""
    total_steps: int | None = None
    """Optimizer steps, warmup included, after which the lowest rate is reached. Unset: those of the whole training."""
    min_lr_ratio: float = 0.0
    """Lowest rate as a fraction of `optimizer.lr`, reached at `total_steps` and kept from there on."""

    def __post_init__(self) -> None:
        faults = []
        if self.name not in ("constant", "linear", "cosine"):
            faults.append(f"name is {self.name!r}; choose one of constant, linear, cosine")
        if self.warmup_steps < 0:
            faults.append(f"warmup_steps is {self.warmup_steps}; it must be at least 0")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            faults.append(f"total_steps is {self.total_steps}; it must be greater than warmup_steps")
        if not 0 <= self.min_lr_ratio <= 1:
            faults.append(f"min_lr_ratio is {self.min_lr_ratio}; it must be from 0 to 1")
        _raise_all("schedule", faults)
