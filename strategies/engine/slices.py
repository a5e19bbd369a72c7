"""Which part of a logical tensor a rank has, where the ranks of a tensor group have a part each: pure arithmetic.

A local tensor is one or more ranges of a dimension of the logical one, end to end: the rows of a projection that belong
to this rank's heads, the three blocks of a fused one, the columns of what is multiplied by these.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from shardlight.strategies.engine.boxes import Box, Shape, boxes_of_range, strides_of
from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """A rank's part of a logical tensor: `ranges` of dimension `dim`, one after the other.

    Example: Slice((6, 4), 0, ((0, 1), (2, 3), (4, 5))) is rows 0, 2 and 4: a (3, 4) tensor.
    """

    shape: Shape
    """Of the logical tensor."""
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    """[start, stop) along `dim`, in the order in which they lie in the local tensor."""

    @classmethod
    def whole(cls, shape: Shape) -> "Slice":
        """Returns the part that is all of a tensor."""
        return cls(tuple(shape), 0, ((0, shape[0]),) if shape else ())

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is the logical one."""
        return not self.shape or self.ranges == ((0, self.shape[self.dim]),)

    @property
    def local_shape(self) -> Shape:
        """The shape of the local tensor."""
        if not self.shape:
            return ()
        own = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], own, *self.shape[self.dim + 1 :])

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the local part of a logical tensor, as a tensor of its own."""
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, self.dim)

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Yields which boxes of the logical tensor elements [start, stop) of the flattened local one are, in order."""
        return (box for _, _, box in self._pairs(start, stop))

    def parts(self, flat: Tensor, start: int = 0) -> Iterator[tuple[Box, Tensor]]:
        """Yields the same boxes, each with a view of `flat`, in the box's sizes.

        Args:
            flat: (n,), elements [start, start + n) of the flattened local tensor.
        """
        for at, local, box in self._pairs(start, start + flat.numel()):
            held = flat[at : at + local.numel].view(local.sizes)
            if local.sizes != box.sizes:
                low = self._local(box.offsets[self.dim]) - local.offsets[self.dim]
                held = held.narrow(self.dim, low, box.sizes[self.dim])
            yield box, held

    def runs(self, flat: Tensor, start: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Yields the same as ranges of the flattened logical tensor: (first element, (n,) elements)."""
        strides = strides_of(self.shape)
        for box, held in self.parts(flat, start):
            # One range: all dimensions behind the last one that has several entries and is cut are whole.
            rows = [((), held)] if box.is_run(self.shape) else _rows(held, self.dim)
            for index, row in rows:
                place = [o + i for o, i in zip(box.offsets, (*index, *[0] * (len(strides) - len(index))), strict=True)]
                yield sum(n * s for n, s in zip(place, strides, strict=True)), row.reshape(-1)

    def _local(self, place: int) -> int:
        """Returns where a place along `dim` of the logical tensor is in the local one."""
        before = 0
        for begin, end in self.ranges:
            if begin <= place < end:
                return before + place - begin
            before += end - begin
        raise ValueError(f"{place} is in none of {self.ranges}")

    def _pairs(self, start: int, stop: int) -> Iterator[tuple[int, Box, Box]]:
        """Yields (offset in the range, box of the local tensor, box of the logical one within it)."""
        at = 0
        for local in boxes_of_range(self.local_shape, start, stop):
            if self.is_whole:
                yield at, local, local
            else:
                low, first = local.offsets[self.dim], 0
                for begin, end in self.ranges:
                    a, b = max(low, first), min(low + local.sizes[self.dim], first + end - begin)
                    if a < b:
                        offsets, sizes = list(local.offsets), list(local.sizes)
                        offsets[self.dim], sizes[self.dim] = begin + a - first, b - a
                        yield at, local, Box(tuple(offsets), tuple(sizes))
                    first += end - begin
            at += local.numel


def _rows(tensor: Tensor, dim: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields (index, tensor) of a tensor's entries along its first `dim` dimensions."""
    for index in itertools.product(*map(range, tensor.shape[:dim])):
        yield index, tensor[index]


def rows_of(box: Box, shape: Shape, most: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of the first dimension that together are a box's, none of more than `most` elements of rows.

    A single row may have more.
    """
    step = max(1, most // max(1, math.prod(shape[1:])))
    stop = box.offsets[0] + box.sizes[0]
    for low in range(box.offsets[0], stop, step):
        yield low, min(low + step, stop)
