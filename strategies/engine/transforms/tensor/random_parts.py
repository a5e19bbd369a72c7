"""Random numbers for tensors that are divided.

[Note: dropout] The ranks of a tensor group draw the same numbers wherever a tensor is whole, since they have the same
generator state: dropout behind a row-parallel layer has one mask for all. For a tensor that is divided every rank draws
from a generator of its own, with a seed that is drawn from the common one: masks of different heads are independent,
the common generator goes on alike on all ranks, and a recomputation, a resume or a repetition from the same state draws
the same again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from shardlight.strategies.engine.seeding import seed_generators

_BETWEEN_RANKS = 0x9E3779B97F4A7C15
_SEEDS = 1 << 62


@contextmanager
def own_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Lets this rank draw numbers of its own; see [Note: dropout]."""
    seed = (int(torch.randint(_SEEDS, ())) + rank * _BETWEEN_RANKS) % _SEEDS
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        seed_generators(seed, device)
        yield
