"""What a config has to know of a class that it names: what it derives from and what its constructor takes.

There are two ways to know it: from the class itself (`FromImport`, here), and from its source, without running any of
it and without the seconds that importing torch takes (`FromSource`, class_source.py).
"""

import importlib
import inspect
import os
import pkgutil
import sys
import traceback
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardlight.framework.constraints import ATTRIBUTE, Exists

MODULE = "lightning.pytorch.core.module.LightningModule"
DATA_MODULE = "lightning.pytorch.core.datamodule.LightningDataModule"
CALLBACK = "lightning.pytorch.callbacks.callback.Callback"
TRAINING_MODULE = "shardlight.framework.module.TrainingModule"
BASES = (MODULE, DATA_MODULE, CALLBACK)
STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}
LOADERS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""What a module and a data module must have for a verb."""
GONE = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}
"""Hooks that Lightning no longer has, and those that came for them."""
HOOKS = ("configure_optimizers", "split_batch", *STEPS.values(), *GONE)
HOOKS += tuple(f"{name}_dataloader" for name in LOADERS.values())

UNREADABLE: Any = type("Unreadable", (), {})
"""Stands for a default or an annotation that is there, and that the source does not tell."""


@dataclass(frozen=True)
class Described:
    """What is known of a class, or of something else that has the name."""

    name: str
    """Module and qualified name, wherever it was imported from."""
    lineage: tuple[str, ...] = ()
    """The names of the class and of all that it derives from, in the order of its MRO; empty: it is no class."""
    parameters: Mapping[str, inspect.Parameter] = field(default_factory=dict)
    """The named parameters of the constructor; behind **kwargs also those of its base classes. Annotations are types,
    Parameter.empty or UNREADABLE. A name that only **kwargs would take is not there: it could not be checked."""
    defines: frozenset[str] = frozenset()
    """Which of HOOKS the class or one that it derives from has, beside Lightning's and TrainingModule's own."""
    constraints: tuple[str, ...] = ()
    """What it says of its arguments, and so do all that it derives from; see [Note: constraints] in constraints.py."""

    def derives_from(self, base: str) -> bool:
        """Whether `base`, a name such as MODULE, is in the lineage."""
        return base in self.lineage


class NoModuleError(Exception):
    """There is no module of that name; `near` are the modules beside it."""

    def __init__(self, missing: str, near: Iterable[str]) -> None:
        super().__init__(missing)
        self.missing = missing
        self.near = set(near)


class BrokenModuleError(Exception):
    """The module is there and cannot be imported; the text is the reason."""


class NoNameError(Exception):
    """The module has nothing of that name; `classes` are those it has."""

    def __init__(self, classes: Mapping[str, Described]) -> None:
        super().__init__()
        self.classes = classes


class UnclearError(Exception):
    """The source does not tell: the class has to be imported."""


class Reader(Protocol):
    """A way to know classes."""

    def describe(self, module_path: str, name: str) -> Described:
        """Raises: NoModuleError, BrokenModuleError, NoNameError, UnclearError."""


class FromImport:
    """Knows classes by importing them.

    Args:
        root: the project's folder; put first on sys.path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def describe(self, module_path: str, name: str) -> Described:
        """Imports the module and looks at what has the name."""
        if str(self.root) not in sys.path:
            sys.path.insert(0, str(self.root))
            importlib.invalidate_caches()
        try:
            module = importlib.import_module(module_path)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and (module_path == missing or module_path.startswith(f"{missing}.")):
                raise NoModuleError(missing, self._beside(missing)) from None
            raise BrokenModuleError(_cause(error, self.root)) from None
        found = getattr(module, name, None)
        if found is None:
            classes = {key: describe(item) for key, item in vars(module).items() if isinstance(item, type)}
            raise NoNameError(classes)
        return describe(found) if isinstance(found, type) else Described(f"{module_path}.{name}")

    def _beside(self, missing: str) -> set[str]:
        parent, _, _ = missing.rpartition(".")
        places = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else [str(self.root)]
        return {info.name for info in pkgutil.iter_modules(places)}


def describe(target: type) -> Described:
    """Looks at a class."""
    hints = _hints(target)
    lineage = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in target.__mro__)
    bases = (*BASES, TRAINING_MODULE)
    own = [cls for cls, name in zip(target.__mro__, lineage, strict=True) if name not in bases and not _is_hooks(name)]
    return Described(
        lineage[0],
        lineage,
        {name: item.replace(annotation=hints.get(name, item.annotation)) for name, item in _parameters(target)},
        frozenset(hook for hook in HOOKS if any(hook in vars(cls) for cls in own)),
        tuple(dict.fromkeys(text for cls in own for text in texts(vars(cls).get(ATTRIBUTE)))),
    )


def texts(value: Any) -> tuple[str, ...]:
    """The constraints in an attribute of that name; what holds anything but texts means something else."""
    found = isinstance(value, tuple | list) and all(isinstance(item, str) for item in value)
    return tuple(value) if found else ()


def _is_hooks(name: str) -> bool:
    """Whether a class is one of those in which Lightning lists the hooks that there are."""
    return name.startswith("lightning.pytorch.core.")


def _parameters(target: type) -> Iterable[tuple[str, inspect.Parameter]]:
    found: dict[str, inspect.Parameter] = {}
    for cls in target.__mro__:
        init = cls.__dict__.get("__init__")
        if init is None:
            continue
        try:
            own = list(inspect.signature(init).parameters.values())[1:]
        except ValueError:  # a constructor in C without a signature, such as those of some builtins
            break
        for parameter in own:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
            break
    return found.items()


def _hints(target: type) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for cls in reversed(target.__mro__):
        init = cls.__dict__.get("__init__")
        if inspect.isfunction(init):
            try:
                own = typing.get_type_hints(init, include_extras=True)
                hints |= {name: _plain(hint) for name, hint in own.items()}
            except (NameError, TypeError, AttributeError):
                # An annotation that exists for type checkers only: its parameter takes any plain value.
                hints |= {name: Any for name in inspect.signature(init).parameters}
    return hints


def _plain(hint: Any) -> Any:
    """An annotation without what `Annotated` adds to it, but for what a config is checked by."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return hint if any(isinstance(item, Exists) for item in arguments[1:]) else _plain(arguments[0])
    return typing.Union[tuple(map(_plain, arguments))] if origin in (typing.Union, types.UnionType) else hint  # noqa: UP007


def _cause(error: BaseException, root: Path) -> str:
    """The error with the line of the project it comes from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({os.path.relpath(error.filename, root)}:{error.lineno})."
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(root)]
    place = f" ({os.path.relpath(lines[-1].filename, root)}:{lines[-1].lineno})" if lines else ""
    return f"{type(error).__name__}: {error}{place}."
