"""Classes known from their source: nothing of the user's code runs, and torch is not imported.

What Python decides only when it runs (a name bound twice, a decorated class, an annotation that is no plain type) is
`UnclearError`, and the class is then imported: what is said here has to be what importing would say.
"""

import ast
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional, Union

from shardlight.framework.constraints import ATTRIBUTE, DirectoryPath, FilePath
from shardlight.framework.described import (
    BASES,
    HOOKS,
    TRAINING_MODULE,
    UNREADABLE,
    BrokenModuleError,
    Described,
    NoModuleError,
    NoNameError,
    UnclearError,
    texts,
)
from shardlight.framework.module_source import Found, Module, Sources, top_level
from shardlight.framework.packages import Missing, missing_packages

EMPTY = inspect.Parameter.empty
_BARE = {"abc.ABC", "typing.Generic", "typing.Protocol", "torch.nn.Module", "torch.utils.data.Dataset", *BASES}
"""Classes whose constructors name no parameter, so that **kwargs may reach them."""
_KEPT_BY = {"override", "final"}
"""Decorators that change neither a class nor a method."""
_BUILTINS = {item.__name__: item for item in (int, float, str, bool, list, tuple, dict, object)}
_TYPES: dict[str, Any] = {
    "typing.Any": Any,
    "typing.Optional": Optional,
    "typing.Union": Union,
    "typing.Literal": Literal,
    "typing.List": list,
    "typing.Dict": dict,
    "typing.Tuple": tuple,
    "pathlib.Path": Path,
    "shardlight.framework.constraints.FilePath": FilePath,
    "shardlight.framework.constraints.DirectoryPath": DirectoryPath,
}
for _kind in (Sequence, Mapping, Iterable):
    _TYPES |= {f"{package}.{_kind.__name__}": _kind for package in ("typing", "collections.abc")}


class FromSource:
    """Knows classes by reading them.

    Args:
        root: the project's folder.
    """

    def __init__(self, root: Path) -> None:
        self.sources = Sources(root, BASES)
        self._missing: dict[str, list[Missing]] = {}

    def describe(self, module_path: str, name: str) -> Described:
        """Reads the module and looks at what has the name.

        Raises: NoModuleError, BrokenModuleError, NoNameError, UnclearError.
        """
        module = self.sources.module(module_path)
        found = self.sources.resolve(module, name)
        if found is None:
            raise NoNameError(dict(self._classes(module)))
        return self._described(found)

    def missing(self, module_path: str) -> list[Missing]:
        """The packages that the module needs and does not find."""
        if module_path not in self._missing:
            try:
                self._missing[module_path] = missing_packages(self.sources, module_path)
            except (NoModuleError, BrokenModuleError, UnclearError):
                self._missing[module_path] = []
        return self._missing[module_path]

    def _described(self, found: Found) -> Described:
        if found.module.opaque:
            return Described(found.path, (found.path,))
        if found.statement is None or isinstance(found.statement, ast.FunctionDef | ast.AsyncFunctionDef):
            return Described(found.path)
        lineage = self._lineage(found)
        own = {name for f in lineage if f.path not in (*BASES, TRAINING_MODULE) for name in _all_bound(f)}
        parameters = dict(self._parameters(lineage))
        constraints = tuple(dict.fromkeys(text for item in lineage for text in _constraints(item)))
        names = tuple(item.path for item in lineage)
        return Described(found.path, names, parameters, frozenset(own & {*HOOKS}), constraints)

    def _classes(self, module: Module) -> Iterator[tuple[str, Described]]:
        for name in module.bound:
            try:
                found = self.sources.resolve(module, name)
                if found is not None and isinstance(found.statement, ast.ClassDef):
                    yield name, self._described(found)
            except UnclearError:
                continue

    # --- a class and its bases

    def _lineage(self, found: Found) -> list[Found]:
        """The class and what it derives from: depth first, and of what comes twice the last."""
        if found.module.opaque or found.path in BASES:
            return [found]
        node = found.statement
        if not isinstance(node, ast.ClassDef) or not _kept(node.decorator_list) or node.keywords:
            raise UnclearError
        lineage = [found]
        for base in node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            inner = self.sources.dotted(found.module, named)
            if inner is not None:
                lineage += self._lineage(inner)
            elif not (isinstance(named, ast.Name) and named.id == "object"):
                raise UnclearError
        last = {item.path: index for index, item in enumerate(lineage)}
        return [item for index, item in enumerate(lineage) if last[item.path] == index]

    def _parameters(self, lineage: list[Found]) -> Iterator[tuple[str, inspect.Parameter]]:
        seen: set[str] = set()
        for found in lineage:
            if found.path in _BARE:
                continue
            if found.module.opaque:
                raise UnclearError
            init = _method(found, "__init__")
            if init is None:
                continue
            if not isinstance(init, ast.FunctionDef) or not _kept(init.decorator_list):
                raise UnclearError
            for parameter in self._own_parameters(found.module, init.args):
                if parameter.name not in seen:
                    yield parameter.name, parameter
                seen.add(parameter.name)
            if init.args.kwarg is None:
                return

    def _own_parameters(self, module: Module, args: ast.arguments) -> Iterator[inspect.Parameter]:
        positional = [*args.posonlyargs, *args.args]
        defaults = [*[None] * (len(positional) - len(args.defaults)), *args.defaults]
        rows = list(zip(positional, defaults, strict=True))[1:]
        rows = [row for row in rows if row[0] not in args.posonlyargs]
        for kind, pairs in (
            (inspect.Parameter.POSITIONAL_OR_KEYWORD, rows),
            (inspect.Parameter.KEYWORD_ONLY, zip(args.kwonlyargs, args.kw_defaults, strict=True)),
        ):
            for arg, default in pairs:
                wanted = EMPTY if arg.annotation is None else self._type_or_unreadable(module, arg.annotation)
                value = EMPTY if default is None else self._value(module, default)
                yield inspect.Parameter(arg.arg, kind, default=value, annotation=wanted)

    def _value(self, module: Module, node: ast.expr) -> Any:
        """The value of a default that is written out, or of a constant of a module."""
        try:
            return ast.literal_eval(node)
        except ValueError:
            pass
        try:
            found = self.sources.dotted(module, node)
        except UnclearError:
            return UNREADABLE
        if (
            found is None
            or not isinstance(found.statement, ast.Assign | ast.AnnAssign)
            or found.statement.value is None
        ):
            return UNREADABLE
        return (
            UNREADABLE
            if isinstance(found.statement.value, ast.Name)
            else self._value(found.module, found.statement.value)
        )

    # --- annotations

    def _type_or_unreadable(self, module: Module, node: ast.expr) -> Any:
        try:
            return self._type(module, node)
        except (UnclearError, SyntaxError, ValueError, TypeError):
            return UNREADABLE

    def _type(self, module: Module, node: ast.expr) -> Any:
        """The type that an annotation means. Raises: UnclearError, or what a wrong annotation raises."""
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return self._type(module, ast.parse(node.value.strip(), mode="eval").body)
            if node.value is None or node.value is Ellipsis:
                return types.NoneType if node.value is None else Ellipsis
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return Union[self._type(module, node.left), self._type(module, node.right)]  # noqa: UP007
        if isinstance(node, ast.Subscript):
            return self._generic(module, node)
        if not isinstance(node, ast.Name | ast.Attribute):
            raise UnclearError
        found = self.sources.dotted(module, node)
        if found is None:
            if isinstance(node, ast.Name) and node.id in _BUILTINS:
                return _BUILTINS[node.id]
            raise UnclearError
        path = found.path.replace("typing_extensions.", "typing.")
        if path in _TYPES:
            return _TYPES[path]
        if isinstance(found.statement, ast.Assign | ast.AnnAssign) and found.statement.value is not None:
            return self._type(found.module, found.statement.value)
        raise UnclearError

    def _generic(self, module: Module, node: ast.Subscript) -> Any:
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        found = self.sources.dotted(module, node.value)
        if found is not None and found.path in ("typing.Annotated", "typing_extensions.Annotated"):
            return self._type(module, inside[0])
        kind = self._type(module, node.value)
        if kind is Literal:
            return Literal[tuple(map(ast.literal_eval, inside))]
        arguments = tuple(self._type(module, item) for item in inside)
        return kind[arguments[0] if len(arguments) == 1 else arguments]


def _kept(decorators: Sequence[ast.expr]) -> bool:
    names = [getattr(node, "id", getattr(node, "attr", "")) for node in decorators]
    return all(name in _KEPT_BY for name in names)


def _all_bound(found: Found) -> set[str]:
    body = found.statement.body if isinstance(found.statement, ast.ClassDef) else []
    return {name for statement in top_level(body) for name in _bound(statement)}


def _method(found: Found, name: str) -> ast.stmt | None:
    """The statement of a class's body that binds the name. Raises: UnclearError: there are several."""
    if not isinstance(found.statement, ast.ClassDef):
        return None
    bound = [statement for statement in top_level(found.statement.body) if name in set(_bound(statement))]
    if len(bound) > 1:
        raise UnclearError
    return bound[0] if bound else None


def _constraints(found: Found) -> tuple[str, ...]:
    """Those that a class has of its own, where they are written out. Raises: UnclearError: they are not."""
    statement = _method(found, ATTRIBUTE)
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return ()
    try:
        return texts(ast.literal_eval(statement.value))
    except ValueError:
        raise UnclearError from None


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
