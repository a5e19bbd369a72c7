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

    Example: suggest("adamm", ["adam", "adamw", "sgd"]) == " Did you mean 'adamw'?"
    """
    names = sorted(known)
    near = nearest(word, names)
    if near:
        return f" Did you mean '{near}'?"
    return f" {what}: {', '.join(names)}." if 0 < len(names) <= many else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that was probably meant."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=5)
    near = near or [name for name in names if len(word) > 1 and (name.startswith(word) or word.startswith(f"{name}_"))]
    # Of what is equally far, what is as long: a wrong letter is likelier than one too many.
    return min(near, key=lambda name: (_distance(word, name), abs(len(name) - len(word))), default=None)


def _distance(one: str, other: str) -> int:
    """How many letters have to be put in, taken out, exchanged or swapped with their neighbour."""
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b)))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]
