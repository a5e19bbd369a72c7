"""How ranks are arranged: which run one stage of a pipeline, which see the same data, which share matrices.

Pure arithmetic. The axis whose ranks exchange most is innermost, so that these are on one host: tensor ranks exchange
activations several times per block, the data ranks of a stage weights and gradients, stages one activation per
micro-batch.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass, fields

from shardlight.strategies.errors import MeshError


@dataclass(frozen=True)
class Place:
    """Where a rank is in a mesh."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """pipeline x data x tensor ranks; rank = (stage * data + replica) * tensor + slice.

    Example: Mesh(pipeline=2, data=2): ranks 0 and 1 run stage 0, ranks 2 and 3 stage 1; 0 and 2 see the same data.
    """

    pipeline: int = 1
    """Ranks that a batch goes through; each runs a part of the model."""
    data: int = 1
    """Ranks that run the same part of the model on different data."""
    tensor: int = 1
    """Ranks that have slices of the same matrices, and see the same data."""

    @classmethod
    def over(cls, world_size: int, pipeline: int = 1, data: int | None = None, tensor: int = 1) -> "Mesh":
        """Arranges `world_size` ranks.

        Args:
            data: None: what the other axes leave.
        Raises: MeshError: the product is not the number of ranks; with the arithmetic.
        """
        asked = {"pipeline": pipeline, "data": data, "tensor": tensor}
        for axis, size in asked.items():
            if size is not None and size < 1:
                raise MeshError(f"{_product(asked)}: each axis has at least 1 rank, and {axis} has {size}.")
        others = pipeline * tensor
        if data is None and world_size % others:
            raise MeshError(_no_fit(world_size, pipeline, tensor))
        mesh = cls(pipeline, world_size // others if data is None else data, tensor)
        if mesh.size != world_size:
            raise MeshError(
                f"{_product(asked)} = {mesh.size} ranks, but {world_size} were started. Start {mesh.size}"
                + ("." if world_size % others else f", or set data to {world_size // others}.")
            )
        return mesh

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(astuple(self))

    def rank(self, pipeline: int, data: int, tensor: int = 0) -> int:
        """Returns the rank at a place."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def place(self, rank: int) -> Place:
        """Returns where a rank is. Ranks with an equal `data` see the same data."""
        above, tensor = divmod(rank, self.tensor)
        return Place(*divmod(above, self.data), tensor)

    def lines(self, *axes: str) -> list[list[int]]:
        """Returns the sets of ranks that differ in these axes alone; ranks of each in order, the sets by their first.

        Example: of Mesh(pipeline=2, data=2) the lines along "pipeline" are [[0, 2], [1, 3]].
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = self.place(rank)
            found.setdefault(_without(place, axes), []).append(rank)
        return list(found.values())

    def joined(self, sets: Iterable[Collection[int]]) -> list[list[int]]:
        """Returns, for each set of stages and each slice of these, all ranks that have it."""
        return [
            [self.rank(stage, data, tensor) for stage in sorted(stages) for data in range(self.data)]
            for stages in sets
            for tensor in range(self.tensor)
        ]


def _without(place: Place, axes: Collection[str]) -> tuple[int, ...]:
    return tuple(getattr(place, f.name) for f in fields(place) if f.name not in axes)


def _product(asked: dict[str, int | None]) -> str:
    """Returns the axes that were asked for, as a product."""
    named = [f"{axis} {size}" for axis, size in asked.items() if size is not None and (axis != "tensor" or size != 1)]
    return " x ".join(named)


def _no_fit(world_size: int, pipeline: int, tensor: int) -> str:
    """Returns why ranks do not divide, and what would."""
    others = pipeline * tensor
    less, more = world_size // others * others, -(-world_size // others) * others
    start = f"Start {less} or {more}" if less else f"Start {more}"
    if tensor == 1:
        into, change = f"{pipeline} pipeline stages", "set stages to"
    elif pipeline == 1:
        into, change = f"groups of {tensor} ranks that share matrices", "make groups of"
    else:
        into = f"pipeline {pipeline} x tensor {tensor} = {others} ranks for each part of the data"
        return f"{world_size} ranks do not divide into {into}. {start}, or make the product smaller."
    fit = [n for n in range(1, world_size + 1) if world_size % n == 0]
    return f"{world_size} ranks do not divide into {into}. {start}, or {change} one of {fit}."
