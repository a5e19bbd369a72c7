"""The rank's side of `shardlight bench collectives`: each way of moving a buffer between the ranks, taking turns.

Shape suffixes: N elements of the whole buffer, R ranks, S = N / R elements of a rank's shard.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from shardlight.framework.bench import meters
from shardlight.framework.bench.contenders.loop import start_group
from shardlight.framework.bench.turns import Turns
from shardlight.strategies.engine.collectives import Collectives, all_gather_flat, newest
from shardlight.strategies.engine.host_ranks import connect
from shardlight.strategies.engine.pages import Pages
from torch import Tensor

# torch 2.13 renamed reduce_scatter_tensor; 2.11 has only the old name.
reduce_scatter_flat = newest(dist, "reduce_scatter_single", "reduce_scatter_tensor")


class Buffers:
    """What a collective reads and writes. Whole numbers, so that their sums are exact in whatever order.

    Rank r gives r + 1 times the same values: `full_N` and `shard_S` are its input, its output, or both.

    Args:
        pages: where the engine has such buffers.
    """

    def __init__(self, numel: int, rank: int, world_size: int, pages: Pages) -> None:
        self.rank = rank
        self.world_size = world_size
        # No period that divides the places where buffers are cut.
        self.values_N: Tensor = torch.arange(numel, dtype=torch.int32).remainder_(997).add_(1).to(torch.float32)
        self.given_N: Tensor = self.values_N * (rank + 1)
        self.full_N: Tensor = pages.fresh(numel, torch.float32).copy_(self.given_N)
        self.shard_S: Tensor = pages.fresh(numel // world_size, torch.float32).copy_(self._own(self.given_N))

    def prepare(self, operation: str) -> None:
        """Sets the input anew, and the output to what no collective gives."""
        self.full_N.fill_(-1) if operation == "all-gather" else self.full_N.copy_(self.given_N)
        self.shard_S.fill_(-1) if operation == "reduce-scatter" else self.shard_S.copy_(self._own(self.given_N))

    def is_right(self, operation: str) -> bool:
        """Whether the output is what the collective has to give on this rank."""
        if operation == "all-gather":
            factors_R1 = torch.arange(1, self.world_size + 1).unsqueeze(1)
            return torch.equal(self.full_N.view(self.world_size, -1), self._rows(self.values_N) * factors_R1)
        sum_N = self.values_N * (self.world_size * (self.world_size + 1) // 2)
        if operation == "reduce-scatter":
            return torch.equal(self.shard_S, self._own(sum_N))
        return torch.equal(self.full_N, sum_N)

    def _rows(self, flat_N: Tensor) -> Tensor:
        return flat_N.view(self.world_size, -1)

    def _own(self, flat_N: Tensor) -> Tensor:
        return self._rows(flat_N)[self.rank]


Way = Mapping[str, Callable[[Buffers], object]]
"""By operation: what does it."""


def engine_way(collectives: Collectives) -> Way:
    """What the engine calls."""
    return {
        "all-gather": lambda b: collectives.all_gather(b.full_N, b.shard_S, "bench"),
        "reduce-scatter": lambda b: collectives.reduce_scatter(b.full_N, b.shard_S, "bench"),
        "all-reduce": lambda b: collectives.all_reduce(b.full_N, "bench"),
    }


GLOO: Way = {
    "all-gather": lambda b: all_gather_flat(b.full_N, b.shard_S),
    "reduce-scatter": lambda b: reduce_scatter_flat(b.shard_S, b.full_N),
    "all-reduce": lambda b: dist.all_reduce(b.full_N),
}
"""What torch.distributed has."""
MEMCPY = "memcpy"


def verify(name: str, way: Way, operation: str, buffers: Buffers) -> None:
    """Does an operation once. Raises: ArithmeticError: with another result than it has to have."""
    buffers.prepare(operation)
    way[operation](buffers)
    if not buffers.is_right(operation):
        raise ArithmeticError(f"{operation} of {buffers.full_N.nbytes} bytes by {name}: wrong on rank {buffers.rank}.")


def measure(
    ways: Mapping[str, Way], operation: str, buffers: Buffers, calls: int, rounds: int, align: Callable[[], object]
) -> dict[str, list[float]]:
    """Returns the seconds of a call by way, each the mean of `calls` that follow each other, one for each round.

    Also those of a plain copy of the buffer, which all ranks make at once.

    Args:
        align: returns when every rank is there.
    Raises: ArithmeticError: see verify.
    """
    for name, way in ways.items():
        verify(name, way, operation, buffers)
    turns = {name: way[operation] for name, way in ways.items()} | {MEMCPY: lambda b: b.full_N.copy_(b.given_N)}
    found: dict[str, list[float]] = {name: [] for name in turns}
    # One round more: the first one warms up.
    for _ in range(rounds + 1):
        for name, call in turns.items():
            buffers.prepare(operation)
            # Whoever comes out of the second one has not slept in it: all begin within microseconds.
            align()
            align()
            began_s = time.perf_counter()
            for _ in range(calls):
                call(buffers)
            found[name].append((time.perf_counter() - began_s) / calls)
    return {name: seconds[1:] for name, seconds in found.items()}


def run(job: dict[str, Any], turns: Turns) -> None:
    """Answers `look` and `measure` until the end. Args: job: nothing that is needed."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    start_group(world_size)
    ours = Collectives(dist.group.WORLD)
    ways = {"shardlight-on-gloo": engine_way(Collectives(dist.group.WORLD, transport="gloo")), "gloo": GLOO}
    if ours.why_not_shared is None:
        ways = {"shardlight": engine_way(ours)} | ways
    memory = connect(dist.group.WORLD, "auto")
    align = dist.barrier if isinstance(memory, str) else memory.local.barrier
    for request in turns.requests():
        if request["do"] == "look":
            turns.reply({"why_not": ours.why_not_shared})
            continue
        before_s = meters.cpu_s()
        buffers = Buffers(request["bytes"] // 4, rank, world_size, ours.pages)
        seconds = measure(ways, request["operation"], buffers, request["calls"], request["rounds"], align)
        turns.reply({"seconds": seconds, "cpu_s": meters.cpu_s() - before_s})
    dist.destroy_process_group()
