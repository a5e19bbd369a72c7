"""What comes after a save comes after a resume: hooks, validations, schedulers, epochs, random numbers, data."""

import os
import signal
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from shardlight.strategies.errors import CheckpointError
from shardlight.strategies.logged_values import _add as restore_entry
from test_lightning_fit import make_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

F64 = {"dtype": torch.float64}
EPOCHS = 3


class Rows(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(7, generator=g, **F64), torch.randn(3, generator=g, **F64)


class Stream(IterableDataset):
    """No length; order and noise are drawn from the process's generator."""

    def __iter__(self):
        for i in torch.randperm(12).tolist():
            x, y = Rows(12)[i]
            yield x + torch.rand((), **F64), y


class Module(pl.LightningModule):
    """Dropout; the rate goes down by epoch, and on two plateaus: one of validation, one of the steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.3), nn.Linear(5, 3)).double()
        self.mean, self.by_hand = MeanMetric(), MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.by_hand.update(loss.detach())
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        torch.rand(())
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.1)
        rates = torch.optim.lr_scheduler
        by_step = {"scheduler": rates.ReduceLROnPlateau(optimizer, factor=0.9, patience=1), "monitor": "loss"}
        monitor = "loss_epoch" if self.trainer.check_val_every_n_epoch == 2 else "val_loss"
        by_epoch = {"scheduler": rates.ReduceLROnPlateau(optimizer, factor=0.8, patience=0), "monitor": monitor}
        return [optimizer], [rates.StepLR(optimizer, 1, 0.7), by_step | {"interval": "step"}, by_epoch]


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.1)


class Log(pl.Callback):
    """Each hook with its epoch, the counts of steps and of hooks, the rate, and what there is to see."""

    def __init__(self):
        self.entries, self.count = [], 0

    def note(self, hook, trainer, *seen):
        if trainer.sanity_checking:
            return
        self.count += 1
        loops = trainer.fit_loop.epoch_loop
        steps = (trainer.current_epoch, trainer.global_step, loops._batches_that_stepped, loops.total_batch_idx)
        self.entries.append((hook, self.count, *steps, trainer.optimizers[0].param_groups[0]["lr"], *seen))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def on_train_epoch_start(self, trainer, module):
        self.note("epoch start", trainer)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.note("batch", trainer, batch_idx, float(batch[0].sum()))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.note("batch end", trainer, batch_idx, float(trainer.callback_metrics["loss"]))

    def on_validation_start(self, trainer, module):
        self.note("validation", trainer, len(trainer.val_dataloaders))

    def on_validation_end(self, trainer, module):
        self.note("validation end", trainer, float(trainer.callback_metrics["val_loss"]))

    def on_train_epoch_end(self, trainer, module):
        by_hand = float(module.by_hand.compute())
        self.note("epoch end", trainer, *(float(trainer.callback_metrics[k]) for k in ("loss_epoch", "mean")), by_hand)
        module.by_hand.reset()


class Save(pl.Callback):
    """Saves in the hooks with these numbers; `saved` has how much of the log came before each checkpoint."""

    def __init__(self, folder, log, numbers):
        self.folder, self.noted, self.numbers, self.saved, self.count = folder, log, numbers, {}, -1

    def save(self, hook, trainer):
        self.count += not trainer.sanity_checking
        if self.count in self.numbers and not trainer.sanity_checking:
            path = f"{self.folder}/{self.count:02} {hook} {trainer.global_step}"
            self.saved[path] = len(self.noted.entries)
            trainer.save_checkpoint(path)

    def on_train_epoch_start(self, trainer, module):
        self.save("epoch start", trainer)

    def on_train_batch_end(self, trainer, *args):
        self.save("batch end", trainer)

    def on_validation_end(self, trainer, module):
        self.save("validation end", trainer)

    def on_train_epoch_end(self, trainer, module):
        self.save("epoch end", trainer)


class Terminate(pl.Callback):
    """SIGTERM to a rank in the hook at the end of its batch `at`, counted from 0; saves when training ends, as runs do."""

    def __init__(self, path, rank, at):
        self.path, self.rank, self.at = path, rank, at

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_rank == self.rank and trainer.fit_loop.epoch_loop.total_batch_idx == self.at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


EVERY = range(100)


def fit(world, folder, saves=(), resume=None, loader=None, module=Module, strategy="zero1", more=(), **kwargs):
    torch.manual_seed(11)
    log = Log()
    save = Save(folder, log, saves)
    trainer = make_trainer(
        strategy,
        world,
        folder,
        use_distributed_sampler=True,
        callbacks=[log, save, *more],
        **{"max_epochs": EPOCHS, **kwargs},
    )
    module = module()
    loader = loader() if loader else DataLoader(Rows(12 * world), 3, shuffle=True)
    trainer.fit(module, loader, DataLoader(Rows(4), 2), ckpt_path=resume)
    with getattr(trainer.strategy, "gathered", nullcontext)():
        weights = [p.detach().clone() for p in module.parameters()]
    return trainer, log.entries, save.saved, (weights, torch.get_rng_state())


def difference(a, b):
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"at {n} of {len(a)}, {len(b)}:\n" + "\n".join(
        f"  {x}" for x in [*a[n : n + 4], "instead of", *b[n : n + 4]]
    )


def counters(trainer):
    state = trainer.fit_loop.state_dict()
    return {k: v for k, v in state.items() if "state_dict" not in k}


def check_goes_on(folder, whole, saved, deeper=True, **kwargs):
    trainer, entries, _, (weights, random_state) = whole
    for path, before in saved.items():
        # A run that is done has nothing left to do, not even what came after its last checkpoint.
        if before == len(entries) or trainer.max_steps == int(path.split()[-1]):
            continue
        saves = (0,) if deeper else ()
        resumed, rest, again, end = fit(trainer.world_size, f"{folder}/again", saves, resume=path, **kwargs)
        where = f"{path.removeprefix(folder)}, {trainer.world_size} ranks, {kwargs}: "
        assert rest == entries[before:], where + difference(rest, entries[before:])
        assert all(torch.equal(a, b) for a, b in zip(weights, end[0], strict=True)), where
        assert torch.equal(random_state, end[1]), where
        assert counters(resumed) == counters(trainer), (where, counters(resumed), counters(trainer))
        if deeper:  # and the resumed run's own first checkpoint goes on too
            first = {path: before + count for path, count in again.items()}
            check_goes_on(f"{folder}/again", whole, first, deeper=False, **kwargs)


def stream():
    return DataLoader(Stream(), 3)


# The hooks to save in: those at the end of an epoch's last batch, of validations and of epochs, and some others.
CASES = {
    "by epoch": ((4, 5, 6, 14), {"num_sanity_val_steps": 2}),
    "by 2 batches": ((2, 9), {"val_check_interval": 2, "accumulate_grad_batches": 3}),
    "by halves": ((4, 5), {"val_check_interval": 0.5, "limit_train_batches": 3}),
    "every second epoch": ((10,), {"check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 2}),
    "across epochs": (
        (3, 7), {"check_val_every_n_epoch": None, "val_check_interval": 3, "max_steps": 11, "max_epochs": -1}
    ),
    "stream": ((0, 2, 4, 6), {"loader": stream}),
    "limited stream": ((3,), {"loader": stream, "limit_train_batches": 3, "accumulate_grad_batches": 2}),
    "manual": ((6,), {"module": Manual, "val_check_interval": 2}),
}  # fmt: skip
AMONG_RANKS = ("by epoch", "stream")


def check(rank, world_size, folder, every):
    for name, (numbers, kwargs) in CASES.items():
        if world_size > 1 and not every and name not in AMONG_RANKS:
            continue
        here = f"{folder}/{name}"
        whole = fit(world_size, here, EVERY if every else numbers[::world_size], **kwargs)
        check_goes_on(here, whole, whole[2], deeper=every or name == "by epoch", **kwargs)
    check_ended_by_sigterm(folder, world_size)
    if world_size == 1:
        check_stopped_by_steps(folder)
        check_lightnings_own(folder)


def check_stopped_by_steps(folder):
    """A run that ended with a batch that is validated goes on with the next batch."""
    _, entries, _, (weights, _) = fit(1, folder, val_check_interval=2)
    trainer, first, _, _ = fit(1, folder, val_check_interval=2, max_steps=6)
    trainer.save_checkpoint(f"{folder}/stopped")
    assert [e[0] for e in first[-3:]] == ["validation", "validation end", "epoch end"]
    _, rest, _, end = fit(1, folder, resume=f"{folder}/stopped", val_check_interval=2)
    ours, theirs = ([(e[0], *e[2:]) for e in log if e[0] != "epoch end"] for log in (rest, entries[len(first) - 1 :]))
    assert ours == theirs, difference(ours, theirs)
    assert all(torch.equal(a, b) for a, b in zip(weights, end[0], strict=True))


def check_ended_by_sigterm(folder, world_size):
    """There is no time for the validation that is due: it is the first thing after the resume."""
    for at, kwargs in ((1, {"val_check_interval": 2}), (3, {"val_check_interval": 2}), (7, {})):
        whole, path = fit(world_size, folder, **kwargs), f"{folder}/ended by SIGTERM after {at}"
        end = Terminate(path, world_size - 1, at)
        _, first, _, _ = fit(world_size, folder, more=[end], **kwargs)
        assert first == whole[1][: len(first)], difference(first, whole[1])
        assert (first[-1][0], whole[1][len(first)][0]) == ("batch end", "validation")
        check_goes_on(folder, whole, {path: len(first)}, deeper=False, **kwargs)


def check_lightnings_own(folder):
    """From Lightning's own file the same hooks are called; what it does not hold is no error."""
    _, entries, saved, _ = fit(1, folder, (2,), strategy="auto", val_check_interval=2)
    ((path, before),) = saved.items()
    with pytest.warns(UserWarning, match="is Lightning's own"):
        _, rest, _, _ = fit(1, folder, resume=path, val_check_interval=2)
    assert [(e[0], *e[2:6]) for e in rest] == [(e[0], *e[2:6]) for e in entries[before:]]
    assert rest[0][0] == "validation"


def test_all_that_came_after_a_save_comes_after_the_resume(tmp_path):
    for world in (1, 2):
        run_ranks(check, world, init=False, folder=str(tmp_path / str(world)), every=False, timeout_s=300)


@pytest.mark.long
def test_all_that_came_after_any_save_comes_after_the_resume(tmp_path):
    for world in (1, 2):
        run_ranks(check, world, init=False, folder=str(tmp_path / str(world)), every=True, timeout_s=1200)


@pytest.mark.parametrize("name", ["builtins.exec", "torch.load", "os.system", ["builtins.max"]])
def test_a_reduction_is_not_looked_up_by_a_name_that_a_checkpoint_has(name):
    with pytest.raises(CheckpointError, match="which is no reduction"):
        restore_entry(None, {"reduce": name, "name": "loss"})


class Rated(Module):
    """One scheduler, of a class that is given."""

    def __init__(self, scheduler):
        super().__init__()
        self.scheduler = scheduler

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [self.scheduler(optimizer)]


def other_scheduler(rank, world_size, folder):
    stepped = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)  # noqa: E731
    exponential = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    loader = DataLoader(Rows(6), batch_size=3)
    trainer = make_trainer("zero1", 1, folder, max_epochs=2)
    trainer.fit(Rated(stepped), loader, loader)
    trainer.save_checkpoint(f"{folder}/saved")
    module, trainer = Rated(exponential), make_trainer("zero1", 1, folder, max_epochs=3)
    with pytest.warns(UserWarning, match="scheduler 0 was StepLR and is ExponentialLR: it starts anew"):
        trainer.fit(module, loader, loader, ckpt_path=f"{folder}/saved")
    state = module.lr_schedulers().state_dict()
    assert state["gamma"] == 0.5 and "step_size" not in state and state["last_epoch"] == 1


def test_a_scheduler_takes_no_state_of_another_class(tmp_path):
    run_ranks(other_scheduler, 1, init=False, folder=str(tmp_path))
