"""One accumulation window: the loss and weight of its micro-batches, and a ledger of gradient contributions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from shardlight.strategies.errors import GradientError
from torch import Tensor

RAW = (
    "{what} by a backward that the strategy does not know of: use `self.manual_backward(loss)` in manual optimization, "
    "and return the loss from training_step otherwise."
)


class StepResult(Enum):
    """What became of an optimizer step."""

    STEPPED = "stepped"
    NO_WEIGHT = "no rank had any weight (no valid token)"
    NOT_FINITE = "some gradient was inf or NaN"


@dataclass
class Window:
    """What the micro-batches since the last optimizer step add up to, on this rank and, once closed, over all ranks.

    A plain loss means the mean over ranks and over the micro-batches that the window really had. A weighted loss means
    the mean over all weights (tokens): the gradients of sums are added and divided once by the total weight.
    """

    weighted: bool | None = None
    losses: list[tuple[Tensor, float]] = field(default_factory=list)
    """Of each micro-batch, with its share of the sum: read at the end, so that nobody waits for a GPU in between."""
    weight_sum: float = 0.0
    factor: float = 1.0
    """What the caller divided the first loss by before backward (Lightning: the accumulation factor)."""
    arrived: dict[int, int] = field(default_factory=dict)
    """Contributions per parameter number that came from autograd."""
    counted: dict[int, int] = field(default_factory=dict)
    """Contributions per parameter number that went into a reduction."""
    anywhere: set[int] = field(default_factory=set)
    """Numbers of parameters that some rank has a gradient of, as far as ranks have told each other."""
    closed: bool = False
    """The gradients are final."""
    stepped: bool = False
    """An optimizer has used them, and they end with it: the next backward opens a new window."""
    carried: set[int] = field(default_factory=set)
    """Numbers of parameters that have a final gradient of an earlier window; see [Note: gradients that stay]."""
    total_weight: float = 0.0
    total_loss: float = 0.0
    loss_scale: float | None = None
    """What each loss was multiplied by before backward, against underflow of fp16 gradients; None: no backward yet."""
    used: list[bool] = field(default_factory=list)
    """By parameter number: there is a final gradient."""
    any_used: bool = False
    """There is a final gradient, of a parameter of whatever stage."""
    written: list[bool] = field(default_factory=list)
    """By buffer: some rank has written gradients in this window."""
    micro_batches: int = 0
    not_finite: list[str] = field(default_factory=list)
    """Names of parameters whose gradient was inf or NaN, on some rank."""
    finite: tuple[frozenset[int], tuple[int, ...]] | None = None
    """Numbers of parameters whose gradients are known to be finite on this rank, and their versions then."""
    norms: dict[Any, Tensor] = field(default_factory=dict)
    """Norms that were taken of the final gradients, by type, parameters and versions of the gradients."""

    def add_loss(self, loss: Tensor, weight: float | None, factor: float | None) -> None:
        """Counts one micro-batch.

        Args:
            loss: 0-dim, the local mean as it was returned by the step.
            weight: None for a plain loss.
            factor: what the loss was divided by for the mean over the window, of which the first of a window counts;
                None: losses of a window are added up.
        Raises: GradientError: plain and weighted losses in one window.
        """
        weighted = weight is not None
        if self.weighted is not None and self.weighted != weighted:
            raise GradientError(
                "one accumulation window holds weighted and plain losses: use `token_loss`/`weighted` in every "
                "training_step of the window, or in none."
            )
        self.weighted = weighted
        share = 1.0 if weight is None else weight
        self.micro_batches += 1
        if factor is None:
            self.factor = float(self.micro_batches)
        elif self.micro_batches == 1:
            self.factor = factor
        if share:
            self.losses.append((loss, share))
        self.weight_sum += share

    def drop(self, number: int) -> None:
        """Forgets the gradient of a parameter."""
        self.arrived.pop(number, None)
        self.counted.pop(number, None)
        self.carried.discard(number)
        self.anywhere.discard(number)
        if self.closed:
            self.used[number] = False

    def check_complete(self, names: list[str]) -> None:
        """Raises GradientError unless every contribution that arrived was reduced exactly once."""
        if self.arrived != self.counted:
            wrong = [
                f"'{names[n]}' ({self.arrived.get(n, 0)} arrived, {self.counted.get(n, 0)} reduced)"
                for n in sorted(self.arrived.keys() | self.counted.keys())
                if self.arrived.get(n, 0) != self.counted.get(n, 0)
            ]
            raise GradientError(f"gradients of this window are missing from the reduction: {', '.join(wrong)}.")

    def row(self, n_params: int, written: list[bool], flags: tuple[bool, bool]) -> Tensor:
        """Returns (4 + n_params + n_buffers,) fp64: loss sum, weight sum, two flags, which parameters have a gradient,
        and which buffers hold any.
        """
        row = torch.zeros(4 + n_params, dtype=torch.float64)
        loss_sum = sum((float(loss) * share for loss, share in self.losses), start=0.0)
        row[:4] = torch.tensor([loss_sum, self.weight_sum, *map(float, flags)], dtype=torch.float64)
        if self.arrived:
            row[4 + torch.tensor(sorted(self.arrived))] = 1.0
        return torch.cat([row, torch.tensor(written, dtype=torch.float64)])

    def close(self, rows: Tensor, n_params: int) -> tuple[bool, bool]:
        """Takes in the rows of all ranks, (world_size, 4 + n_params + n_buffers).

        Returns: for each flag, whether any rank raised it.
        """
        totals = rows.sum(dim=0)
        self.total_loss, self.total_weight = float(totals[0]), float(totals[1])
        self.used = (totals[4 : 4 + n_params] > 0).tolist()
        self.written = (totals[4 + n_params :] > 0).tolist()
        for number in self.carried:
            self.used[number] = True
        self.closed = True
        return bool(totals[2] > 0), bool(totals[3] > 0)

    @property
    def mean_loss(self) -> float:
        """The loss of the closed window over all ranks; NaN without any weight."""
        return self.total_loss / self.total_weight if self.total_weight else float("nan")

    # --- for checkpoints

    def state(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the ledger as plain data, with names for numbers of parameters.

        Args:
            names: of all parameters, by number.
        """
        plain = (
            "weighted",
            "weight_sum",
            "factor",
            "micro_batches",
            "loss_scale",
            "closed",
            "total_weight",
            "total_loss",
        )
        return {
            **{key: getattr(self, key) for key in plain},
            "losses": [[float(loss), share] for loss, share in self.losses],
            "arrived": {names[n]: count for n, count in sorted(self.arrived.items())},
            "counted": {names[n]: count for n, count in sorted(self.counted.items())},
            "carried": [names[n] for n in sorted(self.carried)],
            "used": [names[n] for n, used in enumerate(self.used) if used],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], names: Sequence[str]) -> "Window":
        """Makes a window of what `state` returned; its gradients are the buffers' to restore.

        Raises: KeyError, TypeError, ValueError: the data is not that of a window, or names an unknown parameter.
        """
        number = {name: n for n, name in enumerate(names)}
        weighted, loss_scale = state["weighted"], state["loss_scale"]
        window = cls(
            weighted=None if weighted is None else bool(weighted),
            losses=[(torch.tensor(float(loss), dtype=torch.float64), float(share)) for loss, share in state["losses"]],
            weight_sum=float(state["weight_sum"]),
            factor=float(state["factor"]),
            arrived={number[name]: int(count) for name, count in state["arrived"].items()},
            counted={number[name]: int(count) for name, count in state["counted"].items()},
            closed=bool(state["closed"]),
            carried={number[name] for name in state["carried"]},
            total_weight=float(state["total_weight"]),
            total_loss=float(state["total_loss"]),
            loss_scale=None if loss_scale is None else float(loss_scale),
            micro_batches=int(state["micro_batches"]),
        )
        if window.closed:
            used = {number[name] for name in state["used"]}
            window.used = [n in used for n in range(len(names))]
        return window
