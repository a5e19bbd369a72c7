"""The class of a parameter that holds a 16-bit copy of its master weights, under mixed precision.

[Note: copies] Autocast casts fp32 weights for matrix multiplications alone: a penalty on weights, a norm in a hook or
a write sees fp32. So does everyone here: an operation that autocast would cast runs on the 16-bit copy; any other use
brings the master weights of its unit first, and the parameter holds these until its unit is released or the next step
begins. What was written to them then is taken into the masters.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from shardlight.strategies.engine.released import Owner, answer, marked_in, needs_no_values
from torch import Tensor, nn
from torch.nn import functional as F

CAST_BY_AUTOCAST: frozenset[Callable] = frozenset(
    [
        F.linear,
        F.multi_head_attention_forward,
        *(getattr(torch, f"conv{t}{n}d") for t in ("", "_transpose") for n in (1, 2, 3)),
        *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addbmm", "addmv")),
        *(getattr(Tensor, name) for name in ("matmul", "mm", "bmm", "mv", "__matmul__", "__rmatmul__")),
    ]
)
"""Of the functions that take weights, those for which torch.autocast casts their arguments on every device."""


class CopiedParameter(nn.Parameter):
    """Mixin that is put before a parameter's own class while it holds a copy; see [Note: copies]."""

    _shardlight_owner: Owner
    _shardlight_dtype: torch.dtype

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Lets operations that autocast casts use the copy, and brings the master weights for all others."""
        kwargs = kwargs or {}
        if needs_no_values(func):
            return answer(func, args, kwargs)
        copies = marked_in(args, kwargs, CopiedParameter)
        if func in CAST_BY_AUTOCAST and copies and _casts_to(copies[0]):
            return super().__torch_function__(func, types, args, kwargs)
        for parameter in copies:
            parameter._shardlight_owner.on_copy_use(parameter)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        self._shardlight_owner.on_copy_use(self)
        return copy.deepcopy(self, memo)


def _casts_to(parameter: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        kind, dtype = parameter.device.type, parameter.dtype
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == dtype
