"""Boxes of a tensor: which part of it a stored piece is, and what two parts have in common. Pure arithmetic.

A range of a flattened row-major tensor is a few boxes (at most 2 * ndim - 1), each contiguous in memory.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Elements [offset, offset + size) along each dim of a tensor; of a 0-dim tensor its one element."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.sizes)

    def fits(self, shape: Shape) -> bool:
        """Whether it lies inside a tensor of that shape."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= whole for o, n, whole in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def common(self, other: "Box") -> "Box | None":
        """Returns the elements that are in both, None if there are none.

        Example: rows [0, 4) and rows [2, 6) of the same columns have rows [2, 4) in common.
        """
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if start >= stop:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def span(self, outer: "Box") -> tuple[int, int]:
        """Returns the elements [start, stop) of the row-major memory of `outer` from its first to its last element.

        Args:
            outer: a box that holds this one.
        """
        first = last = 0
        for o, n, base, size in zip(self.offsets, self.sizes, outer.offsets, outer.sizes, strict=True):
            first = first * size + o - base
            last = last * size + o - base + n - 1
        return first, last + 1

    def is_run(self, shape: Shape) -> bool:
        """Whether its elements are one range of the flattened tensor of that shape."""
        start, stop = self.span(whole(shape))
        return stop - start == self.numel


def whole(shape: Sequence[int]) -> Box:
    """Returns the box of all elements."""
    return Box((0,) * len(shape), tuple(shape))


def strides_of(sizes: Shape) -> Shape:
    """Returns the row-major strides. Example: (2, 3, 5) gives (15, 5, 1)."""
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yields the boxes that elements [start, stop) of the flattened tensor are, in their order.

    Args:
        shape: of the tensor; a tensor without elements is one box without elements.
        start, stop: 0 <= start <= stop <= number of elements.
    Example: elements [2, 9) of a (3, 4) tensor: row 0 from column 2, row 1, and the first element of row 2.
    """
    if 0 in shape:
        yield whole(shape)
    elif not shape:
        if start < stop:
            yield Box((), ())
    elif start < stop:
        yield from _cut((), shape, start, stop)


def _cut(above: Shape, shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yields the boxes of a range below the row that `above` names."""
    ones = (1,) * len(above)
    if len(shape) == 1:
        yield Box((*above, start), (*ones, stop - start))
        return
    row = math.prod(shape[1:])
    first, at = divmod(start, row)
    last, rest = divmod(stop, row)
    if at:
        end = row if last > first else rest
        yield from _cut((*above, first), shape[1:], at, end)
        first += 1
    if first < last:
        yield Box((*above, first, *(0,) * (len(shape) - 1)), (*ones, last - first, *shape[1:]))
    if rest and last >= first:
        yield from _cut((*above, last), shape[1:], 0, rest)
