"""Deferred tensors as a user meets them: the context they are made in, what they answer after it, their end.

[Note: deferred tensors] Inside `deferred_init` tensors are plain tensors on the meta device. When the context ends,
those that are still alive get a class of their own, as released parameters do, so that whatever happens to them before
they are sharded (`model.apply(init)`, `model.to(dtype)`, a resized embedding) is recorded as well. They answer as the
tensors that they will be (`device`, `is_meta`).
"""

import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from shardlight.strategies.engine.deferred.record import Recorder, note
from shardlight.strategies.engine.deferred.replay import (
    History,
    fill,
    history_of,
    is_recorded,
    materialised_alias,
    ref_of,
    value_of,
)
from shardlight.strategies.engine.released import needs_no_values
from shardlight.strategies.errors import StrategyError
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

MEND = (
    "Build the module without deferral (strategy.defer: false, in Python ZeRO3(defer=False)), or move this out of it."
)

_depth = 0
_recorders = 0
_any = False
"""Whether there may be deferred tensors in this process."""


class _Answers(TorchFunctionMode):
    """Answers for deferred tensors what does not come to the recorder as an operation."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answers, or hands on."""
        return _answer(func, args, kwargs or {})


def _answer(func: Callable, args: tuple, kwargs: dict) -> Any:
    name = func.__name__
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__set__" and attribute == "data":
            return _set_data(func, *args)
        if attribute in ("device", "is_meta", "is_cpu", "is_cuda") and first is not None and is_recorded(first):
            return _place(first, attribute)
    elif first is not None and name in _OF_VALUES and is_recorded(first):
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return func(value_of(first), *args[1:], **kwargs)
    elif name == "__deepcopy__" and first is not None and not is_recorded(first):
        # A real tensor's copy is real; it is made of storages, which are no operations.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return func(*args, **kwargs)
    elif first is not None and name in ("to", "cpu", "cuda") and is_recorded(first):
        return _move(func, name, args, kwargs)
    return func(*args, **kwargs)


_OF_VALUES = frozenset(["tolist", "numpy", "__array__", "__repr__", "__format__", "__reduce_ex__"])


def _place(tensor: Tensor, attribute: str) -> Any:
    with torch._C.DisableTorchFunction():
        device = history_of(tensor).device
    return {"device": device, "is_meta": False, "is_cpu": device.type == "cpu", "is_cuda": device.type == "cuda"}[
        attribute
    ]


def _set_data(func: Callable, tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value` where one of the two is deferred and the other is not."""
    with torch._C.DisableTorchFunction():
        if value.is_meta and not tensor.is_meta:
            value = value_of(value)
        elif tensor.is_meta and not value.is_meta:
            with _disable_current_modes():
                lifted = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
                ref = ref_of(lifted)
                ref.history.device, ref.history.known = value.device, True
                note(torch.ops.aten.clone.default, (value,), {}, [], [ref])
            value = lifted
    func(tensor, value)


def _move(func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """`to` a device where the tensor will be anyway is no operation."""
    if name == "to":
        device, dtype, _, layout = torch._C._nn._parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})
        here = _place(args[0], "device")
        stays = device is None or (device.type == here.type and device.index in (None, here.index or 0))
        if not stays or kwargs.get("copy") or layout is not None:
            return func(*args, **kwargs)
        return args[0] if dtype in (None, args[0].dtype) else func(args[0], dtype)
    wanted = torch.device(name) if len(args) == 1 and not kwargs else None
    return args[0] if wanted is not None and _place(args[0], "device").type == name else func(*args, **kwargs)


@contextmanager
def _recording(device: torch.device) -> Iterator[None]:
    """Records, once: of two recorders inside each other both would note the same operation."""
    global _recorders
    _recorders += 1
    try:
        if _recorders > 1:
            yield
            return
        with Recorder(device), _Answers():
            yield
    finally:
        _recorders -= 1


class DeferredTensor(Tensor):
    """Mixin that is put before a tensor's own class from the end of its context on; see [Note: deferred tensors]."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answers what needs no values, and records everything else."""
        kwargs = kwargs or {}
        creates = func.__name__.endswith("_like") or func.__name__.startswith("new_")
        with torch._C.DisableTorchFunctionSubclass():
            if needs_no_values(func) and not creates and func.__name__ != "__get__":
                return func(*args, **kwargs)
            if func.__name__ == "__get__" and needs_no_values(func):
                return _answer(func, args, kwargs)
            device = next((_place(t, "device") for t in args if isinstance(t, DeferredTensor)), torch.device("cpu"))
            with _recording(device):
                result = func(*args, **kwargs)
        tree_map(lambda x: _mark(x) if isinstance(x, Tensor) else x, result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is deferred as well, and of the same own class."""
        if id(self) in memo:
            return memo[id(self)]
        deferred, device = type(self), _place(self, "device")
        self.__class__ = deferred._shardlight_own_class
        try:
            with _recording(device):
                result = copy.deepcopy(self, memo)
        finally:
            self.__class__ = deferred
        _mark(result)
        return result

    def __repr__(self) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            kind = "Parameter" if isinstance(self, nn.Parameter) else "Tensor"
            kind = f"{kind}(deferred, shape={tuple(self.shape)}, dtype={self.dtype}"
            return f"{kind}, requires_grad={self.requires_grad})"


_classes: dict[type, type] = {}


def _mark(tensor: Tensor) -> None:
    own = type(tensor)
    if issubclass(own, DeferredTensor | UninitializedTensorMixin) or not is_recorded(tensor):
        return
    if own is not Tensor and not issubclass(own, nn.Parameter):
        return
    if own not in _classes:
        bases = (DeferredTensor,) if own is Tensor else (DeferredTensor, own)
        _classes[own] = type(f"Deferred{own.__name__}", bases, {"_shardlight_own_class": own})
    tensor.__class__ = _classes[own]


def give_own_class(tensor: Tensor, own: type[Tensor]) -> None:
    """Gives a tensor another class; to a deferred one, the class that it has once it is not."""
    tensor.__class__ = own
    _mark(tensor)


@contextmanager
def deferred_init(device: torch.device | str | None = None) -> Iterator[None]:
    """A module built in this context takes no memory: its parameters get their values when they are sharded.

    The values are those of an ordinary construction, to the last bit, and so is the random generator afterwards.

    Args:
        device: where an ordinary construction would make tensors that name no device; None: torch's default device.
    Raises: StrategyError: by name, later: a parameter whose initialisation cannot be run again.
    Example:
        with deferred_init():
            model = GPT(layers=96)
        engine = Engine(model, PLANS["zero3"], group)    # or trainer.fit(model)
    """
    global _depth, _any
    _any = True
    with torch._C.DisableTorchFunction():
        home = torch.get_default_device() if device is None else torch.device(device)
    _depth += 1
    try:
        # The device's own context too: what is made from values (`torch.tensor([1.0])`) is real, and belongs there.
        with _recording(home), home if device is not None else nullcontext():
            yield
    except Exception as error:
        error.add_note(f"(The module was being built without memory. If that is the reason: {MEND})")
        raise
    finally:
        _depth -= 1
        if not _depth:
            for tensor in _alive(Tensor):
                _mark(tensor)


def _alive(kind: type) -> list[Any]:
    """Returns all tensors of a class that anything refers to, whether or not a module has registered them."""
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]


def is_deferred(tensor: Tensor) -> bool:
    """Whether a tensor's values are still to be made."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def home_of(tensor: Tensor) -> torch.device:
    """Returns the device where a tensor is, or will be."""
    return _place(tensor, "device") if is_recorded(tensor) else tensor.device


def refuse_unrecorded(module: nn.Module) -> None:
    """Raises: StrategyError: naming a parameter or buffer on the meta device whose initialisation was not recorded."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_deferred(tensor) and not is_recorded(tensor) and not isinstance(tensor, UninitializedTensorMixin):
            raise StrategyError(
                f"'{name}' is on the meta device, and how it is initialised was not recorded: build it in "
                "`configure_model`, or under `with shardlight.strategies.deferred_init():` instead of "
                "`torch.device('meta')`."
            )


def write_values(out: Tensor, tensor: Tensor, name: str) -> None:
    """Writes a parameter's values into `out` (contiguous, its shape), which need not exist anywhere before.

    Raises: StrategyError: naming the parameter, when its initialisation cannot be run again.
    """
    if not is_deferred(tensor):
        out.copy_(tensor.data)
        return
    try:
        fill(out, tensor)
    except StrategyError as error:
        raise StrategyError(f"parameter '{name}' cannot be initialised: {error}. {MEND}") from error


def become(tensor: Tensor, value: Tensor) -> None:
    """Gives a tensor other data, and a deferred one its own class and device back; it stays the same object."""
    if not is_deferred(tensor):
        tensor.data = value
        return
    with torch._C.DisableTorchFunction():
        if isinstance(tensor, DeferredTensor):
            tensor.__class__ = type(tensor)._shardlight_own_class
        # `data`, and not `detach`: its version counter is its own, and not that of a buffer it may be a view of.
        other = value.data.requires_grad_(tensor.requires_grad)
        # `tensor.data = value` is refused between devices of different kinds.
        torch._C._swap_tensor_impl(tensor, other)
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(tensor, hooks) is not None:
                setattr(tensor, hooks, getattr(tensor, hooks))  # registers them with the new data


def materialise(module: nn.Module) -> None:
    """Gives every deferred parameter and buffer of a module its values, whole, on this process.

    For use without a strategy; a strategy does it unit by unit. Raises: StrategyError: see `deferred_init`.
    """
    materialise_tensors([*module.named_parameters(), *module.named_buffers()])


def materialise_buffers(module: nn.Module) -> None:
    """Gives a module's deferred buffers, and parameters that are not floating point, their values."""
    small = [(n, p) for n, p in module.named_parameters() if not (p.is_floating_point() or p.is_complex())]
    materialise_tensors([*module.named_buffers(), *small])


def materialise_others() -> None:
    """Gives everything that is still deferred its values: tensors that no module has registered, hidden modules."""
    global _any
    if _any and _alive(DeferredTensor):
        gc.collect()  # what only waits to be collected needs no memory
        materialise_tensors([("(not registered in the module)", t) for t in _alive(DeferredTensor)])
    _any = False


def materialise_tensors(named: Iterable[tuple[str, Tensor]]) -> None:
    """Gives those tensors that are deferred their values; those that shared a storage share one again."""
    for name, tensor in named:
        if is_deferred(tensor) and not isinstance(tensor, UninitializedTensorMixin):
            try:
                value = materialised_alias(tensor)
            except StrategyError as error:
                raise StrategyError(f"'{name}' cannot be initialised: {error}. {MEND}") from error
            become(tensor, value)


__all__ = ["DeferredTensor", "History", "become", "deferred_init", "home_of", "is_deferred", "materialise"]
