"""What a class says of its arguments, as plain data: a config is checked by it, and nothing runs for that.

    from shardlight.framework import DirectoryPath, FilePath, TrainingModule

    class LanguageModel(TrainingModule):
        constraints = ("width % heads == 0", "depth >= 1")

        def __init__(self, width: int, heads: int, depth: int, vocabulary: FilePath) -> None: ...

[Note: constraints] A constraint is a comparison of arguments, as Python writes it: numbers, names of arguments,
+ - * / // %, comparisons, `and`, `or`, `not`. It is parsed, and its tree evaluated here; there are no calls, no
attributes and no other names, so it can do nothing. It holds where a number that it compares is null. Classes inherit
those of their bases.
"""

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

ATTRIBUTE = "constraints"
"""Attribute of a class that holds its constraints."""
_FAR = 1024
"""How far from a number others are tried that would do."""


@dataclass(frozen=True)
class Exists:
    """Marks the annotation of a path that has to be there before a run starts."""

    kind: Literal["file", "folder"]


FilePath = Annotated[Path, Exists("file")]
"""Annotation of an argument: a file that is there. In a config a relative path starts at the project's folder."""
DirectoryPath = Annotated[Path, Exists("folder")]
"""Annotation of an argument: a folder that is there. In a config a relative path starts at the project's folder."""

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


class ConstraintError(ValueError):
    """A constraint is none: the text says why."""


class _UndecidedError(Exception):
    """A number that is compared is null."""


class Constraint:
    """One of the constraints of a class.

    Args:
        text: as the class has it, such as "width % heads == 0".
        known: names of the arguments that there are.
    Raises: ConstraintError: it is no comparison of arguments.
    """

    def __init__(self, text: str, known: Iterable[str]) -> None:
        self.text = text
        try:
            self.tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError):
            raise ConstraintError("it is not written as Python writes it") from None
        names = [node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)]
        self.names: tuple[str, ...] = tuple(dict.fromkeys(names))
        strangers = sorted({*self.names} - {*known})
        if strangers:
            raise ConstraintError(f"there is no argument {strangers[0]}")
        if not self.names or not isinstance(self.tree, ast.Compare | ast.BoolOp | ast.UnaryOp):
            raise ConstraintError("it compares no arguments")
        for node in ast.walk(self.tree):
            if not isinstance(node, _ALLOWED):
                raise ConstraintError("it may only have names of arguments, numbers, arithmetic and comparisons")

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it is so for these arguments; each of `names` has to be among them."""
        try:
            return bool(_value(self.tree, values))
        except (_UndecidedError, TypeError):
            return True
        except ArithmeticError:  # a division by zero
            return False

    def nearest(self, name: str, values: Mapping[str, Any], others: Iterable["Constraint"]) -> Iterator[int]:
        """The next lower and the next higher number for an argument with which it would be so, and all of `others`."""
        now = values[name]
        for direction in (-1, 1):
            for far in range(1, _FAR):
                tried = {**values, name: now + direction * far}
                if tried[name] < 1:
                    break
                if all(item.holds(tried) for item in (self, *others)):
                    yield tried[name]
                    break


_ALLOWED = (ast.Name, ast.Load, ast.Constant, ast.Compare, ast.BoolOp, ast.And, ast.Or, ast.BinOp, ast.UnaryOp)
_ALLOWED += (ast.Not, ast.USub, *_ARITHMETIC, *_COMPARED)


def _value(node: ast.AST, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BoolOp):
        wanted = isinstance(node.op, ast.Or)
        return wanted if any(bool(_value(item, values)) is wanted for item in node.values) else not wanted
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand, values)
        return not inner if isinstance(node.op, ast.Not) else -_number(inner)
    if isinstance(node, ast.BinOp):
        return _ARITHMETIC[type(node.op)](_number(_value(node.left, values)), _number(_value(node.right, values)))
    if isinstance(node, ast.Compare):
        return _compare(node, values)
    raise TypeError(f"{ast.dump(node)} is none of {_ALLOWED}")


def _compare(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left = _value(node.left, values)
    for kind, item in zip(node.ops, node.comparators, strict=True):
        right = _value(item, values)
        if not isinstance(kind, ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
            left, right = _number(left), _number(right)
        if not _COMPARED[type(kind)](left, right):
            return False
        left = right
    return True


def _number(value: Any) -> Any:
    if value is None:
        raise _UndecidedError
    if not isinstance(value, int | float):
        raise TypeError
    return value
