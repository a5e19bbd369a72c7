"""A migration in the making: the keys of the source, our values so far, and the lines of the report."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from shardlight.framework.check import BAD, Checker
from shardlight.framework.faults import Fault
from shardlight.framework.source import FILL_IN, Node

Group = Literal["maps", "differs", "none", "unknown"]
GROUPS: dict[Group, str] = {
    "maps": "Maps",
    "differs": "Another default or meaning here: check",
    "none": "No equivalent",
    "unknown": "Unknown: not a key of the source's own tool",
}
"""Heading of each group of the report."""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the source, with its dotted name and its place in the order of all."""

    name: str
    node: Node
    order: int

    @property
    def value(self) -> Any:
        """Plain value."""
        return self.node.plain()

    @property
    def auto(self) -> bool:
        """Whether transformers fills the value in."""
        return self.node.value == "auto"

    @property
    def leaf(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        """For a comment: name, file and line."""
        place, line = Path(self.node.origin.place).name, self.node.origin.line
        return f"{self.name} ({place}{'' if line is None else f':{line}'})"


@dataclasses.dataclass(frozen=True)
class Line:
    """What became of one key.

    Attributes:
        key: dotted name; with " (not set)" for a default that matters.
        at: file and line.
        value: in the source.
        group: see GROUPS.
        to: what is written in our config, "trainer.devices: 2"; empty for nothing.
        text: what to know.
        order: of the source.
    """

    key: str
    at: str
    value: Any
    group: Group
    to: str
    text: str
    order: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """A value of our config, with its comment; `hint`: only proposed, as a comment."""

    value: Any
    why: str
    hint: bool = False


class Draft:
    """Collects everything about one migration.

    Attributes:
        faults: of the source; nothing is written where there is one.
        lines: of the report, one per key of the source.
        entries: dotted path in our config -> value and comment.
        facts: name of a fact -> the keys that state it.
        count: keys met so far.
        chosen: what `one` chose.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.lines: list[Line] = []
        self.entries: dict[str, Entry] = {}
        self.facts: dict[str, list[Key]] = {}
        self.count = 0
        self.chosen: dict[str, Key | None] = {}

    def fault(self, key: Key, text: str) -> Any:
        """Adds a fault at a key; returns BAD."""
        self.faults.append(Fault(key.node.origin, text))
        return BAD

    def line(self, key: Key, group: Group, text: str, to: str = "") -> None:
        """Adds the line of a key."""
        self.lines.append(Line(key.name, str(key.node.origin), key.value, group, self._shown(to), text, key.order))

    def unset(self, name: str, text: str, to: str = "", near: Key | None = None) -> None:
        """Adds a line on a key that the source does not set, and whose default is another one here."""
        order = self.count if near is None else near.order
        at = "" if near is None else near.node.origin.place
        self.lines.append(Line(f"{name} (not set)", at, None, "differs", self._shown(to), text, order))

    def _shown(self, to: str) -> str:
        entry = self.entries.get(to)
        if entry is None or entry.hint:
            return ""
        value = entry.value
        return f"{to}: {str(value).lower() if isinstance(value, bool) else value}"

    def put(self, path: str, value: Any, why: object) -> None:
        """Writes a value; an earlier one at the path stays."""
        self.entries.setdefault(path, Entry(value, str(why)))

    def leave(self, path: str, why: object) -> None:
        """Leaves a value to the user."""
        self.put(path, FILL_IN, why)

    def hint(self, path: str, value: Any, why: object) -> None:
        """Proposes a value as a comment."""
        self.entries.setdefault(path, Entry(value, str(why), hint=True))

    def number(self, key: Key, kind: Any, least: float | None = None) -> Any:
        """The value of a key as `kind`, or BAD after a fault."""
        value = Checker(self.faults).convert(key.node, kind, key.name)
        if value is not BAD and least is not None and value < least:
            return self.fault(key, f"{key.name} is {value}; it must be at least {least:g}.")
        return value

    def maps(self, key: Key, path: str, value: Any, text: str = "") -> None:
        """Writes the value of a key under our name, with its line; nothing after a fault."""
        if value is not BAD:
            self.put(path, value, key)
            self.line(key, "maps", text, path)

    def one(self, fact: str) -> Key | None:
        """The key that states a fact; of several the first that is not "auto".

        Two that contradict each other are a fault; what is said twice gets its line here.
        """
        if fact in self.chosen:
            return self.chosen[fact]
        keys = self.facts.get(fact, [])
        stated = [key for key in keys if not key.auto and key.value is not None]
        chosen = (stated or keys or [None])[0]
        self.chosen[fact] = chosen
        for key in keys:
            if key is chosen:
                continue
            if key in stated and chosen is not None and not _same(key.value, chosen.value):
                other = f"{chosen.name} is {chosen.value} ({chosen.node.origin})"
                self.fault(key, f"{key.name} is {key.value}, but {other}. Make them agree.")
            else:
                self.line(key, "maps", f"as {chosen}")
        return chosen

    def filled_in(self) -> Iterator[str]:
        """Paths of what is left to the user."""
        return (path for path, entry in self.entries.items() if entry.value == FILL_IN and not entry.hint)


def _same(one: Any, other: Any) -> bool:
    return str(one).lower() == str(other).lower() or one == other
