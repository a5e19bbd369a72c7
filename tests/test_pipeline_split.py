"""A stage's backward with the gradients of weight matrices apart gives the numbers of the whole backward."""

import copy

import pytest
import torch
from shardlight.strategies.engine.pipeline.split_backward import SplitBackward
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Gradients:
    """Adds products to `grad` of a model's parameters, and knows which came so."""

    def __init__(self, model):
        self.weights = {id(p): name for name, p in model.named_parameters()}
        self.apart = []

    def is_weight(self, tensor):
        return id(tensor) in self.weights

    def add_product(self, weight, left, right):
        if weight._backward_hooks:
            return False
        self.apart.append(self.weights[id(weight)])
        weight.grad = left @ right if weight.grad is None else weight.grad + left @ right
        return True


class Projection(nn.Module):
    """As GPT-2 of transformers has it: (in, out), by addmm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(x.shape)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x):
        return torch.bmm(x, self.weight)


class Twice(nn.Module):
    """One weight in two products, and what is added to it in a third place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.third(self.second(self.first(x))) + self.third.weight.sum()


class Adapted(nn.Module):
    """A frozen matrix with two small ones beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.addmm(self.inner.bias, x.flatten(0, 1), self.inner.weight, alpha=0.5).view(x.shape)


class FromTheLeft(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return torch.mm(self.weight, x.flatten(0, 1).t()).t().reshape(x.shape)


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.inner, self.before(x), use_reentrant=self.reentrant)


def sequence(*modules):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), *modules, nn.Linear(WIDTH, WIDTH, bias=False))


MODELS = {
    # By name: what makes it, and the weights whose gradients come apart.
    "linear": (lambda: sequence(nn.GELU()), ["0.weight", "3.weight"]),
    "addmm": (lambda: sequence(Projection()), ["0.weight", "2.weight", "3.weight"]),
    "experts": (lambda: sequence(Experts()), ["0.weight", "2.weight", "3.weight"]),
    "twice": (lambda: sequence(Twice()), ["0.weight", "3.weight"]),
    "adapted": (lambda: sequence(Adapted()), ["0.weight", "2.down.weight", "2.up.weight", "3.weight"]),
    "scaled": (lambda: sequence(Scaled()), ["0.weight", "3.weight"]),
    "from the left": (lambda: sequence(FromTheLeft()), ["0.weight", "3.weight"]),
    "recomputed": (lambda: sequence(Recomputed(False)), ["0.weight", "2.before.weight", "3.weight"]),
    "recomputed inside": (lambda: sequence(Recomputed(True)), []),
    "norm of a weight": (
        lambda: sequence(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
        ["0.weight", "3.weight"],
    ),
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_backward_to_the_bit(name, at_once):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    whole = copy.deepcopy(model)
    gradients = Gradients(model)
    for number in range(2):
        x, dy = torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH)
        received, there = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
        whole(there).backward(dy)
        split = SplitBackward(model(received), dy, received, gradients, at_once)
        assert torch.equal(split.input(), there.grad)
        if not at_once:
            assert set(gradients.apart) == (set(MODELS[name][1]) if number else set())
        split.weight()
    assert set(gradients.apart) == set(MODELS[name][1])
    for (which, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), which
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), which


def test_a_first_stage_without_anything_to_hand_back_gets_all_gradients():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    whole, gradients, x = copy.deepcopy(model), Gradients(model), torch.randn(3, WIDTH)
    whole(x).sum().backward()
    split = SplitBackward(model(x).sum(), None, None, gradients)
    assert split.input() is None
    # The first one's own gradient is all that is computed below it.
    assert gradients.apart == [] and model[1].weight.grad is None and model[0].weight.grad is not None
    split.weight()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_autocast_and_hooks_of_a_weight_go_by_autograd():
    model = sequence(nn.Linear(WIDTH, WIDTH))
    whole, gradients = copy.deepcopy(model), Gradients(model)
    seen = []
    for which in (model, whole):
        which[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
    x = torch.randn(2, 5, WIDTH)
    received, there = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = model(received).float().sum(), whole(there).float().sum()
    theirs.backward()
    split = SplitBackward(ours, None, received, gradients)
    assert torch.equal(split.input(), there.grad) and len(seen) == 1
    assert model[0].weight.grad is None and model[3].weight.grad is None
    split.weight()
    assert len(seen) == 2 and torch.equal(*seen)
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_only_factors_of_products_are_kept_between_the_two_parts():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.LayerNorm(WIDTH)).requires_grad_(True)
    gradients, x = Gradients(model), torch.randn(4, WIDTH, requires_grad=True)
    alive = []

    class Alive:
        def __init__(self, tensor):
            self.tensor = tensor.detach()
            alive.append(1)

        def __del__(self):
            alive.pop()

    with torch.autograd.graph.saved_tensors_hooks(Alive, lambda saved: saved.tensor):
        output = model(x)
    assert len(alive) > 3
    split = SplitBackward(output.sum(), None, x, gradients)
    del output
    split.input()
    assert alive == []
    assert [tuple(t.shape) for t in split.kept()] == [(WIDTH, 4), (4, WIDTH)]
    split.weight()
    assert list(split.kept()) == []


def test_a_stage_of_which_nothing_was_received_depends_on_nothing():
    model = nn.Linear(WIDTH, WIDTH)
    received = torch.randn(2, WIDTH, requires_grad=True)
    split = SplitBackward(model(received.detach()).sum(), None, received, Gradients(model))
    assert split.input() is None
    split.weight()
    assert model.weight.grad is not None and F.linear(received, model.weight) is not None
