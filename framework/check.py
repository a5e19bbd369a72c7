"""Values of a config tree checked against type annotations, and frozen dataclasses built from them.

One rule for a file, the command line and Python: a float field takes 1e-5 and "1e-5", an int field takes 1e4 as
10000 and never 1.5, true and false are for bool fields only, and a number is not text.
"""

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from shardlight.framework.constraints import Exists
from shardlight.framework.faults import DEFAULT, Fault, nearest, suggest
from shardlight.framework.source import BROKEN, Node, parse_scalar

BAD = object()
"""What a conversion returns when it reported a fault."""

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
_SWITCHES = {"on": "true", "yes": "true", "y": "true", "off": "false", "no": "false", "n": "false"}

_SAME = {"gpu": "cuda"}
"""What other tools call a choice."""

Elsewhere = Callable[[str, str, Node], str | None]
"""(section, key, node) -> the fault of a key that is known in another section, or None."""


class Checker:
    """Converts nodes to what annotations ask for, and collects every fault on the way.

    Args:
        faults: the list that faults are added to.
        elsewhere: looks a key up that its section does not know; see `Elsewhere`.
        root: where relative paths start that have to be there: the project's folder.
    """

    def __init__(
        self,
        faults: list[Fault],
        elsewhere: Elsewhere = lambda section, key, node: None,
        root: Path = Path(),
    ):
        self.faults = faults
        self.elsewhere = elsewhere
        self.root = root

    def fault(self, node: Node, text: str) -> Any:
        """Adds a fault at the node; returns BAD."""
        self.faults.append(Fault(node.origin, text))
        return BAD

    def unknown(self, section: str, key: str, node: Node, known: Iterable[str], what: str) -> None:
        """Reports a key that its section does not have; `what` is such as "a key of trainer"."""
        path = f"{section}.{key}" if section else key
        text = self.elsewhere(section, key, node) or f"{path} is not {what}.{suggest(key, known)}"
        self.fault(node, text)

    def section(self, node: Node | None, cls: type, path: str, what: str | None = None) -> Any:
        """Builds the frozen dataclass `cls` from a mapping; null or nothing stands for its defaults."""
        if node is None or node.value is None:
            node = Node({}, DEFAULT if node is None else node.origin)
        if not isinstance(node.value, dict):
            mend = " Remove the dashes." if isinstance(node.value, list) else ""
            if isinstance(node.value, str) and "name" in {field.name for field in dataclasses.fields(cls)}:
                mend = f" Write {{name: {node.value}, ...}}."
            return self.fault(node, f"{path} must be a mapping of keys, got {show(node)}.{mend}")
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        hints = typing.get_type_hints(cls)
        before = len(self.faults)
        values: dict[str, Any] = {}
        for key, item in node.value.items():
            if key not in fields:
                self.unknown(path, key, item, fields, what or f"a key of {path}")
            else:
                values[key] = self.convert(item, hints[key], f"{path}.{key}" if path else key)
        for name, field in fields.items():
            unset = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if unset and name not in values:
                self.fault(node, f"{path}.{name} is missing: it has no default. It is {words(hints[name])}.")
        unsure = {name for name, value in values.items() if value is BAD}
        unsure |= {near for key in node.value.keys() - fields.keys() if (near := nearest(key, fields))}
        if len(self.faults) > before:
            self._rest(node, cls, path, {key: value for key, value in values.items() if value is not BAD}, unsure)
        if len(self.faults) > before or unsure:
            return BAD
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            return self._owner_faults(node, str(error), path, fields)

    def _rest(self, node: Node, cls: type, path: str, values: dict[str, Any], unsure: set[str]) -> None:
        """What a dataclass's own check says of the values that are right by themselves, beside others that are not.

        Only what is a fault whatever the others were meant to be: nothing that speaks of one of them, and nothing
        at all where that is `name`, which decides what the other keys mean.
        """
        if "name" in unsure:
            return
        try:
            cls(**values)
        except ValueError as error:
            fields = [field.name for field in dataclasses.fields(cls)]
            attempt = Checker([], self.elsewhere, self.root)
            attempt._owner_faults(node, str(error), path, fields)
            said = [fault for fault in attempt.faults if unsure.isdisjoint(re.findall(r"\w+", fault.text))]
            self.faults += [fault for fault in said if any(fault.text.startswith(f"{path}.{key} ") for key in values)]
        except TypeError:  # one that it needs is not there
            return

    def _owner_faults(self, node: Node, text: str, path: str, fields: Iterable[str]) -> Any:
        """Faults of a dataclass's own check, "optimizer: lr is -1; ...; eps is ...", each at the line of its field."""
        parts: list[str] = []
        for part in text.removeprefix(f"{path}: ").split("; "):
            if parts and part.split(" ")[0] not in fields:
                parts[-1] += f"; {part}"
            else:
                parts.append(part)
        for part in parts:
            name = part.split(" ")[0]
            where = node.value.get(name, node) if name in fields else node
            self.fault(where, f"{path}.{part}." if name in fields else f"{path}: {part}.")
        return BAD

    def convert(self, node: Node, wanted: Any, path: str) -> Any:
        """Returns the value of the node as the annotation `wanted`, or BAD after a fault."""
        if node.value is BROKEN:
            return BAD
        origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
        if wanted is inspect.Parameter.empty or wanted in (Any, object):
            return node.plain()
        if origin is typing.Annotated:
            value = self.convert(node, arguments[0], path)
            marks = [item for item in arguments[1:] if isinstance(item, Exists)]
            return self._existing(node, value, marks[0], path) if marks and value is not BAD else value
        if origin in (Union, types.UnionType):
            return self._union(node, wanted, arguments, path)
        if origin is Literal:
            return self._literal(node, arguments, path)
        if wanted in _WORDS:
            return self._scalar(node, wanted, path)
        if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
            return self.section(node, wanted, path)
        if wanted is Path:
            text = self._scalar(node, str, path)
            return BAD if text is BAD else Path(text)
        container = origin or wanted
        if container in (list, tuple, Sequence, Iterable):
            return self._items(node, container, arguments, path)
        if container in (dict, Mapping):
            return self._mapping(node, arguments, path)
        return self.fault(node, f"{path} must be {words(wanted)}, which a config cannot give; got {show(node)}.")

    def _existing(self, node: Node, value: Path, wanted: Exists, path: str) -> Any:
        """The path from the project's folder on, where what it means is there."""
        found = self.root / value
        if found.is_file() if wanted.kind == "file" else found.is_dir():
            return found
        if found.exists():
            other = "a folder" if found.is_dir() else "a file"
            return self.fault(node, f"{path}: {found} is {other}, and has to be a {wanted.kind}.")
        near = nearest(found.name, (item.name for item in found.parent.iterdir())) if found.parent.is_dir() else None
        mend = f" Did you mean '{value.with_name(near)}'?" if near else ""
        if not mend and not value.is_absolute():
            mend = f" Relative paths start at {self.root}."
        return self.fault(node, f"{path}: there is no {wanted.kind} {value}.{mend}")

    def _scalar(self, node: Node, wanted: type, path: str) -> Any:
        value = node.value
        if isinstance(value, str) and wanted is not str:
            try:
                value = parse_scalar(value.strip())
            except ValueError as error:
                return self.fault(node, f"{path}: {error}")
        if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isnan(value):
                return float(value)
        elif wanted is int and isinstance(value, float) and value.is_integer():
            return int(value)
        elif type(value) is wanted:
            return value
        return self.fault(node, f"{path} must be {_WORDS[wanted]}, got {show(node)}.{_mend(node, wanted)}")

    def _union(self, node: Node, wanted: Any, arms: tuple[Any, ...], path: str) -> Any:
        if node.value is None and type(None) in arms:
            return None
        arms = tuple(arm for arm in arms if arm is not type(None))
        if type(node.value) in arms and type(node.value) is not float:
            return node.value
        if len(arms) == 1:
            return self.convert(node, arms[0], path)
        scalars = sorted(arms, key=lambda arm: arm is not type(node.value))
        for arm in scalars:
            attempt = Checker([], self.elsewhere, self.root)
            value = attempt.convert(node, arm, path)
            if value is not BAD:
                return value
        return self.fault(node, f"{path} must be {words(wanted)}, got {show(node)}.")

    def _literal(self, node: Node, choices: tuple[Any, ...], path: str) -> Any:
        for choice in choices:
            if type(choice) is type(node.value) and choice == node.value:
                return choice
        word = _SAME.get(node.value) if isinstance(node.value, str) else None
        near = f" Write {word}." if word in choices else suggest(str(node.value), map(str, choices), many=0)
        listed = ", ".join(map(str, choices))
        return self.fault(node, f"{path} must be one of {listed}; got {show(node)}.{near}")

    def _items(self, node: Node, container: Any, arguments: tuple[Any, ...], path: str) -> Any:
        fixed = container is tuple and arguments and arguments[-1] is not Ellipsis
        many = len(arguments) if fixed else 0
        if not isinstance(node.value, list):
            mend = ""
            if isinstance(node.value, str | int | float):
                rest = ", ..." if many > 1 and "," not in str(node.value) else ""
                mend = f" Write [{node.value}{rest}]."
            return self.fault(node, f"{path} must be a list{f' of {many}' if many else ''}, got {show(node)}.{mend}")
        if many and many != len(node.value):
            return self.fault(node, f"{path} must be a list of {many}, got {len(node.value)}.")
        wanted = list(arguments) if fixed else [arguments[0] if arguments else Any] * len(node.value)
        values = [
            self.convert(item, kind, f"{path}[{index}]")
            for index, (item, kind) in enumerate(zip(node.value, wanted, strict=True))
        ]
        if any(value is BAD for value in values):
            return BAD
        return tuple(values) if container is tuple else values

    def _mapping(self, node: Node, arguments: tuple[Any, ...], path: str) -> Any:
        if not isinstance(node.value, dict):
            return self.fault(node, f"{path} must be a mapping of keys, got {show(node)}.")
        kind = arguments[1] if arguments else Any
        values = {key: self.convert(item, kind, f"{path}.{key}") for key, item in node.value.items()}
        return BAD if any(value is BAD for value in values.values()) else values


def show(node: Node) -> str:
    """The value as a person wrote it, with its kind: 'on' (text), 1.5 (number), a list, null."""
    value = node.value
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true or false)"
    return f"{value!r} (text)" if isinstance(value, str) else f"{value} (number)"


def _mend(node: Node, wanted: type) -> str:
    value = node.value
    if wanted is bool and isinstance(value, str) and value.lower() in _SWITCHES:
        return f" Write {_SWITCHES[value.lower()]}."
    if wanted in (int, float) and isinstance(value, str) and re.fullmatch(r"[0-9]{1,3}(_[0-9]{3})+", value):
        return f" Write {value.replace('_', '')}."
    if wanted is str and isinstance(value, bool | int | float):
        text = str(value).lower() if isinstance(value, bool) else value
        return f" Write '{text}' in quotes."
    return ""


def words(wanted: Any) -> str:
    """An annotation in words: "a whole number or null", "one of adam, sgd"."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted in _WORDS:
        return _WORDS[wanted]
    if origin is typing.Annotated:
        marks = [item.kind for item in arguments[1:] if isinstance(item, Exists)]
        return f"the path of a {marks[0]}" if marks else words(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(words(arm) for arm in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if (origin or wanted) in (list, tuple, Sequence, Iterable):
        return "a list"
    if (origin or wanted) in (dict, Mapping):
        return "a mapping"
    if wanted is inspect.Parameter.empty or wanted in (Any, object):
        return "any plain value"
    if isinstance(wanted, type):
        return "text" if wanted is Path else f"a {wanted.__name__}"
    return str(wanted)
