"""YAML and `key=value` text as trees in which every value knows where it was written.

Scalars follow the YAML 1.2 core schema and nothing more: on, off, yes, no and 12:30 are text, 1e-5 is a number,
and a leading zero (010) is a fault, since readers disagree on what it means. Tags, merge keys and duplicate keys
are faults. Nothing in here imports torch.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from shardlight.framework.faults import COMMAND_LINE, PYTHON, ConfigError, Fault, Origin
from shardlight.framework.yaml_faults import explain
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

MAX_NODES = 100_000
"""More values than any config has: a few lines of nested aliases can expand to billions."""

_CONSTANTS = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_CONSTANTS |= {text: True for text in ("true", "True", "TRUE")} | {text: False for text in ("false", "False", "FALSE")}
_INT = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TEXT_ALONE = ("*", "%", "@", "`")
"""What begins no value in YAML."""
_JOINED = re.compile(r"([A-Za-z_][\w.-]*):([^\s:/\\].*)")

BROKEN = object()
"""Stands in a tree for a value whose fault is already reported, so that it is not reported again."""

FILL_IN = "FILL_IN"
"""What a config says where a value is still to be filled in."""


@dataclass(frozen=True)
class Node:
    """A value and the place it was written; containers hold nodes.

    Attributes:
        value: dict[str, Node], list[Node], str, int, float, bool, None or BROKEN.
        origin: for a value in a mapping the line of its key.
    """

    value: Any
    origin: Origin

    def plain(self) -> Any:
        """The value as plain containers, without origins."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return None if self.value is BROKEN else self.value

    def find(self, path: str) -> "Node | None":
        """The node at a dotted path, or None."""
        node: Node | None = self
        for part in path.split("."):
            node = node.value.get(part) if node is not None and isinstance(node.value, dict) else None
        return node


def parse_scalar(text: str) -> str | int | float | bool | None:
    """Reads plain (unquoted) text as a YAML 1.2 scalar.

    Raises: ValueError: an integer with a leading zero.
    Example: parse_scalar("1e-5") == 1e-05, parse_scalar("on") == "on"
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > 1 and digits.startswith("0"):
            mend = f"{digits.lstrip('0') or '0'}, or '{text}' in quotes for text"
            raise ValueError(f"{text} has a leading zero, which some readers take as octal. Write {mend}.")
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return math.nan if text[1:].lower() == "nan" else float(text.replace(".", ""))
    return text


class _Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """Composes nodes with no implicit tags; explicit tags are collected as faults."""

    def __init__(self, text: str):
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self.tags: dict[int, tuple[int, str]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        node = super().compose_node(parent, index)
        if tag is not None and tag != "!":
            self.tags[id(node)] = (event.start_mark.line, tag.replace("tag:yaml.org,2002:", "!!"))
        return node


class _Reading:
    """One text being turned into nodes; collects its faults."""

    def __init__(self, place: str, *, lines: bool):
        self.place = place
        self.lines = lines
        self.faults: list[Fault] = []
        self.count = 0
        self.open: set[int] = set()
        self.tagged: frozenset[int] = frozenset()

    def origin(self, line: int) -> Origin:
        return Origin(self.place, line + 1 if self.lines else None)

    def fault(self, line: int, text: str) -> None:
        self.faults.append(Fault(self.origin(line), text))

    def tree(self, text: str) -> Node:
        try:
            loader = _Loader(text)
            root = loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            line, said = explain(text, error)
            self.fault(line, f"not valid YAML: {said}")
            return Node(BROKEN, self.origin(0))
        except ReaderError as error:
            self.fault(0, f"not valid YAML: character #x{error.character:04x} is not allowed.")
            return Node(BROKEN, self.origin(0))
        self.tagged = frozenset(loader.tags)
        for line, tag in loader.tags.values():
            self.fault(line, f"the tag {tag} is not allowed: a config holds plain values only. Remove it.")
        return Node(None, self.origin(0)) if root is None else self.node(root, root.start_mark.line, "")

    def node(self, node: Any, line: int, path: str) -> Node:
        self.count += 1
        if self.count > MAX_NODES or id(node) in self.open:
            what = "an alias that contains itself" if id(node) in self.open else f"more than {MAX_NODES} values"
            raise ConfigError([*self.faults, Fault(self.origin(line), f"{what}: not a config.")])
        if id(node) in self.tagged:  # its fault is reported
            return Node(BROKEN, self.origin(line))
        if isinstance(node, yaml.ScalarNode):
            return Node(self.scalar(node, path), self.origin(line))
        self.open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            value: Any = [
                self.node(item, item.start_mark.line, f"{path}[{index}]") for index, item in enumerate(node.value)
            ]
        else:
            value = self.mapping(node, path)
        self.open.discard(id(node))
        return Node(value, self.origin(line))

    def mapping(self, node: Any, path: str) -> dict[str, Node]:
        value: dict[str, Node] = {}
        for key, content in node.value:
            item, line = content, key.start_mark.line
            if not isinstance(key, yaml.ScalarNode):
                self.fault(line, "a key must be a name, not a list or mapping.")
                continue
            name = str(key.value)
            if key.style is None and item.value == "" and (joined := _JOINED.fullmatch(name)):
                mend = f"Write '{joined[1]}: {joined[2]}'."
                self.fault(line, f"not valid YAML: {name!r} needs a space behind its ':'. {mend}")
                name, item = joined[1], yaml.ScalarNode(item.tag, joined[2], item.start_mark, item.end_mark)
            if name == "<<" and key.style is None:
                self.fault(line, "the merge key << is not supported. Use 'extends: other.yaml', or write the keys out.")
                continue
            full = f"{path}.{name}" if path else name
            made = self.node(item, line, full)
            if name in value:
                self.fault(line, f"{full} is already set at {value[name].origin}. Remove one of the two.")
                continue
            value[name] = made
        return value

    def scalar(self, node: Any, path: str) -> Any:
        if node.style is not None:
            return node.value
        try:
            return parse_scalar(node.value)
        except ValueError as error:
            self.fault(node.start_mark.line, f"{path}: {error}" if path else str(error))
            return BROKEN


def read_text(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns (path, text) of a file in UTF-8. Raises: ConfigError: it cannot be read."""
    place = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError([Fault(Origin(place), f"not UTF-8 text (byte {error.start}).")]) from None
    except OSError as error:
        raise ConfigError([Fault(Origin(place), f"cannot be read: {error.strerror}.")]) from None
    return place, text


def read_yaml(path: str | os.PathLike[str]) -> tuple[Node, list[Fault]]:
    """Reads a YAML file whose top level is a mapping.

    Returns: the tree, and the faults of single values and keys, which the rest of the tree can do without.
    Raises: ConfigError: the file cannot be read, or is no YAML at all.
    """
    place, text = read_text(path)
    reading = _Reading(place, lines=True)
    root = reading.tree(text)
    if root.value is BROKEN:
        raise ConfigError(reading.faults)
    if root.value is None:
        root = Node({}, root.origin)
    if not isinstance(root.value, dict):
        reading.fault(0, "the top level must be a mapping of keys, such as 'trainer: {...}'.")
        raise ConfigError(reading.faults)
    return root, reading.faults


@dataclass(frozen=True)
class Override:
    """One `key.path=value` of the command line."""

    parts: tuple[str, ...]
    node: Node

    @property
    def path(self) -> str:
        """The dotted path."""
        return ".".join(self.parts)


def parse_override(text: str) -> tuple[Override | None, list[Fault]]:
    """Reads `key.path=value`; the value is YAML of the same strict subset, in flow style.

    A leading + or ~, known from other tools, is a fault, but the key is still read so that it is checked as well.
    """
    key, equals, value = text.partition("=")
    faults = []
    if not equals:
        return None, [Fault(COMMAND_LINE, f"{text} is not key.path=value. Write {text}=VALUE.")]
    if key[:1] in ("+", "~"):
        mend = f"Write {key.lstrip('+~')}={value}."
        faults.append(Fault(COMMAND_LINE, f"{key} starts with '{key[0]}', which overrides here do not have. {mend}"))
        key = key.lstrip("+~")
    parts = tuple(key.split("."))
    if not all(parts) or key != key.strip():
        return None, [
            *faults,
            Fault(COMMAND_LINE, f"'{key}' is not a dotted key. Write key.path=value, without spaces."),
        ]
    reading = _Reading(COMMAND_LINE.place, lines=False)
    # *.txt: nothing else could begin so, and of the quotes that a file needs a shell leaves none.
    node = Node(value, reading.origin(0)) if value[:1] in _TEXT_ALONE else reading.tree(value)
    faults += [Fault(fault.origin, f"{key}: {fault.text}") for fault in reading.faults]
    return Override(parts, node), faults


def from_python(values: Mapping[str, Any]) -> Node:
    """Makes a tree of plain Python containers; tuples become lists, paths text.

    Raises: ConfigError: a value is none of mapping, list, tuple, str, int, float, bool, None, path.
    """
    faults: list[Fault] = []

    def make(value: Any, path: str) -> Node:
        if isinstance(value, Mapping):
            items = {str(key): make(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
            return Node(items, PYTHON)
        if isinstance(value, list | tuple):
            return Node([make(item, f"{path}[{index}]") for index, item in enumerate(value)], PYTHON)
        if isinstance(value, os.PathLike):
            return Node(os.fspath(value), PYTHON)
        if value is not None and not isinstance(value, str | int | float | bool):
            faults.append(Fault(PYTHON, f"{path} is a {type(value).__name__}; a config holds plain values only."))
        return Node(value, PYTHON)

    root = make(values, "")
    if faults:
        raise ConfigError(faults)
    return root
