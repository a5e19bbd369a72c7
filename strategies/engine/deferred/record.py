"""Records how tensors come to their values, while the tensors themselves are on the meta device and hold nothing.

[Note: recorded initialisation] Under `Recorder` every operation that makes a tensor makes it on the meta device, and
every operation on such tensors is noted: what it was called with, which storages it wrote or made, and for a random
one the state of the generator before it. The notes hang on the storages, so views, `p.data`, `p.data = ...`, tied
weights and copies need no rule of their own. `replay.py` runs, for one tensor, only what its values depend on.

A random operation is also run once on a real tensor of that shape, which is thrown away: the generator ends where an
ordinary construction leaves it, so every value, and every random number drawn later, is that of an ordinary
construction. What asks for values (`item`, a data-dependent shape) is answered by a replay at that point.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from shardlight.ops.disk import aligned
from shardlight.strategies.engine.deferred.replay import (
    History,
    Node,
    Real,
    Ref,
    generator_of,
    history_of,
    ref_of,
    value_of,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_numbers = itertools.count()
_APART_FROM_BYTES = 1 << 18
"""Of what is drawn and thrown away: from which size on it has pages of its own."""

_OVERWRITES = frozenset(
    [
        "copy_",
        "fill_",
        "zero_",
        "uniform_",
        "normal_",
        "random_",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "geometric_",
    ]
)
"""In-place operations whose result does not depend on what was there before."""


class Recorder(TorchDispatchMode):
    """See [Note: recorded initialisation].

    Args:
        device: where tensors would be made that are made without a device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs an operation on meta tensors and notes it; what concerns real tensors alone is run as it is."""
        with torch._C.DisableTorchFunction():
            return _record(func, args, dict(kwargs or {}), self.device)


def _record(func: Any, args: tuple, kwargs: dict, home: torch.device) -> Any:
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    written = _written(func, args, kwargs)
    has_device = any(a.name == "device" for a in func._schema.arguments)
    copies = func.overloadpacket is torch.ops.aten._to_copy
    device = _target(func, tensors, kwargs, home, has_device)
    if not any(t.is_meta for t in tensors) and (copies or not has_device):
        _keep_noted(written)
        if copies and kwargs.get("device") is not None:
            kwargs["device"] = device
        return func(*args, **kwargs)
    if any(not t.is_meta for t in written) or not _returns_tensors(func):
        return _evaluate(func, args, kwargs, written)
    present = {t.untyped_storage()._cdata for t in tensors if t.is_meta}
    on_meta = dict(kwargs)
    if has_device and not (copies and kwargs.get("device") is None):
        on_meta["device"], kwargs["device"] = "meta", device
        on_meta.pop("pin_memory", None)
    try:
        result = func(*_to_meta(args), **_to_meta(on_meta))
    except NotImplementedError:
        # No kernel for meta tensors, or a shape that depends on values.
        if not written:
            return _evaluate(func, args, kwargs, written)
        result = args[0]
    if has_device and not copies and not present and isinstance(result, Tensor) and not result.numel():
        # Takes no memory, and may be made a view of real memory: so tensors are copied and read from files.
        return func(*args, **kwargs)
    random = _draw(func, args, kwargs, written, device)
    outputs = tree_flatten(result)[0]
    made = [ref_of(t) if t is not None and t.untyped_storage()._cdata not in present else None for t in outputs]
    if not written and not any(made):
        return result  # a view
    for ref in filter(None, made):
        ref.history.device, ref.history.known = device, True
    if has_device and "dtype" in (a.name for a in func._schema.arguments) and kwargs.get("dtype") is None:
        kwargs["dtype"] = outputs[0].dtype
    note(func, args, kwargs, written, made, random)
    return result


def note(
    func: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    written: Iterable[Tensor],
    made: list[Ref | None],
    random: Any = None,
    overwrites: bool | None = None,
) -> None:
    """Notes one operation with the storages that it writes and makes.

    Args:
        written: meta tensors among the arguments that it writes.
        made: by output: what it makes; None for an output that is a view of an argument.
        random: state of the generator before it.
        overwrites: the result does not depend on what was in the written tensors; None: known by the name of `func`.
    """
    refs = [ref_of(t) for t in written]
    if overwrites is None:
        overwrites = getattr(func, "__name__", "").partition(".")[0] in _OVERWRITES
    read = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.is_meta]
    count: dict[History, int] = {}
    for tensor in read:
        count[history_of(tensor)] = count.get(history_of(tensor), 0) + 1
    node = Node(
        number=next(_numbers),
        func=func,
        args=_noted(args),
        kwargs=_noted(kwargs),
        reads=tuple(count),
        made=tuple(made),
        random=random,
        default_dtype=torch.get_default_dtype(),
        covers=frozenset(r.history for r in refs if overwrites and r.whole and count.get(r.history) == 1),
    )
    for history in {r.history: None for r in (*refs, *filter(None, made))}:
        history.writes.append(node)


def note_overwrite(write: Callable[[Tensor], None], tensor: Tensor) -> None:
    """Notes that `write` gives a deferred tensor all its values; it is called with a real one when they are needed."""
    with torch._C.DisableTorchFunction():
        note(write, (tensor,), {}, [tensor], [], overwrites=True)


def _noted(arguments: Any) -> Any:
    return tree_map(lambda x: _note_tensor(x) if isinstance(x, Tensor) else x, arguments)


def _note_tensor(tensor: Tensor) -> Ref | Real:
    if tensor.is_meta:
        return ref_of(tensor)
    real = Real(tensor, tensor.detach(), None if tensor.is_inference() else tensor._version)
    storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
    if storage is not None:
        if not hasattr(storage, "_shardlight_noted"):
            storage._shardlight_noted = WeakSet()
        storage._shardlight_noted.add(real)
    return real


def _keep_noted(written: Iterable[Tensor]) -> None:
    """Before a real tensor is written: notes that refer to it get a copy of what it was."""
    for tensor in written:
        noted = getattr(tensor.untyped_storage(), "_shardlight_noted", ()) if tensor.layout == torch.strided else ()
        for real in list(noted):
            real.keep()
        if noted:
            noted.clear()


def _written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value]
    return [t for t in found if isinstance(t, Tensor)]


def _returns_tensors(func: Any) -> bool:
    return all("Tensor" in str(r.type) for r in func._schema.returns)


def _target(func: Any, tensors: list[Tensor], kwargs: dict, home: torch.device, has_device: bool) -> torch.device:
    """Returns where the operation's results would be in an ordinary construction."""
    asked = kwargs.get("device") if has_device else None
    if asked is not None and torch.device(asked).type != "meta":
        return torch.device(asked)
    for tensor in tensors:
        if asked is None and not (tensor.dim() == 0 and tensor.device.type == "cpu"):
            return history_of(tensor).device if tensor.is_meta else tensor.device
    return home


def _to_meta(arguments: Any) -> Any:
    return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) and not x.is_meta else x, arguments)


def _evaluate(func: Any, args: tuple, kwargs: dict, written: list[Tensor]) -> Any:
    """Runs an operation on the real values of its arguments, now; what it returns is real."""
    _keep_noted([t for t in written if not t.is_meta])
    args, kwargs = tree_map(lambda x: value_of(x) if isinstance(x, Tensor) and x.is_meta else x, (args, kwargs))
    return func(*args, **kwargs)


def _draw(func: Any, args: tuple, kwargs: dict, written: list[Tensor], device: torch.device) -> Any:
    """Lets a random operation draw its numbers, for the generator's sake; returns the generator's state before."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    written_ids = set(map(id, written))
    shape_only = func.__name__.partition(".")[0].endswith("_like")

    def real(item: Any) -> Any:
        if not isinstance(item, Tensor) or not item.is_meta:
            return item
        if id(item) in written_ids or shape_only:
            return _scratch(item, device)
        return value_of(item)

    generator = next((x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Generator)), None)
    state = (generator or generator_of(device)).get_state()
    args, kwargs = tree_map(real, (args, kwargs))
    func(*args, **kwargs)
    return state


def _scratch(like: Tensor, device: torch.device) -> Tensor:
    """Returns memory for what is thrown away. From the heap, what is noted next would lie in the holes that large
    tensors leave, and each of them would take memory anew, as much as the whole model in the end.
    """
    span = 1 + sum((n - 1) * step for n, step in zip(like.size(), like.stride(), strict=True)) if like.numel() else 0
    if device.type != "cpu" or span * like.dtype.itemsize < _APART_FROM_BYTES:
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
    return aligned(span * like.dtype.itemsize).view(like.dtype).as_strided(like.size(), like.stride())
