"""Small parameters stay whole on every rank under zero3: never gathered, and trained like all others."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from harness import run_ranks
from loops import build, check_equal, check_released, group, optimizer_of, plain, rows, sharded
from models import TinyGPT
from shardlight.strategies import ZeRO3, deferred_init
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.partition import find_units, set_small_apart
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.released import ReleasedParameter
from shardlight.strategies.errors import StrategyError
from shardlight.strategies.options import EngineOptions, make_options
from test_checkpoint import Module, Rows, run
from test_engine_uses import GPT, USES, Blocks, Experts, gpt_batch, one_expert_per_rank, order_by_step, tokens
from test_lightning_fit import make_trainer
from test_master_weights import BF16, check_changes, made, step
from test_precision import weights_of
from torch.utils.data import DataLoader

LIMIT = 10
"""Biases of the small models; no weight."""


def frozen_weights():
    model = Blocks()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.numel() <= LIMIT)
    return model


RUNS = {
    "order changes by step": (Blocks, order_by_step, {"steps": 5}),
    "experts differ by rank": (Experts, one_expert_per_rank, {}),
    "recomputed, frozen norms": (partial(GPT, False), tokens, {"batch": gpt_batch, "keep_small": 12}),
    "order differs by rank": (*USES["order differs by rank"], {"reduce": "window"}),
    "a rank far ahead": (*USES["a rank far ahead of the other"], {}),
    "frozen and set free": (*USES["frozen and set free"], {}),
    "unused, tied, frozen": (*USES["unused, tied, non-contiguous, frozen"], {"reduce": "window"}),
    "only small ones are trained": (frozen_weights, order_by_step, {}),
    "two forwards, two backwards": (*USES["two forwards, two backwards"], {}),
}
"""Uses of a model in which ranks need different units, or the same ones in another order, and others."""


class Watch:
    """Notes what ranks gather, and looks at the small parameters whenever the model is used."""

    def __init__(self, losses, limit=LIMIT):
        self.losses, self.limit = losses, limit
        self.callers, self.small = [], {}

    def __enter__(self):
        self.start_all_gather = start = Collectives.start_all_gather

        def noted(collectives, full, shard, caller):
            self.callers.append(caller)
            return start(collectives, full, shard, caller)

        Collectives.start_all_gather = noted
        return self

    def __exit__(self, *error):
        Collectives.start_all_gather = self.start_all_gather

    def __call__(self, model, batch, step, rank):
        self.look(model)
        losses = self.losses(model, batch, step, rank)
        self.look(model)
        for loss in losses:
            loss.register_hook(lambda gradient: self.look(model))
        return losses

    def look(self, model):
        whole = {n: p.data_ptr() for n, p in model.named_parameters() if p.numel() <= self.limit}
        released = [n for n, p in model.named_parameters() if n in whole and isinstance(p, ReleasedParameter)]
        assert not released
        self.small = self.small or whole
        assert whole == self.small, "their memory is the same all the time"


def check_runs(rank, world_size):
    weights = {}
    for name, (make, losses, settings) in RUNS.items():
        options = {"keep_small": LIMIT, **{n: settings[n] for n in ("keep_small", "reduce") if n in settings}}
        settings = {n: v for n, v in settings.items() if n not in options}
        want = plain(make, losses, world_size, **settings)
        with Watch(losses, options["keep_small"]) as watch:
            got = sharded(make, watch, "zero3", rank, world_size, **options, **settings)
        check_equal(got, want, name)
        gathered = [c for c in watch.callers if "small" in c and not c.startswith("publish")]
        assert watch.small and not gathered, name
        # One publication a step for those that began trainable, and one for those that did not if they were set free.
        published = watch.callers.count("publish small parameters")
        assert len(got.norms) <= published <= 2 * len(got.norms), name
        assert any(c.startswith("gather ") for c in watch.callers), name
        weights[name] = got.weights, sorted(watch.small)
    return weights


@pytest.mark.case("C095")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_small_parameters_are_never_gathered_and_train_as_in_the_plain_loop(world_size):
    first, *others = run_ranks(check_runs, world_size, timeout_s=120)
    for other in others:
        for name, (weights, small) in first.items():
            assert other[name][1] == small, f"{name}: ranks keep different parameters"
            assert all(torch.equal(other[name][0][n], w) for n, w in weights.items()), name


def check_counts(rank, world_size):
    counts = {}
    for keep_small in (0, LIMIT, 1 << 40):
        with Watch(None) as watch:
            run = sharded(
                Blocks, USES["two forwards, one backward"][1], "zero3", rank, world_size, keep_small=keep_small
            )
        counts[keep_small] = run.calls, watch.callers
    return counts


def test_a_step_sends_one_publication_and_one_reduction_more():
    for counts in run_ranks(check_counts, 2):
        calls, callers = counts[LIMIT]
        for kept, without in zip(calls, counts[0][0], strict=True):
            assert kept["all_gather"] == without["all_gather"] + 1
            assert kept["reduce_scatter"] == without["reduce_scatter"] + 1
        calls, callers = counts[1 << 40]
        assert set(callers) == {"publish small parameters"}, "with all of them small nothing is ever gathered"
        assert all(c["all_gather"] == c["reduce_scatter"] == 1 for c in calls)


def write(model, step):
    """In place, through `data`, and other data: what user code does between steps."""
    with torch.no_grad():
        model.shift.mul_(0.5)
        model.blocks[0][0].bias.data.add_(0.25)
        model.blocks[step % 3][2].bias.data = model.blocks[step % 3][2].bias.data * 2 + step
        model.head.bias[1] = 0.125


def check_writes(rank, world_size):
    plain_model, model = build(Blocks), build(Blocks)
    optimizers = [optimizer_of(m) for m in (plain_model, model)]
    engine = Engine(model, PLANS["zero3"], group(world_size), keep_small=LIMIT)
    engine.take_optimizer(optimizers[1])
    for number in range(3):
        for peer in range(world_size):
            (plain_model(rows(number, peer)).square().mean() / world_size).backward()
        want = torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 0.05)
        optimizers[0].step()
        optimizers[0].zero_grad()
        with engine.forward():
            loss = model(rows(number, rank)).square().mean()
        engine.backward(loss)
        del loss
        with engine.gathered(model.head):
            assert model.head.weight.shape == (5, 7) and model.head.bias.shape == (5,)
        torch.testing.assert_close(engine.clip(optimizers[1], 0.05), want, rtol=1e-10, atol=1e-10)
        grads = engine.gradient(model.shift), engine.gradient(model.head.weight)
        assert grads[0].shape == (5,) and grads[1].shape == (5, 7)
        engine.step(optimizers[1])
        with engine.gathered(), torch.no_grad():
            model.head.bias.add_(1.0)
            model.head.weight.add_(1.0)
        with torch.no_grad():
            plain_model.head.bias.add_(1.0)
            plain_model.head.weight.add_(1.0)
        for each in (plain_model, model):
            write(each, number)
        check_released(engine)
        for (n, p), q in zip(model.named_parameters(), plain_model.parameters(), strict=True):
            if p.numel() <= LIMIT:
                torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10, msg=lambda m: f"{n} after {number}: {m}")
        with engine.forward(), torch.no_grad():
            got = model(rows(9, 9))
        torch.testing.assert_close(got, plain_model(rows(9, 9)).detach(), rtol=1e-10, atol=1e-10)
    engine.take_in_changes()
    kept = weights_of(engine)
    for n, p in plain_model.named_parameters():
        torch.testing.assert_close(kept[n], p.detach(), rtol=1e-10, atol=1e-10)
    with pytest.raises(StrategyError, match="'head.weight' is sharded"):
        model.head.weight.sum()
    engine.detach()
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_written_to_small_parameters_between_steps_counts(world_size):
    run_ranks(check_writes, world_size)


def check_deferred(rank, world_size):
    want = build(TinyGPT, None).state_dict()
    torch.manual_seed(rank)
    with deferred_init():
        torch.manual_seed(0)
        model = TinyGPT()
    engine = Engine(model, PLANS["zero3"], group(world_size), keep_small=12)
    check_released(engine)
    got = weights_of(engine)
    assert all(torch.equal(w, want[n]) for n, w in got.items())
    small = {n for n, p in model.named_parameters() if p.numel() <= 12}
    assert small == {n for n, p in model.named_parameters() if not isinstance(p, ReleasedParameter)} and small
    assert all(torch.equal(p, want[n]) for n, p in model.named_parameters() if n in small)


def check_masters(rank, world_size):
    """The 16-bit copies stay, the masters of each rank's part are sharded."""
    model, optimizer, engine = made("zero3", BF16, keep_small=8)
    for _ in range(10):
        step(model, optimizer, engine)
    assert model.line.weight.dtype == torch.bfloat16 and engine.buffers[0].home.dtype == torch.float32
    weight = weights_of(engine)["line.weight"]
    torch.testing.assert_close(weight, torch.full((1, 8), 0.99), rtol=0, atol=1e-6)
    check_changes(model, optimizer, engine, "zero3 with small parameters")


def check_both(rank, world_size):
    check_deferred(rank, world_size)
    check_masters(rank, world_size)


def test_deferred_and_mastered_small_parameters():
    run_ranks(check_both, 2)


def save(rank, world_size, folder):
    out = run(ZeRO3(keep_small=LIMIT), world_size, folder, stop=3, path=f"{folder}/saved")
    whole = run(ZeRO3(), world_size, folder)
    for keep_small in (0, 7, 60):
        resumed = run(ZeRO3(keep_small=keep_small), world_size, folder, resume=f"{folder}/saved")
        for n, w in whole[1].items():
            assert torch.equal(resumed[1][n], w), f"{n} resumed with keep_small={keep_small}"
        assert all(torch.equal(a, b) for a, b in zip(resumed[2], whole[2], strict=True)), keep_small
    return out[1]


def load(rank, world_size, folder, keep_small):
    module = Module()
    trainer = make_trainer(ZeRO3(keep_small=keep_small), world_size, folder, precision="32-true")
    with pytest.warns(UserWarning, match="StopAfter") if rank == 0 else nullcontext():
        trainer.test(module, DataLoader(Rows()), ckpt_path=f"{folder}/saved", verbose=False)
    with trainer.strategy.gathered():
        return {k: v.detach().clone() for k, v in module.state_dict().items()}


def test_a_checkpoint_is_read_at_another_threshold_and_world_size(tmp_path):
    (saved, _) = run_ranks(save, 2, init=False, folder=str(tmp_path), timeout_s=90)
    for world_size, keep_small in ((1, 7), (3, 60)):
        for loaded in run_ranks(load, world_size, init=False, folder=str(tmp_path), keep_small=keep_small):
            assert all(torch.equal(loaded[n], w) for n, w in saved.items()) and loaded.keys() == saved.keys()


def test_small_parameters_leave_their_units_for_one_of_their_own():
    units = find_units(TinyGPT())
    apart = set_small_apart(units, 12)
    assert [(u.name, u.roots, u.keep, u.block) for u in apart[:-1]] == [
        (u.name, u.roots, u.keep, u.block) for u in units
    ]
    small = apart[-1]
    assert small.whole and not small.roots and not any(u.whole for u in apart[:-1])
    assert all(p.numel() <= 12 for _, p in small.params)
    assert all(p.numel() > 12 for u in apart[:-1] for _, p in u.params)
    names = [n for u in apart for n, _ in u.params]
    assert sorted(names) == sorted(n for u in units for n, _ in u.params)
    assert set_small_apart(units, 1) == units


def test_only_zero3_keeps_small_parameters():
    for name in ("single", "ddp", "zero1", "zero2"):
        with pytest.raises(
            StrategyError,
            match=f"keep_small is for zero3, infinity, pipeline, tensor and mesh: the weights of {name} are always there",
        ):
            make_options(EngineOptions, name, {"keep_small": 10})
    with pytest.raises(StrategyError, match="keep_small=-1 must be 0 or more elements"):
        make_options(EngineOptions, "zero3", {"keep_small": -1})
    assert make_options(EngineOptions, "zero3", {"keep_small": 10}).keep_small == 10
