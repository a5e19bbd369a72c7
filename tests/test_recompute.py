"""`recompute: blocks` changes memory and time, never a number."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import TinyGPT, token_batch, token_loss
from shardlight.strategies import ZeRO3
from shardlight.strategies.engine import agreement
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.transforms.blocks import BlockTransforms
from shardlight.strategies.engine.unit import Unit
from shardlight.strategies.errors import StrategyError
from torch import nn
from torch.utils.checkpoint import checkpoint


class Dropped(nn.Module):
    """A block with dropout that counts its forwards."""

    def __init__(self, block):
        super().__init__()
        self.block, self.dropout, self.calls = block, nn.Dropout(0.5), 0

    def forward(self, x):
        self.calls += 1
        return x + self.dropout(self.block(x))


def train(plan, world, recompute_blocks):
    torch.manual_seed(0)
    model = TinyGPT()
    model.blocks = nn.ModuleList([Dropped(b) for b in model.blocks])
    for block in model.blocks:
        block.block.norm1.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    group = dist.group.WORLD if world > 1 else None
    engine = Engine(
        model, PLANS[plan], group, transforms=BlockTransforms(recompute="blocks" if recompute_blocks else "no")
    )
    engine.take_optimizer(optimizer)
    torch.manual_seed(5)
    losses, gradients = [], []
    for step in range(3):
        with engine.forward():
            loss = token_loss(model, token_batch(step, 4, torch.float32))
        engine.backward(loss)
        engine.close_window()
        losses.append(loss.item())
        gradients += [g for p in engine.table.parameters if (g := engine.gradient(p)) is not None]
        engine.step(optimizer)
        assert plan != "zero3" or not any(b.gathered for b in engine.buffers)
    calls = [b.calls for b in model.blocks]
    with torch.no_grad(), engine.forward():
        token_loss(model, token_batch(9, 4, torch.float32))
    assert [b.calls for b in model.blocks] == [c + 1 for c in calls], "evaluation does not recompute"
    engine.detach()
    assert "forward" not in vars(model.blocks[0])
    return losses, gradients, calls


def same_numbers(rank, world_size):
    for plan in ("ddp", "zero1", "zero2", "zero3"):
        losses, gradients, calls = train(plan, world_size, False)
        again = train(plan, world_size, True)
        assert calls == [3, 3] and again[2] == [6, 6]
        assert again[0] == losses
        assert len(gradients) == len(again[1]) > 10
        for a, b in zip(gradients, again[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.case("C013")
@pytest.mark.case("C076")
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_and_gradients_are_those_without(world_size):
    run_ranks(same_numbers, world_size)


class InnerCheckpoint(nn.Module):
    """Recomputes a part of itself, which starts with a frozen norm: its weight is needed after the last gradient."""

    def __init__(self, width, reentrant):
        super().__init__()
        self.part = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
        self.part[0].requires_grad_(False)
        nn.init.uniform_(self.part[0].weight)
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return x + self.part(x)
        return x + checkpoint(self.part, x, use_reentrant=self.reentrant)


def inner_checkpoints(rank, world_size):
    for plan in ("ddp", "zero3"):
        results = []
        for reentrant in (None, False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*[InnerCheckpoint(7, reentrant) for _ in range(3)])
            engine = Engine(model, PLANS[plan], dist.group.WORLD)
            x = torch.randn(4, 7, requires_grad=True)
            with engine.forward():
                loss = model(x).square().mean()
            engine.backward(loss)
            engine.close_window()
            results.append([x.grad, *(engine.gradient(p) for p in engine.table.parameters)])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)


def test_a_frozen_weight_in_a_recomputed_part_is_never_a_nan():
    run_ranks(inner_checkpoints, 2)


def most_gathered(rank, world_size, how):
    torch.manual_seed(0)
    model = TinyGPT(layers=8)
    engine = Engine(
        model,
        PLANS["zero3"],
        dist.group.WORLD,
        transforms=BlockTransforms(recompute="blocks" if how == "option" else "no"),
    )
    if how == "user":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    most, finish = [0, 0], Unit.finish_gather
    agreement.PREFETCH_BYTES = 0  # one ahead, however small

    def counted(self):
        finish(self)
        units = [u for u in engine.table.units if u.name != "rest"]
        most[0] = max(most[0], sum(u.gathered for u in units))
        most[1] = max(most[1], sum(b.filled for u in units for b in u.buffers))

    Unit.finish_gather = counted
    for _ in range(5):
        with engine.forward():
            loss = token_loss(model, token_batch(rank, 4, torch.float32))
        engine.backward(loss)
    Unit.finish_gather = finish
    return most


@pytest.mark.parametrize("how", ["plain", "option", "user"])
def test_a_recomputed_unit_is_released_when_its_gradients_are_there(how):
    # The unit that computes, the one before it until its last gradient is there, and in memory one more on its way.
    for gathered, filled in run_ranks(most_gathered, 2, how=how):
        assert gathered <= 2 and filled <= 3


def test_a_misspelt_choice_is_refused():
    with pytest.raises(
        StrategyError, match="recompute='block' is not an option of zero3: use 'no', 'blocks' or 'blocks_reentrant'"
    ):
        ZeRO3(recompute="block")
