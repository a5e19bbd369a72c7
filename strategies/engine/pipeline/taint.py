"""Tensors with a shape and no values: what a stage has of what only another stage computes.

[Note: taint] A parameter that is on another stage, and the output of a block that runs there, are `Tainted` here: the
user's own code runs on them unchanged, and whatever it makes of them is tainted as well. Shapes come from running each
operation on meta tensors. So nothing wrong is ever computed in silence: where values are asked for, or where a tainted
tensor would get into what is computed, an error names where it comes from.

[Note: resolved] The hidden state that a stage receives belongs into a tensor that the user's code already holds. So
that tensor gets a `value`, and every function that is given the tensor from then on gets the value: `x + block(x)` is
computed with what was received, and so is a repetition of it in backward, where the graph holds the same tensor.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from shardlight.strategies.errors import PipelineError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
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
            "From stage to stage a pipeline hands on the hidden state alone: what else a block computes (a router's "
            "logits, a skip connection) can be used on its own stage only. Use it there, or train without a pipeline."
        )


class Tainted(Tensor):
    """A tensor with shape, dtype, device and source, but without values or memory; see [Note: taint]."""

    meta: Tensor
    place: torch.device
    """The device, without asking the tensor."""
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
        tensor.meta, tensor.place, tensor.source, tensor.value, tensor.run = meta, device, source, None, run
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
            _refuse_functions(found)
            if _writes(name) and type(args[0]) is Tainted and args[0].value is not None:
                args[0].value = args[0].value.clone()  # what was received stays, for a repetition in backward
            args, kwargs = _with_values(args), _with_values(kwargs)
            found = [t for t in found if t.value is None]
        if not found:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if name in _OF_VALUES and not (name in _READ and _learning):
                raise unreadable(found[0].source, name)
            if name in _READ:
                with _disable_current_modes():
                    return func(*_zeros(args), **_zeros(kwargs))
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
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with torch._C.DisableTorchFunctionSubclass():
        return Tainted(torch.empty(shape, dtype=dtype, device="meta"), device, source)


def is_tainted(value: Any) -> bool:
    """Whether it is a tensor without values."""
    return type(value) is Tainted and value.value is None


def unreadable(source: Source, name: str) -> PipelineError:
    """Returns the error for a use of values that are not there."""
    return PipelineError(f"'{name.strip('_')}' asks for the values of what was computed from {source}. {source.mend}")


_learning: Source | None = None
"""The source of everything that is made, see `learning`."""
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
    before, _learning = _learning, source
    try:
        with _Fresh(source):
            yield
    finally:
        _learning = before


class _Fresh(TorchDispatchMode):
    """What is made to be written into (`torch.zeros`) is tainted from the start: it could not become so later."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs an operation."""
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _FRESH and type(out) is not Tainted:
            with torch._C.DisableTorchFunctionSubclass():
                return Tainted(torch.empty_like(out, device="meta"), out.device, self.source, _run)
        return out


_FRESH = frozenset(
    [
        *[aten.empty, aten.zeros, aten.ones, aten.full, aten.empty_like, aten.zeros_like, aten.ones_like],
        *[aten.full_like, aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.empty_strided],
    ]
)


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


def _refuse_functions(found: list[Tainted]) -> None:
    """A function of one's own would see tensors that need no gradient, and none would come to the stage before."""
    if torch.is_grad_enabled() or not any(t.value is not None and t.value.requires_grad for t in found):
        return
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is torch.autograd.Function.apply.__func__.__code__:
            raise PipelineError(
                "a torch.autograd.Function (or a reentrant checkpoint) outside the blocks is given the hidden state "
                "that this stage receives, and would hand no gradient on. Move it into the block, or give it `x + 0`. "
                "Checkpoint with use_reentrant=False."
            )
        frame = frame.f_back


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
_READ = frozenset(["tolist", "numpy", "__array__"])
_FACTORIES = frozenset(
    [
        *["empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"],
        *["new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"],
    ]
)

_NAMES = {aten._local_scalar_dense.default: "item"}


def _register_hook(func: Any, args: tuple, kwargs: dict) -> RemovableHandle:
    return RemovableHandle(OrderedDict())  # no gradient will ever come


_SPECIAL: dict[str, Callable[[Any, tuple, dict], Any]] = {
    "requires_grad_": lambda func, args, kwargs: args[0],
    "retain_grad": lambda func, args, kwargs: None,
    "register_hook": _register_hook,
}


def _attribute(func: Any, name: str, args: tuple) -> Any:
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__":
        return args[0].detach() if attribute == "data" else func(*args)
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
    first = next((t for t in found if t.dim()), found[0])
    if func._schema.is_mutable:
        _refuse_writes(func, args, kwargs, first)
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        if func is aten.index.Tensor:
            args = (args[0], [i for index in args[1] for i in _positions(index, first)], *args[2:])
        elif _learning is None:
            raise unreadable(first.source, _NAMES.get(func, func._schema.name.removeprefix("aten::")))
        else:
            return _wrap(func(*_zeros(args), **_zeros(kwargs)), [], first, first.place)
    if torch.Tag.nondeterministic_seeded in func.tags and _learning is None:
        # Random numbers are drawn as elsewhere, for the generator's sake: every stage draws the same ones behind it.
        func(*_zeros(args), **_zeros(kwargs))
    device = _device(func, args, kwargs, first)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "meta"}
        kwargs.pop("pin_memory", None)
    return _wrap(_shapes(func, args, kwargs, found), found, first, device)


_known: dict[Any, Any] = {}
"""What operations return, by what they are given: running them on meta tensors takes ten times as long."""


def _shapes(func: Any, args: tuple, kwargs: dict, found: list[Tainted]) -> Any:
    """Returns what an operation returns: meta tensors, and for an argument itself its place in `found`."""
    try:
        key = (func, _key(args), _key(kwargs))
        known = _known.get(key, _known)
    except TypeError:  # an argument that cannot be hashed
        key, known = None, _known
    if known is not _known:
        return known
    try:
        out = func(*_metas(args), **_metas(kwargs))
    except NotImplementedError as error:
        source = found[0].source
        raise PipelineError(
            f"{func} cannot run without values, and it is given what was computed from {source}. {source.mend}"
        ) from error
    positions = {id(t.meta): i for i, t in enumerate(found)}
    out = _indexed(out, positions)
    if key is not None:
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = out
    return out


_MOST = 4096


@dataclass(frozen=True)
class _Argument:
    position: int


def _indexed(out: Any, positions: dict[int, int]) -> Any:
    if isinstance(out, Tensor):
        return _Argument(positions[id(out)]) if id(out) in positions else out
    if isinstance(out, list | tuple):
        return type(out)([_indexed(x, positions) for x in out])
    return out


def _key(tree: Any) -> Any:
    kind = type(tree)
    if kind is Tainted:
        meta = tree.meta
        return (Tainted, meta.shape, meta.stride(), meta.dtype)
    if kind is tuple or kind is list:
        return (kind, *[_key(x) for x in tree])
    if kind is dict:
        return tuple([(k, _key(v)) for k, v in tree.items()]) if tree else None
    if isinstance(tree, Tensor):
        return (tree.shape, tree.stride(), tree.dtype) if tree.layout == torch.strided else (id(tree), tree)
    return (kind, tree)


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
    return tuple(Tainted(empty, index.device, _learning) for _ in range(index.dim()))


def _device(func: Any, args: tuple, kwargs: dict, first: Tainted) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    if first.dim():
        return first.place
    # A number of another device goes with the others.
    others = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim())
    return next((t.device for t in others), first.place)


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


def _wrap(out: Any, found: list[Tainted], first: Tainted, device: torch.device) -> Any:
    """Returns `out` (see `_shapes`) as tainted tensors."""
    if isinstance(out, Tensor):
        meta = out if out.is_meta else torch.empty_like(out, device="meta")
        return Tainted(meta, device, _learning or first.source, _run or first.run)
    if type(out) is _Argument:
        return found[out.position]
    if isinstance(out, list | tuple):
        return type(out)([_wrap(x, found, first, device) for x in out])
    return out
