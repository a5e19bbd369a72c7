"""Every row of the table gives the losses, norms and weights of one process on the joined batch."""

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import MODELS, OPTIMIZERS, make, reference, windows
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.window import StepResult

STEPS = 10


def train(name, plan, reduce, accumulate, clip, optimizer, dtype, rank, world, steps=STEPS):
    model = make(name, dtype)
    _, loss_of, batch_of = MODELS[name]
    opt = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    engine = Engine(model, PLANS[plan], dist.group.WORLD if world > 1 else None, reduce)
    engine.take_optimizer(opt)
    losses, norms = [], []
    for window in windows(steps, accumulate):
        for m in window:
            with engine.forward():
                loss = loss_of(model, batch_of(1000 * m + rank, 4, dtype))
            engine.backward(loss)
        engine.close_window()
        norms.append(float(engine.clip(opt, clip) if clip else engine.norm(opt)))
        losses.append(engine.window.mean_loss)
        assert engine.step(opt) is StepResult.STEPPED
        if PLANS[plan].shard_parameters:
            assert not any(b.gathered or b.filled for b in engine.buffers)
    with engine.gathered():
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return losses, norms, weights


def check(rank, world_size, cases, dtype, optimizer, tolerance):
    """Each case is (model, accumulate, clip)."""
    for name, accumulate, clip in cases:
        expected = reference(name, world_size, STEPS, accumulate, clip, optimizer, dtype)
        plans = ["ddp", "zero1", "zero2", "zero3"] + (["single"] if world_size == 1 else [])
        for reduce in ("micro_batch", "window"):
            runs = {}
            for plan in plans:
                where = f"{name} {plan} reduce={reduce} accumulate={accumulate} clip={clip}"
                runs[where] = train(name, plan, reduce, accumulate, clip, optimizer, dtype, rank, world_size)
                equals_reference(where, runs[where], expected, tolerance)
            first, *others = runs.values()
            for where, (losses, norms, weights) in zip(list(runs)[1:], others, strict=True):
                assert losses == first[0], f"{where}: losses are not bit-identical with ddp"
                assert norms == first[1], f"{where}: norms are not bit-identical with ddp"
                for n in first[2]:
                    assert torch.equal(weights[n], first[2][n]), f"{where}: {n} is not bit-identical with ddp"


def equals_reference(where, got, expected, tolerance):
    for want, have in zip(expected[0] + expected[1], got[0] + got[1], strict=True):
        assert have == pytest.approx(want, rel=tolerance, abs=tolerance), where
    for n, w in expected[2].items():
        torch.testing.assert_close(got[2][n], w, rtol=tolerance, atol=tolerance, msg=lambda m, n=n: f"{where} {n}: {m}")


SETTINGS = [(a, c) for a in (1, 2, 3) for c in (None, 0.05)]


def some_cases(world_size):
    """One setting per model; over the world sizes every setting meets every kind of model."""
    return [(name, *SETTINGS[(2 * i + world_size * 3 + i // 2) % 6]) for i, name in enumerate(MODELS)]


def all_cases():
    return [(name, *setting) for name in MODELS for setting in SETTINGS]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sgd_in_fp64_equals_one_process(world_size):
    cases = some_cases(world_size)[: {3: 2, 4: 1}.get(world_size)]
    run_ranks(check, world_size, cases=cases, dtype=torch.float64, optimizer="sgd", tolerance=1e-10, timeout_s=240)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_adamw_in_fp64_equals_one_process(world_size):
    cases = [("tiny_gpt", 2, 0.05), ("frozen_mix", 1, None)] if world_size == 2 else [("multi_call", 3, 0.05)]
    run_ranks(check, world_size, cases=cases, dtype=torch.float64, optimizer="adamw", tolerance=1e-10, timeout_s=240)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_sgd_in_fp32_equals_one_process(world_size):
    cases = [("odd_mlp", 3, None), ("tiny_gpt", 1, 0.05)] if world_size == 2 else [("frozen_mix", 2, 0.05)]
    run_ranks(check, world_size, cases=cases, dtype=torch.float32, optimizer="sgd", tolerance=1e-5, timeout_s=240)


@pytest.mark.conformance("A8")
@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_setting_equals_one_process(world_size, optimizer):
    run_ranks(
        check, world_size, cases=all_cases(), dtype=torch.float64, optimizer=optimizer, tolerance=1e-10, timeout_s=3000
    )
