"""The class that a parameter has while its values are not on this rank.

[Note: released parameters] While its unit is released, a parameter's data is one NaN expanded to its full shape, and
its class is a subclass whose `__torch_function__` sees every use. Shape, dtype and the like answer as always. A use of
the values gathers the unit first when a training or evaluation step is running, and is an error that names the
parameter otherwise. When the unit is gathered the parameter gets its own class back, so computing costs nothing extra.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_PROPERTIES = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_leaf",
        "grad",
        "grad_fn",
        "ndim",
        "is_cuda",
        "is_cpu",
        "is_mps",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "itemsize",
        "nbytes",
        "names",
        "retains_grad",
        "output_nr",
        "_version",
        "_backward_hooks",
        "name",
        "_post_accumulate_grad_hooks",
        "is_xpu",
        "is_mkldnn",
        "is_vulkan",
        "is_ipu",
        "is_xla",
        "is_maia",
        "is_mtia",
        "is_sparse_csr",
    ]
)
_METHODS = frozenset(
    [
        "size",
        "numel",
        "nelement",
        "dim",
        "ndimension",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "has_names",
        "is_same_size",
        "__hash__",
        "__len__",
        "is_pinned",
        "is_shared",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_tensor",
        "_is_view",
    ]
)


class Owner(Protocol):
    """What stands behind a released parameter: gathers it, or refuses."""

    def on_use(self, parameter: nn.Parameter, operation: str) -> None:
        """Returns with the parameter gathered; raises StrategyError when that is not possible now."""

    def on_copy_use(self, parameter: nn.Parameter) -> None:
        """Returns with the parameter in full precision."""

    def equal(self, first: Tensor, second: Tensor) -> bool:
        """Compares two tensors; on all ranks."""


class ReleasedParameter(nn.Parameter):
    """Mixin that is put before a parameter's own class while it is released; see [Note: released parameters]."""

    _shardlight_owner: Owner

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answers what needs no values, and gathers the unit before everything else."""
        kwargs = kwargs or {}
        if needs_no_values(func):
            return answer(func, args, kwargs)
        name = (
            getattr(getattr(func, "__self__", None), "__name__", None)
            if func.__name__ in ("__get__", "__set__")
            else None
        )
        if func.__name__ == "equal" and len(args) == 2:
            return _released(args, kwargs)[0]._shardlight_owner.equal(*args)
        # Until all are there at once: where micro-batches take turns, a unit may go while another one is gathered.
        while released := _released(args, kwargs):
            for parameter in released:
                parameter._shardlight_owner.on_use(parameter, name or func.__name__)
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return (
                f"Parameter(sharded, shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad})"
            )


_classes: dict[tuple[type, type], type] = {}


def mark(parameter: nn.Parameter, kind: type[nn.Parameter] | None) -> None:
    """Puts `kind` before the own class of `parameter`, instead of what is there; None: gives it its own class."""
    parameter.__class__ = marked_class(parameter, kind)


def marked_class(parameter: nn.Parameter, kind: type[nn.Parameter] | None) -> type[nn.Parameter]:
    """Returns the class that `mark` gives."""
    own = getattr(type(parameter), "_shardlight_own_class", type(parameter))
    if kind is None:
        return own
    marked = _classes.get((kind, own))
    if marked is None:
        bases = (kind,) if own is nn.Parameter else (kind, own)
        name = f"{kind.__name__.removesuffix('Parameter')}{own.__name__}"
        marked = _classes[kind, own] = type(name, bases, {"_shardlight_own_class": own})
    return marked


def mark_released(parameter: nn.Parameter) -> None:
    """Gives `parameter` the released class of its own class."""
    mark(parameter, ReleasedParameter)


def mark_gathered(parameter: nn.Parameter) -> None:
    """Gives a parameter its own class back."""
    mark(parameter, None)


_FACTORIES = frozenset(n for n in _METHODS if n.endswith("_like") or n.startswith("new_"))


def answer(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Runs what needs no values; the dtype of a 16-bit copy is that of its master weights."""
    master = getattr(args[0], "_shardlight_dtype", None) if args else None
    with torch._C.DisableTorchFunctionSubclass():
        if master is not None:
            if func.__name__ == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "dtype":
                return master
            if func.__name__ in _FACTORIES:
                kwargs = {"dtype": master, **kwargs}
        return func(*args, **kwargs)


def needs_no_values(func: Callable) -> bool:
    """Whether a torch function only reads or sets what a tensor has without its values (shape, dtype, grad, hooks)."""
    name = func.__name__
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute in _PROPERTIES and (name == "__get__" or attribute in ("grad", "requires_grad"))
    return name in _METHODS


def _released(args: Any, kwargs: dict) -> list[ReleasedParameter]:
    return marked_in(args, kwargs, ReleasedParameter)


def marked_in(args: Any, kwargs: dict, kind: type) -> list[Any]:
    """Returns the parameters of a kind among the arguments of an operation."""
    found: list[Any] = []
    stack: list[Any] = [*args, *kwargs.values()]
    while stack:
        item = stack.pop()
        if isinstance(item, kind):
            found.append(item)
        elif isinstance(item, list | tuple) and not isinstance(item, Tensor):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    # The order in which units are asked for must not depend on the traversal, which is the same on every rank anyway.
    return found[::-1]
