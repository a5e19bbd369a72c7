"""How long weights stay gathered changes what is sent and held, and no bit of a result."""

import itertools

import pytest
import torch
from harness import run_ranks
from loops import build, group, optimizer_of
from models import FrozenMix, TinyGPT, regression_batch, regression_loss, token_batch, token_loss
from shardlight.strategies.engine import kept_units
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import StrategyError
from shardlight.strategies.options import EngineOptions, make_options

MICRO_BATCHES = 2
MODELS = {
    "gpt": (lambda: TinyGPT(layers=3, tied=False), token_batch, token_loss),
    "frozen": (FrozenMix, regression_batch, regression_loss),
}


def held(engine):
    return [u.name for u in engine.table.units if u.gathered]


def train(rank, world_size, kind, keep, averaged=False):
    """Three windows of two micro-batches, an evaluation within each; returns results, gathers and what was held."""
    make, batch, loss_of = MODELS[kind]
    model = build(make)
    engine = Engine(model, PLANS["zero3"], group(world_size), keep_gathered=keep)
    optimizer = optimizer_of(model)
    engine.take_optimizer(optimizer)
    results, gathers, between, after = [], [], [], []
    for step in range(3):
        before = engine.collectives.calls["all_gather"]
        for m in range(MICRO_BATCHES):
            data = batch(10 * (MICRO_BATCHES * step + m) + rank, 4, torch.float64)
            with engine.forward():
                loss = loss_of(model, data)
            between.append(held(engine))
            engine.backward(loss)
            after.append(held(engine))
            results.append(loss.item())
            if averaged and m == 0:
                # Other weights in the middle of a window, as an average that is evaluated.
                parts = [engine.owned_piece(p)[1] for p in engine.table.parameters]
                own = [p.clone() for p in parts]
                for values in ([p / 2 for p in own], own):
                    for part, value in zip(parts, values, strict=True):
                        part.copy_(value)
                    engine.weights_changed()
                    with torch.no_grad(), engine.forward():
                        results.append(float(loss_of(model, data)))
                    assert held(engine) == []
        engine.close_window()
        results.append(float(engine.norm(optimizer)))
        engine.step(optimizer)
        assert held(engine) == [], "an optimizer's step ends every hold"
        gathers.append(engine.collectives.calls["all_gather"] - before)
    with engine.gathered():
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return results, weights, gathers, between, after


def compare(rank, world_size):
    kept_units.available_bytes = lambda: 0
    out = {}
    for kind, averaged in itertools.product(MODELS, (False, True)):
        want = train(rank, world_size, kind, "no", averaged)
        for keep in ("backward", "window", "auto"):
            got = train(rank, world_size, kind, keep, averaged)
            where = f"{kind} {keep} averaged={averaged}"
            assert got[0] == want[0], where
            assert all(torch.equal(got[1][n], w) for n, w in want[1].items()), where
            out[kind, averaged, keep] = got[2:]
        out[kind, averaged, "no"] = want[2:]
    return out


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_kept_changes_no_bit_and_gathers_once(world_size):
    for out in run_ranks(compare, world_size, timeout_s=180):
        units = 4  # three blocks, and the rest
        for keep in ("no", "auto"):  # without memory that is left `auto` keeps nothing
            # The last unit of forward, which backward needs first, stays from the second time on.
            assert out["gpt", False, keep][1] == [[]] + [["rest"]] * 5
        assert out["gpt", False, "no"][0] == out["gpt", False, "auto"][0]
        for keep, times in (("backward", MICRO_BATCHES), ("window", 1)):
            gathers, between, after = out["gpt", False, keep]
            assert all(len(names) == units for names in between)
            assert all(len(names) == (units if keep == "window" else 0) for names in after)
            if world_size > 1:
                assert gathers[0] == units * times, f"{keep}: {gathers}"
                assert gathers[0] < out["gpt", False, "no"][0][0]


def choose(rank, world_size):
    model = build(MODELS["gpt"][0])
    engine = Engine(model, PLANS["zero3"], group(world_size), keep_gathered="auto")
    sizes = [u.nbytes for u in engine.table.units]
    # Half of what is left, shared by two ranks, holds the last two units; rank 1 has more, and follows.
    kept_units.available_bytes = lambda: int(4 * (sizes[-1] + sizes[-2])) + (1 << 20) * rank
    with engine.forward():
        loss = token_loss(model, token_batch(rank, 4, torch.float64))
    engine.backward(loss)
    return [u.keep_gathered for u in engine.table.units]


def test_auto_keeps_the_last_units_that_fit_on_every_rank():
    assert run_ranks(choose, 2) == [["no"] * 2 + ["window"] * 2] * 2


def test_only_zero3_has_something_to_keep():
    for name in ("single", "ddp", "zero1", "zero2"):
        with pytest.raises(
            StrategyError,
            match=f"keep_gathered is for zero3, infinity, pipeline, tensor and mesh: the weights of {name} are always there",
        ):
            make_options(EngineOptions, name, {"keep_gathered": "auto"})
    with pytest.raises(StrategyError, match="keep_gathered='yes' is not an option of zero3: use 'no', 'backward'"):
        make_options(EngineOptions, "zero3", {"keep_gathered": "yes"})
    assert make_options(EngineOptions, "zero3", {"keep_gathered": "window"}).keep_gathered == "window"
