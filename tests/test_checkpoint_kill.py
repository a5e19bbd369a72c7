"""Training that is killed anywhere and resumed is the run that never stopped: weights, optimizer, randomness, losses,
order of the data, to the last bit."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from harness import RanksFailedError, run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import IN_MEMORY
from shardlight.strategies.checkpoint.candidates import find, tidy
from shardlight.strategies.checkpoint.exact import compare_exactly
from shardlight.strategies.checkpoint.reader import CheckpointReader
from test_checkpoint import Rows
from test_lightning_fit import make_trainer
from torch import nn
from torch.utils.data import DataLoader

STEPS = 20
LAST = f"batch-{2 * STEPS}"
NAMES = [s for s in IN_MEMORY if s != "single"]


class Module(pl.LightningModule):
    """Dropout, BatchNorm, a tied and a frozen weight, clipping and a schedule, in windows of two micro-batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.3)) for _ in range(2)]
        )
        self.tied, self.frozen, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.tied.weight = self.blocks[0][0].weight
        self.frozen.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(self.head(self.tied(self.frozen(x))), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}]


class SaveWithin(pl.Callback):
    """Also saves within windows and epochs, where no optimizer step ends."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.fit_loop.total_batch_idx + 1) % 5 == 0:
            count = trainer.fit_loop.total_batch_idx + 1
            trainer.save_checkpoint(f"{trainer.default_root_dir}/checkpoints/batch-{count}")


class Killed(pl.Callback):
    """SIGKILL for this process, some time after training began."""

    def __init__(self, after_s):
        self.after_s = after_s

    def on_train_start(self, trainer, module):
        def kill():
            time.sleep(self.after_s)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()


def train(strategy, world, folder, resume=None, kill_after_s=None):
    callbacks = [
        SaveWithin(),
        ModelCheckpoint(Path(folder) / "checkpoints", "step-{step}", every_n_train_steps=3, save_top_k=-1),
    ]
    if kill_after_s is not None:
        callbacks.append(Killed(kill_after_s))
    pl.seed_everything(11, verbose=False)
    trainer = make_trainer(
        strategy, world, folder, precision="32-true", max_epochs=-1, max_steps=STEPS, use_distributed_sampler=True,
        callbacks=callbacks, accumulate_grad_batches=2, gradient_clip_val=0.5, enable_checkpointing=True,
    )  # fmt: skip
    started = time.perf_counter()
    trainer.fit(Module(), DataLoader(Rows(), batch_size=2, shuffle=True), ckpt_path=resume)
    assert trainer.global_step == STEPS
    took = time.perf_counter() - started
    return took


def uninterrupted(rank, world_size, folder):
    return {name: train(name, world_size, f"{folder}/{name}") for name in NAMES}


def killed(rank, world_size, folder, strategy, after_s, who):
    train(strategy, world_size, folder, kill_after_s=after_s if who in (rank, None) else None)


def resumed(rank, world_size, folder, runs):
    for number, (strategy, resume) in runs.items():
        train(strategy, world_size, f"{folder}/{number}", resume)


@pytest.mark.parametrize("seeds", [6, pytest.param(100, marks=pytest.mark.long)])
def test_a_run_that_is_killed_anywhere_resumes_to_the_last_bit(seeds, tmp_path):
    took = run_ranks(uninterrupted, 2, init=False, folder=str(tmp_path), timeout_s=120)[0]
    runs, died = {}, 0
    for seed in range(seeds):
        rng = random.Random(seed)
        strategy, who = NAMES[seed % len(NAMES)], rng.choice([0, 1, None])
        folder = tmp_path / str(seed)
        try:
            after_s = rng.uniform(0, took[strategy])
            run_ranks(killed, 2, init=False, folder=str(folder), strategy=strategy, after_s=after_s, who=who)
        except RanksFailedError:
            died += 1
        found = find([folder])
        runs[seed] = strategy, str(found.paths[0]) if found.paths else None
    assert died > seeds // 3, "kills that come after the end test nothing"
    run_ranks(resumed, 2, init=False, folder=str(tmp_path), runs=runs, timeout_s=30 * seeds)
    for seed, (strategy, resume) in runs.items():
        ends = (CheckpointReader(tmp_path / name / "checkpoints" / LAST) for name in (strategy, str(seed)))
        differences = [str(d) for d in compare_exactly(*ends)]
        assert not differences, f"{strategy}, seed {seed}, resumed from {resume}: {differences}"
        tidy(tmp_path / str(seed) / "checkpoints")
    assert sum(resume is not None for _, resume in runs.values()) > seeds // 4
