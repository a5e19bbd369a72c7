"""Rows B1, B4, B6, B8, B10 of the conformance matrix: the order of all hooks is that of Lightning's ddp, and what is refused."""

import functools
import math
import warnings
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from conformance import Base, batch
from harness import run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.strategies import DDPStrategy
from loops import IN_MEMORY
from shardlight.strategies.errors import StrategyError
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer
from torch.optim import lr_scheduler as lrs

STEPS = ("training_step", "validation_step", "test_step", "predict_step", "backward", "forward")
STEPS += ("optimizer_step", "optimizer_zero_grad", "configure_optimizers", "configure_gradient_clipping")
STEPS += ("lr_scheduler_step", "configure_callbacks", "configure_model")


def hooks_of(*kinds: type) -> list[str]:
    return [n for kind in kinds for n in vars(kind) if callable(getattr(kind, n)) and not n.startswith("_")]


def recording(kind: type, names: list[str], label: str) -> type:
    """Returns a subclass that notes each call of the named methods in `trace`."""

    def noted(name):
        @functools.wraps(getattr(kind, name))
        def method(self, *args, **kwargs):
            self.trace.append(f"{label}.{name}")
            return getattr(super(made, self), name)(*args, **kwargs)

        return method

    made = type(kind.__name__, (kind,), {n: noted(n) for n in names if hasattr(kind, n)})
    return made


class Plain(Base):
    def configure_optimizers(self):
        optimizer = self.optimizer()
        plateau = {"scheduler": lrs.ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
        return [optimizer], [{"scheduler": lrs.StepLR(optimizer, 1), "interval": "step"}, plateau]

    def test_step(self, batch, batch_idx):
        return self.loss(batch)

    def predict_step(self, batch, batch_idx):
        return self.net(batch)


class Data(pl.LightningDataModule):
    def __init__(self, rank):
        super().__init__()
        self.loader = batches(*[batch(n, rank) for n in range(5)])

    def train_dataloader(self):
        return self.loader

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


MODULE = recording(Plain, [*hooks_of(ModelHooks, CheckpointHooks), *STEPS], "module")
DATA = recording(Data, [*hooks_of(DataHooks, CheckpointHooks), "state_dict", "load_state_dict"], "data")
CALLBACK = recording(pl.Callback, hooks_of(pl.Callback), "callback")


def trace_of(strategy, rank, world_size, folder, settings):
    module, data, callback = MODULE(), DATA(rank), CALLBACK()
    trace: list[str] = []
    module.trace = data.trace = callback.trace = trace
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_last=False)
    options = {"callbacks": [callback, checkpoint], "enable_checkpointing": True, "num_sanity_val_steps": 1}
    trainer = make_trainer(strategy, world_size, folder, **{**options, "max_epochs": 2, **settings})
    trainer.fit(module, datamodule=data)
    for entry in (trainer.validate, trainer.test, trainer.predict):
        trace.append(entry.__name__)
        entry(module, datamodule=data, **({} if entry == trainer.predict else {"verbose": False}))
    return trace


SETTINGS = (
    {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
    {"val_check_interval": 2, "max_epochs": 1, "limit_val_batches": 1},
    {"max_steps": 3, "accumulate_grad_batches": 2},
)


def check_order(rank, world_size, folder, full):
    for number, settings in enumerate(SETTINGS if full else SETTINGS[:2]):
        stock = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
        want = trace_of(stock, rank, world_size, f"{folder}/stock{number}", settings)
        assert len(want) > 200, want
        names = [n for n in IN_MEMORY if n != "single"]
        for name in names if full else (names[number % 4], "zero3"):
            got = trace_of(name, rank, world_size, f"{folder}/{name}{number}", settings)
            for place, (mine, theirs) in enumerate(zip(got, want, strict=False)):
                assert mine == theirs, (name, place, got[place - 3 : place + 5], want[place - 3 : place + 5])
            assert len(got) == len(want), name


@pytest.mark.conformance("B1")
def test_hooks_come_in_the_order_of_lightnings_ddp(tmp_path):
    run_ranks(check_order, 2, init=False, folder=str(tmp_path), full=False, timeout_s=120)


@pytest.mark.long
@pytest.mark.conformance("B1")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_hooks_come_in_the_order_of_lightnings_ddp_everywhere(world_size, tmp_path):
    run_ranks(check_order, world_size, init=False, folder=str(tmp_path), full=True, timeout_s=600)


# --- what is refused, or runs without an optimizer


class ReturnsNothing(Base):
    """The first batch of two is left out."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 0 else self.loss(batch)


class NoOptimizer(Base):
    def configure_optimizers(self):
        return None


class QuasiNewton(Base):
    def optimizer(self):
        return torch.optim.LBFGS(self.trained())


class NotANumber(Base):
    settings = {"detect_anomaly": True}

    def loss(self, x):
        return super().loss(x) + torch.sqrt(self.net.stem.weight.square().sum() * -1.0) * 0


def fit(kind, strategy, rank, world_size, folder):
    module = kind()
    trainer = make_trainer(strategy, world_size, folder, max_epochs=1, **module.settings)
    loader = batches(*[batch(n, rank) for n in range(2)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns of a loss or an optimizer that is None, once, on rank 0
        trainer.fit(module, loader, loader)
    with trainer.strategy.gathered():
        return trainer, [p.detach().clone() for p in module.parameters()]


def check_refusals(rank, world_size, folder):
    for strategy in strategies(world_size):
        where = f"{strategy} on {world_size}"
        if world_size > 1:
            with pytest.raises(RuntimeError, match="returning None in distributed training is not supported"):
                fit(ReturnsNothing, strategy, rank, world_size, folder)
        else:
            trainer, weights = fit(ReturnsNothing, strategy, rank, world_size, folder)
            want = Base()
            want.loss(batch(1, 0)).backward()
            want.optimizer().step()
            assert trainer.global_step == 2 and trainer.strategy.skipped_steps == 0, where
            assert all(map(partial(torch.allclose, rtol=1e-12), weights, want.parameters())), where
        trainer, weights = fit(NoOptimizer, strategy, rank, world_size, folder)
        assert all(torch.equal(a, b) for a, b in zip(weights, NoOptimizer().parameters(), strict=True)), where
        with pytest.raises(StrategyError, match=f"LBFGS cannot run under {strategy}: it evaluates the loss several"):
            fit(QuasiNewton, strategy, rank, world_size, folder)
        with pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values"):
            fit(NotANumber, strategy, rank, world_size, folder)
        assert math.isfinite(weights[0].sum())


@pytest.mark.conformance("B4")
@pytest.mark.conformance("B6")
@pytest.mark.conformance("B8")
@pytest.mark.conformance("B10")
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_refused_and_a_fit_without_an_optimizer(world_size, tmp_path):
    run_ranks(check_refusals, world_size, init=False, folder=str(tmp_path))
