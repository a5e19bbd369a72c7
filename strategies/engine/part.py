"""What an engine is told of the part of a model that its rank has: a stage of a pipeline, slices of parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardlight.strategies.engine.slices import Slice
from torch import nn


@dataclass(frozen=True)
class ModelPart:
    """Which part of a model a rank has, beside what the ZeRO table shards."""

    blocks: Sequence[tuple[str, nn.Module]] | None = None
    """The blocks of this stage with their names; None: the model has them all, and they are looked for."""
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By name of a parameter that other stages have too, the stages that do, in order."""
    elsewhere: frozenset[str] = frozenset()
    """Names of the parameters that only other stages have."""
    writes: Callable[[str], bool] = lambda name: True
    """Whether this stage is the one that writes a module buffer, given its name, to checkpoints."""
    slices: Mapping[str, Slice] = field(default_factory=dict)
    """By name of a parameter of which this rank has a part: which. All ranks of a tensor group have the others, and no
    two of them the same element of these."""
    tensor_rank: int = 0
    """This rank's place in its tensor group."""

    def accounts_for(self, name: str) -> bool:
        """Whether of the ranks of a tensor group that have a parameter this one counts it in norms and checkpoints."""
        return self.tensor_rank == 0 or name in self.slices


WHOLE_MODEL = ModelPart()
