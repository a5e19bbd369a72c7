"""Operations along dimensions: softmax, means, norms, on tensors that are divided along another one."""

from collections.abc import Callable
from typing import Any

import torch
from shardlight.strategies.engine.transforms.tensor.elementwise import seen
from shardlight.strategies.engine.transforms.tensor.exchange import shared, summed
from shardlight.strategies.engine.transforms.tensor.sharded import Sharded, local_of, named, on_parts, sharded
from shardlight.strategies.engine.transforms.tensor.split import Split
from torch import Tensor

_DIM_AT = {
    1: """softmax log_softmax softmin sum mean var std amax amin max min argmax argmin logsumexp cumsum cumprod cummax
    cummin nansum nanmean std_mean var_mean all any prod median argsort sort count_nonzero flip logcumsumexp glu""",
    2: "norm topk kthvalue normalize",
}
"""By position of the argument that names the dimensions, the functions."""
_LAST = ("sort", "argsort", "topk", "kthvalue", "glu", "median")
"""Of these the dimension is the last one if none is given."""
_POSITION = {
    function: position for position, names in _DIM_AT.items() for name in names.split() for function in named(name)
}


@on_parts(*_POSITION)
def _along(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, name = args[0] if args else None, func.__name__
    if type(x) is not Sharded or "out" in kwargs or any(type(a) is Sharded for a in (*args[1:], *kwargs.values())):
        return NotImplemented
    position = _POSITION[func]
    dims = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else None))
    if dims is None and name in _LAST:
        dims = -1
    if name == "normalize" and dims is None:
        dims = 1
    ndim = len(x.whole_shape)
    if dims is None or dims == ():
        found = list(range(ndim))
    elif isinstance(dims, bool | Tensor | str):
        return NotImplemented
    else:
        found = [d % ndim for d in (dims if isinstance(dims, list | tuple) else [dims])]
    if x.axis in found:
        return _across(func, x, found, args, kwargs)
    result = func(local_of(x), *args[1:], **kwargs)
    return _wrapped(result, x, found)


def _wrapped(result: Any, x: Sharded, dims: list[int]) -> Any:
    """Returns results that are divided as `x`; where dimensions are gone, along the one that is left of it."""
    if isinstance(result, Tensor):
        gone = len(x.whole_shape) - result.dim()
        axis = x.axis - sum(d < x.axis for d in dims) if gone else x.axis
        return sharded(result, axis, x.division, x.group)
    parts = [_wrapped(r, x, dims) for r in result]
    return type(result)(parts) if hasattr(type(result), "n_fields") else tuple(parts)


def _across(func: Callable, x: Sharded, dims: list[int], args: tuple, kwargs: dict) -> Any:
    """Adds up over the dimension that is divided as well, or finds the highest entry along it alone."""
    name = func.__name__
    if name == "argmax" and dims == [x.axis] and x.division.once:
        given = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
        return _highest(x, keepdim=given.get("keepdim", False))
    if name not in ("sum", "mean") or not x.division.once:
        return NotImplemented
    options = dict(kwargs)
    for key, value in zip(("dim", "keepdim"), args[1:], strict=False):
        options[key] = value
    options.pop("axis", None)
    partial = local_of(x).sum(dims, keepdim=options.pop("keepdim", False), dtype=options.pop("dtype", None))
    options.pop("dim", None)
    if options:
        return NotImplemented
    total = summed(partial, x.group)
    if name == "sum":
        return total
    count = 1
    for dim in dims:
        count *= x.whole_shape[dim]
    return total / count


def _highest(x: Sharded, keepdim: bool) -> Tensor:
    """Returns where along the divided dimension the highest entry is, the first of equal ones; whole."""
    local, group = x.local.detach(), x.group
    shape = [n for dim, n in enumerate(x.whole_shape) if dim != x.axis]
    value, place = local.new_full(shape, -torch.inf), torch.full(shape, x.division.size, device=local.device)
    if local.shape[x.axis]:
        value, index = local.max(x.axis)
        place = torch.tensor(x.division.places(group.rank), device=local.device)[index]
    everyone = Split.even(group.size, group.size)
    values = group.gather(value[None].to(torch.float64), 0, everyone)
    places = group.gather(place[None], 0, everyone)
    found = places.masked_fill(values < values.amax(0), x.division.size).amin(0)
    return found.unsqueeze(x.axis) if keepdim else found


@on_parts(*named("layer_norm rms_norm"))
def _norm(func: Callable, args: tuple, kwargs: dict) -> Any:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    if func.__name__ == "rms_norm":
        names = ("input", "normalized_shape", "weight", "eps")
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    x, shape = given.pop("input"), given.pop("normalized_shape")
    if type(x) is not Sharded or x.axis >= len(x.whole_shape) - len(shape):
        return NotImplemented
    if any(type(v) is Sharded for v in given.values()):
        return NotImplemented
    rest = {k: shared(seen(v), x.group) if isinstance(v, Tensor) else v for k, v in given.items()}
    return sharded(func(local_of(x), shape, **rest), x.axis, x.division, x.group)
