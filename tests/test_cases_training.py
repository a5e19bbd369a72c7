"""Known traps of training under Lightning's Trainer: token weights, schedules, short windows, uneven data."""

import warnings
from collections.abc import Callable

import pytest
import torch
from harness import run_ranks
from loops import IN_MEMORY
from shardlight.framework import TrainingModule
from shardlight.strategies import STRATEGIES
from test_lightning_fit import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset


def strategies(world: int) -> list[str]:
    return [name for name in IN_MEMORY if name != "single" or world == 1]


class Scalar(TrainingModule):
    """One weight w = 0; `loss_of(module, batch)` is the loss; keeps what happened."""

    def __init__(self, loss_of: Callable, schedule=None, lr=0.1):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.loss_of, self.schedule, self.lr = loss_of, schedule, lr
        self.losses, self.gradients, self.rates = [], [], []

    def training_step(self, batch, batch_idx):
        return self.loss_of(self, batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}

    def on_before_optimizer_step(self, optimizer):
        self.losses.append(self.trainer.strategy.window_loss)
        self.gradients.append(self.trainer.strategy.gradient(self.w).item())

    def on_train_start(self):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step == len(self.rates):
            self.rates.append(self.optimizers().param_groups[0]["lr"])

    def weight(self) -> float:
        with self.trainer.strategy.gathered():
            return self.w.item()


def batches(*tensors):
    return DataLoader(list(tensors), batch_size=None)


def tokens(count: int, target: float) -> Tensor:
    return torch.full((count,), target, dtype=torch.float64)


# --- C004: token loss (w - t)^2 / 2 at w = 0; piece A: one token t = 4; piece B: three tokens t = 0


def by_token(module, t):
    return module.weighted(((module.w - t) ** 2 / 2).sum(), t.numel())


def by_step(module, t):
    return ((module.w - t) ** 2 / 2).mean()


A, B, NONE = tokens(1, 4.0), tokens(3, 0.0), tokens(0, 0.0)
LAYOUTS = {  # (ranks, accumulation): by rank, its micro-batches
    (1, 1): [[torch.cat([A, B])]],
    (1, 2): [[A, B]],
    (2, 1): [[A], [B]],
    (2, 2): [[A, tokens(1, 0.0)], [NONE, tokens(2, 0.0)]],
}


def check_weighting(rank, world_size, folder):
    for (ranks, accumulate), pieces in LAYOUTS.items():
        for strategy in strategies(world_size) if ranks == world_size else []:
            module = Scalar(by_token)
            trainer = make_trainer(strategy, world_size, folder, accumulate_grad_batches=accumulate)
            trainer.fit(module, batches(*pieces[rank]))
            where = f"{strategy} {ranks} ranks, accumulation {accumulate}"
            assert module.gradients == pytest.approx([-1.0], abs=1e-12), where
            assert module.losses == pytest.approx([2.0], abs=1e-12), where
            assert module.weight() == pytest.approx(0.1, abs=1e-12), where
            for equal_counts in (False, True):
                other = tokens(1 if equal_counts else 3, 0.0)
                mine = {(1, 2): [A, other], (2, 1): [[A, other][rank]]}.get((ranks, accumulate))
                if mine is None:
                    continue
                got = []
                for loss_of in (by_step, by_token) if equal_counts else (by_step,):
                    module = Scalar(loss_of)
                    make_trainer(strategy, world_size, folder, accumulate_grad_batches=accumulate).fit(
                        module, batches(*mine)
                    )
                    got.append((module.gradients[0], module.losses[0], module.weight()))
                # The default is a mean of means; with equal counts the two are the same.
                assert all(g == pytest.approx((-2.0, 4.0, 0.2)) for g in got), (where, got)


@pytest.mark.case("C004")
@pytest.mark.parametrize("world_size", [1, 2])
def test_token_weights_do_not_depend_on_the_layout(world_size, tmp_path):
    run_ranks(check_weighting, world_size, init=False, folder=str(tmp_path))


class Reading(Scalar):
    """Reads final gradients in both hooks, and doubles them in one."""

    def on_after_backward(self):
        self.gradients.append(self.trainer.strategy.gradient(self.w).item())
        self.losses.append(None if self.w.grad is None else self.w.grad.item())

    def on_before_optimizer_step(self, optimizer):
        if self.w.grad is not None:
            self.w.grad.mul_(2)


def check_hooks(rank, world_size, folder):
    for strategy in strategies(world_size):
        module = Reading(by_step)
        make_trainer(strategy, world_size, folder).fit(module, batches([A, B][rank]))
        assert module.gradients == [-2.0] and module.losses == [-2.0], strategy
        assert module.weight() == pytest.approx(0.4), strategy


@pytest.mark.conformance("B2")
def test_gradients_are_final_in_the_hooks(tmp_path):
    run_ranks(check_hooks, 2, init=False, folder=str(tmp_path))


def check_no_tokens(rank, world_size, folder):
    for strategy in strategies(world_size):
        module = Scalar(by_token)
        trainer = make_trainer(strategy, world_size, folder)
        trainer.fit(module, batches(NONE, tokens(1 + rank, 1.0), NONE))
        assert trainer.strategy.skipped_steps == 2 and module.weight() == pytest.approx(0.1), strategy


@pytest.mark.case("C004")
def test_window_without_tokens_changes_nothing(tmp_path):
    run_ranks(check_no_tokens, 2, init=False, folder=str(tmp_path))


# --- C010, C031: gradient 1 from each batch


def slope_one(module, batch):
    return module.w + 0 * batch.sum()


def step_by_two(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)


def check_schedule(rank, world_size, folder):
    for strategy in strategies(world_size):
        module = Scalar(slope_one, step_by_two, lr=1.0)
        trainer = make_trainer(strategy, world_size, folder, accumulate_grad_batches=2)
        trainer.fit(module, batches(*[tokens(1, 0.0)] * 8))
        assert module.rates == pytest.approx([1, 1, 0.1, 0.1, 0.01]), strategy
        assert trainer.global_step == 4 and module.weight() == pytest.approx(-2.2), strategy


@pytest.mark.conformance("A7")
@pytest.mark.case("C010")
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_schedule_counts_optimizer_steps(world_size, tmp_path):
    run_ranks(check_schedule, world_size, init=False, folder=str(tmp_path))


def check_short_window(rank, world_size, folder):
    for strategy in strategies(world_size):
        for count, accumulate, steps in ((5, 2, 3), (3, 4, 1), (5, 3, 2)):
            module = Scalar(slope_one)
            trainer = make_trainer(strategy, world_size, folder, accumulate_grad_batches=accumulate, max_epochs=2)
            trainer.fit(module, batches(*[tokens(1, 0.0)] * count))
            where = f"{strategy} {count} batches, accumulation {accumulate}"
            assert trainer.global_step == 2 * steps, where
            assert module.gradients == pytest.approx([1.0] * 2 * steps), where
            assert module.weight() == pytest.approx(-0.2 * steps, abs=1e-12), where


@pytest.mark.conformance("A2")
@pytest.mark.case("C031")
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_short_last_window_is_a_step_of_its_own_mean(world_size, tmp_path):
    run_ranks(check_short_window, world_size, init=False, folder=str(tmp_path))


# --- C019


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def not_empty(samples):
    assert samples
    return torch.stack(samples)


def check_uneven(rank, world_size, folder):
    one = torch.ones((), dtype=torch.float64)
    # 3 batches on rank 0 and 2 on rank 1; 5 samples in batches of 2 where rank 1 has nothing left; nothing at all.
    cases = (
        ("ended after 2 batches", Stream([one] * (6 - 2 * rank)), 2),
        ("ended after 1 batches", Stream([one] * (3 - rank)), 1),
        ("ended after 0 batches", Stream([one] * (2 - 2 * rank)), 0),
    )
    for strategy in strategies(world_size):
        for message, data, steps in cases:
            for epochs in (1, 2):
                module = Scalar(slope_one)
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    trainer = make_trainer(strategy, world_size, folder, max_epochs=epochs)
                    trainer.fit(module, DataLoader(data, batch_size=2, collate_fn=not_empty))
                where = f"{strategy} {message} {epochs} epochs"
                assert trainer.global_step == steps * epochs, where
                assert module.weight() == pytest.approx(-0.1 * steps * epochs), where
                said = [str(w.message) for w in seen if "the training data of rank 1" in str(w.message)]
                assert len(said) == (0 if rank else epochs) and all(message in s for s in said), (where, said)


@pytest.mark.case("C019")
@pytest.mark.conformance("E3")
@pytest.mark.conformance("E9")
def test_training_stops_at_the_shortest_rank(tmp_path):
    run_ranks(check_uneven, 2, init=False, folder=str(tmp_path))


def check_sized(rank, world_size, folder):
    """Lengths that are known, and differ: the shortest is the length on every rank."""
    for strategy in strategies(world_size):
        module = Scalar(slope_one)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            trainer = make_trainer(strategy, world_size, folder, accumulate_grad_batches=2)
            trainer.fit(module, batches(*[tokens(1, 0.0)] * (5 - 2 * rank)))
        assert trainer.num_training_batches == 3 and trainer.global_step == 2, strategy
        assert module.weight() == pytest.approx(-0.2), strategy


@pytest.mark.case("C019")
def test_loaders_of_different_length(tmp_path):
    run_ranks(check_sized, 2, init=False, folder=str(tmp_path))


@pytest.mark.parametrize("precision,dtype", [("64-true", torch.float64), ("32-true", torch.float32)])
def test_trainer_precision_holds_for_a_strategy_object(precision, dtype, tmp_path):
    for strategy in (STRATEGIES["single"](), "single"):
        trainer = make_trainer(strategy, 1, str(tmp_path), precision=precision)
        assert trainer.precision == precision
        assert trainer.precision_plugin.convert_module(nn.Linear(2, 2)).weight.dtype == dtype
