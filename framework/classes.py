"""Classes named in a config: which may be imported, and whether their arguments fit their signature.

A config is data. It can name a class under `module.class`, `data.class` and `callbacks.NAME.class` only, of the
expected base class, and only from the project, from shardlight, lightning or torchmetrics, or from a package trusted
on the command line. Nothing of another origin is imported, and an object that a project merely imported (such as
`my_project.model.Popen`) is refused by its own `__module__`.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from shardlight.framework.check import BAD, Checker, show, words
from shardlight.framework.faults import suggest
from shardlight.framework.source import BROKEN, Node

TRUSTED = ("shardlight", "lightning", "torchmetrics")
"""Packages whose classes a config may always name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassConfig:
    """A class named in a config and the keyword arguments it is made with, checked against its signature."""

    class_path: str
    """Import path, such as my_project.model.LanguageModel."""
    target: type
    """The class itself."""
    arguments: Mapping[str, Any]
    """Keyword arguments as the config gives them; what is not given takes the default of the signature."""

    def build(self) -> Any:
        """Makes the object, with containers of its own."""
        return self.target(**{name: _copy(value) for name, value in self.arguments.items()})

    def argument(self, name: str) -> Any:
        """The value of an argument, else its default in the signature, else None."""
        if name in self.arguments:
            return self.arguments[name]
        found = parameters(self.target).get(name)
        return None if found is None or found.default is inspect.Parameter.empty else found.default


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value


def project_root(folder: Path) -> Path:
    """The nearest folder from `folder` upwards that has a pyproject.toml, else `folder` itself."""
    folder = folder.resolve()
    for parent in (folder, *folder.parents):
        if (parent / "pyproject.toml").is_file():
            return parent
    return folder


class Classes:
    """Imports the classes a config names, within the rules above.

    Args:
        root: the project's folder; put first on sys.path when a class of the project is imported.
        trust: further packages that may be named.
        checker: takes the faults.
    Attributes:
        targets: config path -> the class imported for it, whether or not its arguments were right.
    """

    def __init__(self, root: Path, trust: Iterable[str], checker: Checker):
        self.root = root.resolve()
        self.trusted = (*TRUSTED, *trust)
        self.checker = checker
        self.targets: dict[str, type] = {}

    def load(self, node: Node | None, base: type, path: str, home: Node) -> ClassConfig | None:
        """Checks a block {class: IMPORT.PATH, argument: value, ...} and imports its class; None after a fault.

        Args:
            node: the block; None where the config has none.
            base: what the class must derive from.
            path: of the block in the config, such as "module".
            home: where to report a missing block.
        """
        if node is None or node.value is None:
            text = f"{path} is missing. Name a {base.__name__}: '{path}: {{class: my_project.{path}.NAME}}'."
            return self._fault(home, text)
        if not isinstance(node.value, dict):
            return self._fault(node, f"{path} must be a mapping with the key class, got {show(node)}.")
        named = self._named(node, base, path)
        target = None if named is None else self._import(named, base, f"{path}.class")
        if named is None or target is None:
            return None
        self.targets[path] = target
        items = {key: item for key, item in node.value.items() if key != "class"}
        return self._arguments(Node(items, node.origin), target, named.value, path)

    def _named(self, node: Node, base: type, path: str) -> Node | None:
        named = node.value.get("class")
        if named is None:
            return self._fault(node, f"{path}.class is missing: the import path of a {base.__name__}.")
        if named.value is BROKEN:
            return None
        if not isinstance(named.value, str) or "." not in named.value:
            return self._fault(named, f"{path}.class must be an import path such as pkg.NAME, got {show(named)}.")
        return named

    def _fault(self, node: Node, text: str) -> None:
        self.checker.fault(node, text)

    def _import(self, node: Node, base: type, path: str) -> type | None:
        module_path, _, name = node.value.rpartition(".")
        top = module_path.partition(".")[0]
        if not self._allowed(top):
            return self._fault(node, f"{path}: {node.value} is outside the project {self.root}. {self._mend(top)}")
        module = self._import_module(node, module_path, path)
        if module is None:
            return None
        target = getattr(module, name, None)
        if target is None:
            known = [key for key, item in vars(module).items() if isinstance(item, type) and issubclass(item, base)]
            text = f"{path}: {module_path} has no class {name}.{suggest(name, known, what='Its classes')}"
            return self._fault(node, text)
        if not isinstance(target, type) or not issubclass(target, base):
            kind = "is not a class" if not isinstance(target, type) else f"is not a {base.__name__}"
            same = isinstance(target, type) and any(item.__name__ == base.__name__ for item in target.__mro__)
            mend = f" It derives from another one: import {base.__name__} from lightning.pytorch." if same else ""
            return self._fault(node, f"{path}: {node.value} {kind}.{mend}")
        home = target.__module__.partition(".")[0]
        if not self._allowed(home):
            text = f"{path}: {node.value} is {target.__module__}.{target.__qualname__}, from outside the project."
            return self._fault(node, f"{text} {self._mend(home)}")
        return target

    def _mend(self, top: str) -> str:
        trust = "" if top in sys.stdlib_module_names else f", or a package given with --trust {top}"
        return f"Classes come from the project, {', '.join(TRUSTED)}{trust}."

    def _allowed(self, top: str) -> bool:
        if top in self.trusted:
            return True
        if (self.root / f"{top}.py").is_file() or (self.root / top).is_dir():
            loaded = sys.modules.get(top)
            return loaded is None or self._inside(_files(loaded))
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return False
        return spec is not None and self._inside([spec.origin, *(spec.submodule_search_locations or [])])

    def _inside(self, files: Iterable[str | None]) -> bool:
        """Whether one of the files lies in the project, and not in a virtual environment inside it."""
        for file in files:
            if file and os.path.isabs(file) and Path(file).resolve().is_relative_to(self.root):
                parts = Path(file).resolve().relative_to(self.root).parts
                return "site-packages" not in parts and "dist-packages" not in parts
        return False

    def _import_module(self, node: Node, module_path: str, path: str) -> ModuleType | None:
        if str(self.root) not in sys.path:
            sys.path.insert(0, str(self.root))
            importlib.invalidate_caches()
        try:
            return importlib.import_module(module_path)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and (module_path == missing or module_path.startswith(f"{missing}.")):
                self._fault(node, f"{path}: there is no module {missing}.{self._siblings(missing)}")
            else:
                self._fault(node, f"{path}: {module_path} cannot be imported: {_cause(error, self.root)}")
            return None

    def _siblings(self, missing: str) -> str:
        parent, _, name = missing.rpartition(".")
        places = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else [str(self.root)]
        return suggest(name, {info.name for info in pkgutil.iter_modules(places)}, many=0)

    def _arguments(self, node: Node, target: type, class_path: str, path: str) -> ClassConfig | None:
        known = parameters(target)
        hints = _hints(target)
        before = len(self.checker.faults)
        values = {}
        for key, item in node.value.items():
            if key in known:
                values[key] = self.checker.convert(item, hints.get(key, known[key].annotation), f"{path}.{key}")
            else:
                self.checker.unknown(path, key, item, known, f"a parameter of {class_path}")
        for name, parameter in known.items():
            if parameter.default is inspect.Parameter.empty and name not in values:
                wanted = words(hints.get(name, inspect.Parameter.empty))
                self._fault(node, f"{path}.{name} is missing: {class_path} needs it. It is {wanted}.")
        if len(self.checker.faults) > before or any(value is BAD for value in values.values()):
            return None
        return ClassConfig(class_path=class_path, target=target, arguments=MappingProxyType(values))


def parameters(target: type) -> dict[str, inspect.Parameter]:
    """The named parameters of a class's constructor; behind **kwargs also those of its base classes.

    A name that only **kwargs would take is not listed: it could not be checked.
    """
    found: dict[str, inspect.Parameter] = {}
    for cls in target.__mro__:
        init = cls.__dict__.get("__init__")
        if init is None:
            continue
        own = list(inspect.signature(init).parameters.values())[1:]
        for parameter in own:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
            break
    return found


def _hints(target: type) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for cls in reversed(target.__mro__):
        init = cls.__dict__.get("__init__")
        if inspect.isfunction(init):
            try:
                hints |= typing.get_type_hints(init)
            except (NameError, TypeError, AttributeError):
                # An annotation that exists for type checkers only: its parameter takes any plain value.
                hints |= {name: Any for name in inspect.signature(init).parameters}
    return hints


def _files(module: ModuleType) -> list[str | None]:
    return [getattr(module, "__file__", None), *getattr(module, "__path__", [])]


def _cause(error: BaseException, root: Path) -> str:
    """The error with the line of the project it comes from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({os.path.relpath(error.filename, root)}:{error.lineno})."
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(root)]
    place = f" ({os.path.relpath(lines[-1].filename, root)}:{lines[-1].lineno})" if lines else ""
    return f"{type(error).__name__}: {error}{place}."
