"""How ranks are arranged: which run one stage of a pipeline, and which see the same data. Pure arithmetic.

Stages are outermost: the ranks of one stage follow each other, since they exchange weights and gradients, which is more
than the activations that go from stage to stage.
"""

from collections.abc import Collection
from dataclasses import dataclass

from shardlight.strategies.errors import MeshError


@dataclass(frozen=True)
class Mesh:
    """pipeline x data ranks; rank = stage * data + place.

    Example: Mesh(pipeline=2, data=2): ranks 0 and 1 run stage 0, ranks 2 and 3 stage 1; 0 and 2 see the same data.
    """

    pipeline: int = 1
    """Ranks that a batch goes through; each runs a part of the model."""
    data: int = 1
    """Ranks that run the same part of the model on different data."""

    @classmethod
    def over(cls, world_size: int, pipeline: int = 1, data: int | None = None) -> "Mesh":
        """Arranges `world_size` ranks.

        Args:
            data: None: what `pipeline` leaves.
        Raises: MeshError: the product is not the number of ranks; with the arithmetic.
        """
        if pipeline < 1 or (data is not None and data < 1):
            raise MeshError(f"pipeline {pipeline} x data {data}: each axis has at least 1 rank.")
        if data is None and world_size % pipeline:
            fit = [n for n in range(1, world_size + 1) if world_size % n == 0]
            less, more = world_size // pipeline * pipeline, -(-world_size // pipeline) * pipeline
            start = f"Start {less} or {more}" if less else f"Start {more}"
            raise MeshError(
                f"{world_size} ranks do not divide into {pipeline} pipeline stages. {start}, or set stages to one of "
                f"{fit}."
            )
        mesh = cls(pipeline, world_size // pipeline if data is None else data)
        if mesh.size != world_size:
            raise MeshError(
                f"pipeline {pipeline} x data {data} = {mesh.size} ranks, but {world_size} were started. Start "
                f"{mesh.size}" + ("." if world_size % pipeline else f", or set data to {world_size // pipeline}.")
            )
        return mesh

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.pipeline * self.data

    def rank(self, stage: int, place: int) -> int:
        """Returns the rank at a stage, of those that see the data of `place`."""
        return stage * self.data + place

    def stage(self, rank: int) -> int:
        """Returns the rank's place in its pipeline."""
        return rank // self.data

    def place(self, rank: int) -> int:
        """Returns which data the rank sees; equal for all ranks of one pipeline."""
        return rank % self.data

    def stages(self) -> list[list[int]]:
        """Returns the ranks of each stage."""
        return self.ranks_of([[stage] for stage in range(self.pipeline)])

    def pipelines(self) -> list[list[int]]:
        """Returns the ranks of each pipeline, its first stage first."""
        return [[self.rank(stage, place) for stage in range(self.pipeline)] for place in range(self.data)]

    def ranks_of(self, sets: Collection[Collection[int]]) -> list[list[int]]:
        """Returns, for each set of stages, all ranks that run one of them."""
        return [[self.rank(stage, place) for stage in sorted(set_) for place in range(self.data)] for set_ in sets]
