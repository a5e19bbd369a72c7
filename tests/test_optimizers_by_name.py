"""Every optimizer that a config can name, under the Trainer: one process's numbers with schedule, clipping and accumulation."""

import functools

import pytest
import torch
from harness import run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from models import TinyGPT, token_batch, token_loss
from shardlight.framework.build_optim import build_optimizer, build_schedule
from shardlight.framework.module import TrainingModule
from shardlight.framework.optim import OptimizerConfig, ScheduleConfig
from test_lightning_fit import make_trainer
from torch.utils.data import DataLoader

STEPS, ACCUMULATE, CLIP = 4, 2, 0.05
SCHEDULE = ScheduleConfig(name="cosine", warmup_steps=1, total_steps=6)
OPTIONS = {
    "adagrad": {"lr": 1e-2, "lr_decay": 0.1},
    "rmsprop": {"lr": 1e-3, "momentum": 0.9, "centered": True, "eps": 1e-4},
    "adafactor": {"lr": 1e-2},
    "lamb": {"lr": 1e-2},
    "lion": {"lr": 1e-3, "weight_decay": 0.1},
    "muon": {"lr": 1e-2, "adamw_lr": 1e-3},
}


class Named(TrainingModule):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.model = Gained().double()
        self.optimizer_config, self.schedule_config = OptimizerConfig(name=name, **OPTIONS[name]), SCHEDULE

    def training_step(self, batch, batch_idx):
        return token_loss(self.model, batch)


class Gained(TinyGPT):
    """Without the biases of keys, whose gradient is nothing but rounding, which Adafactor blows up."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.qkv.bias = None


def batches(rank):
    found = [token_batch(1000 * m + rank, 2, torch.float64) for m in range(STEPS * ACCUMULATE)]
    return DataLoader(found, batch_size=None)


@functools.cache
def one_process(name, world):
    module = Named(name)
    optimizer = build_optimizer(module, module.optimizer_config)
    schedule = build_schedule(optimizer, SCHEDULE, 6)
    for step in range(STEPS):
        for m in range(ACCUMULATE):
            for rank in range(world):
                batch = token_batch(1000 * (step * ACCUMULATE + m) + rank, 2, torch.float64)
                (module.training_step(batch, 0) / (ACCUMULATE * world)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def fit(name, strategy, rank, world, folder, **options):
    module = Named(name)
    keep = ModelCheckpoint(folder, f"{name}-{strategy}-{{step}}", every_n_train_steps=2, save_top_k=-1)
    settings = {"callbacks": keep, "enable_checkpointing": True, "gradient_clip_val": CLIP}
    trainer = make_trainer(strategy, world, folder, accumulate_grad_batches=ACCUMULATE, **settings)
    trainer.fit(module, batches(rank), **options)
    assert trainer.global_step == STEPS
    with trainer.strategy.gathered():
        return {n: p.detach().clone() for n, p in module.named_parameters()}


def check_fits(rank, world_size, folder, every):
    for number, name in enumerate(OPTIONS):
        want = one_process(name, world_size)
        chosen = ("zero1", "zero2", "zero3")[number % 3]
        for strategy in (chosen, "zero3" if chosen != "zero3" else "zero2") if every else (chosen,):
            got = fit(name, strategy, rank, world_size, folder)
            for n, weight in want.items():
                torch.testing.assert_close(
                    got[n], weight, rtol=1e-8, atol=1e-8, msg=lambda m, n=n: f"{name} {strategy} {n}: {m}"
                )
            again = fit(name, strategy, rank, world_size, folder, ckpt_path=f"{folder}/{name}-{strategy}-step=2.ckpt")
            assert all(torch.equal(again[n], got[n]) for n in want), f"{name} {strategy} resumed"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_an_optimizer_by_name_trains_as_in_one_process_and_resumes(world_size, every, tmp_path):
    run_ranks(check_fits, world_size, init=False, folder=str(tmp_path), every=every, timeout_s=120)
