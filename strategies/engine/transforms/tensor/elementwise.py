"""Operations that treat each element alike, on tensors that are divided; and what needs no values at all."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup, part_of, shared
from shardlight.strategies.engine.transforms.tensor.random_parts import own_numbers
from shardlight.strategies.engine.transforms.tensor.sharded import (
    Sharded,
    full,
    like,
    local_of,
    named,
    on_parts,
    sharded,
    writes,
)
from shardlight.strategies.engine.transforms.tensor.split import Split
from shardlight.strategies.errors import StrategyError
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_unseen = torch._C.DisableTorchFunctionSubclass

_POINTWISE = named(
    """abs absolute add addcdiv addcmul acos acosh arccos arcsin arctan asin asinh atan atan2 atanh bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip clone conj copysign cos cosh
    deg2rad div divide elu eq erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod
    frac ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isclose
    isfinite isinf isnan le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp logical_and
    logical_not logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish mul multiply
    nan_to_num ne neg negative not_equal positive pow reciprocal relu relu6 remainder round rsqrt rsub
    selu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh
    tanhshrink threshold true_divide trunc where xlogy log_sigmoid
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __or__ __xor__
    __rand__ __ror__ __rxor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    add_ sub_ mul_ div_ pow_ addcmul_ addcdiv_ clamp_ clamp_min_ clamp_max_ exp_ neg_ relu_ sigmoid_ tanh_ silu_
    sqrt_ rsqrt_ masked_fill_ copy_ lerp_ abs_ leaky_relu_ elu_ hardtanh_ threshold_ __iadd__ __isub__ __imul__
    __itruediv__ __ipow__"""
)
_RANDOM = named(
    """dropout dropout_ alpha_dropout bernoulli bernoulli_ rrelu uniform_ normal_ rand_like randn_like random_
    exponential_"""
)
_ALIKE = named(
    """to type float double half bfloat16 bool int long short char byte cfloat cdouble contiguous detach detach_
    clone zeros_like ones_like empty_like full_like zero_ fill_ cpu cuda real imag alias"""
)
_METADATA = named(
    """size dim ndimension numel nelement element_size is_floating_point is_complex is_signed get_device stride
    storage_offset is_contiguous __len__ __hash__ is_same_size has_names"""
)
_ATTRIBUTES = """shape dtype device layout requires_grad is_leaf grad_fn ndim is_cuda is_cpu is_mps is_meta is_sparse
is_quantized is_nested itemsize nbytes names retains_grad output_nr _version is_xpu is_mkldnn"""
_METADATA += [getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split() if hasattr(Tensor, name)]


@on_parts(*_METADATA)
def _metadata(func: Callable, args: tuple, kwargs: dict) -> Any:
    with _unseen():
        return func(*args, **kwargs)


@on_parts(*named("new_zeros new_ones new_empty new_full new_tensor"))
def _new(func: Callable, args: tuple, kwargs: dict) -> Any:
    return func(args[0].local.detach(), *args[1:], **kwargs)


@on_parts(*named("type_as"))
def _cast_as(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, other = args
    other = other.local if type(other) is Sharded else other
    return like(func(local_of(x), other), x) if type(x) is Sharded else func(x, other)


@on_parts(*_ALIKE)
def _alike(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What gives a tensor of the same shape from one."""
    x = args[0]
    if type(x) is not Sharded:  # such as plain.to(sharded)
        return func(*tree_map_only(Sharded, lambda t: t.local, args), **kwargs)
    kwargs.pop("memory_format", None)
    rest = tree_map_only(Sharded, lambda t: t.local, args[1:])
    local = local_of(x)
    result = func(local, *rest, **kwargs)
    if result is local:
        x.stale = x.stale or writes(func)
        return x
    return like(result, x) if isinstance(result, Tensor) else result


@on_parts(*_POINTWISE)
def _pointwise(func: Callable, args: tuple, kwargs: dict) -> Any:
    return pointwise(func, args, kwargs)


@on_parts(*_RANDOM)
def _random(func: Callable, args: tuple, kwargs: dict) -> Any:
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    off = func.__name__.endswith("dropout") and not (given.get("training", True) and given.get("p", 0.5))
    return pointwise(func, args, kwargs, draws=not off)


def pointwise(func: Callable, args: tuple, kwargs: dict, draws: bool = False) -> Any:
    """Runs an operation on parts of operands that are broadcast against each other.

    Args:
        draws: it uses random numbers; see [Note: dropout].
    """
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    parts = [t for t in tensors if type(t) is Sharded]
    place = common_place(parts)
    if place is None or "out" in kwargs:
        return NotImplemented
    behind, split = place
    for tensor in tensors:
        if type(tensor) is not Sharded and not fits(tensor, behind, split):
            return NotImplemented
    target = args[0] if writes(func) or kwargs.get("inplace") else None
    if target is not None and (type(target) is not Sharded or not target.division.same(split)):
        return NotImplemented

    def local(t: Tensor) -> Tensor:
        return operand(t, behind, split, parts[0].group)

    new_args = [local(t) if isinstance(t, Tensor) else t for t in args]
    new_kwargs = {k: local(t) if isinstance(t, Tensor) else t for k, t in kwargs.items()}
    with own_numbers(parts[0].group.rank, new_args[0].device) if draws else nullcontext():
        result = func(*new_args, **new_kwargs)
    if target is not None:
        target.local, target.stale = result, True
        return target
    return sharded(result, result.dim() + behind, split, parts[0].group)


def common_place(parts: list[Sharded]) -> tuple[int, Split] | None:
    """Returns which dimension, counted from the last one, all are divided along, and what every rank has of all.

    A single entry that all ranks have (the one head of keys) is broadcast against the others.
    """
    places = {other.axis - len(other.whole_shape) for other in parts}
    if len(places) != 1:
        return None
    split = parts[0].division
    for other in parts[1:]:
        if split.size == 1:
            split = other.division
        elif other.division.size != 1 and not other.division.same(split):
            inner = narrower(split, other.division)
            if inner is None:
                return None
            split = inner
    if any(other.division.size == 1 != split.size and other.division.once for other in parts):
        return None
    return places.pop(), split


def narrower(a: Split, b: Split) -> Split | None:
    """Returns the one that on each rank is a part of the other; None: neither is."""
    if a.size != b.size:
        return None
    for inner, outer in ((a, b), (b, a)):
        if all(
            all(any(low >= c and high <= d for c, d in theirs) for low, high in own)
            for own, theirs in zip(inner.ranges, outer.ranges, strict=True)
        ):
            return inner
    return None


def fits(tensor: Tensor, behind: int, split: Split) -> bool:
    """Whether a whole tensor can be broadcast against what is divided."""
    return tensor.dim() < -behind or tensor.shape[behind] in (1, split.size)


def operand(tensor: Tensor, behind: int, split: Split, group: TensorGroup) -> Tensor:
    """Returns this rank's part of an operand; of a whole one that is the same everywhere, all of it."""
    if type(tensor) is Sharded and tensor.division.size == 1 != split.size:
        return local_of(tensor)
    if type(tensor) is Sharded:
        return narrowed(local_of(tensor), tensor.axis, tensor.division, split, group.rank)
    if tensor.dim() < -behind or tensor.shape[behind] != split.size or split.size == 1:
        return shared(seen(tensor), group)
    return part_of(seen(tensor), tensor.dim() + behind, split, group)


def narrowed(local: Tensor, axis: int, split: Split, inner: Split, rank: int) -> Tensor:
    """Returns the part that `inner` gives a rank, of what `split` gives it."""
    if split.same(inner):
        return local
    places = [split.within(rank, a, b) for a, b in inner.ranges[rank]]
    parts = [local.narrow(axis, first, count) for first, count in places]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, axis) if parts else local.narrow(axis, 0, 0)


def seen(tensor: Tensor) -> Tensor:
    """Lets the engine see that a parameter is used: released ones are gathered, 16-bit copies give way to masters."""
    if isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter:
        return tensor.view_as(tensor)
    return tensor


@on_parts(Tensor.requires_grad_, Tensor.requires_grad.__set__)
def _requires_grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    func(x.local, *args[1:], **kwargs)
    with _unseen():
        func(x, *args[1:], **kwargs)
    return x


@on_parts(Tensor.grad.__get__)
def _grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    gradient = args[0].local.grad
    return None if gradient is None else like(gradient, args[0])


@on_parts(Tensor.retain_grad)
def _retain_grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    args[0].local.retain_grad()


@on_parts(Tensor.register_hook)
def _register_hook(func: Callable, args: tuple, kwargs: dict) -> Any:
    x, hook = args

    def on_part(gradient: Tensor) -> Any:
        changed = hook(Sharded(gradient, x.axis, x.division, x.group))
        return changed.local if type(changed) is Sharded else changed

    return local_of(x).register_hook(on_part)


@on_parts(torch.autograd.backward, Tensor.backward)
def _backward(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Starts a backward at tensors that are divided, as a reentrant recomputation does."""
    given = dict(zip(("tensors", "gradients"), args, strict=False))
    gradients = given.get("gradients", kwargs.pop("grad_tensors", kwargs.pop("gradient", None)))
    tensors = [given["tensors"]] if isinstance(given["tensors"], Tensor) else list(given["tensors"])
    gradients = [gradients] if gradients is None or isinstance(gradients, Tensor) else list(gradients)
    pairs = [
        _start(t, g) for t, g in zip(tensors, gradients * (1 if len(gradients) > 1 else len(tensors)), strict=True)
    ]
    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs], **kwargs)


def _start(tensor: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if type(tensor) is not Sharded:
        return tensor, full(gradient) if type(gradient) is Sharded else gradient
    if type(gradient) is Sharded and gradient.axis == tensor.axis and gradient.division.same(tensor.division):
        return local_of(tensor), gradient.local
    if gradient is None:
        raise StrategyError("backward of a tensor that the tensor strategy has sharded needs its gradient.")
    whole = full(gradient) if type(gradient) is Sharded else gradient
    return local_of(tensor), tensor.group.part(whole, tensor.axis, tensor.division)


@on_parts(Tensor.data.__get__)
def _data(func: Callable, args: tuple, kwargs: dict) -> Any:
    return like(args[0].local.data, args[0])
