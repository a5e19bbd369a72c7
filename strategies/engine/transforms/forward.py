"""Puts another forward into a module, and takes it out again; what the transforms of a model are made of."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]
"""A forward that is not bound: its first argument is the module."""


class AroundCall:
    """Stands where a module is called, outside of all its hooks.

    PyTorch has one place for that, the one of a module's compiled call.

    Args:
        run: called instead; `call` is the call as it would be.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.before = module._compiled_call_impl
        self.call = self.before or module._call_impl
        self._module = module
        self._run = run
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs what stands here."""
        return self._run(*args, **kwargs)

    def undo(self) -> None:
        """Lets the module be called as before."""
        self._module._compiled_call_impl = self.before


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
