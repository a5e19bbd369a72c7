"""What `p.grad` is where gradients are sharded: metadata as always, and the full gradient as soon as it is used.

[Note: sharded gradients] When the gradients of a window are final, each parameter's `grad` is a stand-in. Code that
uses it on all ranks (a hook that logs norms, `clip_grad_norm_`, `p.grad.mul_(...)`) gets the full mean gradient, which
is gathered then and stays as `p.grad` until the step. Whatever was done to it, in place, by a view or by replacing it,
is taken into this rank's shard before norm, clipping and step. Setting `p.grad = None` drops the gradient.
"""

from collections.abc import Callable
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from shardlight.strategies.engine.released import needs_no_values
from shardlight.strategies.errors import GradientError
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class GradientSource(Protocol):
    """Gathers the gradient of a parameter."""

    def materialise(self, parameter: nn.Parameter) -> Tensor:
        """Returns the full gradient, which is `parameter.grad` from then on. Collective."""


class ShardedGradient(Tensor):
    """The stand-in of [Note: sharded gradients]."""

    # Weak, as `p.grad` is another thing that the collector does not see: [Note: weak hooks], `gradients.py`.
    _source: ReferenceType[GradientSource]
    _parameter: ReferenceType[nn.Parameter]

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answers what needs no values, and uses the full gradient for everything else."""
        kwargs = kwargs or {}
        if needs_no_values(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(ShardedGradient, cls._full, (args, kwargs))
        return func(*args, **kwargs)

    def _full(self) -> Tensor:
        source, parameter = self._source(), self._parameter()
        if source is None or parameter is None:
            raise GradientError("a sharded gradient was used after its model and Trainer are gone: use it before.")
        return source.materialise(parameter)

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Gradient(sharded, shape={tuple(self.shape)}, dtype={self.dtype})"


def stand_in(parameter: nn.Parameter, source: GradientSource, dtype: torch.dtype) -> ShardedGradient:
    """Makes the stand-in for the gradient of `parameter`, a NaN of its shape and device; gradients are of `dtype`."""
    nan = torch.full((), float("nan"), dtype=dtype, device=parameter.device)
    made = torch.Tensor._make_subclass(ShardedGradient, nan.expand(parameter.shape))
    made._source = ref(source)
    made._parameter = ref(parameter)
    return made
