"""Which rank updates a parameter that its optimizer needs whole, and what is sent for it: pure arithmetic, no tensors.

[Note: whole parameters] Muon orthogonalises matrices, LAMB and Adafactor scale an update by norms of a whole parameter:
a rank that holds a range of it cannot. The layout stays as it is, equal shards of flat buffers; but each such parameter
has an *owner* among the ranks that share the shards. For a step the pieces of its gradient (and of its weights, where
the owner has not got them) go to the owner, which updates it alone and sends the new values back to the shards.
Optimizer state of the parameter is on its owner only, in the parameter's shape.

Balancing by longest processing time first: Graham 1969, Bounds on Multiprocessing Timing Anomalies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardlight.strategies.engine.layout import FlatLayout


def element_cost(shape: Sequence[int]) -> int:
    """Returns what an update costs whose work is the same for each element."""
    return math.prod(shape)


def orthogonal_cost(shape: Sequence[int]) -> int:
    """Returns what orthogonalising an (m, n) matrix costs: Newton-Schulz multiplies (m, n) by its Gram matrix."""
    return math.prod(shape) * (min(shape) if len(shape) == 2 else 1)


def assign(costs: Sequence[float], held: Sequence[Sequence[int]], loads: Sequence[float]) -> list[int]:
    """Returns the owner of each parameter, such that no rank has much more to do than another.

    The dearest first, each to the rank with the least to do; of those the one that holds most of it already.

    Args:
        costs: of each parameter's update.
        held: by parameter and rank, how many elements of it are in the rank's shard.
        loads: by rank, what it has to do already.
    Returns: ranks; the largest load exceeds the mean by less than the largest cost.
    """
    owners, loads = [0] * len(costs), list(loads)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        best = min(range(len(loads)), key=lambda rank: (loads[rank], -held[index][rank], rank))
        owners[index] = best
        loads[best] += costs[index]
    return owners


def holders(layout: FlatLayout, slot: int) -> list[tuple[int, int, int]]:
    """Returns (rank, start, stop) for each rank that holds elements [start, stop) of a parameter; nothing of none."""
    place, length = layout.slots[slot], layout.shard_numel
    if place.start == place.stop:
        return []
    ranks = range(place.start // length, (place.stop - 1) // length + 1)
    cuts = [max(place.start, rank * length) - place.start for rank in ranks] + [place.stop - place.start]
    return list(zip(ranks, cuts, cuts[1:], strict=False))


@dataclass(frozen=True)
class Move:
    """Elements [start, stop) of a flattened parameter that go from their holder to the owner, and later back."""

    number: int
    """Of the parameter in the engine's order."""
    what: Literal["gradient", "weight"]
    owner: int
    holder: int
    start: int
    stop: int
    width: int
    """Bytes per element."""

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return (self.stop - self.start) * self.width


_GRAIN_BYTES = 16
"""What a move takes of a round is rounded up to this, the widest element there is, so that none is ever split."""


def rounds(moves: Sequence[Move], limit_bytes: int) -> list[list[Move]]:
    """Cuts moves into rounds, in each of which no owner has more than `limit_bytes` to receive (or to send back).

    Every owner takes part from the first round on until it has all, so that none waits for another's turn.

    Args:
        limit_bytes: a multiple of 16.
    """
    found: list[list[Move]] = []
    filled: dict[int, int] = {}
    for move in moves:
        start = move.start
        while start < move.stop:
            number, used = divmod(filled.get(move.owner, 0), limit_bytes)
            stop = min(move.stop, start + (limit_bytes - used) // move.width)
            piece = replace(move, start=start, stop=stop)
            if number == len(found):
                found.append([])
            found[number].append(piece)
            filled[move.owner] = filled.get(move.owner, 0) - (-piece.nbytes // _GRAIN_BYTES) * _GRAIN_BYTES
            start = stop
    return found
