"""A checkpoint inside an accumulation window keeps what was accumulated: the run goes on to the last bit."""

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from shardlight.strategies import STRATEGIES, MixedFP16
from test_lightning_fit import make_trainer
from torch import nn
from torch.utils.data import DataLoader

BATCHES, ACCUMULATE = 6, 4  # the second window of an epoch is short


class Windows(pl.LightningModule):
    """Buffers that move with each rank's data, dropout, a tied weight, a frozen and an empty one, and one that only
    some ranks use, late in a window."""

    def __init__(self, weighted=False):
        super().__init__()
        torch.manual_seed(3)
        self.weighted = weighted
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.5)) for _ in range(2)]
        )
        self.tied, self.frozen, self.late, self.head = (nn.Linear(7, n) for n in (7, 7, 7, 3))
        self.tied.weight = self.blocks[0][0].weight
        self.frozen.requires_grad_(False)
        self.empty, self.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
        self.seen, self.norms = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        # What a rank has in its buffers counts in its next forward.
        x = x + self.blocks[0][1].running_mean.to(x.dtype)
        for block in self.blocks:
            x = x + block(x)
        if batch_idx % ACCUMULATE == 3 or (batch_idx % ACCUMULATE == 1 and self.trainer.global_rank == 1):
            x = x + self.late(x)
        loss = nn.functional.mse_loss(self.head(self.tied(self.frozen(x))) * self.scalar, y) + self.empty.sum()
        if self.weighted:
            self.trainer.strategy.weigh_loss(1.0 + (batch_idx + self.trainer.global_rank) % 3)
        self.seen.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(self.trainer.strategy.gradient_norm()))

    def validation_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.01)


class SaveAt(pl.Callback):
    """Saves after some batches, counted over epochs, or in the validation behind them."""

    def __init__(self, folder, at, hook="on_train_batch_end"):
        self.folder, self.at = folder, at
        setattr(self, hook, self._save)

    def _save(self, trainer, *args):
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if done in self.at:
            trainer.save_checkpoint(f"{self.folder}/{done}")


def rows(rank):
    made = [torch.Generator().manual_seed(10 * m + rank) for m in range(BATCHES)]
    return DataLoader([(torch.randn(3, 7, generator=g), torch.randn(3, 3, generator=g)) for g in made], batch_size=None)


def run(cell, world, rank, folder, callback=None, resume=None, **settings):
    strategy, options, weighted, precision = cell
    module = Windows(weighted)
    torch.manual_seed(11 + rank)
    precision = {"precision": None, "plugins": MixedFP16()} if precision == "fp16" else {"precision": precision}
    settings = {"max_epochs": 2, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 0.5, **settings}
    settings.setdefault("limit_val_batches", 0)
    trainer = make_trainer(
        STRATEGIES[strategy](**options),
        world,
        folder,
        callbacks=[callback] if callback else [],
        **settings,
        **precision,
    )
    trainer.fit(module, rows(rank), rows(rank), ckpt_path=resume)
    return module, trainer, state_of(module, trainer)


def state_of(module, trainer):
    """Everything that has to be equal to the last bit, by name."""
    held = [s for o in trainer.optimizers for s in o.state.values()]
    state = {f"state {n} {k}": v.clone() for n, s in enumerate(held) for k, v in s.items() if torch.is_tensor(v)}
    for buffer in trainer.strategy.engine.buffers:
        state[f"masters of {buffer.name} {buffer.dtype}"] = buffer.shard.clone()
    return state | {n: b.clone() for n, b in module.named_buffers()}


def assert_same(got, want, where):
    assert got.keys() == want.keys(), where
    differ = [n for n, v in want.items() if not torch.equal(got[n], v)]
    assert not differ, f"{where}: {differ} differ"


CELLS = [
    ("single", {}, True, "32-true"),
    ("ddp", {}, False, "32-true"),
    ("ddp", {"reduce": "micro_batch"}, True, "32-true"),
    ("zero1", {}, True, "bf16-mixed"),
    ("zero1", {"reduce": "micro_batch"}, False, "32-true"),
    ("zero2", {}, True, "32-true"),
    ("zero2", {"reduce": "window"}, False, "bf16-true"),
    ("zero3", {}, False, "bf16-mixed"),
    ("zero3", {"reduce": "window", "loss_scale": 256.0, "loss_scale_growth_steps": 1}, True, "fp16"),
    ("zero3", {"keep_small": 8}, True, "32-true"),
]


def cells(world):
    return [c for c in CELLS if (c[0] == "single") == (world == 1) or c[0] == "zero3"]


def check_resume(rank, world_size, folder, every):
    for number, cell in enumerate(cells(world_size)):
        module, trainer, want = run(cell, world_size, rank, folder)
        points = (1, 2, 3, 5, 7, 9, 11) if every else [(2, 5), (3, 11), (9, 5)][number % 3]
        place = f"{folder}/{number}"
        saving = run(cell, world_size, rank, folder, SaveAt(place, points))
        assert_same(saving[2], want, f"{cell}: saving changed the run")
        for at in points:
            where = f"{cell} saved after batch {at}"
            again, resumed, got = run(cell, world_size, rank, folder, resume=f"{place}/{at}")
            assert again.seen == module.seen[at:], f"{where}: losses {again.seen} instead of {module.seen[at:]}"
            assert again.norms == module.norms[-len(again.norms) :], f"{where}: {again.norms} {module.norms}"
            assert len(again.norms) == sum(at < end for end in (4, 6, 10, 12)), where
            assert resumed.global_step == trainer.global_step == 4, where
            assert_same(got, want, where)


@pytest.mark.conformance("D1")
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_that_stops_inside_a_window_is_the_run_that_never_stopped(world_size, tmp_path):
    run_ranks(check_resume, world_size, init=False, folder=str(tmp_path), every=world_size == 3, timeout_s=300)
