"""The tensor that a user's code sees in the place of activations of which each rank has a part.

[Note: logical shapes] Between a column-parallel and a row-parallel layer each rank has some heads, or some of an MLP's
width; of logits, some of the vocabulary; with norms that are sharded along the sequence, some positions. The user's
code runs on tensors with the shape that it knows, so that numbers of heads, reshapes and scales need no change. Each
operation runs on this rank's part where that is the same function: `__torch_function__` looks it up in a table by the
dimension that is divided. Where it is not, the operands are gathered first, and the result is whole: slower, and right.

[Note: seen by autograd] The parts carry the graph of what is computed. So that nothing is lost where a tensor gets past
the table (a user's autograd.Function, a C++ extension), it is a node of the graph as well, behind which the part is;
and operations of the dispatcher gather it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from shardlight.strategies.engine.released import ReleasedParameter
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup, gathered, part_of
from shardlight.strategies.engine.transforms.tensor.split import Split
from shardlight.strategies.errors import StrategyError
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_map_only

Handler = Callable[[Callable, tuple, dict], Any]
"""(function, args, kwargs) -> result, or NotImplemented: the operands are to be gathered."""

TABLE: dict[Any, Handler] = {}
"""By torch function, what runs it on parts; see `on_parts`."""

_unseen = torch._C.DisableTorchFunctionSubclass
aten = torch.ops.aten


_layers = 0
"""How many forwards of layers that are cut are running."""


@contextmanager
def layer_running() -> Iterator[None]:
    """Lets parameters that are cut be this rank's parts; see [Note: cut parameters]."""
    global _layers
    _layers += 1
    try:
        yield
    finally:
        _layers -= 1


def in_layer() -> bool:
    """Whether a layer that is cut is running."""
    return _layers > 0


def as_held(parameter: Tensor) -> Tensor:
    """Returns a parameter's values, gathered, for a product of a layer: 16-bit copies as they are ([Note: copies])."""
    if isinstance(parameter, ReleasedParameter):
        parameter._shardlight_owner.on_use(parameter, "layer")
    with _unseen():
        return parameter.view_as(parameter)


class ParameterPart(nn.Parameter):
    """A parameter of which this rank has a part; see [Note: cut parameters]."""

    _shardlight_cut: "tuple[int, Split, TensorGroup]"


def whole_parameters(values: Any) -> Any:
    """Returns arguments with tensors of logical shape in the place of parameters of which this rank has a part."""

    def whole(parameter: ParameterPart) -> Tensor:
        return sharded(as_held(parameter), *parameter._shardlight_cut)

    return tree_map_only(ParameterPart, whole, values)


class Sharded(Tensor):
    """A tensor of which this rank has a part; see [Note: logical shapes]."""

    local: Tensor
    """This rank's part."""
    axis: int
    """The dimension that is divided."""
    division: Split
    group: TensorGroup
    whole_shape: torch.Size
    stale: bool
    """Whether it was changed in place since it was made, which its own node of the graph does not know."""

    @staticmethod
    def __new__(cls, local: Tensor, axis: int, split: Split, group: TensorGroup) -> "Sharded":
        """Makes one; `sharded` is what to call."""
        shape = list(local.shape)
        shape[axis] = split.size
        tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        tensor.local, tensor.axis, tensor.division, tensor.group, tensor.stale = local, axis, split, group, False
        tensor.whole_shape = torch.Size(shape)
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs a function on parts, or gathers."""
        kwargs = kwargs or {}
        if not _layers and len(types) > 1:
            args, kwargs = whole_parameters((args, kwargs))
        handler = TABLE.get(func)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Gathers, for what got past the table."""
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            x = args[0]
            return Sharded(x.local.detach(), x.axis, x.division, x.group)
        if func._schema.is_mutable:
            raise StrategyError(
                f"'{func}' writes to an activation that is sharded by the tensor strategy, out of its sight. Do it out "
                "of place, or leave the layers around it whole (strategy option plan: {NAME: whole})."
            )
        with torch.no_grad():
            return func(*tree_map_only(Sharded, full, args), **tree_map_only(Sharded, full, kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        # Not the values: asking for them on one rank would wait for the others.
        with _unseen():
            return f"Sharded(shape={tuple(self.whole_shape)}, dtype={self.dtype}, axis={self.axis})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict) -> "Sharded":
        if id(self) not in memo:
            memo[id(self)] = sharded(self.local.detach().clone(), self.axis, self.division, self.group)
        return memo[id(self)]


class _Shown(Function):
    """See [Note: seen by autograd]."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: int, split: Split, group: TensorGroup) -> Sharded:
        ctx.place = axis, split, group
        return Sharded(local, axis, split, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        axis, split, group = ctx.place
        if type(gradient) is Sharded and gradient.axis == axis and gradient.division.same(split):
            return gradient.local, None, None, None
        whole = full(gradient) if type(gradient) is Sharded else gradient
        return group.part(whole, axis, split).contiguous(), None, None, None


class _Hidden(Function):
    """The part of a tensor that came out of a user's autograd.Function."""

    @staticmethod
    def forward(ctx: Any, tensor: Sharded) -> Tensor:
        ctx.place = tensor.axis, tensor.division, tensor.group
        return tensor.local.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Sharded(gradient, *ctx.place)


def sharded(local: Tensor, axis: int, split: Split, group: TensorGroup) -> Sharded:
    """Returns the tensor of which this rank has `local`.

    Args:
        local: plain; its size along `axis` is this rank's.
        axis: not negative.
    """
    if torch.is_grad_enabled() and local.requires_grad:
        tensor = _Shown.apply(local, axis, split, group)
        tensor.local = local
        return tensor
    return Sharded(local, axis, split, group)


def like(local: Tensor, tensor: Sharded) -> Sharded:
    """Returns a tensor that is divided as another, given this rank's part."""
    return sharded(local, tensor.axis, tensor.division, tensor.group)


def local_of(tensor: Sharded) -> Tensor:
    """Returns this rank's part, with its graph."""
    with _unseen():
        node = tensor.grad_fn
    if node is None or type(node) is _Shown._backward_cls:
        return tensor.local
    return _Hidden.apply(tensor)


def full(tensor: Sharded) -> Tensor:
    """Returns the whole tensor. Collective."""
    return gathered(local_of(tensor), tensor.axis, tensor.division, tensor.group)


def on_parts(*functions: Any) -> Callable[[Handler], Handler]:
    """Puts a handler into the table for torch functions."""

    def put(handler: Handler) -> Handler:
        TABLE.update(dict.fromkeys(functions, handler))
        return handler

    return put


def named(names: str) -> list[Any]:
    """Returns the torch functions and methods of these names, between spaces; those that this version of torch has."""
    places = (torch, Tensor, torch.nn.functional, torch._C._nn, torch.special)
    found = [getattr(place, name) for name in names.split() for place in places if hasattr(place, name)]
    return list(dict.fromkeys(found))


def writes(func: Callable) -> bool:
    """Whether a function changes its first argument."""
    name = func.__name__
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__invert__", "__int__", "__index__", "__iter__")
        )
    return name.endswith("_")


def on_whole(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Runs a function on whole tensors; what it writes to is divided again. Collective."""
    found: list[Sharded] = []

    def whole(tensor: Sharded) -> Tensor:
        found.append(tensor)
        return full(tensor)

    first = args[0] if args else None
    new_args, new_kwargs = tree_map_only(Sharded, whole, args), tree_map_only(Sharded, whole, kwargs)
    group = found[0].group
    group.gathered[func.__name__] += 1
    if isinstance(kwargs.get("out"), Sharded):
        raise StrategyError(f"{func.__name__}(out=...): the tensor strategy has sharded what it would write to.")
    if not writes(func) or type(first) is not Sharded:
        return func(*new_args, **new_kwargs)
    target = new_args[0].clone()
    func(target, *new_args[1:], **new_kwargs)
    # The part is replaced, and not written to: it may be a view that others have.
    first.local = part_of(target, first.axis, first.division, group)
    first.stale = True
    return first
