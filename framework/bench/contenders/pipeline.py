"""The rank's side of `shardlight bench pipeline`, part training: ours, torch's, and what the simulator says of both."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from shardlight.framework.bench.contenders import loop, torch_ddp
from shardlight.framework.bench.contenders.gpt import fixed_gpt, loss_of, optimizer_of
from shardlight.framework.bench.contenders.ours import count_so_far
from shardlight.framework.bench.contenders.stages import (
    Part,
    Pipelined,
    PlainGradients,
    SavedBytes,
    counts_of,
    shared,
    token_loss,
)
from shardlight.framework.bench.sizes import Size
from shardlight.framework.bench.turns import Turns
from shardlight.strategies.engine.pipeline.costs import Costs
from shardlight.strategies.engine.pipeline.schedules import SCHEDULES, build
from shardlight.strategies.engine.pipeline.simulate import Simulation, simulate
from shardlight.strategies.engine.pipeline.split_backward import SplitBackward
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

MICRO_BATCHES = 8


class OurPipeline:
    """The engine, the cut and the runner in a bare loop.

    Args:
        size: of the model.
        name: of the schedule.
    """

    def __init__(self, size: Size, name: str) -> None:
        schedule = build(name, dist.get_world_size(), MICRO_BATCHES)
        self.model = fixed_gpt(size)
        counts = counts_of(size, schedule.placement)
        self.pipelined = Pipelined(self.model, schedule, counts, dist.new_group())
        self.engine = self.pipelined.engine
        self.optimizer = optimizer_of(self.model)
        self.engine.take_optimizer(self.optimizer)
        self._size = size
        self._pipeline_s = 0.0

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """Takes an optimizer step; returns the batch's mean loss."""
        began_s = time.perf_counter()
        loss = self._train(tokens_BT, labels_BT)
        self._pipeline_s += time.perf_counter() - began_s
        self.engine.step(self.optimizer)
        return shared(loss)

    def _train(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        tokens, labels = tokens_BT.chunk(MICRO_BATCHES), labels_BT.chunk(MICRO_BATCHES)
        return self.pipelined.train(lambda number: loss_of(self.model, tokens[number], labels[number]))

    def counters(self) -> dict[str, float]:
        """The time from the first forward to the last backward, and what the engine counts."""
        return {"pipeline_ms": 1000 * self._pipeline_s, **count_so_far(self.engine)}

    def gauges(self) -> dict[str, float]:
        """The most bytes of activations that this rank held at a time, over a batch whose gradients are dropped."""
        meter = SavedBytes(self.engine.table.parameters)
        runner = self.pipelined.runner
        runner.split = meter.counted_split()
        with meter.counting():
            self._train(*loop.rows_of(self._size, 0, 0, 1))
        runner.split = SplitBackward
        self.engine.open_window()
        return {"activation_bytes": meter.most}


class TorchPipeline:
    """torch.distributed.pipelining, with the model cut by hand.

    Args:
        size: of the model.
        schedule: its class.
    """

    def __init__(self, size: Size, schedule: type[Schedule1F1B] | type[ScheduleGPipe]) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.part = Part(size, counts_of(size, range(ranks)), rank)
        self.optimizer = optimizer_of(self.part)
        stage = PipelineStage(self.part, rank, ranks, torch.device("cpu"), group=dist.group.WORLD)
        self.schedule = schedule(stage, MICRO_BATCHES, loss_fn=token_loss)
        self._is_first, self._is_last = rank == 0, rank == ranks - 1
        self._pipeline_s = 0.0

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """Takes an optimizer step; returns the batch's mean loss."""
        began_s = time.perf_counter()
        losses: list[Tensor] = []
        given = (tokens_BT,) if self._is_first else ()
        wanted = {"target": labels_BT, "losses": losses} if self._is_last else {}
        self.schedule.step(*given, **wanted)
        mean = float(torch.stack(losses).detach().mean()) if self._is_last else 0.0
        self._pipeline_s += time.perf_counter() - began_s
        self.optimizer.step()
        self.optimizer.zero_grad()
        return shared(mean)

    def counters(self) -> dict[str, float]:
        """As OurPipeline."""
        return {"pipeline_ms": 1000 * self._pipeline_s}

    def gauges(self) -> dict[str, float]:
        """Nothing."""
        return {}


class Simulated:
    """What the simulator says of a schedule whose stages cost what they cost here: plain modules, on all ranks at once.

    Its step measures the costs; nothing of a pipeline, no message and no bubble, is in it.

    Args:
        size: of the model.
        name: of the schedule, which has a stage per rank.
    """

    def __init__(self, size: Size, name: str) -> None:
        self.schedule = build(name, dist.get_world_size(), MICRO_BATCHES)
        self.stage = dist.get_rank()
        self.part = Part(size, counts_of(size, self.schedule.placement), self.stage)
        self._gradients = PlainGradients(self.part)
        self.splits = SCHEDULES[name].splits
        self._is_last = self.stage == self.schedule.stages - 1
        self._size = size
        self._pipeline_s = 0.0

    def step(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """Measures the costs, and adds the simulator's time for them."""
        tokens, labels = tokens_BT.chunk(MICRO_BATCHES), labels_BT.chunk(MICRO_BATCHES)
        seconds = torch.zeros(3, dtype=torch.float64)
        dist.barrier()
        for number in range(MICRO_BATCHES):
            seconds += torch.tensor(self._micro_batch(tokens[number], labels[number], time.perf_counter))
        self.part.zero_grad()
        self._pipeline_s += self._simulate(seconds / MICRO_BATCHES, torch.zeros(2)).makespan
        return 0.0

    def counters(self) -> dict[str, float]:
        """What the time from the first forward to the last backward has to be."""
        return {"pipeline_ms": 1000 * self._pipeline_s}

    def gauges(self) -> dict[str, float]:
        """What the most bytes of activations have to be."""
        meter = SavedBytes(list(self.part.parameters()))
        tokens_BT, labels_BT = loop.rows_of(self._size, 0, 0, 1)
        rows = self._size.batch // MICRO_BATCHES
        with meter.counting():
            given = tokens_BT[:rows], labels_BT[:rows]
            kept = self._micro_batch(*given, lambda: float(meter.now), meter.counted_split())
        self.part.zero_grad()
        # kept[0]: what the forward added; kept[1]: what the input's gradient added, that is, took away.
        sizes = torch.tensor([kept[0], kept[0] + kept[1]])
        simulation = self._simulate(torch.ones(3, dtype=torch.float64), sizes)
        return {"activation_bytes": simulation.peak_bytes[self.stage]}

    def _micro_batch(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        read: Callable[[], float],
        split_by: type[SplitBackward] = SplitBackward,
    ) -> tuple[float, ...]:
        """Returns by how much `read` grows over forward, input's gradient and weights' gradients."""
        received = gradient = None
        if self.stage:
            received = torch.randn(*tokens_BT.shape, self._size.width, requires_grad=True)
        began = read()
        output = self.part(tokens_BT if received is None else received)
        if self._is_last:
            output = token_loss(output, labels_BT)
        forward = read() - began
        if not self._is_last:
            gradient = torch.randn_like(output)
        began = read()
        if self.splits:
            split = split_by(output, gradient, received, self._gradients)
            del output
            split.input()
            middle = read()
            split.weight()
        else:
            torch.autograd.backward(output, gradient)
            middle = read()
        return forward, middle - began, read() - middle

    def _simulate(self, times: Tensor, sizes: Tensor) -> Simulation:
        """Returns the simulation with the costs of all ranks' stages. Args: of this one's."""
        rows = [torch.zeros(5, dtype=torch.float64) for _ in range(self.schedule.stages)]
        dist.all_gather(rows, torch.cat([times, sizes.double()]))
        forward, input_, weight, whole, held = (tuple(column) for column in torch.stack(rows, 1).tolist())
        costs = Costs(
            forward=forward, backward_input=input_, backward_weight=weight, activation_bytes=whole, held_bytes=held
        )
        return simulate(self.schedule, costs)


BUILDERS: loop.Builders = {
    "single": torch_ddp.BUILDERS["single"],
    "torch-1f1b": functools.partial(TorchPipeline, schedule=Schedule1F1B),
    "torch-gpipe": functools.partial(TorchPipeline, schedule=ScheduleGPipe),
    **{f"shardlight-{name}": functools.partial(OurPipeline, name=name) for name in ("1f1b", "zb_h1")},
    **{f"simulated-{name}": functools.partial(Simulated, name=name) for name in ("1f1b", "zb_h1")},
}


def run(job: dict[str, Any], turns: Turns) -> None:
    """See loop.run; every rank gets all rows of a batch."""
    loop.run(job, turns, BUILDERS, whole=True)
