"""The strategies' names in Lightning's registry, put there without importing Lightning or a strategy."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REGISTRY = "lightning.pytorch.strategies"
_HOME = "shardlight.strategies.zero"
CLASSES = {
    "single": "Single",
    "ddp": "DDP",
    "zero1": "ZeRO1",
    "zero2": "ZeRO2",
    "zero3": "ZeRO3",
    "infinity": "Infinity",
    "pipeline": "Pipeline",
    "tensor": "TensorParallel",
    "mesh": "MeshStrategy",
}
"""By the name that `Trainer(strategy=...)` knows."""


def register_once_lightning_is_there() -> None:
    """Registers the names now, or as soon as somebody imports Lightning: whichever import comes first."""
    if _REGISTRY in sys.modules:
        _register(sys.modules[_REGISTRY])
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register(module: ModuleType) -> None:
    for name, kind in CLASSES.items():
        description = f"See {_HOME}.{kind}."
        module.StrategyRegistry.register(name, partial(_make, kind), description=description, override=True)


def _make(kind: str, **options: Any) -> Any:
    return getattr(importlib.import_module(_HOME), kind)(**options)


class _Watch(MetaPathFinder):
    """Finds nothing itself; has the module of the registry call `_register` when it has been imported."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec that the other finders have, with a loader that does one thing more."""
        if fullname != _REGISTRY or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        _register(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
