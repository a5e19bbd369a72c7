"""The bare training loop that every contender is stepped in, and what it needs of one."""

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from shardlight.framework.bench.contenders.gpt import rows_of
from shardlight.framework.bench.contenders.trace import StepTrace
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from shardlight.framework.launch import STORE
from torch import Tensor

TIMEOUT = timedelta(minutes=20)
"""Of a collective; the benchmark's own limit for a step is shorter, and shows more."""


class Contender(Protocol):
    """One way of training the model; made on each of its ranks from the size."""

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """Takes an optimizer step on this rank's rows; returns their mean loss."""

    def counters(self) -> dict[str, float]:
        """What it has counted itself so far."""

    def gauges(self) -> dict[str, float]:
        """What it can tell at any time between two steps."""


Builders = Mapping[str, Callable[[Size], Contender]]


SHARED = "shared memory:"
"""As in strategies/engine/ranges.py, which the peers' processes do not import."""


class CollectivesProbe:
    """Counts the operations of torch.distributed that this process starts, by any thread, also those of C++ code.

    A collective is one, also through shared memory, and so is each send or receive.
    """

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def start(self) -> None:
        """Counts from here on."""
        self._profile.start()

    def stop(self) -> int:
        """Returns the number of operations since `start`."""
        self._profile.stop()
        return sum(e.name.startswith(("c10d::", SHARED)) for e in self._profile.events())


def start_group(world_size: int, alone: bool = False) -> None:
    """Starts the process group of the ranks of this crew; `alone`: also where there is one rank."""
    if (world_size > 1 or alone) and not dist.is_initialized():
        store = f"file://{os.environ[STORE]}"
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


def run(job: dict[str, Any], turns: Turns, builders: Builders, whole: bool = False) -> None:
    """Trains the contenders of a job, whichever has its turn.

    Args:
        job: `size`, the fields of one; `hosts`: name of each contender to its number of ranks, which come first.
        whole: every rank gets all rows of a batch, not its share.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start_group(world_size)
    train(Size(**job["size"]), job["hosts"], turns, builders, rank, whole)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(
    size: Size, hosts: Mapping[str, int], turns: Turns, builders: Builders, rank: int, whole: bool = False
) -> None:
    """The loop itself."""
    contenders = {who: builders[who](size) for who, processes in hosts.items() if rank < processes}
    turns.counters = lambda who: contenders[who].counters()
    turns.gauges = lambda who: contenders[who].gauges()
    turns.probes["collectives"] = CollectivesProbe
    turns.tracer = StepTrace
    for who, step in turns:
        share = (0, 1) if whole else (rank, hosts[who])
        turns.report(contenders[who].step(*rows_of(size, step, *share)))
