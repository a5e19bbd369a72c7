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
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from shardlight.framework.check import BAD, Checker, show, words
from shardlight.framework.class_source import FromSource
from shardlight.framework.constraints import Constraint, ConstraintError
from shardlight.framework.described import (
    UNREADABLE,
    BrokenModuleError,
    Described,
    FromImport,
    NoModuleError,
    NoNameError,
    Reader,
    UnclearError,
)
from shardlight.framework.faults import suggest
from shardlight.framework.packages import Missing, told
from shardlight.framework.source import BROKEN, Node

TRUSTED = ("shardlight", "lightning", "torchmetrics")
"""Packages whose classes a config may always name."""
_EMPTY = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassConfig:
    """A class named in a config and the keyword arguments it is made with, checked against its signature."""

    class_path: str
    """Import path, such as my_project.model.LanguageModel."""
    described: Described = dataclasses.field(compare=False, repr=False)
    """What the check knows of the class."""
    arguments: Mapping[str, Any]
    """Keyword arguments as the config gives them; what is not given takes the default of the signature."""

    @property
    def target(self) -> type:
        """The class itself; imports its module."""
        module, _, name = self.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def build(self) -> Any:
        """Makes the object, with containers of its own."""
        return self.target(**{name: _copy(value) for name, value in self.arguments.items()})

    def argument(self, name: str) -> Any:
        """The value of an argument, else its default in the signature, else None."""
        if name in self.arguments:
            return self.arguments[name]
        found = self.described.parameters.get(name)
        return None if found is None or found.default is _EMPTY else found.default


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
    """Checks the classes a config names, within the rules above.

    Args:
        root: the project's folder.
        trust: further packages that may be named.
        checker: takes the faults.
        readers: how classes are known: each is asked where those before it find a class unclear.
    Attributes:
        targets: config path -> the class named there, whether or not its arguments were right.
    """

    def __init__(self, root: Path, trust: Iterable[str], checker: Checker, readers: Sequence[Reader] = ()):
        self.root = root.resolve()
        self.trusted = (*TRUSTED, *trust)
        self.checker = checker
        self.readers = readers or (FromSource(root), FromImport(root))
        self.targets: dict[str, Described] = {}
        self._said: set[Missing] = set()

    def load(self, node: Node | None, base: str, path: str, home: Node) -> ClassConfig | None:
        """Checks a block {class: IMPORT.PATH, argument: value, ...}; None after a fault.

        Args:
            node: the block; None where the config has none.
            base: what the class must derive from, as MODULE of described.py.
            path: of the block in the config, such as "module".
            home: where to report a missing block.
        """
        if node is None or node.value is None:
            text = f"{path} is missing. Name a {_leaf(base)}: '{path}: {{class: my_project.{path}.NAME}}'."
            return self._fault(home, text)
        if not isinstance(node.value, dict):
            return self._fault(node, f"{path} must be a mapping with the key class, got {show(node)}.")
        named = self._named(node, base, path)
        if named is None:
            return None
        items = Node({key: item for key, item in node.value.items() if key != "class"}, node.origin)
        missing = self._missing(named, path)
        for reader in self.readers:
            faults = len(self.checker.faults)
            try:
                return self._known(named, items, base, path, reader)
            except UnclearError:
                del self.checker.faults[faults:]
            if missing:  # it cannot be imported to know more
                return None
        raise AssertionError("the last reader is never unclear")

    def _missing(self, named: Node, path: str) -> bool:
        """Whether packages are missing that the class's module needs; says so."""
        module_path = named.value.rpartition(".")[0]
        if not self._allowed(module_path.partition(".")[0]):
            return False
        missing = [
            item for reader in self.readers if isinstance(reader, FromSource) for item in reader.missing(module_path)
        ]
        if missing:
            self._fault(named, f"{path}.class: {module_path} needs what is not installed: {told(missing)}")
        return bool(missing)

    def _known(self, named: Node, items: Node, base: str, path: str, reader: Reader) -> ClassConfig | None:
        target = self._target(named, base, f"{path}.class", reader)
        if target is None:
            return None
        self.targets[path] = target
        return self._arguments(items, target, named.value, path)

    def _named(self, node: Node, base: str, path: str) -> Node | None:
        named = node.value.get("class")
        if named is None:
            other = next(
                (key for key in ("_target_", "class_path", "target", "type", "name") if key in node.value), None
            )
            mend = f" Write class instead of {other}." if other else ""
            mend += " The arguments stand beside it, without init_args." if "init_args" in node.value else ""
            return self._fault(node, f"{path}.class is missing: the import path of a {_leaf(base)}.{mend}")
        if named.value is BROKEN:
            return None
        if not isinstance(named.value, str) or "." not in named.value:
            mend = f" Write {named.value.replace(':', '.')}." if ":" in str(named.value) else ""
            text = f"{path}.class must be an import path such as pkg.NAME, got {show(named)}.{mend}"
            return self._fault(named, text)
        return named

    def _fault(self, node: Node, text: str) -> None:
        self.checker.fault(node, text)

    def _target(self, node: Node, base: str, path: str, reader: Reader) -> Described | None:
        module_path, _, name = node.value.rpartition(".")
        top = module_path.partition(".")[0]
        if not self._allowed(top):
            if top not in sys.modules and _spec(top) is None:
                near = {info.name for info in pkgutil.iter_modules([str(self.root)])}
                return self._fault(node, f"{path}: there is no module {top}.{suggest(top, near, many=0)}")
            return self._fault(node, f"{path}: {node.value} is outside the project {self.root}. {self._mend(top)}")
        try:
            target = reader.describe(module_path, name)
        except NoModuleError as error:
            near = suggest(error.missing.rpartition(".")[2], error.near, many=0)
            return self._fault(node, f"{path}: there is no module {error.missing}.{near}")
        except BrokenModuleError as error:
            return self._fault(node, f"{path}: {module_path} cannot be imported: {error}")
        except NoNameError as error:
            known = [key for key, item in error.classes.items() if item.derives_from(base)]
            text = f"{path}: {module_path} has no class {name}.{suggest(name, known, what='Its classes')}"
            return self._fault(node, text)
        if not target.derives_from(base):
            same = any(_leaf(item) == _leaf(base) for item in target.lineage)
            mend = f" It derives from another one: import {_leaf(base)} from lightning.pytorch." if same else ""
            kind = f"is not a {_leaf(base)}" if target.lineage else "is not a class"
            return self._fault(node, f"{path}: {node.value} {kind}.{mend}")
        home = target.name.partition(".")[0]
        if not self._allowed(home):
            text = f"{path}: {node.value} is {target.name}, from outside the project."
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
        spec = _spec(top)
        return spec is not None and self._inside([spec.origin, *(spec.submodule_search_locations or [])])

    def _inside(self, files: Iterable[str | None]) -> bool:
        """Whether one of the files lies in the project, and not in a virtual environment inside it."""
        for file in files:
            if file and os.path.isabs(file) and Path(file).resolve().is_relative_to(self.root):
                parts = Path(file).resolve().relative_to(self.root).parts
                return "site-packages" not in parts and "dist-packages" not in parts
        return False

    def _arguments(self, node: Node, target: Described, class_path: str, path: str) -> ClassConfig | None:
        known = target.parameters
        before = len(self.checker.faults)
        values = {}
        for key, item in node.value.items():
            if key in known:
                values[key] = self.checker.convert(item, _readable(known[key].annotation), f"{path}.{key}")
            else:
                self.checker.unknown(path, key, item, known, f"a parameter of {class_path}")
        for name, parameter in known.items():
            if name in values:
                continue
            if parameter.default is _EMPTY:
                wanted = words(_readable(parameter.annotation))
                self._fault(node, f"{path}.{name} is missing: {class_path} needs it. It is {wanted}.")
            elif name == "batch_size":
                _readable(parameter.default)
        self._constraints(node, target, values, class_path, path)
        if len(self.checker.faults) > before or any(value is BAD for value in values.values()):
            return None
        return ClassConfig(class_path=class_path, described=target, arguments=MappingProxyType(values))

    def _constraints(self, node: Node, target: Described, given: Mapping[str, Any], class_path: str, path: str) -> None:
        """Compares arguments as the class says; those with faults of their own are left out."""
        defaults = {name: item.default for name, item in target.parameters.items() if item.default is not _EMPTY}
        values = {name: value for name, value in {**defaults, **given}.items() if value is not BAD}
        found = []
        for text in target.constraints:
            try:
                found.append(Constraint(text, target.parameters))
            except ConstraintError as error:
                where = f"{class_path} has the constraint {text!r}"
                self._fault(node, f"{path}.class: {where}: {error}. Change it in the class.")
        known = [item for item in found if values.keys() >= {*item.names}]
        for item in known:
            for name in item.names:
                _readable(values[name])
            if item.holds(values):
                continue
            name = next((name for name in reversed(item.names) if name in given), item.names[-1])
            others = " and ".join(f"{other} is {values[other]}" for other in item.names if other != name)
            told = f"{path}.{name} is {values[name]}, but {class_path} needs {item.text}"
            told += f", and {others}." if others else "."
            self._fault(node.value.get(name, node), told + _instead(item, name, values, known))


def _instead(failed: Constraint, name: str, values: Mapping[str, Any], known: Sequence[Constraint]) -> str:
    """Whole numbers near those of a config with which a constraint would hold."""
    choices = []
    for other in (name, *(item for item in failed.names if item != name)):
        if type(values[other]) is int:
            beside = [item for item in known if other in item.names and item is not failed]
            numbers = " or ".join(map(str, failed.nearest(other, values, beside)))
            choices += [f"{other} {numbers}"] if numbers else []
    return f" Write {', or '.join(choices)}." if choices else ""


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None


def _readable(value: Any) -> Any:
    if value is UNREADABLE:
        raise UnclearError
    return value


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _files(module: ModuleType) -> list[str | None]:
    return [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
