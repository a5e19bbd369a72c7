"""Faults of a configuration: where a value was written, what is wrong with it, and all of them raised at once."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """The place a value came from: a file and line, or "command line", "Python", "default"."""

    place: str
    line: int | None = None

    def __str__(self) -> str:
        return self.place if self.line is None else f"{self.place}:{self.line}"


COMMAND_LINE = Origin("command line")
PYTHON = Origin("Python")
DEFAULT = Origin("default")


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a configuration."""

    origin: Origin
    text: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.text}"


class ConfigError(ValueError):
    """Every fault found in a configuration, one line each, by file and line; the command line comes last.

    Attributes:
        faults: the faults, in the order they are shown.
    """

    def __init__(self, faults: Iterable[Fault]):
        unique = dict.fromkeys(faults)
        self.faults: tuple[Fault, ...] = tuple(
            sorted(unique, key=lambda fault: (fault.origin.line is None, fault.origin.place, fault.origin.line or 0))
        )
        super().__init__("\n".join(map(str, self.faults)))


def suggest(word: str, known: Iterable[str], *, many: int = 24, what: str = "Choose from") -> str:
    """Returns " Did you mean 'x'?", else the known words where they are few, else nothing.

    Example: suggest("adamv", ["adam", "sgd"]) == " Did you mean 'adam'?"
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" {what}: {', '.join(names)}." if 0 < len(names) <= many else ""
