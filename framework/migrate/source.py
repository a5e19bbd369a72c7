"""Reads what is to be migrated: JSON with comments or YAML, as a tree that knows the line of each key."""

import json
import os
from typing import Any, Literal, NoReturn

from shardlight.framework.faults import ConfigError, Fault, Origin
from shardlight.framework.source import Node, read_text, read_yaml

Kind = Literal["deepspeed", "accelerate"]
MAX_DEPTH = 50
"""Deeper than any config."""


def read_source(path: str | os.PathLike[str]) -> Node:
    """Reads a JSON or YAML file whose top level is a mapping.

    JSON may have //, # and /* */ comments and a comma before a closing bracket, as DeepSpeed's reader takes them.

    Raises: ConfigError: with file and line, where it cannot be read.
    """
    place, text = read_text(path)
    if place.lower().endswith(".json") or text.lstrip()[:1] == "{":
        return _Json(text, place).read()
    tree, faults = read_yaml(path)
    if faults:
        raise ConfigError(faults)
    return tree


class _Json:
    """One JSON text being read; `at` is the offset of what comes next."""

    def __init__(self, text: str, place: str):
        self.text = text
        self.place = place
        self.at = 0
        self.decoder = json.JSONDecoder()

    def origin(self, at: int) -> Origin:
        return Origin(self.place, self.text.count("\n", 0, at) + 1)

    def fail(self, at: int, text: str) -> NoReturn:
        raise ConfigError([Fault(self.origin(at), text)])

    def read(self) -> Node:
        self._skip()
        start = self.at
        root = self._value(0)
        self._skip()
        if self.at < len(self.text):
            self.fail(self.at, "not valid JSON: there is something behind the closing bracket.")
        if not isinstance(root, dict):
            self.fail(start, 'the top level must be a mapping of keys, such as {"train_batch_size": 32}.')
        return Node(root, self.origin(start))

    def _skip(self) -> None:
        """Goes past blanks and comments."""
        while self.at < len(self.text):
            if self.text[self.at].isspace():
                self.at += 1
            elif self.text.startswith(("//", "#"), self.at):
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.text.startswith("/*", self.at):
                end = self.text.find("*/", self.at + 2)
                if end < 0:
                    self.fail(self.at, "not valid JSON: the comment /* has no end.")
                self.at = end + 2
            else:
                return

    def _value(self, depth: int) -> Any:
        char = self.text[self.at : self.at + 1]
        if depth > MAX_DEPTH:
            self.fail(self.at, f"more than {MAX_DEPTH} levels: not a config.")
        if char == "{":
            return self._mapping(depth)
        if char == "[":
            return self._list(depth)
        return self._scalar()

    def _scalar(self) -> Any:
        try:
            value, self.at = self.decoder.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            self.fail(error.pos, f"not valid JSON: {error.msg[0].lower()}{error.msg[1:]}.")
        except ValueError as error:
            self.fail(self.at, f"not valid JSON: {error}.")
        return value

    def _more(self, close: str) -> bool:
        """Whether another item follows: goes past the comma, or past `close`."""
        self._skip()
        comma = self.text.startswith(",", self.at)
        if comma:
            self.at += 1
            self._skip()
        if self.text.startswith(close, self.at):
            self.at += 1
            return False
        if not comma:
            end = self.at >= len(self.text)
            self.fail(self.at, f"not valid JSON: {'the file ends' if end else 'a comma is missing'} before this.")
        return True

    def _open(self, close: str) -> bool:
        """Goes past an opening bracket; whether there is anything inside."""
        self.at += 1
        self._skip()
        if not self.text.startswith(close, self.at):
            return True
        self.at += 1
        return False

    def _list(self, depth: int) -> list[Node]:
        items: list[Node] = []
        more = self._open("]")
        while more:
            origin = self.origin(self.at)
            items.append(Node(self._value(depth + 1), origin))
            more = self._more("]")
        return items

    def _mapping(self, depth: int) -> dict[str, Node]:
        items: dict[str, Node] = {}
        more = self._open("}")
        while more:
            start = self.at
            if not self.text.startswith('"', start):
                end = start >= len(self.text)
                self.fail(
                    start, f"not valid JSON: {'the file ends here' if end else 'a key must be in double quotes'}."
                )
            name = self._scalar()
            self._skip()
            if not self.text.startswith(":", self.at):
                self.fail(self.at, f"not valid JSON: a colon is missing after {json.dumps(name)}.")
            self.at += 1
            self._skip()
            value = Node(self._value(depth + 1), self.origin(start))
            if name in items:
                self.fail(start, f"{json.dumps(name)} is already set at {items[name].origin}. Remove one of the two.")
            items[name] = value
            more = self._more("}")
        return items
