"""A model cut over a tensor group against the same model whole: results and gradients, on every rank."""

import copy
from collections.abc import Callable, Mapping

import torch.distributed as dist
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.transforms.tensor.apply import apply
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup
from shardlight.strategies.engine.transforms.tensor.plan import TensorPlan, tensor_plan
from torch import Tensor, nn


def tensor_group() -> TensorGroup:
    """All ranks, as one group."""
    return TensorGroup(Collectives(dist.group.WORLD))


def cut(model: nn.Module, group: TensorGroup, **options) -> tuple[nn.Module, TensorPlan]:
    """A copy of the model, cut; and its plan."""
    mine = copy.deepcopy(model)
    plan = tensor_plan(mine, group.size, **options)
    apply(mine, plan, group)
    return mine, plan


def part(plan: TensorPlan, name: str, tensor: Tensor, rank: int) -> Tensor:
    """What a rank has of a logical tensor."""
    return plan.slices(rank)[name].of(tensor) if name in plan.cuts else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check_equal(
    model: nn.Module, step: Callable[[nn.Module], Tensor], group: TensorGroup, tolerance=1e-10, gathers=(), **options
) -> TensorPlan:
    """Asserts that a step gives the same loss and gradients, and that just `gathers` was gathered; None: whatever was."""
    mine, plan = cut(model, group, **options)
    group.gathered.clear()
    loss = step(mine)
    loss.backward()
    whole = copy.deepcopy(model)
    expected = step(whole)
    expected.backward()
    assert abs(loss.item() - expected.item()) <= tolerance * max(1.0, abs(expected.item())), (loss, expected)
    same_gradients(gradients(mine), gradients(whole), plan, group, tolerance)
    assert gathers is None or set(group.gathered) == set(gathers), group.gathered
    return plan


def same_gradients(
    mine: Mapping[str, Tensor], whole: Mapping[str, Tensor], plan: TensorPlan, group: TensorGroup, tolerance: float
) -> None:
    assert mine.keys() == whole.keys(), mine.keys() ^ whole.keys()
    for name, gradient in whole.items():
        expected = part(plan, name, gradient, group.rank)
        assert mine[name].shape == expected.shape, name
        worst = (mine[name] - expected).abs().max().item() if expected.numel() else 0.0
        assert worst <= tolerance * max(1e-3, gradient.abs().max().item()), (name, worst)
        if name not in plan.cuts:
            rows = group.collectives.gather_small(mine[name].flatten(), "the same on all ranks")
            assert (rows == rows[0]).all(), f"{name} differs between ranks"
