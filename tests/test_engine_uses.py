"""Ways of using weights inside a step: each gives the numbers of the plain loop under every strategy."""

import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from loops import Losses, build, check_all_plans, check_released, group, rows
from models import TinyGPT, token_batch
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import StrategyError
from torch import nn
from torch.utils.checkpoint import checkpoint


def mlp(width=7):
    return nn.Sequential(nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width))


class Blocks(nn.Module):
    """Three blocks (units of their own), a head, and a bias that the parent adds itself."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([mlp() for _ in range(3)])
        self.head = nn.Linear(7, 5)
        self.shift = nn.Parameter(torch.linspace(0, 1, 5))

    def forward(self, x, order=(0, 1, 2)):
        for number in order:
            x = x + self.blocks[number](x)
        return self.head(x) + self.shift


class Views(nn.Module):
    """A weight used through views that autograd saves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 7) / 3)

    def forward(self, x):
        y = torch.tanh(x @ self.weight.t())
        first, *_, last = self.weight.chunk(3)
        z = torch.einsum("bi,oi->bo", x, first) * torch.einsum("bi,oi->bo", x, last)
        fixed = torch.sin(x @ self.weight.detach().t()) @ self.weight * self.weight.detach()[0]
        return y @ self.weight + fixed + z.sum(1, keepdim=True) * self.weight[1:3, :].T.sum(1)


class Slice(nn.Module):
    """Returns a slice of its weight: a view leaves the module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 7) / 3)

    def forward(self):
        return self.weight[2:9]


class Escaping(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.parts = nn.ModuleList([module() for _ in range(3)])

    def forward(self, x):
        for part in self.parts:
            x = x + torch.tanh(x @ part() if isinstance(part, Slice) else part(x))
        return x


class Uneven(nn.Module):
    """Unused, tied, non-contiguous and frozen parameters beside ordinary ones."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([mlp() for _ in range(3)])
        self.blocks[0].requires_grad_(False)
        self.blocks[2][0].weight = self.blocks[1][0].weight
        self.unused = nn.Linear(5, 4)
        self.skewed = nn.Parameter((torch.randn(5, 7) / 3).t())
        assert not self.skewed.is_contiguous()

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x @ self.skewed


class Parametrized(nn.Module):
    """Weights that are computed from parameters whenever they are read; a parent that owns some of them."""

    def __init__(self):
        super().__init__()
        norms = nn.utils.parametrizations
        self.blocks = nn.ModuleList([nn.Sequential(norms.weight_norm(nn.Linear(7, 7)), nn.Tanh()) for _ in range(2)])
        self.outer = norms.orthogonal(nn.Linear(7, 7))
        self.lstm = nn.LSTM(7, 7, batch_first=True)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) + F.linear(x, block[0].weight)
        return self.outer(self.lstm(x.unsqueeze(1))[0])


class GPT(TinyGPT):
    """TINY-GPT with frozen norms and its blocks recomputed in backward."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("norm" not in name)

    def forward(self, idx):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x) if self.mode is None else checkpoint(block, x, use_reentrant=self.mode)
        return self.head(self.norm(x))


def square(model, batch, step, rank):
    return [model(batch).square().mean()]


def two_forwards(model, x, step, rank):
    return [model(x).square().mean(), model(x * 0.5).abs().mean()]


def sum_of_two(model, x, step, rank):
    return [model(x).square().mean() + model(x * 0.5).abs().mean()]


def shared_block(model, x, step, rank):
    return [model(x, (1, 1, 0, 1)).square().mean()]


def gradient_penalty(model, x, step, rank):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return [model(x).square().mean() + 0.1 * slope.square().mean()]


def weight_penalty(model, x, step, rank):
    loss = model(x).square().mean()
    weights = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss, weights, create_graph=True)
    return [loss + 0.1 * sum(s.square().sum() for s in slopes)]


def other_ways(model, x, step, rank):
    """Another module's weight by function, a bias that would broadcast, shapes read on the way."""
    assert model.shift.shape == (5,) and model.shift.numel() == 5 and model.head.weight.shape == (5, 7)
    first = model.blocks[0]
    y = F.linear(x, first[0].weight, first[0].bias).tanh() @ first[0].weight
    return [(model.head.forward(y + first[2].bias) + model.shift).square().mean()]


def recomputed_function(model, x, step, rank):
    """A recomputed function, not a module: it reads weights of several modules."""

    def run(x):
        return F.linear(x, model.blocks[0][0].weight, model.blocks[0][0].bias) @ model.blocks[1][2].weight.t()

    y = checkpoint(run, x @ model.head.weight.t() @ model.head.weight, use_reentrant=bool(step % 2))
    return [(model.head(y @ model.blocks[1][0].weight.t() @ model.blocks[1][0].weight) + model.shift).square().mean()]


def half_frozen():
    model = Blocks()
    model.blocks[0][0].requires_grad_(False)
    return model


def recomputed_frozen_weight(model, x, step, rank):
    """A recomputed function: it reads a frozen weight of a block, and calls the block, which is over before that."""

    def run(x):
        scaled = (x @ model.blocks[1][2].weight) * model.blocks[0][0].bias
        return model.blocks[0](scaled @ model.blocks[1][2].weight.t())

    y = checkpoint(run, model.blocks[1](x), use_reentrant=bool(step % 2))
    return [(model.head(y) + model.shift).square().mean()]


def frozen_by_step(model, x, step, rank):
    """Blocks are frozen and set free between the steps."""
    model.blocks[step % 3].requires_grad_(False)
    model.blocks[(step + 1) % 3].requires_grad_(True)
    return [model(x).square().mean()]


def order_by_step(model, x, step, rank):
    """Order changes, early exit, evaluation in between, generation."""
    order = [(0, 1, 2), (2, 0), (0,), (1, 1), (0, 1, 2)][step]
    with torch.no_grad():
        if step in (1, 3):
            model.eval()
            model(x, (1, 1))
            model.train()
        for _ in range(3 if step == 2 else 0):
            x = torch.cat([x, model(x[-1:], (2,)).sum(1, keepdim=True).expand(1, 7).tanh()])
    return [model(x, order).square().mean()]


def ahead_of_the_other(model, x, step, rank):
    """One rank samples for longer than the other, which is in backward by then."""
    with torch.no_grad():
        for _ in range(4 * (step + rank) % 8):
            model(x)
    return [model(x).square().mean()]


def order_by_rank(model, x, step, rank):
    return [model(x, (0, 1, 2) if (step + rank) % 2 else (2, 0)).square().mean()]


def tokens(model, batch, step, rank):
    return [F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())]


def gpt_batch(step, rank):
    return token_batch(100 * step + rank, 4, torch.float64)


USES: dict[str, tuple[Callable[[], nn.Module], Losses]] = {
    "views of a weight": (partial(Escaping, Views), square),
    "a slice leaves its module": (partial(Escaping, Slice), square),
    "unused, tied, non-contiguous, frozen": (Uneven, square),
    "a block called three times": (Blocks, shared_block),
    "two forwards, two backwards": (Blocks, two_forwards),
    "two forwards, one backward": (Blocks, sum_of_two),
    "gradient penalty on the input": (Blocks, gradient_penalty),
    "gradient penalty on the weights": (Blocks, weight_penalty),
    "weights outside their module's forward": (Blocks, other_ways),
    "a rank far ahead of the other": (Blocks, ahead_of_the_other),
    "order differs by rank": (Blocks, order_by_rank),
    "parametrized weights": (Parametrized, square),
    "a recomputed function": (Blocks, recomputed_function),
    "a frozen weight in a recomputed function": (half_frozen, recomputed_frozen_weight),
    "frozen and set free": (Blocks, frozen_by_step),
}


def check_uses(rank, world_size, names, every=True):
    for number, name in enumerate(names):
        options = ({"reduce": "micro_batch"}, {"reduce": "window"}) if world_size == 2 else ({},)
        chosen = None if every else (("ddp", "zero1", "zero2")[number % 3], "zero3")
        check_all_plans(*USES[name], rank, world_size, name, options=options, chosen=chosen)


@pytest.mark.parametrize("world_size,every", [(1, True), (3, False), pytest.param(3, True, marks=pytest.mark.long)])
def test_every_use_gives_the_numbers_of_the_plain_loop(world_size, every):
    run_ranks(check_uses, world_size, names=list(USES), every=every)


@pytest.mark.conformance("A10")
@pytest.mark.case("C037")
@pytest.mark.case("C038")
@pytest.mark.parametrize("name", USES)
def test_use_on_two_ranks(name):
    run_ranks(check_uses, 2, names=[name], timeout_s=30)


def check_order(rank, world_size):
    check_all_plans(Blocks, order_by_step, rank, world_size, "changing order", steps=5)


@pytest.mark.case("C014")
def test_module_order_may_change_from_step_to_step():
    run_ranks(check_order, 2, timeout_s=30)


def check_recompute(rank, world_size):
    for mode in (None, False, True):
        check_all_plans(partial(GPT, mode), tokens, rank, world_size, f"recompute {mode}", batch=gpt_batch)


@pytest.mark.case("C013")
@pytest.mark.parametrize("world_size", [1, 2])
def test_recomputed_blocks_with_frozen_norms(world_size):
    run_ranks(check_recompute, world_size)


class Experts(nn.Module):
    """Four experts chosen by a Python loop over the tokens' choices."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(7, 7) for _ in range(4)])
        self.head = nn.Linear(7, 3)

    def forward(self, x, choices):
        y = torch.zeros_like(x)
        for number in sorted(set(choices)):
            mask = torch.tensor([c == number for c in choices])
            y[mask] = self.experts[number](x[mask])
        return self.head(x + y)


def one_expert_per_rank(model, x, step, rank):
    return [model(x, [0 if rank == 0 else 3] * 4).square().mean()]


def expert_two_idle(model, x, step, rank):
    return [model(x, [0, 1, 3, 3] if rank == 0 else [1, 1, 0, step % 2 * 3]).square().mean()]


def check_experts(rank, world_size):
    for route in (one_expert_per_rank, expert_two_idle):
        torch.manual_seed(0)
        start = {n: p.detach().double() for n, p in Experts().named_parameters()}
        options = ({"reduce": "micro_batch"}, {"reduce": "window"}, {"unit_classes": ("Experts",)})
        for run in check_all_plans(Experts, route, rank, world_size, route.__name__, options=options):
            for name in ("experts.2.weight", "experts.2.bias"):
                assert torch.equal(run.weights[name], start[name]), f"{name} was never used, and changed"


@pytest.mark.case("C007")
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_experts_that_differ_by_rank(world_size):
    run_ranks(check_experts, world_size, timeout_s=20)


def waits_for_the_other(rank, world_size):
    model = build(Blocks)
    engine = Engine(model, PLANS["zero3"], group(world_size))
    x = rows(0, rank)
    with torch.no_grad(), engine.forward():
        for _ in range(rank):
            model(x)
    engine.agreement.meet("after evaluation")
    check_released(engine)
    with engine.gathered():
        weights = [p.clone() for p in model.parameters()]
    with engine.forward():
        if rank == 0:
            assert model.head.weight.sum() != 0
        with engine.gathered(model):
            assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    check_released(engine)
    with pytest.raises(StrategyError, match="the graph of a result that was computed without"), engine.gathered():
        y = model(x)
    with pytest.raises(ZeroDivisionError), engine.gathered():
        y = model(x)
        raise ZeroDivisionError
    del y


def test_a_rank_that_waits_for_others_keeps_none_of_their_weights():
    run_ranks(waits_for_the_other, 2, timeout_s=20)


def look_before_the_step(rank, world_size, keep):
    """A use of the model between a window's end and its step, that stops while the next gather is on its way."""
    results = []
    for looks in (False, True):
        model = build(Blocks)
        engine = Engine(model, PLANS["zero3"], group(world_size), keep_gathered=keep)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        engine.take_optimizer(optimizer)
        losses = []
        for step in range(8):
            with engine.forward():
                loss = model(rows(step, rank)).square().mean()
            engine.backward(loss)
            losses.append(loss.item())
            engine.close_window()
            if looks and step >= 5:  # the order of a forward has been recorded by then
                with engine.forward():
                    model(rows(step, rank), order=())
                if step == 6 and rank == 0:
                    with engine.forward():
                        model(rows(step, rank), order=(1,))
            engine.step(optimizer)
        check_released(engine)
        results.append(losses)
    assert results[0] == results[1]


@pytest.mark.parametrize("keep", ["no", "window"])
def test_a_gather_that_was_on_its_way_during_a_step_brings_no_old_weights(keep):
    run_ranks(look_before_the_step, 2, keep=keep)


def look_with_numpy(rank, world_size):
    """`.numpy()` under `gathered` fixes a storage for good: the unit takes another one, also while a loss is open."""
    results = []
    for looks in (False, True):
        model = build(Blocks)
        engine = Engine(model, PLANS["zero3"], group(world_size))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        engine.take_optimizer(optimizer)
        losses = []
        for step in range(6):
            with engine.forward():
                loss = model(rows(step, rank)).square().mean()
            if looks:
                with engine.gathered():
                    assert model.head.weight.detach().numpy().std() > 0
            engine.backward(loss)
            losses.append(loss.item())
            engine.step(optimizer)
            if looks:
                with engine.gathered(model.blocks):
                    kept = [p.detach().numpy().sum() for p in model.blocks.parameters()]
                    assert len(kept) == 12
                check_released(engine)
        results.append(losses)
    assert results[0] == results[1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_numpy_may_look_at_gathered_weights(world_size):
    run_ranks(look_with_numpy, world_size)


class Emptiness(nn.Module):
    """An empty parameter that is alone in its unit."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x)) + self.empty.sum()


def train_with_emptiness(rank, world_size):
    check_all_plans(Emptiness, lambda m, b, step, r: [m(b).square().mean()], rank, world_size, "empty", steps=5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_of_an_empty_parameter_trains(world_size):
    run_ranks(train_with_emptiness, world_size)


def test_a_model_under_an_engine_can_be_pickled_where_its_weights_are_there():
    for plan in ("single", "zero1", "zero2"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        engine = Engine(model, PLANS[plan])
        optimizer = torch.optim.AdamW(model.parameters())
        engine.take_optimizer(optimizer)
        with engine.forward():
            loss = model(torch.ones(4, 8)).square().mean()
        engine.backward(loss)
        engine.step(optimizer)
        found = pickle.loads(pickle.dumps(model))
        assert torch.equal(found(torch.ones(1, 8)), model(torch.ones(1, 8)))
        found(torch.ones(1, 8)).sum().backward()
        assert found[0].weight.grad is not None, "it is a plain model"
