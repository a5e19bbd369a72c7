"""Muon for the hidden matrices of a model and AdamW for everything else, as one optimizer.

Sources: Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks; Loshchilov and Hutter 2019,
Decoupled Weight Decay Regularization (arXiv 1711.05101). The arithmetic is torch.optim's own.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

Kind = Literal["muon", "adamw"]
_KINDS: dict[str, type[Optimizer]] = {"muon": Muon, "adamw": AdamW}
_OURS = ("kind", "needs_whole_parameters", "name", "param_names", "initial_lr")
"""Entries of a group that neither class takes."""


class MuonAdamW(Optimizer):
    """torch.optim.Muon and torch.optim.AdamW behind one set of param groups, one state and one learning-rate schedule.

    A group's entry `kind` says which of the two trains it ("adamw" where there is none); it has all options of that
    class, torch's defaults where they are not given. Under sharded optimizer state only Muon's groups are kept whole.

    Args:
        params: groups, each {"params": [...], "kind": "muon" or "adamw", ...options of that class}.
    Raises: ValueError: a kind or option that there is not, or Muon is to train something that is not a matrix.
    Example: MuonAdamW([{"params": matrices, "kind": "muon", "lr": 0.02}, {"params": rest, "lr": 3e-4}])
    """

    needs_whole_parameters = True

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        super().__init__(params, {})

    @staticmethod
    def whole_cost(shape: Sequence[int]) -> int:
        """Returns what an update costs, for balancing: Newton-Schulz multiplies a matrix by its Gram matrix."""
        return math.prod(shape) * min(shape, default=1)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; see the class."""
        kind = param_group.setdefault("kind", "adamw")
        if kind not in _KINDS:
            raise ValueError(f"MuonAdamW: a group's kind is {kind!r}; choose one of {', '.join(_KINDS)}")
        params = param_group["params"]
        param_group["params"] = params = [params] if isinstance(params, Tensor) else list(params)
        cls, defaults = _KINDS[kind], _KINDS[kind]([torch.zeros(1, 1)]).defaults
        options = {k: v for k, v in param_group.items() if k not in ("params", *_OURS)}
        unknown = sorted(options.keys() - defaults.keys())
        if unknown:
            raise ValueError(f"MuonAdamW: {', '.join(unknown)} is not an option of {cls.__name__}")
        # The class itself looks at values and shapes.
        cls(params or [torch.zeros(1, 1)], **{k: v for k, v in options.items() if k != "decoupled_weight_decay"})
        for name, value in defaults.items():
            param_group.setdefault(name, value)
        param_group["needs_whole_parameters"] = kind == "muon"
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one update of every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, cls in _KINDS.items():
            groups = [group for group in self.param_groups if group["kind"] == kind]
            if groups:
                # One that works on our groups and state; made anew, since loading a state replaces both.
                inner = cls([torch.zeros(1, 1)])
                inner.param_groups, inner.state = groups, self.state
                inner.step()
        return loss
