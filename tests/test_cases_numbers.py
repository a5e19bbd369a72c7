"""Known traps of numbers: odd and empty sizes, clipping, dtypes, options that must not matter."""

from functools import partial

import pytest
import torch
from harness import run_ranks
from loops import build, check_all_plans, check_equal, group, plain, plans, sharded
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from torch import nn
from torch.nn import functional as F

BOTH = ({"reduce": "micro_batch"}, {"reduce": "window"})


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)


# --- C025: w = 0, loss 3 w0 + 4 w2, clip 1: norm 5 (inf 4), w = -0.6, 0, -0.8 (inf -0.75, 0, -1)


class Vectors(nn.Module):
    """w0 and w2, on different ranks when far apart; `twice`: the same weight under two names."""

    def __init__(self, twice=False, length=8192):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(length))
        if twice:
            self.c = self.a
        self.twice = twice

    def forward(self):
        first = 1.5 * self.a[0] + 1.5 * self.c[0] if self.twice else 3 * self.a[0]
        return first + 4 * self.b[-2]


def check_clipping(rank, world_size):
    for plan in plans(world_size):
        for make in (Vectors, partial(Vectors, length=4), partial(Vectors, twice=True)):
            for reduce in BOTH:
                for norm_type, norm, want in ((2.0, 5.0, (-0.6, -0.8)), (float("inf"), 4.0, (-0.75, -1.0))):
                    model = build(make)
                    opt = sgd(model, 1.0)
                    engine = Engine(model, PLANS[plan], group(world_size), **reduce)
                    engine.take_optimizer(opt)
                    with engine.forward():
                        loss = model()
                    engine.backward(loss)
                    where = f"{plan} {reduce} norm {norm_type}"
                    assert float(engine.clip(opt, 1.0, norm_type)) == pytest.approx(norm), where
                    assert float(engine.norm(opt, norm_type)) == pytest.approx(1.0, abs=1e-5), where
                    engine.clip_value(opt, 0.7)  # no more than the -0.6 of the 2-norm
                    engine.step(opt)
                    want = tuple(max(w, -0.7) for w in want)
                    with engine.gathered():
                        got = model.a[0].item(), model.b[-2].item()
                        assert got == pytest.approx(want, abs=1e-5), where
                        assert model.a.count_nonzero() + model.b.count_nonzero() == 2, where


@pytest.mark.case("C025")
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_clipping_uses_the_norm_of_all_shards_once(world_size):
    run_ranks(check_clipping, world_size, timeout_s=30)


# --- C034, C035


class Sizes(nn.Module):
    """Parameters of 0 elements, 1 element, no dim, and odd sizes; forward may take no input."""

    def __init__(self, own_units):
        super().__init__()
        self.wide, self.empty = nn.Linear(6, 3), nn.Linear(6, 0)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.scalar, self.one = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor([0.5]))
        self.odd = nn.ParameterList([nn.Parameter(torch.randn(n) / n) for n in (1, 7, 58, 101)])
        self.blocks = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(2)]) if own_units else None

    def forward(self):
        x = torch.linspace(-1, 1, 12, dtype=self.one.dtype).view(2, 6)
        y = self.wide(x)
        y = y + sum(block(y) for block in self.blocks) if self.blocks is not None else y
        y = torch.cat([y, self.empty(x)], dim=1) * self.scalar + self.one
        return y.square().sum() + self.nothing.sum() + sum(p.square().sum() for p in self.odd)


def no_input(model, batch, step, rank):
    return [model() * (1 + rank)]


def groups_of_their_own(model):
    """An own group for the one-element parameter."""
    rest = [p for p in model.parameters() if p is not model.one]
    return torch.optim.SGD([{"params": rest}, {"params": [model.one], "lr": 0.05}], lr=0.01, momentum=0.9)


def check_sizes(rank, world_size):
    for own_units in (False, True):
        make = partial(Sizes, own_units)
        shapes = {n: p.shape for n, p in build(make).named_parameters()}
        settings = {"optimizer": groups_of_their_own, "steps": 2, "options": BOTH}
        for run in check_all_plans(make, no_input, rank, world_size, "sizes", **settings):
            assert {n: w.shape for n, w in run.weights.items()} == shapes


@pytest.mark.case("C034")
@pytest.mark.case("C035")
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_sizes_that_do_not_divide(world_size):
    run_ranks(check_sizes, world_size)


def check_padding(rank, world_size):
    """Padding is never in a norm, a mean or a count, also when memory is not clean."""
    for plan in plans(world_size):
        model, same = build(partial(Sizes, True)), build(partial(Sizes, True))
        opt = groups_of_their_own(model)
        engine = Engine(model, PLANS[plan], group(world_size))
        engine.take_optimizer(opt)
        assert [p.numel() for p in model.parameters()] == [p.numel() for p in same.parameters()]
        with engine.gathered():
            for name, parameter in model.named_parameters():
                want = same.get_parameter(name)
                assert torch.equal(parameter, want), f"{plan} {name}"
                assert torch.equal(parameter.norm(), want.norm()), f"{plan} {name}"
        ours = sum(engine.owned_piece(p)[1].numel() for p in model.parameters())
        total = sum(engine.collectives.gather_objects(ours, "owned"))
        assert total == sum(p.numel() for p in same.parameters()), f"{plan}: pieces {total}"


@pytest.mark.case("C035")
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_padding_is_in_no_count(world_size):
    run_ranks(check_padding, world_size, timeout_s=30)


# --- C088, C089


class Exotic(nn.Module):
    """z = 1 + 1j with loss |z|^2: torch's gradient is 2 z, and z = 0.8 + 0.8j after a step of 0.1."""

    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(torch.tensor([1 + 1j], dtype=torch.complex64))
        self.table = nn.Parameter(torch.tensor([3, -7], dtype=torch.int8), requires_grad=False)
        self.flag = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self):
        return self.z.abs().square().sum() + 0 * self.linear(self.table[self.mask[:2].int()].float()).sum()


def check_exotic(rank, world_size):
    for plan in plans(world_size):
        for reduce in BOTH:
            model = build(Exotic, None)
            if rank:
                model.table.data.zero_(), model.flag.data.zero_(), model.mask.zero_()  # rank 0's count
            opt = sgd(model)
            engine = Engine(model, PLANS[plan], group(world_size), **reduce)
            engine.take_optimizer(opt)
            assert {b.dtype for b in engine.buffers} == {torch.complex64, torch.float32}
            with engine.forward():
                loss = model()
            engine.backward(loss)
            assert float(engine.clip(opt, 100.0)) == pytest.approx(8**0.5)
            engine.step(opt)
            with engine.gathered():
                assert model.z.item() == pytest.approx(0.8 + 0.8j), f"{plan} {reduce}"
                assert model.table.dtype == torch.int8 and model.table.tolist() == [3, -7]
                assert model.flag.tolist() == [True, False] and model.mask.tolist() == [True, False, True]


@pytest.mark.case("C088")
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_complex_integer_and_bool_values(world_size):
    run_ranks(check_exotic, world_size, timeout_s=30)


class Mixed(nn.Module):
    """An fp32 norm and a bf16 linear in each block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7).to(torch.bfloat16)) for _ in range(2)]
        )

    def forward(self, x):
        for norm, linear in self.blocks:
            x = x + linear(norm(x).bfloat16()).float()
        return x


def mixed_loss(model, x, step, rank):
    return [model(x.float()).square().mean()]


def check_mixed(rank, world_size):
    settings = {"steps": 2, "dtype": None, "options": BOTH, "tolerance": 1e-2}
    want = {n: p.dtype for n, p in build(Mixed, None).named_parameters()}
    runs = check_all_plans(Mixed, mixed_loss, rank, world_size, "mixed", **settings)
    exact = plain(Mixed, mixed_loss, world_size, steps=2, dtype=None)
    for run in runs:
        assert {n: w.dtype for n, w in run.weights.items()} == want
        assert run.norms[0] == pytest.approx(exact.norms[0], rel=1e-3)  # not a norm in bf16
        for name, weight in run.weights.items():
            torch.testing.assert_close(weight, runs[0].weights[name], rtol=1e-2, atol=1e-3)


@pytest.mark.case("C089")
@pytest.mark.parametrize("world_size", [1, 2])
def test_two_dtypes_in_one_block(world_size):
    run_ranks(check_mixed, world_size, timeout_s=30)


# --- C091, C083


class Shared(nn.Module):
    """ODD-MLP with a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(7, 7)
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x):
        return self.layers(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


def one_forward(model, x, step, rank):
    return [F.mse_loss(model(x), torch.ones(4, 3, dtype=x.dtype))]


def three_forwards(model, x, step, rank):
    return [F.mse_loss(model(x * scale), torch.ones(4, 3, dtype=x.dtype)) for scale in (1, 2, 0.5)]


def check_options(rank, world_size, dtype, tolerance):
    for losses, steps in ((one_forward, 20), (three_forwards, 7)):
        settings = {"steps": steps, "dtype": dtype, "batch": partial(rows_of, dtype)}
        want = plain(Shared, losses, world_size, **settings)
        for plan in plans(world_size):
            for reduce, units in (("micro_batch", ()), ("window", ("Linear",)), ("micro_batch", ("Shared",))):
                options = {"reduce": reduce, "unit_classes": units}
                got = sharded(Shared, losses, plan, rank, world_size, **settings, **options)
                check_equal(got, want, f"{plan} {options} {losses.__name__}", tolerance)


def rows_of(dtype, step, rank):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 7, generator=g, dtype=torch.float64).to(dtype)


@pytest.mark.case("C091")
def test_stages_and_options_do_not_change_the_result():
    run_ranks(check_options, 2, dtype=torch.float32, tolerance=1e-5)


def four_forwards(model, x, step, rank):
    return [F.mse_loss(model(x * scale), torch.ones(4, 3, dtype=x.dtype)) for scale in (1, 2, 0.5, 3)]


def check_reductions(rank, world_size):
    want = plain(Shared, four_forwards, world_size)
    for plan in plans(world_size):
        for reduce in ("micro_batch", "window"):
            got = sharded(Shared, four_forwards, plan, rank, world_size, reduce=reduce, unit_classes=("Shared",))
            check_equal(got, want, f"{plan} {reduce}")
            for calls in got.calls:
                assert calls["reduce_scatter"] == (4 if reduce == "micro_batch" else 1), f"{plan} {reduce}"


@pytest.mark.case("C083")
def test_one_reduction_per_window_or_one_per_micro_batch():
    run_ranks(check_reductions, 2, timeout_s=30)
