"""Where parameters lie in a flat buffer and which part of it each rank owns: pure arithmetic, no tensors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGN = 16
"""Every parameter starts at a multiple of this many elements (64 bytes in fp32), so that kernels see one alignment."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a flat buffer: elements [start, stop)."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns.

    Elements [start, stop) of the flattened parameter `slot` lie at [offset, offset + stop - start) of the shard.
    """

    slot: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """Parameters laid end to end in one buffer of `numel` elements, cut into `world_size` equal shards.

    `used` is the end of the last parameter; what follows is padding, which is always zero.
    """

    slots: tuple[Slot, ...]
    world_size: int
    used: int
    numel: int

    @classmethod
    def pack(
        cls, shapes: Sequence[tuple[str, tuple[int, ...]]], world_size: int, multiple: int = ALIGN, apart: int = 0
    ) -> "FlatLayout":
        """Lays parameters out in the given order.

        Args:
            shapes: (name, shape) of each parameter; sizes of 0 and 0-dim shapes are allowed.
            world_size: number of shards.
            multiple: every shard's length is a multiple of this, in elements.
            apart: what comes after the first `apart` parameters begins at a multiple of it as well.
        """
        slots, at = [], 0
        for index, (name, shape) in enumerate(shapes):
            start = _round_up(at, multiple if apart and index == apart else ALIGN)
            at = start + math.prod(shape)
            slots.append(Slot(name, tuple(shape), start, at))
        return cls(tuple(slots), world_size, at, _round_up(at, world_size * multiple))

    @property
    def shard_numel(self) -> int:
        """Length of every shard, in elements."""
        return self.numel // self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Returns the elements [start, stop) of the buffer that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def gaps(self) -> list[tuple[int, int]]:
        """Returns the ranges of the buffer that belong to no parameter."""
        ends = [0, *(s.stop for s in self.slots)]
        starts = [*(s.start for s in self.slots), self.numel]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yields what `rank` owns of each parameter, in the order of the buffer; leaves out what it has no part of."""
        low, high = self.shard_range(rank)
        for index, slot in enumerate(self.slots):
            start, stop = max(low, slot.start), min(high, slot.stop)
            if start < stop:
                yield Piece(index, start - slot.start, stop - slot.start, start - low)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
