"""Rows B of the conformance matrix: what a module overrides, and where the loop validates, accumulates and ends."""

import pytest
import torch
from conformance import Base, Cases, Scheduled, batch, check_cases
from harness import run_ranks
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, GradientAccumulationScheduler
from test_cases_training import batches
from test_lightning_fit import make_trainer
from torch import nn
from torch.optim import lr_scheduler as lrs

case = Cases()


@case("B2")
class ReadsGradients(Base):
    """Global gradients in each hook where Lightning's ddp has them."""

    settings = {"gradient_clip_val": 0.05}

    def note(self, where):
        self.seen.append([where, *(0.0 if p.grad is None else float(p.grad.norm()) for p in self.parameters())])

    def on_after_backward(self):
        self.note("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.note("on_before_optimizer_step")
        self.seen.append(float(sum(p.grad.sum() for p in optimizer.param_groups[0]["params"] if p.grad is not None)))

    def on_before_zero_grad(self, optimizer):
        self.note("on_before_zero_grad")


@case("B2")
class ChangesGradients(Base):
    def on_after_backward(self):
        for p in self.trained():
            if p.grad is not None:
                p.grad.add_(0.01 * p.grad.sign())

    def on_before_optimizer_step(self, optimizer):
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad = p.grad * 2


@case("B3")
class StepsEverySecondBatch(Base):
    """Skipped batches run the closure; their gradients are lost, as zero_grad comes with the next."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@case("B3")
class WarmsUp(Base):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 5)


@case("B3")
class StepsItself(Base):
    """Past Lightning's wrapper and the strategy."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer.optimizer.step(optimizer_closure)
        else:
            optimizer_closure()
            optimizer.optimizer.step()


@case("B3")
class TwoClosures(Base):
    """Runs forward and backward twice per step; the first only for its loss."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


@case("B3")
class OwnBackward(Base):
    def backward(self, loss):
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()

    def optimizer(self):
        # At the usual rate these gradients make weights of 1e8, which multiply what is rounded.
        return torch.optim.SGD(self.trained(), 0.05, momentum=0.9, weight_decay=0.01)


@case("B3")
class OwnClipping(Base):
    settings = {"gradient_clip_val": 0.05}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.trainer.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)))


@case("B3")
class ZeroesNotNone(Base):
    settings = {"accumulate_grad_batches": 2}

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


@case("B3")
class ZeroesItself(Base):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.zero_grad()


@case("B3")
class ZeroesNever(Base):
    """Gradients go on adding up over the steps."""

    settings = {"accumulate_grad_batches": 2}

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.seen.append("left")


@case("B3")
class ZeroesSometimes(Base):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


@case("B3")
class OwnSchedulerStep(Scheduled):
    def schedule(self, optimizer):
        return lrs.ExponentialLR(optimizer, 0.9)

    def lr_scheduler_step(self, scheduler, metric):
        if self.trainer.global_step % 2:
            scheduler.step()


@case("B4")
class ReturnsDict(Base):
    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "rows": 4}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += [outputs["rows"], sorted(outputs)]


@case("B7")
class EndsInsideAWindow(Base):
    settings = {"accumulate_grad_batches": 2, "max_steps": 4, "max_epochs": None}


@case("B7")
class ValidatesInsideAWindow(Base):
    settings = {"accumulate_grad_batches": 3, "val_check_interval": 2, "limit_val_batches": 1}


@case("B7")
class ValidatesAcrossEpochs(Base):
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 5, "check_val_every_n_epoch": None}


@case("B9")
class ChangesAccumulation(Base):
    def __init__(self):
        super().__init__()
        self.settings = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})], "max_epochs": 3}


@case("B10")
class DetectsAnomalies(Base):
    settings = {"detect_anomaly": True}


class Unfreezes(BaseFinetuning):
    """Trains the blocks one after another, each in a group of its own."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module, epoch, optimizer):
        if 1 <= epoch <= 2:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[2 - epoch], optimizer, lr=0.05 / epoch)


@case("B3")
class Unfreezing(Base):
    def __init__(self):
        super().__init__()
        for p in self.parameters():
            nn.init.normal_(p)  # Lightning leaves parameters out that equal one it has
        self.settings = {"callbacks": [Unfreezes()], "max_epochs": 4, "limit_train_batches": 3}

    def optimizer(self):
        return torch.optim.Adam(self.trained(), 0.01)


@case("B3")
class Backbone(Base):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.5)
        self.settings = {"callbacks": [callback], "max_epochs": 4, "limit_train_batches": 2}

    def loss(self, x):
        return super().loss(self.backbone(x))


def check(rank, world_size, folder, full):
    check_cases(case, rank, world_size, folder, full)


@case.rows
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_loop_is_that_of_stock_lightning_in_one_process(world_size, tmp_path):
    run_ranks(check, world_size, init=False, folder=str(tmp_path), full=False, timeout_s=180)


@case.rows
@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_loop_under_every_strategy(world_size, tmp_path):
    run_ranks(check, world_size, init=False, folder=str(tmp_path), full=True, timeout_s=900)


def resumed(strategy, world_size, loader, folder, path):
    """Trains to the end of the third epoch, saves, and goes on in another Trainer; returns its module and Trainer."""
    for epochs, start in ((3, None), (5, path)):
        module = Unfreezing()
        settings = {**module.settings, "max_epochs": epochs}
        trainer = make_trainer(strategy, world_size, folder, **settings)
        trainer.fit(module, loader, loader, ckpt_path=start)
        if start is None:
            trainer.save_checkpoint(path)
    return module, trainer


def check_resume(rank, world_size, folder):
    joined = batches(*[torch.cat([batch(n, r) for r in range(world_size)]) for n in range(3)])
    want, _ = resumed("auto", 1, joined, folder, f"{folder}/stock{rank}.ckpt")
    mine = batches(*[batch(n, rank) for n in range(3)])
    for strategy in ("ddp", "zero3"):
        got, trainer = resumed(strategy, world_size, mine, folder, f"{folder}/{strategy}")
        assert len(trainer.optimizers[0].param_groups) == 3, strategy
        with trainer.strategy.gathered():
            for p, q in zip(got.parameters(), want.parameters(), strict=True):
                torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.conformance("B3")
def test_groups_that_a_finetuning_callback_added_are_there_after_a_resume(tmp_path):
    run_ranks(check_resume, 2, init=False, folder=str(tmp_path))
