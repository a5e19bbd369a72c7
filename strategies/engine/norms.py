"""The global gradient norm, independent of how the gradients are partitioned.

The squares are summed in fp64 over chunks that are fixed by the layout, and the chunk sums are added in one order on
every rank, so that all strategies at any world size get the same bits from the same gradients.
"""

from collections.abc import Sequence

import torch
from shardlight.ops.sums import CHUNK, abs_max, square_sums
from shardlight.strategies.engine.buffer import FlatBuffer
from shardlight.strategies.engine.disk_tensor import in_memory
from shardlight.strategies.engine.groups import Ranks
from shardlight.strategies.errors import StrategyError
from torch import Tensor


def global_norm(buffers: Sequence[FlatBuffer], used: Sequence[bool], norm_type: float, ranks: Ranks) -> Tensor:
    """Returns the norm of the reduced gradients of all ranks. Collective.

    Args:
        used: by parameter number (in the order of the buffers), which gradients count.
        norm_type: 2.0 or inf.
        ranks: those of the engine; a parameter that several of a model's ranks have counts once.
    Returns: 0-dim fp64 on the buffers' device.
    Raises: StrategyError: another norm type.
    """
    if norm_type not in (2.0, float("inf")):
        raise StrategyError(f"norm_type={norm_type} is not supported: use 2.0 or inf.")
    parts = []
    for group in (ranks, *ranks.joint.values()):
        parts += _chunks(buffers, used, norm_type, group, counts=ranks.counts(group))
    nothing = torch.zeros(1, dtype=torch.float64, device=ranks.world.device)
    found = torch.cat(parts or [nothing])
    total = found.sum() if norm_type == 2.0 else found.max()
    if ranks.model.world_size > 1:
        rows = ranks.model.gather_small(total.view(1).double(), "gradient norm")
        total = rows.sum() if norm_type == 2.0 else rows.max()
    return total.sqrt() if norm_type == 2.0 else total


def _chunks(
    buffers: Sequence[FlatBuffer], used: Sequence[bool], norm_type: float, ranks: Ranks, counts: bool
) -> list[Tensor]:
    """Returns by buffer of a group of ranks the sums of squares by chunk, or the largest element. Collective.

    Args:
        counts: False: they are counted on another stage, and this rank only takes part.
    """
    local: list[Tensor] = []
    spans: list[tuple[int, int]] = []
    first = 0
    for buffer in buffers:
        mask = used[first : first + len(buffer.params)]
        first += len(buffer.params)
        if buffer.ranks is ranks and any(mask):
            local.append(_squares(buffer, mask) if norm_type == 2.0 else abs_max(_masked(buffer, mask)).view(1))
            spans.append((-(-buffer.copied_until // CHUNK), -(-buffer.layout.used // CHUNK)))
    if not local:
        return []
    sharded = any(b.plan.shard_optimizer for b in buffers)
    rows = ranks.shard.gather_small(torch.cat(local), "gradient norm") if sharded else torch.cat(local).unsqueeze(0)
    if not counts:
        return []
    if norm_type != 2.0:
        return [rows.max().view(1)]
    # Per buffer: the chunks of rank 0, rank 1, ... follow each other; padding chunks are cut off, and what another rank
    # of the tensor group accounts for.
    parts = rows.split([t.numel() for t in local], dim=1)
    return [p.reshape(-1)[first:stop] for p, (first, stop) in zip(parts, spans, strict=True)]


def _squares(buffer: FlatBuffer, mask: Sequence[bool]) -> Tensor:
    known = buffer.squares() if all(mask) else None
    return square_sums(_masked(buffer, mask))[0] if known is None else known


def _masked(buffer: FlatBuffer, mask: Sequence[bool]) -> Tensor:
    """Returns the reduced gradients this rank accounts for, zero where they do not count."""
    replicated = not buffer.plan.shard_optimizer
    buffer.settle()
    found = buffer.full_grad if replicated else buffer.grad
    assert found is not None
    flat = in_memory(found)
    for slot, counts in enumerate(mask):
        if not counts:
            s = buffer.layout.slots[slot]
            part = flat[s.start : s.stop] if replicated else buffer.piece_of_shard(slot, flat)
            if part is not None and part.count_nonzero():
                flat = flat.clone()
                part = flat[s.start : s.stop] if replicated else buffer.piece_of_shard(slot, flat)
                assert part is not None
                part.zero_()
    return flat
