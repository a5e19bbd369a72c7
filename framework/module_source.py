"""Modules known from their source: what they bind, and what a name in them stands for. Nothing of them is run."""

import ast
import importlib.util
import os
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from shardlight.framework.described import BrokenModuleError, NoModuleError, UnclearError

OPAQUE = ("torch", "numpy", "typing", "typing_extensions", "collections", "pathlib", "abc")
"""Packages that are not read: what matters of them is known by name, and none has a class of Lightning."""
_OWN = __package__.partition(".")[0]
"""This package: it is no part of a project, also where the project's folder is its repository."""
_DYNAMIC = {"globals", "vars", "locals", "exec", "setattr", "__getattr__"}
"""A module that uses one of these may have names that its source does not show."""


@dataclass
class Module:
    """A module's source, and what it binds at its top level."""

    name: str
    places: tuple[str, ...] = ()
    """Folders of its submodules; empty: it is no package."""
    package: str = ""
    """What relative imports start from."""
    bound: dict[str, list[ast.stmt]] = field(default_factory=dict)
    stars: list[ast.ImportFrom] = field(default_factory=list)
    dynamic: bool = False
    """Whether it may have other names too."""
    opaque: bool = False
    """Whether it is one of OPAQUE."""
    tree: ast.Module | None = None
    path: Path | None = None
    """Of its file, where it has one."""


@dataclass(frozen=True)
class Found:
    """What a name stands for: a module, or a statement of a module that binds it."""

    module: Module
    name: str = ""
    statement: ast.stmt | None = None
    """None: the module itself, or something in an opaque one."""

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.module.name}.{self.name}" if self.name else self.module.name


class Sources:
    """The modules that were read.

    Args:
        root: the project's folder, where modules are looked for first.
        ends: dotted names that are not followed into their module.
    """

    def __init__(self, root: Path, ends: Sequence[str] = ()) -> None:
        self.root = root.resolve()
        self.ends = frozenset(ends)
        self._read: dict[str, Module] = {}

    def module(self, name: str) -> Module:
        """Finds and parses a module. Raises: NoModuleError, BrokenModuleError, UnclearError: it has no source."""
        if name.partition(".")[0] in OPAQUE:
            return Module(name, opaque=True)
        if name not in self._read:
            self._read[name] = self._find(name)
        return self._read[name]

    def _find(self, name: str) -> Module:
        parent, _, leaf = name.rpartition(".")
        places = self.module(parent).places if parent else (str(self.root),)
        folders = [Path(place, leaf) for place in places]
        for folder in folders:
            if (folder / "__init__.py").is_file():
                return self._parse(name, folder / "__init__.py", (str(folder),))
            if folder.with_name(f"{leaf}.py").is_file():
                return self._parse(name, folder.with_name(f"{leaf}.py"))
        spaces = [str(folder) for folder in folders if folder.is_dir()]
        if not parent:
            spec = find_spec(leaf)
            if spec is not None and spec.origin and spec.origin.endswith(".py"):
                return self._parse(name, Path(spec.origin), tuple(spec.submodule_search_locations or ()))
            if spec is not None and spec.origin:
                raise UnclearError
            if spec is not None:
                spaces += [place for place in spec.submodule_search_locations or () if os.path.isdir(place)]
        elif any(folder.with_name(leaf + suffix).is_file() for folder in folders for suffix in EXTENSION_SUFFIXES):
            raise UnclearError
        if spaces:
            return Module(name, tuple(spaces), name)
        raise NoModuleError(name, {info.name for info in pkgutil.iter_modules(places)})

    def _parse(self, name: str, path: Path, places: tuple[str, ...] = ()) -> Module:
        try:
            tree = ast.parse(path.read_bytes(), path)
        except SyntaxError as error:
            place = f"{os.path.relpath(path, self.root)}:{error.lineno}"
            raise BrokenModuleError(f"SyntaxError: {error.msg} ({place}).") from None
        except (ValueError, OSError):
            raise UnclearError from None
        module = Module(name, places, name if places else name.rpartition(".")[0], tree=tree, path=path)
        for statement in top_level(tree.body):
            for bound in _names(statement):
                module.bound.setdefault(bound, []).append(statement)
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                module.stars.append(statement)
        module.dynamic = any(isinstance(n, ast.Name) and n.id in _DYNAMIC for n in ast.walk(tree))
        module.dynamic |= not _DYNAMIC.isdisjoint(module.bound)
        return module

    def in_project(self, name: str) -> bool:
        """Whether there is a module of this name in the project's folder, and none of this package."""
        if name.partition(".")[0] == _OWN:
            return False
        try:
            path = self.module(name).path
        except (NoModuleError, UnclearError, BrokenModuleError):
            return False
        return path is not None and path.resolve().is_relative_to(self.root)

    def is_there(self, top: str) -> bool:
        """Whether a module of this name can be imported, as far as its place tells."""
        if (self.root / f"{top}.py").is_file() or (self.root / top).is_dir():
            return True
        return find_spec(top) is not None

    def reachable(self, name: str) -> Iterator[tuple[Module, ast.Module]]:
        """A module and all of the project that it imports, wherever in its source, each once."""
        waiting, seen = [name], set()
        while waiting:
            module = self.module(waiting.pop())
            if module.name in seen or module.tree is None:
                continue
            seen.add(module.name)
            yield module, module.tree
            targets = [target for node in ast.walk(module.tree) for target in self.targets(module, node)]
            waiting += filter(self.in_project, targets)

    def targets(self, module: Module, node: ast.AST) -> list[str]:
        """The modules that a statement imports; nothing where it is no import."""
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if not isinstance(node, ast.ImportFrom):
            return []
        home = self.absolute(module, node)
        inner = [f"{home}.{alias.name}" for alias in node.names]
        return [home, *filter(self.in_project, inner)]

    # --- names

    def resolve(self, module: Module, name: str, seen: frozenset[str] = frozenset()) -> Found | None:
        """Follows a name of a module through imports and aliases to what binds it; None: there is no such name.

        Raises: UnclearError.
        """
        if module.opaque:
            return Found(module, name)
        path = f"{module.name}.{name}"
        statements = module.bound.get(name, [])
        if path in seen or len(statements) > 1:
            raise UnclearError
        seen |= {path}
        if statements:
            return self._follow(module, name, statements[0], seen)
        for star in module.stars if not name.startswith("_") else ():
            found = self.resolve(self._imported(module, star), name, seen)
            if found is not None:
                return found
        try:
            return Found(self.module(path)) if module.places else self._nothing(module)
        except NoModuleError:
            return self._nothing(module)

    def _nothing(self, module: Module) -> None:
        if module.dynamic:
            raise UnclearError

    def _follow(self, module: Module, name: str, statement: ast.stmt, seen: frozenset[str]) -> Found | None:
        if isinstance(statement, ast.Import):
            (alias,) = [item for item in statement.names if name in (item.asname, item.name.partition(".")[0])][:1]
            return Found(self._known(alias.name if alias.asname else alias.name.partition(".")[0]))
        if isinstance(statement, ast.ImportFrom):
            real = next(item.name for item in statement.names if name == (item.asname or item.name))
            home = self.absolute(module, statement)
            if f"{home}.{real}" in self.ends:
                return Found(Module(home), real, ast.Pass())
            found = self.resolve(self._imported(module, statement), real, seen)
            if found is None:
                raise UnclearError  # importing says what is wrong
            return found
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Name | ast.Attribute):
            return self.dotted(module, value, seen) or Found(module, name, statement)
        return Found(module, name, statement)

    def _imported(self, module: Module, statement: ast.ImportFrom) -> Module:
        return self._known(self.absolute(module, statement))

    def _known(self, name: str) -> Module:
        try:
            return self.module(name)
        except NoModuleError:
            raise UnclearError from None

    def absolute(self, module: Module, statement: ast.ImportFrom) -> str:
        """The module that an import is from, with its dots resolved."""
        if not statement.level:
            return str(statement.module)
        parts = module.package.split(".")
        base = parts[: len(parts) - statement.level + 1]
        return ".".join([*base, *([statement.module] if statement.module else [])])

    def dotted(self, module: Module, node: ast.expr, seen: frozenset[str] = frozenset()) -> Found | None:
        """What `a.b.C` stands for in a module; None: the first name is not bound there (a builtin, say).

        Raises: UnclearError.
        """
        if isinstance(node, ast.Name):
            return self.resolve(module, node.id, seen)
        if not isinstance(node, ast.Attribute):
            raise UnclearError
        found = self.dotted(module, node.value, seen)
        if found is not None and found.module.opaque:
            return Found(found.module, f"{found.name}.{node.attr}" if found.name else node.attr)
        if found is None or found.statement is not None:
            raise UnclearError
        inner = self.resolve(found.module, node.attr, seen)
        if inner is None:
            raise UnclearError
        return inner


def find_spec(top: str) -> importlib.machinery.ModuleSpec | None:
    """Where a top package lies; it is not imported."""
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None


def top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, and those in its ifs, tries and withs."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for part in ("body", "orelse", "finalbody"):
                yield from top_level(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from top_level(handler.body)
        yield statement


def _names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Import):
        yield from dict.fromkeys(alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names if alias.name != "*")
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
