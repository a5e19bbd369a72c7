"""Every row of the table gives the losses, norms and weights of one process on the joined batch."""

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import MODELS, OPTIMIZERS, make, reference, windows
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS

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
        assert engine.step(opt)
        if PLANS[plan].shard_parameters:
            assert not any(b.gathered or b.full.untyped_storage().nbytes() for b in engine.buffers)
    with engine.gathered():
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return losses, norms, weights


def check_all(rank, world_size, names, dtype, optimizer, tolerance, accumulations, clips, steps=STEPS):
    for name in names:
        for accumulate in accumulations:
            for clip in clips:
                expected = reference(name, world_size, steps, accumulate, clip, optimizer, dtype)
                by_reduce = {"micro_batch": [], "window": []}
                plans = ["ddp", "zero1", "zero2", "zero3"] + (["single"] if world_size == 1 else [])
                for plan in plans:
                    for reduce in by_reduce:
                        got = train(name, plan, reduce, accumulate, clip, optimizer, dtype, rank, world_size, steps)
                        where = f"{name} {plan} reduce={reduce} accumulate={accumulate} clip={clip}"
                        for want, have in zip(expected[0] + expected[1], got[0] + got[1], strict=True):
                            assert have == pytest.approx(want, rel=tolerance, abs=tolerance), where
                        for n, w in expected[2].items():
                            torch.testing.assert_close(
                                got[2][n], w, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where} {n}: {m}"
                            )
                        by_reduce[reduce].append((where, got))
                for runs in by_reduce.values():
                    first = runs[0][1]
                    for where, got in runs[1:]:
                        assert got[0] == first[0], f"{where}: losses are not bit-identical with ddp"
                        assert got[1] == first[1], f"{where}: norms are not bit-identical with ddp"
                        for n in first[2]:
                            assert torch.equal(got[2][n], first[2][n]), f"{where}: {n} is not bit-identical with ddp"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sgd_in_fp64_equals_one_process(world_size):
    run_ranks(
        check_all,
        world_size,
        names=list(MODELS),
        dtype=torch.float64,
        optimizer="sgd",
        tolerance=1e-10,
        accumulations=[1, 2, 3],
        clips=[None, 0.05],
        timeout_s=240,
    )
