"""Every element-wise optimizer gives, on state that is streamed from disk, the bits that it gives in memory."""

import pytest
import torch
from harness import run_ranks
from loops import group
from models import TinyGPT  # noqa: F401 (its module makes small blocks units)
from shardlight.ops.lamb import Lamb
from shardlight.ops.lion import Lion
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.offload import Offload
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import StrategyError
from torch import nn, optim

SIZES = ((1,), (), (3,), (7, 73), (1000,), (4097,), (14407,))
"""Of a parameter each: one element, none of a dimension, and around the length of a range (4096 at the least)."""


class Single(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self):
        return self.weight * 1.0


class Sizes(nn.Module):
    """All parameters in one unit, or each in one of its own."""

    def __init__(self, complex_too=False, apart=False):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        kinds = [torch.float32] * len(SIZES)
        sizes = SIZES
        if complex_too:
            sizes, kinds = (*SIZES, (4099,)), [*kinds, torch.complex64]
        weights = [nn.Parameter(torch.randn(s, generator=g, dtype=kind)) for s, kind in zip(sizes, kinds, strict=True)]
        self.weights = nn.ModuleList(map(Single, weights)) if apart else nn.ParameterList(weights)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, step, rank):
        """Step 2 does not use the parameter of 4097 elements."""
        total = torch.zeros(())
        for number, weight in enumerate(self.weights):
            if step != 2 or number != 5:
                weight = weight() if isinstance(weight, Single) else weight
                g = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
                target = torch.randn(weight.shape, generator=g, dtype=weight.dtype)
                total = total + (weight - target).abs().square().mean() * (number + 1)
        return total + self.frozen.sum()


MADE = {
    "Adam": lambda p: optim.Adam(p, 0.01, weight_decay=0.1),
    "Adam, fused": lambda p: optim.Adam(p, 0.01, fused=True),
    "Adam, foreach, maximized": lambda p: optim.Adam(p, 0.01, foreach=True, maximize=True),
    "AdamW, amsgrad": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    "AdamW, amsgrad, fused": lambda p: optim.AdamW(p, 0.01, amsgrad=True, fused=True),
    "AdamW, rate as a tensor": lambda p: optim.AdamW(p, torch.tensor(0.01)),
    "Adamax": lambda p: optim.Adamax(p, 0.01),
    "Adamax, foreach": lambda p: optim.Adamax(p, 0.01, foreach=True),
    "NAdam": lambda p: optim.NAdam(p, 0.01),
    "NAdam, foreach": lambda p: optim.NAdam(p, 0.01, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, 0.01),
    "RAdam, foreach": lambda p: optim.RAdam(p, 0.01, foreach=True, decoupled_weight_decay=True, weight_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, 0.5),
    "Adadelta, foreach": lambda p: optim.Adadelta(p, 0.5, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "Adagrad, fused": lambda p: optim.Adagrad(p, 0.1, fused=True),
    "Adagrad, foreach": lambda p: optim.Adagrad(p, 0.1, foreach=True),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.9),
    "RMSprop, foreach": lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.9, foreach=True),
    "ASGD": lambda p: optim.ASGD(p, 0.1, t0=1.0),
    "ASGD, foreach": lambda p: optim.ASGD(p, 0.1, t0=1.0, foreach=True),
    "Rprop": lambda p: optim.Rprop(p, 0.01),
    "Rprop, foreach": lambda p: optim.Rprop(p, 0.01, foreach=True),
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD, nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "SGD, fused, maximized": lambda p: optim.SGD(p, 0.01, momentum=0.9, fused=True, maximize=True),
    "Lion": lambda p: Lion(p, 0.01, weight_decay=0.1),
}
WITH_COMPLEX = tuple(name for name in MADE if "fused" not in name and "Lion" not in name)


def everything_on(folder, staging_bytes=4096):
    return Offload(parameters="disk", gradients="disk", optimizer="disk", disk=folder, staging_bytes=staging_bytes)


def run(world, rank, make, offload, complex_too=False, apart=False):
    """Losses, norms, weights and state of four steps."""
    model = Sizes(complex_too, apart)
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = make([{"params": [*trained[:2], *trained[3:]]}])
    opt.add_param_group({"params": [trained[2]], "lr": 0.02})
    engine = Engine(model, PLANS["zero3"], group(world), offload=offload)
    engine.take_optimizer(opt)
    numbers = []
    for step in range(1, 5):
        with engine.forward():
            loss = model(step, rank)
        engine.backward(loss)
        numbers += [loss.item(), float(engine.clip(opt, 0.5))]
        engine.step(opt)
    with engine.gathered():
        weights = [p.detach().clone() for p in model.parameters()]
    state = {
        (n, key): value.clone() if isinstance(value, torch.Tensor) else value
        for n, p in enumerate(model.parameters())
        for key, value in opt.state.get(p, {}).items()
    }
    engine.detach()
    return numbers, weights, state


def same(got, want, where):
    assert got[0] == want[0], where
    for number, (a, b) in enumerate(zip(got[1], want[1], strict=True)):
        assert torch.equal(a, b), (where, number)
    assert got[2].keys() == want[2].keys(), (where, got[2].keys() ^ want[2].keys())
    for place, value in want[2].items():
        there = got[2][place]
        equal = torch.equal(there, value) if isinstance(value, torch.Tensor) else there == value
        assert equal, (where, place)


def same_as_in_memory(rank, world, folder, names):
    for name in names:
        for complex_too in (False, True)[: 1 + (name in WITH_COMPLEX)]:
            want = run(world, rank, MADE[name], None, complex_too)
            same(run(world, rank, MADE[name], everything_on(folder), complex_too), want, (name, complex_too))


def test_element_wise_optimizers_give_the_same_bits(tmp_path):
    names = ["Adam, fused", "AdamW, amsgrad", "NAdam, foreach", "RAdam", "Adadelta", "RMSprop"]
    names += ["ASGD", "Rprop", "SGD, nesterov", "Lion"]
    run_ranks(same_as_in_memory, 2, folder=str(tmp_path), names=names, timeout_s=200)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_kinds_of_every_element_wise_optimizer_give_the_same_bits(world, tmp_path):
    run_ranks(same_as_in_memory, world, folder=str(tmp_path), names=list(MADE), timeout_s=300)


def sizes_apart(rank, world, folder):
    for apart in (False, True):
        want = run(world, rank, MADE["Adam"], None, apart=apart)
        for staging_bytes in (4096, 1 << 20):
            got = run(world, rank, MADE["Adam"], everything_on(folder, staging_bytes), apart=apart)
            same(got, want, (apart, staging_bytes))


@pytest.mark.case("C079")
@pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 3])
def test_parameters_of_any_size_are_larger_and_smaller_than_staging_buffers(world, tmp_path):
    run_ranks(sizes_apart, world, folder=str(tmp_path))


def whole_ones(rank, world, folder):
    for make in (optim.Muon, Lamb, optim.Adafactor):
        model = nn.Linear(8, 8, bias=False)
        engine = Engine(model, PLANS["infinity"], group(world), offload=everything_on(folder))
        opt = make(model.parameters(), 0.01)
        why = f"{make.__name__} needs whole parameters, and state on disk .* use an element-wise .*strategy zero3"
        with pytest.raises(StrategyError, match=why):
            engine.take_optimizer(opt)


def test_optimizers_that_need_whole_parameters_are_refused(tmp_path):
    run_ranks(whole_ones, 1, folder=str(tmp_path))
