"""Operations that change the shape of tensors that are divided, or take parts of them."""

import math
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import torch
from shardlight.strategies.engine.transforms.tensor.elementwise import common_place, fits, operand
from shardlight.strategies.engine.transforms.tensor.sharded import Sharded, like, local_of, named, on_parts, sharded
from shardlight.strategies.engine.transforms.tensor.split import Split, reshaped
from torch import Tensor


def _positive(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def _sizes(args: Sequence[Any]) -> list[int]:
    """Returns sizes that were given one by one or as one sequence."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple) else list(args)


def _reshape(x: Sharded, sizes: Sequence[int]) -> Any:
    shape, out = tuple(x.whole_shape), list(sizes)
    if -1 in out:
        rest = math.prod(n for n in out if n != -1)
        out[out.index(-1)] = math.prod(shape) // rest if rest else 0
    if math.prod(out) != math.prod(shape):
        return NotImplemented  # which says so
    found = reshaped(shape, x.axis, x.division, tuple(out))
    if found is None:
        return NotImplemented
    axis, split = found
    out[axis] = split.count(x.group.rank)
    return sharded(local_of(x).reshape(out), axis, split, x.group)


@on_parts(*named("view reshape"))
def _view(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, sizes = args[0], _sizes(args[1:] or tuple(kwargs.values()))
    if type(x) is not Sharded or not all(type(n) is int for n in sizes):
        return NotImplemented
    return _reshape(x, sizes)


@on_parts(*named("view_as reshape_as"))
def _view_as(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, other = args
    return _reshape(x, other.shape) if type(x) is Sharded else x.reshape(other.shape)


@on_parts(*named("flatten"))
def _flatten(func: Callable, args: tuple, kwargs: dict) -> Any:
    start, end = _arguments(args[1:], kwargs, start_dim=0, end_dim=-1)
    x = args[0]
    shape = list(x.whole_shape)
    start, end = _positive(start, len(shape)), _positive(end, len(shape))
    return _reshape(x, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


@on_parts(*named("unflatten"))
def _unflatten(func: Callable, args: tuple, kwargs: dict) -> Any:
    dim, sizes = _arguments(args[1:], kwargs, dim=None, sizes=None)
    x = args[0]
    shape, sizes = list(x.whole_shape), list(sizes)
    dim = _positive(dim, len(shape))
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return _reshape(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def _arguments(args: tuple, kwargs: dict, **defaults: Any) -> list[Any]:
    """Returns arguments by position or name, in order."""
    values = dict(zip(defaults, args, strict=False)) | {k: v for k, v in kwargs.items() if k in defaults}
    return [values.get(name, default) for name, default in defaults.items()]


@on_parts(*named("transpose swapaxes swapdims"))
def _transpose(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, (first, second) = args[0], _sizes(args[1:] or tuple(kwargs.values()))
    ndim = len(x.whole_shape)
    first, second = _positive(first, ndim), _positive(second, ndim)
    axis = {first: second, second: first}.get(x.axis, x.axis)
    return sharded(local_of(x).transpose(first, second), axis, x.division, x.group)


@on_parts(*named("t adjoint"), Tensor.T.__get__, Tensor.mT.__get__)
def _t(func: Callable, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    ndim = len(x.whole_shape)
    if ndim < 2 or (ndim > 2 and func == Tensor.T.__get__):
        return NotImplemented
    axis = {ndim - 1: ndim - 2, ndim - 2: ndim - 1}.get(x.axis, x.axis)
    return sharded(local_of(x).transpose(-1, -2), axis, x.division, x.group)


@on_parts(*named("permute"))
def _permute(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, dims = args[0], _sizes(args[1:] or tuple(kwargs.values()))
    dims = [_positive(d, len(dims)) for d in dims]
    return sharded(local_of(x).permute(dims), dims.index(x.axis), x.division, x.group)


@on_parts(*named("movedim moveaxis"))
def _movedim(func: Callable, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    source, destination = _arguments(args[1:], kwargs, source=None, destination=None)
    ndim = len(x.whole_shape)
    sources = [_positive(d, ndim) for d in (source if isinstance(source, list | tuple) else [source])]
    places = [_positive(d, ndim) for d in (destination if isinstance(destination, list | tuple) else [destination])]
    order = [d for d in range(ndim) if d not in sources]
    for place, dim in sorted(zip(places, sources, strict=True)):
        order.insert(place, dim)
    return sharded(local_of(x).permute(order), order.index(x.axis), x.division, x.group)


@on_parts(*named("unsqueeze"))
def _unsqueeze(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, (dim,) = args[0], _arguments(args[1:], kwargs, dim=None)
    dim = _positive(dim, len(x.whole_shape) + 1)
    return sharded(local_of(x).unsqueeze(dim), x.axis + (dim <= x.axis), x.division, x.group)


@on_parts(*named("squeeze"))
def _squeeze(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, ndim = args[0], len(args[0].whole_shape)
    (dim,) = _arguments(args[1:], kwargs, dim=None)
    dims = range(ndim) if dim is None else dim if isinstance(dim, list | tuple) else [dim]
    gone = sorted(d for d in (_positive(d, ndim) for d in dims) if x.whole_shape[d] == 1)
    if x.axis in gone:
        return NotImplemented
    local = local_of(x)
    for dim in reversed(gone):
        local = local.squeeze(dim)
    return sharded(local, x.axis - sum(d < x.axis for d in gone), x.division, x.group)


@on_parts(*named("expand expand_as broadcast_to"))
def _expand(func: Callable, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    given = args[1:] or tuple(kwargs.values())
    sizes = list(given[0].shape) if isinstance(given[0], Tensor) else _sizes(given)
    if type(x) is not Sharded:
        return x.expand(sizes)
    axis = x.axis + len(sizes) - len(x.whole_shape)
    if sizes[axis] not in (-1, x.division.size):
        return NotImplemented
    sizes[axis] = -1
    return sharded(local_of(x).expand(sizes), axis, x.division, x.group)


@on_parts(*named("repeat tile"))
def _repeat(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, times = args[0], _sizes(args[1:] or tuple(kwargs.values()))
    axis = x.axis + len(times) - len(x.whole_shape)
    if axis < 0 or len(times) < len(x.whole_shape):
        return NotImplemented
    split = Split.fused([x.division] * times[axis]) if times[axis] != 1 else x.division
    return sharded(local_of(x).repeat(times), axis, split, x.group)


@on_parts(*named("repeat_interleave"))
def _repeat_interleave(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, (times, dim) = args[0], _arguments(args[1:], kwargs, repeats=None, dim=None)
    if dim is None or not isinstance(times, int):
        return NotImplemented
    dim = _positive(dim, len(x.whole_shape))
    split = x.division.scaled(times) if dim == x.axis else x.division
    return sharded(local_of(x).repeat_interleave(times, dim), x.axis, split, x.group)


# --- parts


def _narrow(x: Sharded, dim: int, start: int, stop: int) -> Sharded:
    local = local_of(x)
    if dim != x.axis:
        return like(local.narrow(dim, start, stop - start), x)
    if (start, stop) == (0, x.division.size):
        return x
    first, count = x.division.within(x.group.rank, start, stop)
    return sharded(local.narrow(dim, first, count), dim, x.division.piece(start, stop), x.group)


@on_parts(*named("narrow"))
def _narrowed(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, (dim, start, length) = args[0], _arguments(args[1:], kwargs, dim=None, start=None, length=None)
    if not isinstance(start, int):
        return NotImplemented
    dim = _positive(dim, len(x.whole_shape))
    start = _positive(start, x.whole_shape[dim])
    return _narrow(x, dim, start, start + length)


@on_parts(*named("split split_with_sizes"))
def _split(func: Callable, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    kwargs = {
        ("sizes" if k in ("split_size_or_sections", "split_size", "split_sizes") else k): v for k, v in kwargs.items()
    }
    sizes, dim = _arguments(args[1:], kwargs, sizes=None, dim=0)
    dim = _positive(dim, len(x.whole_shape))
    total = x.whole_shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
    if sum(sizes) != total:
        return NotImplemented
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return tuple(_narrow(x, dim, end - size, end) for end, size in zip(ends, sizes, strict=True))


@on_parts(*named("chunk"))
def _chunk(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, (chunks, dim) = args[0], _arguments(args[1:], kwargs, chunks=None, dim=0)
    total = x.whole_shape[_positive(dim, len(x.whole_shape))]
    return _split(func, (x, max(1, -(-total // chunks)), dim), {})


@on_parts(*named("unbind __iter__"))
def _unbind(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, (dim,) = args[0], _arguments(args[1:], kwargs, dim=0)
    dim = _positive(dim, len(x.whole_shape))
    if dim == x.axis:
        return NotImplemented
    parts = tuple(sharded(p, x.axis - (dim < x.axis), x.division, x.group) for p in local_of(x).unbind(dim))
    return iter(parts) if func.__name__ == "__iter__" else parts


@on_parts(*named("select"))
def _select(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, (dim, index) = args[0], _arguments(args[1:], kwargs, dim=None, index=None)
    dim = _positive(dim, len(x.whole_shape))
    if dim == x.axis:
        return NotImplemented
    return sharded(local_of(x).select(dim, index), x.axis - (dim < x.axis), x.division, x.group)


@on_parts(*named("index_select"))
def _index_select(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, (dim, index) = args[0], _arguments(args[1:], kwargs, dim=None, index=None)
    dim = _positive(dim, len(x.whole_shape))
    if type(x) is not Sharded or dim == x.axis or type(index) is Sharded:
        return NotImplemented
    return like(local_of(x).index_select(dim, index), x)


@on_parts(Tensor.__getitem__)
def _getitem(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, index = args
    if type(x) is not Sharded:
        return NotImplemented
    items = list(index) if isinstance(index, tuple) else [index]
    allowed = (int, slice, EllipsisType, Tensor)
    if any(
        not (item is None or (type(item) is not Sharded and isinstance(item, allowed))) or isinstance(item, bool)
        for item in items
    ):
        return NotImplemented
    used = sum(
        1 if not isinstance(i, Tensor) or i.dtype != torch.bool else i.dim()
        for i in items
        if i is not None and i is not ...
    )
    rest = len(x.whole_shape) - used
    at = next((n for n, i in enumerate(items) if i is ...), None)
    if at is None:
        items += [slice(None)] * rest
    else:
        items[at : at + 1] = [slice(None)] * rest
    if any(isinstance(i, Tensor) for i in items):
        return _advanced(x, items)
    return _basic(x, items)


def _basic(x: Sharded, items: list[Any]) -> Any:
    """Indexes with numbers, slices and None, one for each dimension."""
    place, dim, out = None, 0, 0
    items = list(items)
    for number, item in enumerate(items):
        if item is None:
            out += 1
            continue
        if dim == x.axis:
            place = number, out
        dim, out = dim + 1, out + (not isinstance(item, int))
    assert place is not None
    number, axis = place
    item = items[number]
    if isinstance(item, int):
        return NotImplemented
    start, stop, step = item.indices(x.division.size)
    if step != 1:
        return NotImplemented
    part = _narrow(x, x.axis, start, max(start, stop))
    items[number] = slice(None)
    return sharded(local_of(part)[tuple(items)], axis, part.division, x.group)


def _advanced(x: Sharded, items: list[Any]) -> Any:
    """Indexes with tensors for the first dimensions, which are whole, and nothing else."""
    count = next((n for n, i in enumerate(items) if not isinstance(i, Tensor)), len(items))
    if any(not isinstance(i, slice) or i != slice(None) for i in items[count:]):
        return NotImplemented
    tensors = items[:count]
    if any(t.dtype == torch.bool for t in tensors):
        if count != 1:
            return NotImplemented
        used, made = tensors[0].dim(), 1
    else:
        used, made = count, max(t.dim() for t in tensors)
    if x.axis < used:
        return NotImplemented
    return sharded(local_of(x)[tuple(tensors)], x.axis - used + made, x.division, x.group)


# --- several


@on_parts(*named("cat concat concatenate"))
def _cat(func: Callable, args: tuple, kwargs: dict) -> Any:
    tensors, dim = _arguments(args, kwargs, tensors=None, dim=0)
    tensors = [t for t in tensors if t.dim() != 1 or t.shape[0]]  # torch.cat leaves these out, whatever the others are
    return _joined(torch.cat, tensors, dim, made=0)


@on_parts(*named("stack"))
def _stack(func: Callable, args: tuple, kwargs: dict) -> Any:
    tensors, dim = _arguments(args, kwargs, tensors=None, dim=0)
    return _joined(torch.stack, list(tensors), dim, made=1)


def _joined(func: Callable, tensors: list[Tensor], dim: int, made: int) -> Any:
    parts = [t for t in tensors if type(t) is Sharded]
    place = common_place(parts)
    ndim = len(parts[0].whole_shape)
    dim = _positive(dim, ndim + made)
    if place is None or (dim == parts[0].axis and not made) or any(t.dim() != ndim for t in tensors):
        return NotImplemented
    behind, split = place
    if not all(type(t) is Sharded or (fits(t, behind, split) and t.shape[behind] == split.size) for t in tensors):
        return NotImplemented
    local = func([operand(t, behind, split, parts[0].group) for t in tensors], dim)
    axis = parts[0].axis
    return sharded(local, axis + (made and dim <= axis), split, parts[0].group)


@on_parts(*named("view_as_complex view_as_real"))
def _complex(func: Callable, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    if func is torch.view_as_complex and x.axis == len(x.whole_shape) - 1:
        return NotImplemented
    return sharded(func(local_of(x)), x.axis, x.division, x.group)
