"""Puts another forward into a module, and takes it out again; what the transforms of a model are made of."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]
"""A forward that is not bound: its first argument is the module."""


def replace_forward(module: nn.Module, make: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Replaces the module's forward by `make(forward)`, as a method: a deep copy of the module runs its own weights.

    Returns: a function that undoes it.
    """
    before = vars(module).get("forward")
    module.forward = MethodType(make(_unbound(module, before)), module)  # type: ignore[method-assign]

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before  # type: ignore[method-assign]

    return undo


def _unbound(module: nn.Module, own: Any) -> Forward:
    if own is None:
        return type(module).forward
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return forward
