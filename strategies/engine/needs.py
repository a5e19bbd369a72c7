"""What a rank can need of the others, as one integer each: a kind of collective on one unit."""

from enum import IntEnum
from typing import Protocol


class Need(IntEnum):
    """Kinds of needs. A reduction sends single contributions in their own dtype, or sums in that of sums."""

    GATHER = 0
    REDUCE = 1
    GATHER_HOME = 2
    REDUCE_SUMS = 3

    def of(self, unit: int) -> int:
        """Returns the code of this need of the unit with that index."""
        return _KINDS * unit + self


_BY_NUMBER = tuple(Need)
_KINDS = len(_BY_NUMBER)
_REDUCTIONS = (Need.REDUCE, Need.REDUCE_SUMS)


def unit_of(code: int) -> int:
    """Returns the index of the unit that a code is about."""
    return code // _KINDS


def kind_of(code: int) -> Need:
    """Returns what is needed of that unit."""
    return _BY_NUMBER[code % _KINDS]


def is_gather(code: int) -> bool:
    """Whether it can be started before it is needed: shards do not change within a step."""
    return code % _KINDS == Need.GATHER


def is_reduction(code: int) -> bool:
    """Whether nobody waits for its result before the next meeting point."""
    return code % _KINDS in _REDUCTIONS


class Server(Protocol):
    """Runs the collectives that needs stand for; every rank starts them in one order."""

    def start(self, code: int) -> None:
        """Starts the collective."""

    def finish(self, code: int, own: bool) -> None:
        """Returns when it is done. Args: own: this rank needs it; else it only takes part."""

    def can_prefetch(self, code: int) -> bool:
        """Whether the unit of a gather is released, and not on its way, on this rank."""

    def size(self, code: int) -> int:
        """Bytes of the unit of a gather."""
