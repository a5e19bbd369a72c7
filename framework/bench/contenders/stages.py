"""Stages of a pipeline for the benchmark: ours without Lightning, and the same GPT cut by hand for everyone else."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shardlight.framework.bench.contenders.gpt import fixed_gpt
from shardlight.framework.bench.sizes import Size
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.groups import EngineGroups
from shardlight.strategies.engine.part import ModelPart
from shardlight.strategies.engine.pipeline.balance import balance
from shardlight.strategies.engine.pipeline.chain import find_chain, stage_parameters
from shardlight.strategies.engine.pipeline.cut import Cut
from shardlight.strategies.engine.pipeline.runner import Runner
from shardlight.strategies.engine.pipeline.schedules import Schedule
from shardlight.strategies.engine.pipeline.split_backward import SplitBackward
from shardlight.strategies.engine.plan import PLANS
from torch import Tensor, nn


class Pipelined:
    """A model of which this rank runs its stages, as the strategy does it; one pipeline, no replicas.

    Args:
        model: whole; what other ranks run is taken out of it.
        counts: blocks of each virtual stage.
        group: the ranks of the pipeline.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, counts: Sequence[int], group: dist.ProcessGroup) -> None:
        self.model = model
        self.schedule = schedule
        rank, chain = dist.get_rank(group), find_chain(model)
        ranges = [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
        mine = schedule.stages_of(rank)
        of_stages = stage_parameters(model, chain, ranges)
        self.cut = Cut(model, chain, ranges, mine, set().union(*(of_stages[stage] for stage in mine)))
        self.engine = Engine(
            model,
            replace(PLANS["zero1"], name="pipeline", reduce="window"),
            EngineGroups(None, everyone=group, pipeline=group),
            part=ModelPart(
                blocks=[(chain.names[i], chain.blocks[i]) for stage in mine for i in ranges[stage]],
                elsewhere=frozenset(self.cut.dropped),
            ),
        )
        self.runner = Runner(self.cut, self.engine, schedule.placement)
        self.has_last = schedule.stages - 1 in mine

    def train(self, step: Callable[[int], Tensor]) -> float:
        """Runs forward and backward of all micro-batches of a batch; returns their mean loss, 0 without the last stage.

        Args:
            step: returns the mean loss of a micro-batch, given its number.
        """
        count, losses = self.schedule.micro_batches, []

        def loss_of(number: int, loss: Any) -> Tensor:
            losses.append(loss.detach())
            return loss / count

        self.engine.gradients.begin()
        self.runner.train(self.schedule, ["train"] * count, step, loss_of, range(count))
        mean = float(torch.stack(losses).mean()) if self.has_last else 0.0
        self.engine.window.add_loss(torch.tensor(mean, dtype=torch.float64), None, 1.0)
        return mean


def counts_of(size: Size, placement: Sequence[int]) -> tuple[int, ...]:
    """Returns how many blocks each stage gets: balanced by matrices, of which the head is one."""
    return balance([12.0 * size.width**2] * size.blocks, placement, after=float(size.vocabulary * size.width))


class Part(nn.Module):
    """A stage of the benchmark's model, cut by hand.

    Args:
        counts: blocks of each stage.
        stage: which this is.
    """

    def __init__(self, size: Size, counts: Sequence[int], stage: int) -> None:
        super().__init__()
        model, first = fixed_gpt(size), sum(counts[:stage])
        is_last = stage == len(counts) - 1
        self.tokens = None if stage else model.tokens
        self.positions = None if stage else model.positions
        self.blocks = nn.ModuleList(list(model.blocks)[first : first + counts[stage]])
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, T, D), on the last stage logits, (B, T, V). Args: x: the same, on the first tokens, (B, T)."""
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def token_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Returns the mean loss."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def shared(loss: float) -> float:
    """Returns the last rank's loss on every rank."""
    value = torch.tensor([loss], dtype=torch.float64)
    dist.broadcast(value, dist.get_world_size() - 1)
    return value.item()


class PlainGradients:
    """Adds products to `grad`, for a split backward without an engine."""

    def __init__(self, part: nn.Module) -> None:
        self._weights = {id(p) for p in part.parameters()}

    def is_weight(self, tensor: Tensor) -> bool:
        """See Gradients of split_backward.py."""
        return id(tensor) in self._weights

    def add_product(self, weight: nn.Parameter, left: Tensor, right: Tensor) -> bool:
        """See Gradients of split_backward.py."""
        if weight.grad is None:
            weight.grad = left @ right
        else:
            weight.grad.addmm_(left, right)
        return True


class SavedBytes:
    """Counts the bytes that autograd keeps for backward: each storage once, parameters' not.

    Around a forward; what it has kept is counted off when autograd lets go of it, also later. With `counted_split`
    what a backward in two parts keeps between them counts too.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._apart = {p.untyped_storage().data_ptr() for p in parameters}
        self._held: dict[int, tuple[int, int]] = {}
        """By address: how often it was kept, and its bytes."""
        self.now = 0
        self.most = 0

    def counting(self) -> Any:
        """Returns the context in which what is kept is counted."""
        # Detached: a node that keeps its own output, which knows the node, would never go.
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Saved(tensor.detach(), self), lambda saved: saved.tensor.detach()
        )

    def counted_split(self) -> type[SplitBackward]:
        """Returns the class of a backward in two parts that counts here what it keeps."""
        meter = self

        class Counted(SplitBackward):
            def input(self) -> Tensor | None:
                found = super().input()
                self.counted = [_Saved(tensor.detach(), meter) for tensor in self.kept()]
                return found

            def weight(self) -> None:
                super().weight()
                self.counted = []

        return Counted

    def keep(self, tensor: Tensor) -> int | None:
        """Counts a tensor; returns what it is let go of by, None: it does not count."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._apart:
            return None
        times, size = self._held.get(address, (0, storage.nbytes()))
        self._held[address] = times + 1, size
        if not times:
            self.now += size
            self.most = max(self.most, self.now)
        return address

    def let_go(self, address: int) -> None:
        """Counts it off."""
        times, size = self._held.pop(address)
        if times > 1:
            self._held[address] = times - 1, size
        else:
            self.now -= size


class _Saved:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor, meter: SavedBytes) -> None:
        self.tensor = tensor
        self._meter = meter
        self._address = meter.keep(tensor)

    def __del__(self) -> None:
        if self._address is not None:
            self._meter.let_go(self._address)
