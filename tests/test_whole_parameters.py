"""Optimizers that need whole parameters (Muon, LAMB, Adafactor): the numbers of one process, owners, bytes, checkpoints."""

import functools
import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from loops import build, check_all_plans, check_equal, group, plain, sharded
from models import OPTIMIZERS, OddMLP, TinyGPT, reference, token_batch, token_loss
from shardlight.ops.lamb import Lamb
from shardlight.ops.muon_adamw import MuonAdamW
from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine import whole
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.dtypes import DtypePolicy
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.window import StepResult
from shardlight.strategies.errors import StrategyError
from shardlight.strategies.process_group import engine_groups
from test_cases_numbers import Sizes, no_input
from test_engine_parity import equals_reference, train
from test_precision import weights_of
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon

SHARDED = ("zero1", "zero2", "zero3")
HALF = torch.bfloat16


def muon_groups(params):
    """Matrices to Muon, the rest to AdamW."""
    params = list(params)
    return [
        {"params": [p for p in params if p.dim() == 2], "kind": "muon", "lr": 1e-2},
        {"params": [p for p in params if p.dim() != 2], "lr": 1e-2},
    ]


OPTIMIZERS |= {
    "lamb": lambda params: Lamb(params, lr=1e-2),
    # eps: the gradient of the keys' bias is nothing but rounding, which must not be blown up
    "adafactor": lambda params: Adafactor(params, lr=1e-2, weight_decay=0.01, eps=(1e-6, 1e-3)),
    "muon": lambda params: MuonAdamW(muon_groups(params)),
}


def made_by(name):
    return lambda model: OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])


def check_parity(rank, world_size, cases):
    for name, optimizer, accumulate, clip in cases:
        want = reference(name, world_size, 4, accumulate, clip, optimizer)
        for plan in SHARDED:
            got = train(name, plan, None, accumulate, clip, optimizer, torch.float64, rank, world_size, steps=4)
            equals_reference(f"{name} {optimizer} {plan} {accumulate} {clip}", got, want, 1e-9)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_equal_one_process(world_size):
    cases = [
        ("tiny_gpt", "muon", 2, 0.05),
        ("tiny_gpt", "lamb", 1, 0.05),
        ("tiny_gpt", "adafactor", 2, None),
        ("frozen_mix", "lamb", 2, None),
        ("multi_call", "adafactor", 1, None),
    ]
    run_ranks(check_parity, world_size, cases=cases, timeout_s=120)


def regression(model, batch, step, rank):
    return [model(batch).square().mean()]


def check_ways(rank, world_size):
    """More ranks than matrices, rounds of few bytes, and every way in which data moves."""
    whole.ROUND_BYTES = 16 * world_size * 7
    hybrid = {"groups": engine_groups("gloo", 60.0, 2)}
    options = [{}, {"collectives": "gloo"}, {"reduce": "window"}, hybrid, {"keep_small": 8}, "two hosts"]
    for name in ("lamb", "muon"):
        want = plain(OddMLP, regression, world_size, optimizer=made_by(name))
        for number, chosen in enumerate(options):
            if chosen == "two hosts":
                os.environ["SHARDLIGHT_HOST"] = f"host {rank // 2}"
                chosen = {}
            for plan in SHARDED if number == 0 else (SHARDED[number % 3 - 2], "zero3"):
                if plan == "zero3" or "keep_small" not in chosen:
                    got = sharded(OddMLP, regression, plan, rank, world_size, optimizer=made_by(name), **chosen)
                    check_equal(got, want, f"{name} {plan} {number}", 1e-9)
        del os.environ["SHARDLIGHT_HOST"]


def test_more_ranks_than_matrices_in_every_way_that_data_moves():
    run_ranks(check_ways, 4)


def check_sizes(rank, world_size):
    for name in ("lamb", "muon"):
        shapes = {n: p.shape for n, p in build(partial(Sizes, True)).named_parameters()}
        settings = {"optimizer": made_by(name), "steps": 2, "tolerance": 1e-9}
        for run in check_all_plans(partial(Sizes, True), no_input, rank, world_size, name, **settings):
            assert {n: w.shape for n, w in run.weights.items()} == shapes


@pytest.mark.case("C034")
@pytest.mark.parametrize("world_size", [2, 3])
def test_sizes_of_zero_and_one(world_size):
    run_ranks(check_sizes, world_size)


def exchanged(rank, world_size):
    os.environ["SHARDLIGHT_HOST"] = f"host {rank // 2}"
    ways = [Collectives(dist.group.WORLD), Collectives(dist.group.WORLD, transport="gloo")]
    del os.environ["SHARDLIGHT_HOST"]
    for joined in [*ways, Collectives(dist.group.WORLD)]:
        for dtype in (torch.uint8, torch.float64):
            sizes = [[(3 * source + 5 * target) % 4 * 1000 + target for target in range(4)] for source in range(4)]
            sizes[1][2], sizes[3] = 0, [0, 0, 0, 0]
            parts = [torch.full((n,), 10 * rank + r, dtype=dtype) for r, n in enumerate(sizes[rank])]
            into = [torch.empty(sizes[r][rank], dtype=dtype) for r in range(4)]
            sent = joined.bytes_sent
            joined.all_to_all(into, parts, "test")
            for source, found in enumerate(into):
                assert found.eq(10 * source + rank).all(), (joined.why_not_shared, source)
            others = sum(p.nbytes for r, p in enumerate(parts) if r != rank)
            assert joined.bytes_sent - sent == others and joined.calls["all_to_all"] >= 1


def test_parts_of_any_size_arrive_where_they_are_sent():
    run_ranks(exchanged, 4)


def tokens(step, rank):
    return token_batch(100 * step + rank, 4, torch.float64)


def start(plan, optimizer, world, make=TinyGPT, **options):
    model = build(make)
    opt = optimizer(model)
    engine = Engine(model, PLANS[plan], group(world), **options)
    engine.take_optimizer(opt)
    return model, opt, engine


def one_step(model, opt, engine, step, rank):
    with engine.forward():
        loss = token_loss(model, tokens(step, rank))
    engine.backward(loss)
    return engine.step(opt)


def check_bytes(rank, world_size):
    for plan, options in (
        ("zero1", {}),
        ("zero2", {}),
        ("zero3", {}),
        ("zero2", {"dtypes": DtypePolicy(compute=HALF)}),
    ):
        sent, calls = {}, {}
        for name, make_optimizer in (("whole", made_by("lamb")), ("ranges", lambda m: AdamW(m.parameters()))):
            model, opt, engine = start(plan, make_optimizer, world_size, **options)
            for step in range(2):
                before, known = engine.collectives.bytes_sent, engine.collectives.calls.copy()
                one_step(model, opt, engine, step, rank)
            sent[name], calls[name] = engine.collectives.bytes_sent - before, engine.collectives.calls - known
            if name == "whole":
                owners = engine.local_parameters._whole.of(opt).owners
                numbers = range(len(owners))
                layouts = [(engine.table.places[n][1], engine.table.places[n][2]) for n in numbers]
                away = 0
                for n, (buffer, slot) in zip(numbers, layouts, strict=True):
                    s = buffer.layout.slots[slot]
                    low, high = buffer.layout.shard_range(owners[n])
                    away += (s.stop - s.start - max(0, min(high, s.stop) - max(low, s.start))) * buffer.home.itemsize
                # State is with the owner alone, in the parameter's shape.
                mine = [n for n in numbers if owners[n] == rank]
                assert [n for n in numbers if engine.table.parameters[n] in opt.state] == mine
                for n in mine:
                    state, slot = opt.state[engine.table.parameters[n]], layouts[n][0].layout.slots[layouts[n][1]]
                    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == slot.shape
                moments = sum(2 * opt.state[engine.table.parameters[n]]["exp_avg"].nbytes + 4 for n in mine)
                assert engine.state_bytes([opt]) - engine.state_bytes() == moments
                parts = engine.local_parameters._whole.of(opt).by_number.values()
                assert all(p.grad is None and p.untyped_storage().nbytes() <= 8 for p in parts)
        # Gradients go there and weights come back; where nobody else has the weights, they go there too.
        times = 2 if plan != "zero3" and not options else 3
        total = sum(engine.collectives.gather_objects(sent["whole"] - sent["ranges"], "test"))
        assert total == times * away, (plan, options, total, away)
        assert calls["whole"] - calls["ranges"] == Counter(all_to_all=2), plan


@pytest.mark.parametrize("world_size", [2, 3])
def test_owners_alone_have_the_state_and_nothing_else_is_sent(world_size):
    run_ranks(check_bytes, world_size)


def check_masters(rank, world_size):
    """fp32 masters: the same numbers under every strategy, whichever rank makes the update."""
    for mixed in (False, True):
        for name in ("lamb", "muon"):
            found = {}
            for plan in ("ddp", *SHARDED):
                torch.manual_seed(0)
                model = TinyGPT()
                opt = made_by(name)(model)
                dtypes, small = DtypePolicy(compute=HALF, mixed=mixed), 64 * (plan == "zero3")
                engine = Engine(model, PLANS[plan], group(world_size), dtypes=dtypes, keep_small=small)
                engine.take_optimizer(opt)
                for step in range(3):
                    with torch.autocast("cpu", HALF, enabled=mixed), engine.forward():
                        loss = token_loss(model, tokens(step, rank))
                    engine.backward(loss)
                    engine.close_window()
                    engine.clip(opt, 0.05)
                    assert engine.step(opt) is StepResult.STEPPED
                found[plan] = weights_of(engine)
            for plan in SHARDED:
                for n, weight in found["ddp"].items():
                    assert weight.dtype == torch.float32
                    assert torch.equal(found[plan][n], weight), f"{name} {plan} mixed={mixed} {n}"


def test_masters_are_updated_alike_under_every_strategy():
    run_ranks(check_masters, 2)


class Marked(SGD):
    """A user's own: it scales each update by the largest element of the whole gradient."""

    needs_whole_parameters = True

    def step(self, closure=None):
        for options in self.param_groups:
            for parameter in options["params"]:
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter.sub_(parameter.grad / parameter.grad.abs().max().clamp(min=1e-3) * options["lr"])


class Shampoo(SGD):
    """By its name."""


def check_uses(rank, world_size):
    """Steps of the optimizers themselves, several of them, skipped ones, groups that come later, unused parameters."""
    for plan in SHARDED:
        for model, opts, engine in (uses(None, world_size), uses(plan, world_size)):
            losses = run_uses(model, opts, engine, rank, world_size)
            if engine is None:
                want = {n: p.detach().clone() for n, p in model.named_parameters()}, losses
        with engine.gathered():
            for n, p in model.named_parameters():
                torch.testing.assert_close(p, want[0][n], rtol=1e-9, atol=1e-9, msg=lambda m, n=n: f"{plan} {n}: {m}")


def uses(plan, world_size):
    model = build(TinyGPT)
    late = [*model.blocks[1].parameters()]
    now = [p for n, p in model.named_parameters() if not n.startswith("blocks.1.")]
    opts = [
        Muon([p for p in now if p.dim() == 2], lr=1e-2),
        AdamW([p for p in now if p.dim() != 2], lr=1e-2),
        Marked([late.pop()], lr=1e-2),
    ]
    engine = None
    if plan is not None:
        engine = Engine(model, PLANS[plan], group(world_size))
        for opt in opts:
            engine.take_optimizer(opt)
    return model, opts, engine


def run_uses(model, opts, engine, rank, world_size):
    for step in range(5):
        if step == 2:
            rest = [p for p in model.blocks[1].parameters()][:-1]
            opts[0].add_param_group({"params": [p for p in rest if p.dim() == 2], "lr": 2e-2})
            opts[1].add_param_group({"params": [p for p in rest if p.dim() != 2]})
        bad = float("inf") if step == 3 else 1.0
        unused = step == 4
        if engine is None:
            for r in range(world_size):
                (loss_of(model, step, r, unused) / world_size).backward()
        else:
            with engine.forward():
                loss = loss_of(model, step, rank, unused)
            engine.backward(loss * bad)
            engine.close_window()
        for opt in opts:
            if engine is not None or step != 3:
                opt.step()
        for opt in opts:
            opt.zero_grad()
        model.zero_grad()


def loss_of(model, step, rank, unused):
    blocks = model.blocks
    if unused:
        model.blocks = blocks[1:]
    try:
        return token_loss(model, tokens(step, rank))
    finally:
        model.blocks = blocks


def test_steps_of_several_optimizers_themselves_with_skips_late_groups_and_unused_parameters():
    run_ranks(check_uses, 2)


def test_which_optimizers_get_their_parameters_whole():
    weight = [nn.Parameter(torch.ones(2, 3))]
    for optimizer, wanted in (
        (Muon(weight), True), (Adafactor(weight), True), (Lamb(weight), True), (Marked(weight), True),
        (Shampoo(weight), True), (AdamW(weight), False), (SGD(weight), False),
    ):  # fmt: skip
        assert [whole.needs_whole(optimizer, g) for g in optimizer.param_groups] == [wanted], type(optimizer)
    both = MuonAdamW([{"params": weight, "kind": "muon"}, {"params": [nn.Parameter(torch.ones(2))]}])
    assert [whole.needs_whole(both, g) for g in both.param_groups] == [True, False]
    cost = {type(o): whole.cost_of(o)((4, 6)) for o in (both, Muon(weight), Lamb(weight))}
    assert cost == {MuonAdamW: 96, Muon: 96, Lamb: 24}


def refused(rank, world_size):
    with pytest.raises(StrategyError, match=r"SparseAdam cannot run under zero2: it needs sparse gradients. Use an el"):
        start("zero2", lambda model: torch.optim.SparseAdam(list(model.parameters())), 1)
    with pytest.raises(StrategyError, match=r"LBFGS cannot run under zero1: it evaluates the loss several times"):
        start("zero1", lambda model: torch.optim.LBFGS(model.parameters()), 1)


def test_what_cannot_be_sharded_is_refused():
    run_ranks(refused, 1)


# --- checkpoints


GLOBAL = 6


def step_of_all(model, opt, engine, step, rank, world):
    """One step on a batch that is the same whatever the number of ranks."""
    idx, labels = token_batch(step, GLOBAL, torch.float64)
    part = slice(rank * GLOBAL // world, (rank + 1) * GLOBAL // world)
    with engine.forward():
        loss = token_loss(model, (idx[part], labels[part]))
    engine.backward(loss)
    assert engine.step(opt) is StepResult.STEPPED


class Sized(TinyGPT):
    """With parameters that have no elements, or no dims."""

    def __init__(self):
        super().__init__()
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))

    def forward(self, idx):
        return super().forward(idx) * self.scale + self.empty.sum()


def model_for(name):
    """torch.optim.Adafactor fails on a parameter without elements."""
    return TinyGPT if name == "adafactor" else Sized


def run_from(rank, world_size, folder, runs):
    """Each run is (name of a checkpoint or None, optimizer, strategy, first step, steps until a save)."""
    weights = {}
    for source, name, plan, first, saves in runs:
        model, opt, engine = start(plan, made_by(name), world_size, model_for(name))
        if source is not None:
            reader = CheckpointReader(f"{folder}/{source}")
            state = model.state_dict(keep_vars=True)
            trainer_state.load_model(engine, reader, state, list(state), True)
            trainer_state.load_optimizers(engine, reader, [opt])
        for step in range(first, 4):
            step_of_all(model, opt, engine, step, rank, world_size)
            if step == saves:
                path = Path(f"{folder}/{name}-{plan}-{world_size}")
                content = {"state_dict": model.state_dict(keep_vars=True), "optimizer_states": []}
                trainer_state.save(engine, [opt], content, {}, path)
        weights[source, name, plan] = weights_of(engine)
    return weights


@pytest.mark.case("C034")
def test_a_checkpoint_opens_under_any_number_of_ranks_and_strategy(tmp_path):
    names = ("lamb", "muon", "adafactor")
    folder = {"folder": str(tmp_path), "timeout_s": 120}
    found = [
        *run_ranks(run_from, 2, runs=[(None, name, "zero2", 0, 1) for name in names], **folder)[:1],
        *run_ranks(run_from, 3, runs=[(f"{name}-zero2-2", name, "zero3", 2, 2) for name in names], **folder)[:1],
        *run_ranks(
            run_from,
            1,
            runs=[(f"{name}-zero3-3", name, "ddp", 3, 3) for name in names]
            + [(None, name, "ddp", 0, 1) for name in (*names, "adamw")],
            **folder,
        )[:1],
        *run_ranks(
            run_from,
            2,
            runs=[(f"{name}-zero3-3", name, "zero1", 3, -1) for name in names]
            + [(f"{name}-ddp-1", name, "zero3", 2, -1) for name in (*names, "adamw")],
            **folder,
        )[:1],
    ]
    for weights in found:
        for (source, name, plan), got in weights.items():
            want = one_process(name)
            for n, weight in got.items():
                torch.testing.assert_close(
                    weight, want[n], rtol=1e-9, atol=1e-9, msg=lambda m: f"{name} {source} {plan} {n}: {m}"
                )
    # The factors of Adafactor's second moment keep their shape; every rank's state of a parameter is whole.
    reader = CheckpointReader(tmp_path / "adafactor-zero3-3")
    assert reader.shape("optimizer/0/blocks.0.qkv.weight/row_var") == (36, 1)


@functools.cache
def one_process(name):
    model = build(model_for(name))
    opt = made_by(name)(model)
    for step in range(4):
        token_loss(model, token_batch(step, GLOBAL, torch.float64)).backward()
        opt.step()
        opt.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}
