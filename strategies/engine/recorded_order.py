"""The order in which passes over a model need collectives, so that the next pass need not ask for each.

[Note: recorded order] Most passes (a forward, a backward) need the same collectives as the one before. Each rank keeps
what it needed itself in a pass. A pass that ran twice alike is expected to run so again: with its first need each rank
sends the hash of what it expects, and where all agree that list is served without asking further. So a collective can
be started before it is needed: gathers are moved ahead, see `ahead`. A rank whose pass turns out different serves what
it has agreed to (a gather from its shard, a reduction with zeros), and asks again for what it needs beyond.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shardlight.strategies.engine.needs import is_gather

ALIKE = 2
"""How often in a row a pass ran alike before it is expected to do so again."""
KEPT = 64
"""Passes that are remembered."""


@dataclass
class _Seen:
    codes: tuple[int, ...]
    times: int = 1


class RecordedOrder:
    """What the passes of this rank needed, by their kind and by the pass before."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, int], _Seen] = OrderedDict()
        self._own: list[int] = []
        self._kind = ""
        self._before = 0

    def begin(self, kind: str) -> None:
        """Starts a pass; the one before is over."""
        if self._own:
            key, codes = (self._kind, self._before), tuple(self._own)
            seen = self._seen.pop(key, None)
            same = seen is not None and seen.codes == codes
            self._seen[key] = _Seen(codes, seen.times + 1) if seen is not None and same else _Seen(codes)
            if len(self._seen) > KEPT:
                self._seen.popitem(last=False)
            self._before = digest(codes)
            self._own = []
        self._kind = kind

    def note(self, code: int) -> None:
        """Enters a need of this rank."""
        self._own.append(code)

    def expected(self) -> tuple[int, ...]:
        """Returns the codes of the whole pass if only its first need is known, and the pass is expected; else none."""
        seen = self._seen.get((self._kind, self._before)) if len(self._own) == 1 else None
        if seen is None or seen.times < ALIKE or seen.codes[0] != self._own[0]:
            return ()
        return seen.codes


def digest(codes: Sequence[int]) -> int:
    """Returns a positive 56-bit hash of a list of codes; 0 of an empty one."""
    return int.from_bytes(blake2b(array("q", codes), digest_size=7).digest()) | 1 if codes else 0


def ahead(codes: Sequence[int]) -> list[int]:
    """Returns the order in which the codes are started: each gather before what stands between it and the last one.

    Example: in backward, gather 2, reduce 3, gather 1, reduce 2 becomes gather 2, gather 1, reduce 3, reduce 2: the
    weights of unit 1 are on their way while unit 2 computes.
    """
    order: list[int] = []
    held: list[int] = []
    for code in codes:
        if is_gather(code):
            order += [code, *held]
            held = []
        else:
            held.append(code)
    return order + held
