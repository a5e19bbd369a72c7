"""How a dimension is divided over the ranks of a tensor group: pure arithmetic, no tensors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Range = tuple[int, int]
"""[start, stop) along a dimension."""

MOST_RANGES = 256
"""Of one rank: with more of them a dimension is not worth dividing."""


@dataclass(frozen=True, eq=False)
class Split:
    """Which ranges of a dimension each rank has, in ascending order; what a rank has lies end to end.

    Ranks may have the same parts (heads of keys that several ranks use). Equal ones are mostly the same object.

    Example: Split.even(5, 2) is 0..2 on rank 0 and 3..4 on rank 1.
    """

    size: int
    """Of the whole dimension."""
    ranges: tuple[tuple[Range, ...], ...]
    """By rank."""

    @staticmethod
    def even(size: int, ranks: int, unit: int = 1) -> "Split":
        """Divides `size` into equal parts, in multiples of `unit`; the first ranks get one unit more where needed."""
        return _even(size, ranks, unit)

    @staticmethod
    def fused(splits: Iterable["Split"]) -> "Split":
        """Puts dimensions end to end, each divided as before."""
        parts = list(splits)
        first, found = 0, [[] for _ in parts[0].ranges]
        for part in parts:
            for own, ranges in zip(found, part.ranges, strict=True):
                own += [(first + a, first + b) for a, b in ranges]
            first += part.size
        return Split(first, tuple(_joined(own) for own in found))

    def same(self, other: "Split") -> bool:
        """Whether all ranks have the same in both."""
        return self is other or (self.size == other.size and self.ranges == other.ranges)

    def count(self, rank: int) -> int:
        """How many entries a rank has."""
        return self.counts[rank]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many entries each rank has."""
        return tuple(sum(b - a for a, b in own) for own in self.ranges)

    @cached_property
    def once(self) -> bool:
        """Whether no two ranks have the same entry."""
        return sum(self.counts) == self.size

    @cached_property
    def cover(self) -> tuple[tuple[int, int, int, int], ...]:
        """(start, stop, rank, place among what the rank has): each entry once, in order, from the first that has it."""
        found, done = [], 0
        while done < self.size:
            best = None
            for rank, own in enumerate(self.ranges):
                place = 0
                for a, b in own:
                    if a <= done < b and (best is None or b > best[1]):
                        best = (done, b, rank, place + done - a)
                    place += b - a
            if best is None:
                raise ValueError(f"no rank has {done} of {self.size}")
            found.append(best)
            done = best[1]
        return tuple(found)

    @cached_property
    def in_order(self) -> bool:
        """Whether what the ranks have, end to end by rank, is the whole dimension."""
        return self.once and all(
            len(own) <= 1 and (not own or own[0][0] == sum(self.counts[:rank])) for rank, own in enumerate(self.ranges)
        )

    def piece(self, start: int, stop: int) -> "Split":
        """Returns how [start, stop) is divided, as a dimension of its own; see `within`."""
        return _piece(self, start, stop)

    def within(self, rank: int, start: int, stop: int) -> Range:
        """Returns (first place, count) of [start, stop) among what the rank has."""
        place, first, count = 0, 0, 0
        for a, b in self.ranges[rank]:
            low, high = max(a, start), min(b, stop)
            if low < high:
                first = first if count else place + low - a
                count += high - low
            place += b - a
        return first, count

    def places(self, rank: int) -> list[int]:
        """Returns the entries of a rank, in order."""
        return [n for a, b in self.ranges[rank] for n in range(a, b)]

    def scaled(self, inner: int) -> "Split":
        """Returns the division of a dimension with `inner` entries for each of this one."""
        return _scaled(self, inner)


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Leaves out what is empty, and joins what follows each other."""
    joined: list[Range] = []
    for a, b in ranges:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        elif a < b:
            joined.append((a, b))
    return tuple(joined)


@lru_cache(1024)
def _even(size: int, ranks: int, unit: int) -> Split:
    each, more = divmod(size // unit, ranks)
    edges = [unit * (rank * each + min(rank, more)) for rank in range(ranks + 1)]
    return Split(size, tuple(_joined([(edges[r], edges[r + 1])]) for r in range(ranks)))


@lru_cache(1024)
def _piece(split: Split, start: int, stop: int) -> Split:
    cut = ([(max(a, start) - start, min(b, stop) - start) for a, b in own] for own in split.ranges)
    return Split(stop - start, tuple(_joined((a, b) for a, b in own if a < b) for own in cut))


@lru_cache(1024)
def _scaled(split: Split, inner: int) -> Split:
    return Split(split.size * inner, tuple(tuple((a * inner, b * inner) for a, b in own) for own in split.ranges))


@lru_cache(4096)
def reshaped(shape: Sequence[int], dim: int, split: Split, out: Sequence[int]) -> tuple[int, Split] | None:
    """Returns which dimension of `out` is divided and how, when a tensor of `shape` is reshaped; None: not as one.

    Args:
        shape, out: tuples; whole shapes with equally many elements.
        dim: the one of `shape` that is divided.

    Example: (2, 12) with 12 divided in halves, reshaped to (2, 4, 3): 4 is divided in halves. To (2, 3, 4): None, since
    the second 3rd would be on both ranks.
    """
    group = _group(shape, dim, out)
    if group is None:
        return None
    (i, k), (first, last) = group
    outer, inner, size = math.prod(shape[i:dim]), math.prod(shape[dim + 1 : k]), shape[dim]
    if outer * max(map(len, split.ranges)) > MOST_RANGES:
        return None
    flat = [
        _joined((o * size * inner + a * inner, o * size * inner + b * inner) for o in range(outer) for a, b in own)
        for own in split.ranges
    ]
    for place in range(first, last):
        n, inner = out[place], math.prod(out[place + 1 : last])
        found = _divided(flat, math.prod(out[first:place]), n, inner)
        if found is not None:
            return place, (split if found == split.ranges and n == split.size else Split(n, found))
    return None


def _group(shape: Sequence[int], dim: int, out: Sequence[int]) -> tuple[Range, Range] | None:
    """Returns the dims around `dim`, and those of `out` that hold the same elements."""
    if 0 in shape:
        return None
    i = j = 0
    while i < len(shape):
        begin = i, j
        a, b = shape[i], out[j] if j < len(out) else 1
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * shape[i], i + 1
            else:
                b, j = b * out[j], j + 1
        if begin[0] <= dim < i:
            return (begin[0], i), (begin[1], min(j, len(out)))
    return None


def _divided(flat: list[tuple[Range, ...]], outer: int, size: int, inner: int) -> tuple[tuple[Range, ...], ...] | None:
    """Returns how the middle one of (outer, size, inner) is divided, if ranges of all of them are just that."""
    found, length = [], size * inner
    for own in flat:
        first = [(max(a, 0), min(b, length)) for a, b in own if a < length]
        if any(a % inner or b % inner for a, b in first):
            return None
        if _joined((o * length + a, o * length + b) for o in range(outer) for a, b in first) != own:
            return None
        found.append(_joined((a // inner, b // inner) for a, b in first))
    return tuple(found)
