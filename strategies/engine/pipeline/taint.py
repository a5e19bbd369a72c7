"""Tensors with a shape and no values: what a stage has of what only another stage computes.

[Note: taint] A parameter that is on another stage, and the output of a block that runs there, are `Tainted` here: the
user's own code runs on them unchanged, and whatever it makes of them is tainted as well. Shapes come from running each
operation on meta tensors. So nothing wrong is ever computed in silence: where values are asked for, or where a tainted
tensor would get into what is computed, an error names where it comes from.

[Note: resolved] The hidden state that a stage receives belongs into a tensor that the user's code already holds. So
that tensor gets a `value`, and every function that is given the tensor from then on gets the value: `x + block(x)` is
computed with what was received, and so is a repetition of it in backward, where the graph holds the same tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from shardlight.strategies.errors import PipelineError
from torch import Tensor
from torch.utils.hooks import RemovableHandle

aten = torch.ops.aten


@dataclass(frozen=True)
class Source:
    """Where taint comes from."""

    text: str
    """Such as "'tok.weight', which is on stage 0"."""
    module: str | None = None
    """What `strategy.everywhere` would have to name so that every stage has it; None: that is no mend."""

    def __str__(self) -> str:
        return self.text

    @property
    def mend(self) -> str:
        """What to do about it."""
        if self.module is not None:
            return f"Keep it on all stages: strategy.everywhere: [{self.module}]."
        return (
            "From stage to stage only the hidden state is handed on: use what a block returns in the blocks behind it "
            "alone, or fewer stages."
        )


class Tainted(Tensor):
    """A tensor with shape, dtype, device and source, but without values or memory; see [Note: taint]."""

    meta: Tensor
    source: Source
    value: Tensor | None
    """See [Note: resolved]."""
    run: Any
    """The run of a stage in which it was made; None: it outlives them."""

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, source: Source, run: Any = None) -> "Tainted":
        """Makes one of the shape, strides and dtype of `meta`."""
        tensor = Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        tensor.meta, tensor.source, tensor.value, tensor.run = meta, source, None, run
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs a function: on values where all its tensors have some, and otherwise without."""
        kwargs = kwargs or {}
        name = func.__name__
        found = _find(args, kwargs)
        if any(t.value is not None for t in found):
            if _writes(name) and type(args[0]) is Tainted and args[0].value is not None:
                args[0].value = args[0].value.clone()  # what was received stays, for a repetition in backward
            args, kwargs = _with_values(args), _with_values(kwargs)
            found = [t for t in found if t.value is None]
        if not found:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if name in _OF_VALUES:
                raise unreadable(found[0].source, name)
            if name in _SPECIAL:
                return _SPECIAL[name](func, args, kwargs)
            if name in ("__get__", "__set__"):
                return _attribute(func, name, args)
            if name in _FACTORIES and not _learning:
                return _new(func, args, kwargs)
            # The result is a constant for autograd, also where a real parameter takes part.
            with torch.no_grad():
                return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs an operation on meta tensors."""
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"Tainted(shape={tuple(self.shape)}, dtype={self.dtype}, source={self.source})"

    def __format__(self, spec: str) -> str:
        if self.value is not None:
            return format(self.value, spec)
        if spec and not self.dim():
            raise unreadable(self.source, "format")
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tainted":
        """A copy has the same source."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = Tainted(self.meta, self.device, self.source)
        return memo[id(self)]


def tainted(shape: Any, dtype: torch.dtype, device: torch.device, source: Source) -> Tainted:
    """Returns a contiguous tainted tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tainted(torch.empty(shape, dtype=dtype, device="meta"), device, source)


def is_tainted(value: Any) -> bool:
    """Whether it is a tensor without values."""
    return type(value) is Tainted and value.value is None


def unreadable(source: Source, name: str) -> PipelineError:
    """Returns the error for a use of values that are not there."""
    return PipelineError(f"'{name.strip('_')}' asks for the values of what was computed from {source}. {source.mend}")


@dataclass
class _Learning:
    """A run of a foreign block for what its output looks like, see `learning`."""

    source: Source


_learning: _Learning | None = None
_run: Any = None
"""The run of a stage that is going on."""


@contextmanager
def running(run: Any) -> Iterator[None]:
    """Tensors that are made inside note that they belong to `run`."""
    global _run
    before, _run = _run, run
    try:
        yield
    finally:
        _run = before


@contextmanager
def learning(source: Source) -> Iterator[None]:
    """Code inside runs without values to the end: where it asks for some, they are zeros.

    Whatever it makes is from `source`, and no random numbers are drawn.
    """
    global _learning
    before, _learning = _learning, _Learning(source)
    try:
        yield
    finally:
        _learning = before


def _find(*trees: Any) -> list[Tainted]:
    found: list[Tainted] = []
    for tree in trees:
        for item in tree.values() if type(tree) is dict else tree:
            kind = type(item)
            if kind is Tainted:
                found.append(item)
            elif kind is list or kind is tuple or kind is dict:
                found += _find(item)
    return found


def _with_values(tree: Any) -> Any:
    if type(tree) is Tainted:
        return tree if tree.value is None else tree.value
    if type(tree) is list or type(tree) is tuple:
        return type(tree)([_with_values(x) for x in tree])
    if type(tree) is dict:
        return {k: _with_values(v) for k, v in tree.items()}
    return tree


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


_OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
_IN_PLACE = frozenset(f"__i{n}__" for n in _OPERATORS)
_OF_VALUES = frozenset(
    [
        "tolist",
        "numpy",
        "__array__",
        "__dlpack__",
        "data_ptr",
        "untyped_storage",
        "storage",
        "backward",
        "share_memory_",
    ]
)
_FACTORIES = frozenset(
    [
        *["empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"],
        *["new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"],
    ]
)

_NAMES = {aten._local_scalar_dense.default: "item"}


def _register_hook(func: Any, args: tuple, kwargs: dict) -> RemovableHandle:
    return RemovableHandle({})  # no gradient will ever come


_SPECIAL: dict[str, Callable[[Any, tuple, dict], Any]] = {
    "requires_grad_": lambda func, args, kwargs: args[0],
    "retain_grad": lambda func, args, kwargs: None,
    "register_hook": _register_hook,
}


def _attribute(func: Any, name: str, args: tuple) -> Any:
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__":
        return args[0].detach() if attribute == "data" else func(*args)
    if attribute == "data" and type(args[0]) is not Tainted:
        raise _overwritten(args[1], args[0])
    if attribute not in ("requires_grad", "grad"):
        func(*args)
    return None


def _new(func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Runs a function that needs no values of its tensor (`zeros_like`, `new_ones`): the result is real."""
    first, rest = args[0], args[1:]
    if func.__name__ == "new_tensor":
        return func(torch.empty(0, dtype=first.dtype, device=first.device), *rest, **kwargs)
    one = torch.empty((), dtype=first.dtype, device=first.device)
    return func(one.expand(first.shape) if func.__name__.endswith("_like") else one, *rest, **kwargs).contiguous()


def _overwritten(source: Tainted, target: Tensor) -> PipelineError:
    return PipelineError(
        f"a tensor of shape {tuple(target.shape)} is overwritten by what was computed from {source.source}, which has "
        f"no values here. {source.source.mend}"
    )


def _dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    found = _find(args, kwargs)
    by_meta = {id(t.meta): t for t in found}
    first = next((t for t in found if t.dim()), found[0])
    for tensor in found:
        if tensor.value is not None:
            raise PipelineError(
                "a function of one's own (torch.autograd.Function, a reentrant checkpoint) outside the blocks is given "
                f"the hidden state that this stage receives: {func}. Move it into the block, or compute it before the "
                "blocks. Checkpoint with use_reentrant=False."
            )
    if func._schema.is_mutable:
        _refuse_writes(func, args, kwargs, first)
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        if func is aten.index.Tensor:
            args = (args[0], [i for index in args[1] for i in _positions(index, first)], *args[2:])
        elif _learning is None:
            raise unreadable(first.source, _NAMES.get(func, func._schema.name.removeprefix("aten::")))
        else:
            return _wrap(func(*_zeros(args), **_zeros(kwargs)), first, first.device, {})
    if torch.Tag.nondeterministic_seeded in func.tags and _learning is None:
        # Random numbers are drawn as elsewhere, for the generator's sake: every stage draws the same ones behind it.
        func(*_zeros(args), **_zeros(kwargs))
    device = _device(func, args, kwargs, first)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "meta"}
        kwargs.pop("pin_memory", None)
    try:
        out = func(*_metas(args), **_metas(kwargs))
    except NotImplementedError as error:
        raise PipelineError(
            f"{func} cannot run without values, and it is given what was computed from {first.source}. "
            f"{first.source.mend}"
        ) from error
    return _wrap(out, first, device, by_meta)


def _refuse_writes(func: Any, args: tuple, kwargs: dict, first: Tainted) -> None:
    if torch.Tag.inplace_view in func.tags:
        raise PipelineError(f"{func} changes the shape in place of what was computed from {first.source}.")
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[position] if position < len(args) else kwargs.get(argument.name)
        for target in written if isinstance(written, list | tuple) else [written]:
            if isinstance(target, Tensor) and type(target) is not Tainted:
                raise _overwritten(first, target)


def _positions(index: Tensor | None, first: Tainted) -> tuple[Tensor | None, ...]:
    """Returns a mask among the indices as positions, whose number is then known."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return (index,)
    if type(index) is not Tainted:
        return torch.where(index)
    if _learning is None:
        raise unreadable(index.source, "a mask as index")
    empty = torch.empty(0, dtype=torch.int64, device="meta")
    return tuple(Tainted(empty, index.device, _learning.source) for _ in range(index.dim()))


def _device(func: Any, args: tuple, kwargs: dict, first: Tainted) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    if first.dim():
        return first.device
    # A number of another device goes with the others.
    others = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim())
    return next((t.device for t in others), first.device)


def _metas(tree: Any) -> Any:
    kind = type(tree)
    if kind is Tainted:
        return tree.meta
    if kind is list or kind is tuple:
        return kind([_metas(x) for x in tree])
    if kind is dict:
        return {k: _metas(v) for k, v in tree.items()}
    if isinstance(tree, Tensor) and tree.layout == torch.strided:
        return torch.empty_strided(tree.size(), tree.stride(), dtype=tree.dtype, device="meta")
    return tree


def _zeros(tree: Any) -> Any:
    if type(tree) is Tainted:
        return torch.zeros(tree.shape, dtype=tree.dtype, device=tree.device)
    if type(tree) is list or type(tree) is tuple:
        return type(tree)([_zeros(x) for x in tree])
    return {k: _zeros(v) for k, v in tree.items()} if type(tree) is dict else tree


def _wrap(out: Any, first: Tainted, device: torch.device, by_meta: dict[int, Tainted]) -> Any:
    if isinstance(out, Tensor):
        known = by_meta.get(id(out))
        if known is not None:
            return known
        meta = out if out.is_meta else torch.empty_like(out, device="meta")
        return Tainted(meta, device, first.source if _learning is None else _learning.source, _run or first.run)
    if isinstance(out, list | tuple):
        return type(out)([_wrap(x, first, device, by_meta) for x in out])
    return out
