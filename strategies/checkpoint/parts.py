"""Tensors beside weights and optimizer state that a checkpoint keeps in pieces, each rank its own: averages of weights.

A callback puts `OwnedPart`s into `checkpoint[SHARDED]` in `on_save_checkpoint`, under names with a prefix of its own
such as `ema/NAME`, and reads ranges of them in `on_load_checkpoint` from the `StoredParts` that is there then.
"""

from collections.abc import Collection
from dataclasses import dataclass

from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.writer import RankWriter
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.slices import Slice
from torch import Tensor, nn

SHARDED = "sharded"
"""Their key in the Trainer's checkpoint dict."""


@dataclass(frozen=True)
class OwnedPart:
    """Elements [start, start + n) of a rank's flattened part of a tensor, which this rank writes."""

    part: Tensor
    """(n,)"""
    of: Slice
    """Which part of the tensor this rank has."""
    start: int
    """Of the range, in that part as flattened."""


class StoredParts:
    """The tensors of a checkpoint that were saved as parts, to be read in any ranges.

    Args:
        skip: names of parameters that are to stay as they are: nothing is there of them.
    """

    def __init__(self, reader: CheckpointReader, skip: Collection[str] = ()) -> None:
        self._reader = reader
        self._skip = skip

    def has(self, name: str) -> bool:
        """Whether the tensor is there."""
        return self._reader.has(name) and name.partition("/")[2] not in self._skip

    def read(self, name: str, start: int, stop: int, of: Slice | None = None) -> Tensor:
        """Returns elements [start, stop) of the flattened tensor, or of a part of it (`of`).

        Raises: CheckpointError: some are missing.
        """
        return self._reader.read(name, start, stop, of)


def replica_share(engine: Engine, parameter: nn.Parameter, start: int, part: Tensor) -> tuple[int, Tensor]:
    """Returns (start, range) of what this rank writes of a range that it owns: replicas share the work.

    Args:
        start: of the range, in the flattened parameter.
        part: (n,) its elements.
    """
    if not engine.accounts_for(parameter):
        return start, part[:0]
    replicate = engine.ranks.replicate
    low, high = (part.numel() * r // replicate.world_size for r in (replicate.rank, replicate.rank + 1))
    return start + low, part[low:high]


def add_parts(parts: dict[str, OwnedPart], writer: RankWriter, rank: int) -> None:
    """Adds this rank's parts to what it writes."""
    for name, owned in parts.items():
        if owned.part.numel() or (0 in owned.of.shape and rank == 0):
            writer.add(name, owned.part, owned.of, owned.start)
