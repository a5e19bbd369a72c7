"""Optimizer and learning-rate schedule as plain data: the schema of `optimizer:` and `schedule:` in a config.

No torch in here, so that a config can be checked without importing it; the objects are built in `build_optim.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.01, **_ADAM},
    "adam": {"weight_decay": 0.0, **_ADAM},
    "sgd": {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False},
    "adagrad": {"weight_decay": 0.0, "eps": 1e-10, "lr_decay": 0.0},
    "rmsprop": {"weight_decay": 0.0, "eps": 1e-8, "alpha": 0.99, "momentum": 0.0, "centered": False},
    "adafactor": {"weight_decay": 0.0, "beta2_decay": -0.8},
    "lamb": {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-6},
    "lion": {"weight_decay": 0.0, "betas": (0.9, 0.99)},
    "muon": {"weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr": "original",
             "adamw_lr": None, "adamw_for": ("head.*", "*.head.*", "*lm_head.*"), **_ADAM},
}  # fmt: skip
"""The options that each optimizer has beside lr, decay and no_decay, and what they are where they are unset: torch's
defaults, and for lamb and lion those of their authors."""
ADAMW_WEIGHT_DECAY = 0.01
"""Of what AdamW trains beside Muon, where `weight_decay` is unset."""


def _from_0_to_1(value: float) -> bool:
    return 0 <= value < 1


_AT_LEAST_0: tuple[Callable[[Any], bool], str] = (lambda value: 0 <= value < math.inf, "at least 0, and finite")
_DECAY_RATE: tuple[Callable[[Any], bool], str] = (_from_0_to_1, "from 0 up to but not including 1")
_MUST_BE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": _AT_LEAST_0,
    "eps": _AT_LEAST_0,
    "lr_decay": _AT_LEAST_0,
    "adamw_lr": _AT_LEAST_0,
    "weight_decay": (_AT_LEAST_0[0], "at least 0 and finite, or null for the default"),
    "betas": (
        lambda betas: len(betas) == 2 and all(map(_from_0_to_1, betas)),
        "two numbers from 0 up to but not including 1",
    ),
    "momentum": _DECAY_RATE,
    "alpha": _DECAY_RATE,
    "beta2_decay": (lambda value: value <= 0, "at most 0"),
    "ns_steps": (lambda value: 0 < value < 100, "from 1 to 99"),
    "adjust_lr": (lambda value: value in ("original", "match_rms_adamw"), "original or match_rms_adamw"),
}


def _raise_all(kind: str, faults: list[str]) -> None:
    if faults:
        raise ValueError(f"{kind}: " + "; ".join(faults))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which torch.optim optimizer trains the module, and which parameters it decays."""

    name: Literal["adamw", "adam", "sgd", "adagrad", "rmsprop", "adafactor", "lamb", "lion", "muon"]
    """adamw (decoupled weight decay), adam (weight decay as L2 in the gradient), sgd, adagrad, rmsprop, adafactor: from
    torch.optim. lamb: You et al. 2020. lion: Chen et al. 2023. muon: torch.optim.Muon for hidden matrices,
    torch.optim.AdamW for the rest."""
    lr: float
    """Learning rate at the top of the schedule, per optimizer step."""
    weight_decay: float | None = None
    """Weight decay of the parameters that are decayed. Unset: adamw, lamb 0.01, muon 0.1 (its AdamW 0.01), else 0."""
    betas: tuple[float, float] | None = None
    """adamw, adam, lamb, and AdamW of muon: decay rates of the two moments, per optimizer step. Unset: 0.9, 0.999.
    lion: of the update, and of its momentum. Unset: 0.9, 0.99."""
    eps: float | None = None
    """adamw, adam, lamb, adagrad, rmsprop, and AdamW of muon: added to the root of the second moment. Unset: 1e-8; lamb
    1e-6, adagrad 1e-10."""
    momentum: float | None = None
    """sgd, rmsprop, muon: decay rate of the momentum buffer, per step; 0 keeps none. Unset: muon 0.95, else 0."""
    nesterov: bool | None = None
    """sgd, muon: Nesterov momentum; needs momentum > 0. Unset: true for muon, false for sgd."""
    alpha: float | None = None
    """rmsprop: decay rate of the mean square, per optimizer step. Unset: 0.99."""
    centered: bool | None = None
    """rmsprop: divides by the deviation from the mean instead of the mean square. Unset: false."""
    lr_decay: float | None = None
    """adagrad: step s (from 0) uses lr / (1 + s * lr_decay). Unset: 0."""
    beta2_decay: float | None = None
    """adafactor: the second moment's decay rate at step s (from 1) is 1 - s ** beta2_decay. Unset: -0.8."""
    ns_steps: int | None = None
    """muon: Newton-Schulz iterations per step. Unset: 5."""
    adjust_lr: Literal["original", "match_rms_adamw"] | None = None
    """muon: lr grows with sqrt(max(1, rows / columns)), or is one that suits AdamW (0.2 sqrt(max(rows, columns)) times
    that). Unset: original."""
    adamw_lr: float | None = None
    """muon: learning rate of what AdamW trains. Unset: lr, with adjust_lr match_rms_adamw alone; original needs it."""
    adamw_for: tuple[str, ...] | None = None
    """muon: what AdamW trains besides norms, biases, embeddings (with a head tied to one) and all that is no matrix, as
    shell patterns over full names. Unset: parameters of a module called head or lm_head."""
    decay: Literal["weights", "all"] = "weights"
    """weights: no decay for norm layers, biases and embeddings (with a head tied to one). all: no such exceptions."""
    no_decay: tuple[str, ...] = ()
    """Parameters that get no decay besides: shell patterns over full names, such as "*.gate" or "head.*"."""

    def __post_init__(self) -> None:
        known = self.name in DEFAULTS
        faults = [] if known else [f"name is {self.name!r}; choose one of {', '.join(DEFAULTS)}"]
        for field, (fits, must) in _MUST_BE.items():
            value = getattr(self, field)
            if value is not None and not fits(value):
                shown = list(value) if isinstance(value, tuple) else value
                faults.append(f"{field} is {shown!r}; it must be {must}")
        faults += self._misplaced() if known else []
        if self.decay not in ("weights", "all"):
            faults.append(f"decay is {self.decay!r}; choose one of weights, all")
        _raise_all("optimizer", faults)

    def _misplaced(self) -> list[str]:
        """Returns what is wrong with options beside others."""
        own, faults = DEFAULTS[self.name], []
        optional = [f.name for f in fields(self) if f.default is None]
        for field in [name for name in optional if name not in own and getattr(self, name) is not None]:
            owners = ", ".join(name for name, options in DEFAULTS.items() if field in options)
            faults.append(f"{field} is for {owners}, and {self.name} has {', '.join(own)}")
        if self.nesterov and self.options.get("momentum") == 0:
            faults.append("nesterov needs momentum; set momentum to 0.9, say, or nesterov to false")
        if self.name == "muon" and self.adamw_lr is None and self.adjust_lr != "match_rms_adamw":
            faults.append(
                "adamw_lr is missing; set the learning rate of embeddings, norms, biases and head, such as 3e-4, or "
                "adjust_lr to match_rms_adamw, which takes lr for all"
            )
        return faults

    @property
    def options(self) -> dict[str, Any]:
        """Every option that the optimizer has beside lr, decay and no_decay: as set, or its default."""
        own = DEFAULTS[self.name]
        return {name: own[name] if (value := getattr(self, name)) is None else value for name in own}

    @property
    def effective_weight_decay(self) -> float:
        """The decay used: `weight_decay`, or the default of the optimizer where it is unset."""
        return self.options["weight_decay"]


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
