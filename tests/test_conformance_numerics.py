"""Rows A of the conformance matrix: clipping, accumulation, groups, optimizers, schedules, forwards."""

from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from conformance import BATCHES, Base, Cases, Scheduled, batch, check_cases
from harness import run_ranks
from lightning.pytorch.strategies import DDPStrategy
from shardlight.strategies import STRATEGIES
from test_cases_training import batches
from test_lightning_fit import make_trainer
from torch import nn
from torch.optim import lr_scheduler as lrs

case = Cases()


@case("A1", "A3", "A5", "A6")
class Clipped(Base):
    settings = {"gradient_clip_val": 0.05}


@case("A3")
class ClippedByValue(Base):
    settings = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}


@case("A2")
class Accumulated(Base):
    settings = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}


@case("A4")
class DecayByNdim(Base):
    def optimizer(self):
        groups = [[p for p in self.trained() if (p.ndim >= 2) == wide] for wide in (True, False)]
        return torch.optim.AdamW(
            [{"params": p, "weight_decay": d} for p, d in zip(groups, (0.3, 0.0), strict=True)], 0.01
        )


@case("A4")
class DecayByName(Base):
    def optimizer(self):
        named = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        decayed = [(n, p) for n, p in named if "bias" not in n and ".2." not in n]
        rest = [(n, p) for n, p in named if "bias" in n or ".2." in n]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], 0.01
        )


@case("A8")
class Adam(Base):
    def optimizer(self):
        return torch.optim.Adam(self.trained(), 0.01, amsgrad=True)


@case("A8")
class FusedAdamW(Base):
    def optimizer(self):
        return torch.optim.AdamW(self.trained(), 0.01, fused=True)


@case("A8")
class Adagrad(Base):
    """Makes its state in the constructor."""

    def optimizer(self):
        return torch.optim.Adagrad(self.trained(), 0.05, initial_accumulator_value=0.1)


@case("A8")
class Nesterov(Base):
    settings = {"accumulate_grad_batches": 2}

    def optimizer(self):
        return torch.optim.SGD(self.trained(), 0.05, momentum=0.9, nesterov=True, foreach=True)


@case("A8")
class NAdam(Base):
    def optimizer(self):
        return torch.optim.NAdam(self.trained(), 0.01)


@case("A10")
class TwoForwards(Base):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 0.3 * self.loss(batch.flip(1)) + self.net.blocks[1](self.net.stem(batch)).mean()


@case("A10")
class EvaluatesInTraining(Base):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.eval()
            target = self.net(batch)
            self.train()
        return (self.net(batch * 0.5) - target).square().mean()


# --- A7: schedules


@case("A7")
class EverySecondStep(Scheduled):
    frequency = 2
    settings = {"accumulate_grad_batches": 2, "max_epochs": 3}

    def schedule(self, optimizer):
        return lrs.ExponentialLR(optimizer, 0.5)


@case("A7")
class EveryEpoch(Scheduled):
    interval = "epoch"

    def schedule(self, optimizer):
        return lrs.MultiStepLR(optimizer, [1], 0.1)


@case("A7")
class EverySecondEpoch(Scheduled):
    interval, frequency = "epoch", 2
    settings = {"max_epochs": 4, "limit_train_batches": 2}

    def schedule(self, optimizer):
        return lrs.StepLR(optimizer, 1, 0.1)


@case("A7")
class OneCycle(Scheduled):
    """Moves momentum too, and asks the Trainer for the number of steps."""

    settings = {"accumulate_grad_batches": 2}

    def schedule(self, optimizer):
        return lrs.OneCycleLR(optimizer, 0.2, total_steps=int(self.trainer.estimated_stepping_batches))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.trainer.optimizers[0].param_groups[0]["momentum"])
        super().on_train_batch_end(outputs, batch, batch_idx)


@case("A7")
class Sequence(Scheduled):
    def schedule(self, optimizer):
        warmup = lrs.LinearLR(optimizer, 0.1, total_iters=3)
        return lrs.SequentialLR(optimizer, [warmup, lrs.CosineAnnealingLR(optimizer, 9)], [3])


@case("A7")
class Chained(Scheduled):
    def schedule(self, optimizer):
        return lrs.ChainedScheduler([lrs.LinearLR(optimizer, 0.1, total_iters=3), lrs.ExponentialLR(optimizer, 0.9)])


@case("A7")
class Several(Base):
    """Two schedules on one optimizer, one by step and one by epoch."""

    def configure_optimizers(self):
        optimizer = self.optimizer()
        by_step = {"scheduler": lrs.LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step"}
        return [optimizer], [by_step, lrs.CosineAnnealingWarmRestarts(optimizer, 2)]


@case("A7")
class Plateau(Scheduled):
    interval, monitor = "epoch", "val_loss"
    settings = {"max_epochs": 5, "limit_train_batches": 1}

    def schedule(self, optimizer):
        return lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.5)


@case("A7")
class PlateauByStep(Scheduled):
    monitor = "seen_loss"

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("seen_loss", loss, sync_dist=True)
        return loss

    def schedule(self, optimizer):
        return lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.5)


def check(rank, world_size, folder, full):
    check_cases(case, rank, world_size, folder, full)


@case.rows
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_is_that_of_stock_lightning_in_one_process(world_size, tmp_path):
    run_ranks(check, world_size, init=False, folder=str(tmp_path), full=False, timeout_s=180)


@case.rows
@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_under_every_strategy(world_size, tmp_path):
    run_ranks(check, world_size, init=False, folder=str(tmp_path), full=True, timeout_s=900)


# --- C074: schedules go on where they were


class Exponential(Scheduled):
    def schedule(self, optimizer):
        return lrs.ExponentialLR(optimizer, 0.5)


class Patient(Scheduled):
    interval, monitor = "epoch", "metric"

    def schedule(self, optimizer):
        return lrs.ReduceLROnPlateau(optimizer, factor=0.1, patience=2)

    def validation_step(self, batch, batch_idx):
        self.log("metric", 1.0, sync_dist=True, batch_size=len(batch))


class WarmsUpThenFalls(Scheduled):
    def schedule(self, optimizer):
        parts = [lrs.LinearLR(optimizer, 0.25, total_iters=2), lrs.CosineAnnealingLR(optimizer, 4)]
        return lrs.SequentialLR(optimizer, parts, [3])


def check_resume(rank, world_size, folder):
    loader = batches(batch(0, rank))
    for strategy in ("zero1", "zero3") if world_size > 1 else ("single",):
        for kind in (Exponential, Patient, WarmsUpThenFalls):
            path = f"{folder}/{strategy}-{kind.__name__}"
            runs = {}
            for name, first, then in (("whole", 4, None), ("first", 2, None), ("second", 4, path)):
                module = kind()
                trainer = make_trainer(strategy, world_size, folder, max_epochs=first)
                trainer.fit(module, loader, loader, ckpt_path=then)
                if name == "first":
                    trainer.save_checkpoint(path)
                rate = trainer.optimizers[0].param_groups[0]["lr"]
                assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [rate], (strategy, kind)
                runs[name] = [seen[0] for seen in module.seen if isinstance(seen, list)], rate
            whole, first, second = runs["whole"], runs["first"], runs["second"]
            assert first[0] + second[0] == whole[0] and second[1] == whole[1], (strategy, kind, runs)
            if kind is Exponential:
                assert whole[0] == pytest.approx([0.05, 0.025, 0.0125, 0.00625]), runs
            if kind is Patient:
                assert whole == ([0.1] * 4, pytest.approx(0.01)), runs


@pytest.mark.case("C074")
@pytest.mark.conformance("A7")
@pytest.mark.parametrize("world_size", [1, 2])
def test_schedules_go_on_after_a_resume(world_size, tmp_path):
    run_ranks(check_resume, world_size, init=False, folder=str(tmp_path))


# --- A14: a rank draws its own random numbers, from the seed that the user has set


class Dropping(Base):
    def loss(self, x):
        return super().loss(nn.functional.dropout(x, 0.3)) + self.net(nn.functional.dropout(x, 0.5)).square().mean()


def check_dropout(rank, world_size, folder):
    for seeds in ((3, 3), (3, 4)):
        results = []
        stock = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
        for strategy in (stock, *(STRATEGIES[n](recompute=r) for n in ("ddp", "zero3") for r in ("no", "blocks"))):
            module = Dropping()
            trainer = make_trainer(strategy, world_size, folder)
            pl.seed_everything(seeds[rank], verbose=False)
            loader = batches(*[batch(n, rank) for n in range(BATCHES)])
            trainer.fit(module, loader, loader)
            with nullcontext() if strategy is stock else trainer.strategy.gathered():
                results.append([p.detach().clone() for p in module.parameters()])
        for other in results[1:]:
            for got, want in zip(other, results[0], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        yield results[0]


def check_seeds(rank, world_size, folder):
    same, different = check_dropout(rank, world_size, folder)
    assert not torch.equal(same[0], different[0])


@pytest.mark.conformance("A14")
def test_dropout_draws_what_lightnings_ddp_draws(tmp_path):
    run_ranks(check_seeds, 2, init=False, folder=str(tmp_path))
