"""Manual optimization: whatever order of backward, zero_grad and step a module chooses, weights are those of one process.

Each recipe is a training_step. It runs under stock Lightning's single device on the joined batch, and under each
strategy on this rank's rows: the mean over rows is the mean over ranks, so the weights must be the same.
"""

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from shardlight.strategies import STRATEGIES
from shardlight.strategies.errors import GradientError
from test_cases_training import Scalar, batches, strategies, tokens
from test_lightning_fit import make_trainer
from torch import nn

BATCHES = 5


class Pair(pl.LightningModule):
    """A maker and a judge over a common trunk, an optimizer for each; `recipe` is the training_step."""

    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.recipe = recipe
        self.trunk, self.maker, self.judge = (nn.Linear(3, 3).double() for _ in range(3))
        self.seen = []

    def forward(self, x):
        return torch.tanh(self.maker(torch.tanh(self.trunk(x))))

    def made(self, x):
        """The maker's loss; the judge takes part in it."""
        return self.judge(self(x)).square().mean()

    def judged(self, x):
        """The judge's loss; the maker takes no part."""
        return (self.judge(self(x).detach()) - x).square().mean()

    def configure_optimizers(self):
        shared = [self.trunk] if self.recipe is overlapping else []
        makers = [p for m in (self.trunk, self.maker) for p in m.parameters()]
        judges = [p for m in (self.judge, *shared) for p in m.parameters()]
        kind = torch.optim.AdamW if self.recipe is clipped else torch.optim.SGD
        more = {} if kind is torch.optim.AdamW else {"momentum": 0.9}
        first, second = kind(makers, 0.1, **more), kind(judges, 0.2, **more)
        if self.recipe is not schedules_by_hand:
            return first, second
        schedules = torch.optim.lr_scheduler.StepLR(first, 2, 0.5), torch.optim.lr_scheduler.ExponentialLR(second, 0.9)
        return [first, second], list(schedules)

    def training_step(self, batch, batch_idx):
        self.recipe(self, batch, batch_idx, *self.optimizers())


def toggled(m, x, i, maker, judge):
    for optimizer, loss in ((maker, m.made), (judge, m.judged)):
        m.toggle_optimizer(optimizer)
        m.manual_backward(loss(x))
        optimizer.step()
        optimizer.zero_grad()
        m.untoggle_optimizer(optimizer)


def toggled_without_zero_grad(m, x, i, maker, judge):
    for optimizer, loss in ((maker, m.made), (judge, m.made)):
        m.toggle_optimizer(optimizer)
        m.manual_backward(loss(x))
        optimizer.step()
        m.untoggle_optimizer(optimizer)


def closures(m, x, i, maker, judge):
    """The pattern of Lightning's documentation: gradients are added up over two batches."""
    last = i % 2 == 1

    def of(optimizer, loss):
        def closure():
            if not last:
                optimizer.zero_grad()
            value = loss(x)
            m.manual_backward(value / 2)
            return value.detach()

        return closure

    for optimizer, loss in ((maker, m.made), (judge, m.judged)):
        with optimizer.toggle_model(sync_grad=last):
            closure = of(optimizer, loss)
            m.seen.append(float(optimizer.step(closure=closure) if last else closure()))


def left_on_the_other(m, x, i, maker, judge):
    """The maker's backward leaves gradients on the judge, which the judge's zero_grad drops."""
    maker.zero_grad()
    m.manual_backward(m.made(x))
    maker.step()
    judge.zero_grad()
    m.manual_backward(m.judged(x))
    judge.step()


def dropped_within_a_window(m, x, i, maker, judge):
    """No step between: what the maker's backward left on the judge is dropped before anything was reduced."""
    maker.zero_grad()
    m.manual_backward(m.made(x))
    judge.zero_grad()
    m.manual_backward(m.judged(x))
    maker.step()
    judge.step()


def never_zeroed(m, x, i, maker, judge):
    m.manual_backward(m.made(x))
    maker.step()
    m.manual_backward(m.judged(x))
    judge.step()


def zeroed_not_none(m, x, i, maker, judge):
    """Zeros are gradients: momentum goes on."""
    m.manual_backward(m.made(x))
    maker.step()
    judge.zero_grad(set_to_none=False)
    m.manual_backward(m.judged(x))
    judge.step()
    maker.zero_grad(set_to_none=False)
    maker.step()


def every_second_batch(m, x, i, maker, judge):
    m.manual_backward(m.made(x) / 2)
    m.manual_backward(m.judged(x) / 2)
    if i % 2 == 1:
        for optimizer in (maker, judge):
            optimizer.step()
            optimizer.zero_grad()


def two_losses(m, x, i, maker, judge):
    m.manual_backward(m.judged(x))
    m.manual_backward(m.made(x))
    m.manual_backward(m(x).abs().mean())
    for optimizer in (maker, judge):
        optimizer.step()
        optimizer.zero_grad()


def step_between(m, x, i, maker, judge):
    """The maker steps between two backwards of the judge."""
    m.manual_backward(m.judged(x))
    m.toggle_optimizer(maker)
    m.manual_backward(m.made(x))
    m.untoggle_optimizer(maker)
    maker.step()
    maker.zero_grad()
    m.manual_backward(m.judged(x))
    judge.step()
    judge.zero_grad()


def used_by_one_rank(m, x, i, maker, judge):
    """The maker has a gradient of the last rank's rows alone, though the first keeps it; what is left of it is dropped."""

    def loss():
        parts = x.split(4)
        last = max(len(parts), m.trainer.world_size) - 1 - m.trainer.global_rank
        return sum(m.made(rows) if n == last else m.judged(rows) for n, rows in enumerate(parts)) / len(parts)

    m.manual_backward(loss())
    maker.zero_grad()
    m.manual_backward(loss())
    for optimizer in (maker, judge):
        optimizer.step()
        optimizer.zero_grad()


def clipped(m, x, i, maker, judge):
    for optimizer, loss, how in ((maker, m.made, "norm"), (judge, m.judged, "value")):
        optimizer.zero_grad()
        m.manual_backward(loss(x))
        m.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm=how)
        optimizer.step()


def clipped_by_torch(m, x, i, maker, judge):
    for optimizer, loss in ((maker, m.made), (judge, m.judged)):
        optimizer.zero_grad()
        m.manual_backward(loss(x))
        norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)
        m.seen.append(float(norm))
        optimizer.step()


def overlapping(m, x, i, maker, judge):
    """The trunk is in both optimizers."""
    for optimizer in (maker, judge):
        optimizer.zero_grad()
        m.manual_backward(m.made(x))
        optimizer.step()


def frequencies(m, x, i, maker, judge):
    """The maker steps in every batch, the judge in every third on all three gradients."""
    m.manual_backward(m.made(x))
    maker.step()
    maker.zero_grad()
    if i % 3 == 2:
        judge.step()
        judge.zero_grad()


def schedules_by_hand(m, x, i, maker, judge):
    toggled(m, x, i, maker, judge)
    first, second = m.lr_schedulers()
    first.step()
    if m.trainer.is_last_batch or i % 2:
        second.step()
    m.seen += [maker.param_groups[0]["lr"], judge.param_groups[0]["lr"]]


def through_the_module(m, x, i, maker, judge):
    m.manual_backward(m.made(x))
    m.zero_grad()
    m.manual_backward(m.judged(x) + m.made(x))
    maker.step()
    judge.step()
    for p in m.parameters():
        p.grad = None


def looked_at(m, x, i, maker, judge):
    """Gradients are read and changed between two backwards, and stay after the step."""
    m.zero_grad()
    m.manual_backward(m.made(x))
    m.seen.append(float(m.judge.weight.grad.norm()))
    m.judge.weight.grad.mul_(0.5)
    m.maker.bias.grad = m.maker.bias.grad * 2
    m.manual_backward(m.judged(x))
    judge.step()
    maker.step()
    m.seen += [float(p.grad.sum()) for p in m.parameters()]


def own_optimizers(m, x, i, maker, judge):
    """Steps of the optimizers themselves, not of Lightning's wrappers."""
    for optimizer, loss in zip(m.optimizers(use_pl_optimizer=False), (m.made, m.judged), strict=True):

        def closure(optimizer=optimizer, loss=loss):
            optimizer.zero_grad()
            value = loss(x)
            m.manual_backward(value)
            return value.detach()

        if i % 2:
            m.seen.append(float(optimizer.step(closure)))
        else:
            closure()
            optimizer.step()


def gradient_penalty(m, x, i, maker, judge):
    x = x.clone().requires_grad_()
    score = m.judge(torch.tanh(m.trunk(x))).square().sum(1)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    judge.zero_grad()
    m.manual_backward(score.mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean())
    judge.step()


RECIPES = [
    toggled,
    toggled_without_zero_grad,
    closures,
    left_on_the_other,
    dropped_within_a_window,
    never_zeroed,
    zeroed_not_none,
    every_second_batch,
    two_losses,
    step_between,
    used_by_one_rank,
    clipped,
    clipped_by_torch,
    overlapping,
    frequencies,
    schedules_by_hand,
    through_the_module,
    looked_at,
    own_optimizers,
    gradient_penalty,
]


def batch(number, rank):
    g = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 3, generator=g, dtype=torch.float64)


def run_recipe(strategy, recipe, loader, world, folder):
    module = Pair(recipe)
    trainer = make_trainer(strategy, world, folder)
    trainer.fit(module, loader)
    return module, trainer


def check_recipes(rank, world_size, folder, full):
    joined = batches(*[torch.cat([batch(n, r) for r in range(world_size)]) for n in range(BATCHES)])
    mine = batches(*[batch(n, rank) for n in range(BATCHES)])
    names = strategies(world_size)
    for number, recipe in enumerate(RECIPES if full or world_size > 1 else RECIPES[::3]):
        want, stock = run_recipe("auto", recipe, joined, 1, folder)
        chosen = names if full else [names[number % len(names)], "zero3"]
        for name in dict.fromkeys(chosen):
            own = STRATEGIES[name]
            others = [own(reduce=r) for r in ("micro_batch", "window")] if full else [own()]
            for strategy in others:
                where = f"{recipe.__name__} under {name} {strategy.options.reduce}"
                module, trainer = run_recipe(strategy, recipe, mine, world_size, folder)
                assert trainer.global_step == stock.global_step, where
                with trainer.strategy.gathered():
                    for (n, p), q in zip(module.named_parameters(), want.parameters(), strict=True):
                        torch.testing.assert_close(
                            p.detach(), q.detach(), rtol=1e-9, atol=1e-9, msg=lambda m, w=f"{where} {n}": f"{w}: {m}"
                        )
                if recipe not in (closures, own_optimizers):  # there each rank sees the losses of its own rows
                    assert module.seen == pytest.approx(want.seen), where


@pytest.mark.conformance("B5")
@pytest.mark.parametrize("world_size", [1, 2])
def test_manual_optimization_is_that_of_one_process(world_size, tmp_path):
    run_ranks(check_recipes, world_size, init=False, folder=str(tmp_path), full=False, timeout_s=120)


@pytest.mark.long
@pytest.mark.conformance("B5")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_manual_optimization_under_every_strategy(world_size, tmp_path):
    run_ranks(check_recipes, world_size, init=False, folder=str(tmp_path), full=True, timeout_s=600)


def raw_backward(m, x, i, maker, judge):
    m.made(x).backward()
    maker.step()


def check_raw(rank, world_size, folder):
    for name in ("ddp", "zero3"):
        with pytest.raises(GradientError, match=r"use `self.manual_backward\(loss\)`"):
            run_recipe(name, raw_backward, batches(batch(0, rank)), world_size, folder)


def test_backward_past_the_strategy_is_an_error(tmp_path):
    run_ranks(check_raw, 2, init=False, folder=str(tmp_path))


class Manual(Scalar):
    def __init__(self, pattern):
        super().__init__(None)
        self.automatic_optimization = False
        self.pattern = pattern

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for number, sync in enumerate(self.pattern):
            loss = self.w * (number + 1) * (1 + self.trainer.global_rank) + self.w**2
            if sync:
                self.manual_backward(loss / 4)
            else:
                with self.trainer.strategy.block_backward_sync():
                    self.manual_backward(loss / 4)
        optimizer.step()
        optimizer.zero_grad()


def check_manual(rank, world_size, folder):
    for strategy in strategies(world_size):
        for pattern in ((1, 0, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 1)):
            for reduce in ("micro_batch", "window"):
                module = Manual(pattern)
                trainer = make_trainer(STRATEGIES[strategy](reduce=reduce), world_size, folder)
                trainer.fit(module, batches(*[tokens(1, 0.0)] * 3))
                # Mean slope over 4 micro-batches and ranks at w: 2.5 * 1.5 + 2 w.
                w = 0.0
                for _ in range(3):
                    w -= 0.1 * (2.5 * (1 + world_size) / 2 + 2 * w)
                assert module.weight() == pytest.approx(w, abs=1e-12), f"{strategy} {pattern} {reduce}"
                calls = trainer.strategy.engine.collectives.calls["reduce_scatter"]
                expected = 3 * (4 if reduce == "micro_batch" else 1) if world_size > 1 else 0
                assert calls == expected, f"{strategy} {pattern} {reduce}"


@pytest.mark.case("C083")
def test_gradients_do_not_depend_on_which_backward_synchronises(tmp_path):
    run_ranks(check_manual, 2, init=False, folder=str(tmp_path))
