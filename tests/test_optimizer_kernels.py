"""The engine lets compiled ops take the optimizer's step: the same numbers, in every strategy, and no other."""

import copy
import logging
from functools import partial

import pytest
import torch
from harness import run_ranks
from loops import build, group, plans, rows
from shardlight.ops.built import why_not
from shardlight.ops.lion import Lion
from shardlight.strategies import STRATEGIES
from shardlight.strategies.engine import optimizer as engine_optimizer
from shardlight.strategies.engine.dtypes import DtypePolicy
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import StrategyError
from test_lightning_fit import Batches, Module, make_trainer
from test_ops_steps import PlainLion
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.utils.data import DataLoader

needs_native = pytest.mark.skipif(why_not() is not None, reason=f"compiled ops are not used: {why_not()}")
OPTIMIZERS = {
    "adamw": partial(AdamW, lr=0.01, amsgrad=True),
    "adam": partial(Adam, lr=torch.tensor(0.01), weight_decay=0.1, maximize=True),
    "sgd": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "plain sgd": partial(SGD, lr=0.1),
    "adagrad": partial(Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "rmsprop": partial(RMSprop, lr=0.01, centered=True, momentum=0.9, eps=1e-2),
    "lion": partial(Lion, lr=0.01, weight_decay=0.1),
}
STEPS = 4


class Odd(nn.Module):
    """Sizes that no number of ranks divides; a frozen weight, one that is used in some steps, an empty one and a scalar."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(2))
        self.empty = nn.Parameter(torch.zeros(0))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.sometimes = nn.Linear(7, 3)
        self.blocks[0][0].bias.requires_grad_(False)

    def forward(self, x, step):
        for block in self.blocks:
            x = x + block(x)
        extra = self.sometimes(x).square().mean() if step != 1 else 0.0
        return (x * self.scale).square().mean() + self.empty.sum() + extra


def groups_of(model):
    small = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    return [
        {"params": [p for p in model.parameters() if p.dim() == 2], "name": "matrices"},
        {"params": small, "lr": 0.02, "name": "small"},
    ]


def one_process(make, world):
    model = build(Odd)
    optimizer = PlainLion(groups_of(model), 0.01, (0.9, 0.99), 0.1) if make.func is Lion else make(groups_of(model))
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        for rank in range(world):
            for micro in range(2):
                (model(rows(2 * step + micro, rank).double(), step) / (2 * world)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 if step else 1e9)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def under(plan, make, rank, world, look=False, **options):
    model = build(Odd)
    optimizer = make(groups_of(model))
    engine = Engine(model, PLANS[plan], group(world), **options)
    engine.take_optimizer(optimizer)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        for micro in range(2):
            with engine.forward():
                loss = model(rows(2 * step + micro, rank).double(), step)
            engine.backward(loss)
        engine.close_window()
        engine.clip(optimizer, 0.5 if step else 1e9)
        if look:
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            assert float(norm) <= (0.5 if step else 1e9) * (1 + 1e-6)
            torch.testing.assert_close(float(engine.norm(optimizer)), float(norm))
        engine.step(optimizer)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    with engine.gathered():
        return {n: p.detach().clone() for n, p in model.named_parameters()}, state, optimizer


def check_all(rank, world, every):
    taken, take = [], engine_optimizer.take_step

    def counted(optimizer, *rest):
        taken.append(type(optimizer))
        return take(optimizer, *rest)

    engine_optimizer.take_step = counted
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        want = one_process(make, world)
        some = plans(world)[number % 2 :: 2] if world == 2 else plans(world)[number % 4 :: 4]
        for plan in plans(world) if every or (name == "adamw" and world < 3) else some:
            del taken[:]
            weights, state, optimizer = under(plan, make, rank, world, look=plan == "zero2")
            assert taken == [type(optimizer)] * STEPS
            own, state_of_own, _ = under(plan, make, rank, world, optimizer_kernel="torch")
            assert len(taken) == STEPS
            for key, weight in want.items():
                for found in (weights, own):
                    torch.testing.assert_close(
                        found[key], weight, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name} {plan} {key} {m}"
                    )
            assert state.keys() == state_of_own.keys()
            for number, kept in state.items():
                assert kept.keys() == state_of_own[number].keys(), (name, plan)
                for what, value in kept.items():
                    assert value.dtype == state_of_own[number][what].dtype, what
                    torch.testing.assert_close(value, state_of_own[number][what], rtol=1e-9, atol=1e-9)


@needs_native
@pytest.mark.case("C034")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_optimizer_gives_the_numbers_of_one_process_and_the_state_of_its_own_step(world_size, every):
    run_ranks(check_all, world_size, every=every, timeout_s=200)


class Complex(nn.Module):
    """A complex parameter whose gradient is 2 z, and one of no elements."""

    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(torch.tensor([1 + 1j, 0.5 - 2j], dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.complex64))
        self.linear = nn.Linear(2, 2)

    def forward(self):
        return self.z.abs().square().sum() + self.empty.abs().sum() + self.linear(self.z.abs()).square().sum()


def check_complex(rank, world):
    for name, make in OPTIMIZERS.items():
        if name == "lion":
            continue  # PyTorch has no sign of a complex number
        same = build(Complex, None)
        plain = make(same.parameters())
        for _ in range(STEPS):
            same().backward()
            plain.step()
            plain.zero_grad()
        for plan in plans(world):
            model = build(Complex, None)
            optimizer = make(model.parameters())
            engine = Engine(model, PLANS[plan], group(world))
            engine.take_optimizer(optimizer)
            assert engine.why_no_kernel(optimizer) is None
            for _ in range(STEPS):
                with engine.forward():
                    loss = model()
                engine.backward(loss)
                engine.step(optimizer)
            with engine.gathered():
                for (key, found), want in zip(model.named_parameters(), same.parameters(), strict=True):
                    torch.testing.assert_close(
                        found.data, want.data, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{name} {plan} {k} {m}"
                    )


@needs_native
@pytest.mark.case("C088")
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_complex_parameters_get_torchs_numbers(world_size):
    run_ranks(check_complex, world_size)


def check_copies(rank, world):
    """Under masters the 16-bit copy is written with the step, and is what a cast of the masters is."""
    for compute in (torch.bfloat16, torch.float16):
        for plan in plans(world):
            results = []
            for kernel in ("auto", "torch"):
                model = build(Odd, torch.float32)
                optimizer = AdamW(groups_of(model), lr=0.01)
                dtypes = DtypePolicy(compute=compute)
                engine = Engine(model, PLANS[plan], group(world), dtypes=dtypes, optimizer_kernel=kernel)
                engine.take_optimizer(optimizer)
                for step in range(STEPS):
                    with engine.forward():
                        loss = model(rows(step, rank).to(compute), step)
                    engine.backward(loss)
                    engine.close_window()
                    engine.step(optimizer)
                    for buffer in engine.buffers:
                        assert not buffer.copied
                        if not PLANS[plan].shard_parameters:
                            assert torch.equal(buffer.full[buffer._span], buffer.home.to(compute)), (plan, step)
                with engine.gathered():
                    results.append({n: p.detach().clone() for n, p in model.named_parameters()})
            for key, weight in results[0].items():
                torch.testing.assert_close(weight, results[1][key], rtol=2**-7, atol=1e-5)


@needs_native
@pytest.mark.parametrize("world_size", [1, 2])
def test_16_bit_copies_are_written_with_the_step(world_size):
    run_ranks(check_copies, world_size)


class Mine(AdamW):
    """A class of a user's, whose arithmetic is not known."""


def test_only_what_is_exactly_known_is_taken():
    def why(make, **options):
        model = nn.Linear(3, 2)
        optimizer = make(model.parameters())
        engine = Engine(model, PLANS["zero2"], **options)
        engine.take_optimizer(optimizer)
        return engine.why_no_kernel(optimizer), engine, optimizer, model

    assert why(Mine)[0] == "there is no op for Mine"
    assert why(AdamW, optimizer_kernel="torch")[0] == "optimizer_kernel is torch"
    assert why(partial(AdamW, differentiable=True))[0] == "it is differentiable or capturable"
    reason, engine, optimizer, model = why(SGD)
    assert reason == why_not()
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.extend(p.grad for g in o.param_groups for p in g["params"]))
    assert engine.why_no_kernel(optimizer) in (why_not(), "hooks on its step may look at gradients")
    with engine.forward():
        loss = model(torch.ones(1, 3)).sum()
    engine.backward(loss)
    engine.step(optimizer)
    assert torch.equal(torch.cat(seen), torch.ones(8)), "a hook of the user's sees final gradients"
    with pytest.raises(StrategyError, match="optimizer_kernel='fast' is not an option of zero2: use 'auto' or 'torch'"):
        STRATEGIES["zero2"](optimizer_kernel="fast")


def check_log(rank, world, folder):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    for kernel in ("auto", "torch"):
        trainer = make_trainer(STRATEGIES["single"](optimizer_kernel=kernel), 1, folder, max_steps=2)
        batches = DataLoader(Batches("odd_mlp", 0, 4), batch_size=None)
        trainer.fit(Module("odd_mlp", "adamw"), batches, batches)
    return [line for line in said if "is stepped" in line]


@needs_native
@pytest.mark.case("C029")
def test_the_log_says_once_who_steps(tmp_path):
    (said,) = run_ranks(check_log, 1, folder=tmp_path)
    assert said == [
        "optimizer: AdamW is stepped by a compiled op (strategy.optimizer_kernel=torch turns it off)",
        "optimizer: AdamW is stepped by its own code: optimizer_kernel is torch",
    ]
