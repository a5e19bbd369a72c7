"""The rank's side of `shardlight bench pipeline`, part bubble: stages that sleep instead of computing.

What a schedule leaves idle is then all that is measured besides the sleeps, as long as the runtime takes no time.
"""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from shardlight.framework.bench.contenders.loop import start_group
from shardlight.framework.bench.contenders.stages import Pipelined
from shardlight.framework.bench.turns import Turns
from shardlight.strategies.engine.pipeline.schedules import build
from shardlight.strategies.engine.pipeline.split_backward import SplitBackward
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

WIDTH = 8


class Clock:
    """Sleeps, and knows for how long it did."""

    def __init__(self) -> None:
        self.slept_s = 0.0
        self.runs = False
        """Else nothing takes time."""

    def sleep(self, seconds: float) -> None:
        """Sleeps; a sleep that ends late counts as long as it was."""
        if self.runs:
            began_s = time.perf_counter()
            time.sleep(seconds)
            self.slept_s += time.perf_counter() - began_s


class _Slept(torch.autograd.Function):
    """Sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward_s: float, backward_s: float) -> Tensor:
        """Returns the same values."""
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns the same gradient."""
        ctx.clock.sleep(ctx.backward_s)
        return grads[0], None, None, None


class SleepingBlock(nn.Module):
    """A block whose forward and input gradient each take so many seconds; see `sleeping_split` for its weight's."""

    def __init__(self, clock: Clock, forward_s: float, input_s: float) -> None:
        super().__init__()
        self.clock = clock
        self.forward_s, self.input_s = forward_s, input_s
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Returns x times the weight: a product, whose second gradient a schedule may put off."""
        return _Slept.apply(x, self.clock, self.forward_s, self.input_s) @ self.weight


def sleeping_split(clock: Clock, weight_s: float) -> type[SplitBackward]:
    """Returns the class of a backward in two parts in which a weight's gradient takes so many seconds."""

    class Sleeping(SplitBackward):
        def _add(self, edge: GradientEdge, left: Tensor, right: Tensor) -> None:
            super()._add(edge, left, right)
            clock.sleep(weight_s)

    return Sleeping


class SleepingModel(nn.Module):
    """Blocks that sleep, and a parameter before them: the first block has an input gradient, too."""

    def __init__(self, blocks: int, clock: Clock, forward_s: float, input_s: float) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList([SleepingBlock(clock, forward_s, input_s) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        """Returns (1, WIDTH)."""
        x = x + self.start
        for block in self.blocks:
            x = block(x)
        return x


def measure(request: dict[str, Any], group: dist.ProcessGroup) -> dict[str, list[float]]:
    """Returns this rank's `step_s` and `slept_s` of each round.

    Args:
        request: `schedule`, `micro_batches`, `rounds`; `seconds`: what a micro-batch's forward, input gradient and
            weights' gradient take on a rank.
    """
    schedule = build(request["schedule"], dist.get_world_size(group), request["micro_batches"])
    # Two blocks a rank, however many stages it has: all ranks have the same to do.
    clock, blocks = Clock(), 2 * schedule.ranks
    forward_s, input_s, weight_s = (seconds / 2 for seconds in request["seconds"])
    model = SleepingModel(blocks, clock, forward_s, input_s)
    pipelined = Pipelined(model, schedule, (blocks // schedule.stages,) * schedule.stages, group)
    pipelined.runner.split = sleeping_split(clock, weight_s)
    x = torch.ones(1, WIDTH)
    found: dict[str, list[float]] = {"step_s": [], "slept_s": []}
    for number in range(1 + request["rounds"]):
        # The first one warms up: shapes become known.
        clock.runs, before_s = number > 0, clock.slept_s
        dist.barrier(group)
        dist.barrier(group)
        began_s = time.perf_counter()
        pipelined.train(lambda _: model(x).sum())
        if number:
            found["step_s"].append(time.perf_counter() - began_s)
            found["slept_s"].append(clock.slept_s - before_s)
        pipelined.engine.open_window()
    return found


def run(job: dict[str, Any], turns: Turns) -> None:
    """Answers `bubble` until the end. Args: job: `counts`, the numbers of ranks that are asked for."""
    torch.set_num_threads(1)
    start_group(int(os.environ["WORLD_SIZE"]))
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in job["counts"]}
    for request in turns.requests():
        turns.reply(measure(request, groups[request["ranks"]]))
    dist.destroy_process_group()
