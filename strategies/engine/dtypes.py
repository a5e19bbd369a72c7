"""In which dtype each parameter is kept, computed with, and its gradient summed.

[Note: master weights] Under 16-bit precision the authoritative weights are fp32 (the *home* of a buffer, on which the
optimizer works); a model computes with a 16-bit copy that is made when a unit is gathered. Under `bf16-true` every
parameter is such a copy. Under mixed precision only those that autocast would cast in any case are: the weights and
biases of PyTorch's own matrix-multiplying modules. What a model computes is then to the bit what autocast computes, and
embeddings and norms stay in fp32.

Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.1 (arXiv 1710.03740).
"""

from dataclasses import dataclass, replace

import torch
from shardlight.strategies.engine.plan import StatePlan
from shardlight.strategies.errors import StrategyError
from torch import nn

_CAST_BY_AUTOCAST: dict[type[nn.Module], tuple[str, ...]] = {
    kind: ("weight", "bias")
    for kind in (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
    )
}


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """What the precision asks of the engine.

    Attributes:
        compute: dtype of the 16-bit copies; None: every parameter is computed with as it is.
        mixed: only weights that autocast casts have such a copy, and outside of steps `gathered` shows fp32.
        reduce: dtype in which gradients are sent between ranks; None: the one they come in. Sums are fp32.
        guarded: see BufferDtypes.
        keep_fp32: parts of parameter names (split at dots) that stay fp32 under mixed precision.
    """

    compute: torch.dtype | None = None
    mixed: bool = False
    reduce: torch.dtype | None = None
    guarded: bool = True
    keep_fp32: tuple[str, ...] = ()

    def under(self, plan: StatePlan) -> "DtypePolicy":
        """Returns what of it a row of the ZeRO table makes use of."""
        if self.mixed and not plan.shard_optimizer:
            # fp32 weights are there anyway, and autocast makes its copies as it goes.
            return replace(self, compute=None)
        return self

    def compute_dtypes(self, model: nn.Module) -> dict[nn.Parameter, torch.dtype]:
        """Returns the dtype of the 16-bit copy of each parameter that has one.

        Raises: StrategyError: a name of `keep_fp32` is in no parameter's name.
        """
        if self.compute is None:
            return {}
        floating = [p for p in model.parameters() if p.is_floating_point()]
        if not self.mixed:
            return dict.fromkeys(floating, self.compute)
        paths = [f".{name}." for name, _ in model.named_parameters()]
        unknown = [part for part in self.keep_fp32 if not any(f".{part}." in path for path in paths)]
        if unknown:
            raise StrategyError(
                f"strategy.keep_fp32: no parameter is below a module called {', '.join(unknown)}. Use names as in "
                "`module.named_parameters()`, or parts of them between dots."
            )
        cast: set[nn.Parameter] = set()
        other: set[nn.Parameter] = set()
        for prefix, module in model.named_modules():
            names = next((n for k, n in _CAST_BY_AUTOCAST.items() if type(module).forward is k.forward), ())
            for name, parameter in module.named_parameters(recurse=False):
                kept = any(f".{part}." in f".{prefix}.{name}." for part in self.keep_fp32)
                # A tied weight is cast only if all of its users would cast it.
                (cast if name in names and parameter.dtype == torch.float32 and not kept else other).add(parameter)
        return {p: self.compute for p in floating if p in cast and p not in other}


AS_THEY_ARE = DtypePolicy()
"""Parameters are kept, computed with and reduced in their own dtype."""


def master_dtype(own: torch.dtype, compute: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the authoritative weights of a parameter: at least fp32 where it has a 16-bit copy."""
    return own if compute is None else torch.promote_types(own, torch.float32)
