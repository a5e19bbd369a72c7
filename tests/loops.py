"""A use of a model, run by the plain one-process loop and by the engine, so that the two can be compared."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.window import StepResult
from torch import Tensor, nn

Losses = Callable[[nn.Module, Tensor, int, int], Sequence[Tensor]]
"""(model, batch, step, rank) -> the losses that one forward returns; each gets a backward of its own."""


@dataclass
class Outcome:
    """What a run leaves."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    calls: list[dict[str, int]] = field(default_factory=list)


IN_MEMORY = [name for name in PLANS if name != "infinity"]
"""Rows that differ: infinity is zero3's, and its state on disk has tests of its own."""


def plans(world: int) -> list[str]:
    return [name for name in IN_MEMORY if name != "single" or world == 1]


def group(world: int):
    return dist.group.WORLD if world > 1 else None


def build(make: Callable[[], nn.Module], dtype: torch.dtype | None = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = make()
    return model if dtype is None else model.to(dtype)


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    """Momentum and decay, so that a parameter without a gradient shows if it is updated."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9, weight_decay=0.01)


def rows(step: int, rank: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 7, generator=g, dtype=torch.float64)


def plain(make, losses: Losses, world: int, steps=3, batch=rows, dtype=torch.float64, optimizer=optimizer_of):
    """One process, the joined batch, torch.optim."""
    model, out = build(make, dtype), Outcome()
    opt = optimizer(model)
    for step in range(steps):
        total = 0.0
        for rank in range(world):
            parts = losses(model, batch(step, rank), step, rank)
            for loss in parts:
                (loss / (len(parts) * world)).backward(retain_graph=True)
                total += loss.item() / (len(parts) * world)
        grads = [p.grad.abs().flatten() for p in model.parameters() if p.grad is not None]
        out.norms.append(torch.cat([g.double() for g in grads]).square().sum().sqrt().item())
        out.losses.append(total)
        opt.step()
        opt.zero_grad()
    out.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return out


def sharded(
    make, losses: Losses, plan, rank, world, steps=3, batch=rows, dtype=torch.float64, optimizer=optimizer_of, **options
):
    """The same under a row of the ZeRO table; nothing may be gathered between the steps."""
    model, out = build(make, dtype), Outcome()
    opt = optimizer(model)
    engine = Engine(model, PLANS[plan], options.pop("groups", None) or group(world), **options)
    engine.take_optimizer(opt)
    for step in range(steps):
        before = engine.collectives.calls.copy()
        with engine.forward():
            parts = losses(model, batch(step, rank), step, rank)
        check_released(engine, turning=True)
        for loss in parts:
            engine.backward(loss, run=partial(Tensor.backward, retain_graph=len(parts) > 1))
            check_released(engine)
        del parts, loss
        engine.close_window()
        out.norms.append(float(engine.norm(opt)))
        out.losses.append(engine.window.mean_loss)
        assert engine.step(opt) is StepResult.STEPPED
        check_released(engine)
        out.calls.append(engine.collectives.calls - before)
    with engine.gathered():
        out.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    check_released(engine)
    return out


def check_released(engine: Engine, turning: bool = False) -> None:
    """Nothing is gathered; between forward and backward what the one used last and the other needs first may be."""
    may = engine.weights.turning.buffers if turning and engine.weights.turning else []
    sharded = [b for b in engine.buffers if b.plan.shard_parameters and b not in may]
    left = [b.name for b in sharded if b.gathered or b.filled]
    assert not left, f"left gathered: {left}"


def check_equal(got: Outcome, want: Outcome, where: str, tolerance: float = 1e-10) -> None:
    for what in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(getattr(got, what), dtype=torch.float64),
            torch.tensor(getattr(want, what), dtype=torch.float64),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m: f"{where} {what}: {m}",
        )
    for name, weight in want.weights.items():
        torch.testing.assert_close(
            got.weights[name], weight, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where} {name}: {m}"
        )


def check_all_plans(
    make, losses, rank, world, where, tolerance=1e-10, options=({},), chosen=None, **settings
) -> list[Outcome]:
    """Every strategy, or the `chosen` ones, gives the plain loop's losses, norms and weights."""
    want, runs = plain(make, losses, world, **settings), []
    for plan in plans(world) if chosen is None else chosen:
        for option in options:
            got = sharded(make, losses, plan, rank, world, **settings, **option)
            check_equal(got, want, f"{where} {plan} {option} on {world} ranks", tolerance)
            runs.append(got)
    return runs
