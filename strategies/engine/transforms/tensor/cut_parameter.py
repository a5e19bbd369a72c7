"""The class of a parameter of which this rank has a part.

[Note: cut parameters] Layers use their parameters' parts. Wherever else a user's code computes with such a parameter (a
head that is `F.linear(x, embedding.weight)`, a penalty on weights), a part in the place of the whole would give a wrong
number in silence. So there it is a `Sharded` tensor of its logical shape. What only looks at a parameter, or runs
without gradients outside of forwards, sees this rank's part: the engine, optimizers, whoever writes to it.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from shardlight.strategies.engine.copied import CopiedParameter
from shardlight.strategies.engine.deferred.tensors import give_own_class
from shardlight.strategies.engine.released import needs_no_values
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup
from shardlight.strategies.engine.transforms.tensor.sharded import (
    TABLE,
    ParameterPart,
    in_layer,
    named,
    whole_parameters,
    writes,
)
from shardlight.strategies.engine.transforms.tensor.split import Split
from torch import Tensor, nn
from torch.nn import functional as F

_PRODUCTS = frozenset([F.linear, F.embedding, torch.einsum, *named("matmul mm bmm mv __matmul__ __rmatmul__ addmm")])
"""Uses of a whole parameter, with gradients or without."""
_PART = frozenset(
    [*named("detach detach_ clone view_as cpu cuda to __deepcopy__ __reduce_ex__ __repr__"), Tensor.data.__get__]
)
"""What gives this rank's part, also with gradients."""


_forwards = 0
"""How many forwards of models are running."""


@contextmanager
def forward_running() -> Iterator[None]:
    """Notes that the forward of a model with cut parameters runs."""
    global _forwards
    _forwards += 1
    try:
        yield
    finally:
        _forwards -= 1


_PLAIN = (Tensor, nn.Parameter)


class CutParameter(ParameterPart):
    """See [Note: cut parameters]."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs a function on the whole parameter, or on this rank's part."""
        kwargs = kwargs or {}
        if func in TABLE and _of_whole(func) and not in_layer():
            args, kwargs = whole_parameters((args, kwargs))
            return func(*args, **kwargs)
        if any(not issubclass(t, CutParameter | CopiedParameter) and t not in _PLAIN for t in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        if id(self) not in memo:
            result = type(self)(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
            result.__dict__.update(copy.copy(self.__dict__))
            memo[id(self)] = result
        return memo[id(self)]


def _of_whole(func: Callable) -> bool:
    if func in _PRODUCTS:
        return True
    return (_forwards > 0 or torch.is_grad_enabled()) and not (func in _PART or needs_no_values(func) or writes(func))


def mark_cut(parameter: nn.Parameter, dim: int, split: Split, group: TensorGroup) -> None:
    """Gives a plain parameter, whose data is this rank's part, the class for it; others are left as they are."""
    own = getattr(type(parameter), "_shardlight_own_class", type(parameter))
    if own is not nn.Parameter:
        return
    parameter._shardlight_cut = (dim, split, group)  # type: ignore[attr-defined]
    give_own_class(parameter, CutParameter)
