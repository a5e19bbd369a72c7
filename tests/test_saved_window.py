"""A checkpoint inside an accumulation window keeps what was accumulated: the run goes on to the last bit."""

import os
import signal
from functools import partial

import lightning.pytorch as pl
import pytest
import test_manual_optimization as manual
import torch
from harness import run_ranks
from shardlight.strategies import STRATEGIES, MixedFP16
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.errors import CheckpointError
from test_cases_training import Scalar, batches, strategies, tokens
from test_lightning_fit import make_trainer
from test_manual_optimization import BATCHES as MANUAL_BATCHES
from test_manual_optimization import Pair, batch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

BATCHES, ACCUMULATE = 6, 4  # the second window of an epoch is short
WIDTH = 48  # a block is shared out over three ranks


class Windows(pl.LightningModule):
    """Buffers that move with each rank's data, dropout, a tied weight, a frozen and an empty one, and one that only
    some ranks use, late in a window."""

    def __init__(self, weighted=False):
        super().__init__()
        torch.manual_seed(3)
        self.weighted = weighted
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)) for _ in range(2)]
        )
        self.tied, self.frozen, self.late, self.head = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, WIDTH, 3))
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
    return DataLoader(
        [(torch.randn(3, WIDTH, generator=g), torch.randn(3, 3, generator=g)) for g in made], batch_size=None
    )


def run(cell, world, rank, folder, callback=None, resume=None, train=None, **settings):
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
    trainer.fit(module, rows(rank) if train is None else train, rows(rank), ckpt_path=resume)
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
    return CELLS[1:] if world > 1 else [CELLS[0], CELLS[-2]]


def check_resume(rank, world_size, folder, every):
    for number, cell in enumerate(cells(world_size)):
        points = (1, 2, 3, 5, 7, 9, 11) if every else [(2, 5), (3,), (9,), (5,), (11,)][number % 5]
        place = f"{folder}/{number}"
        module, trainer, want = run(cell, world_size, rank, folder, SaveAt(place, points))
        assert any(name.startswith("state") for name in want), f"{cell}: rank {rank} has no part of the model"
        if every or not number % 4:
            assert_same(run(cell, world_size, rank, folder)[2], want, f"{cell}: saving changed the run")
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


# --- manual optimization: every backward may be a window's last, and gradients stay until they are set to None


class Wide(Pair):
    """Large enough that all ranks have a part of it."""

    def __init__(self, recipe):
        super().__init__(recipe)
        self.trunk = nn.Sequential(nn.Linear(3, 400), nn.Linear(400, 3)).double()


def run_manual(strategy, recipe, rank, world, folder, callback=None, resume=None):
    module = Wide(recipe)
    loader = batches(*[batch(n, rank) for n in range(MANUAL_BATCHES)])
    callbacks = [callback] if callback else []
    trainer = make_trainer(strategy, world, folder, callbacks=callbacks)
    trainer.fit(module, loader, ckpt_path=resume)
    return module, trainer, state_of(module, trainer)


def check_manual(rank, world_size, folder, every):
    names = strategies(world_size)
    left = set()
    leaving = [manual.toggled_without_zero_grad, manual.left_on_the_other, manual.zeroed_not_none]
    leaving += [manual.every_second_batch, manual.frequencies, manual.looked_at, manual.gradient_penalty]
    for number, recipe in enumerate(manual.RECIPES if every else leaving):
        for turn, name in enumerate(names if every else [names[number % len(names)]]):
            reduce = ("micro_batch", "window")[(turn + number // 2) % 2]
            place = f"{folder}/{recipe.__name__}-{name}-{reduce}"
            make = partial(STRATEGIES[name], reduce=reduce)
            module, _, want = run_manual(make(), recipe, rank, world_size, folder)
            points = (1 + number % 3, 1 + (number + turn + 1) % 4)[: 1 + every]
            saving = run_manual(make(), recipe, rank, world_size, folder, SaveAt(place, points))
            assert saving[0].seen == module.seen
            assert_same(saving[2], want, f"{recipe.__name__} under {name}: saving changed the run")
            for at in points:
                where = f"{recipe.__name__} under {name} {reduce}, saved after batch {at}"
                window = CheckpointReader(f"{place}/{at}").content["window"]
                left.add(None if window is None else window[0]["closed"])
                again, _, got = run_manual(make(), recipe, rank, world_size, folder, resume=f"{place}/{at}")
                assert again.seen == module.seen[len(module.seen) - len(again.seen) :], where
                assert_same(got, want, where)
    assert left >= {False, True}


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gradients_that_manual_optimization_leaves_are_there_after_a_resume(world_size, every, tmp_path):
    run_ranks(check_manual, world_size, init=False, folder=str(tmp_path), every=every, timeout_s=900)


# --- where a checkpoint can be made, and where not


class Ends(SaveAt):
    """Ends training after some batch: by itself, by SIGTERM on the last rank, or by an error; saves in a hook."""

    def __init__(self, folder, after, how, hook):
        super().__init__(folder, (), hook)
        self.after, self.how = after, how

    def on_train_batch_end(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.after:
            if self.how == "stop":
                trainer.should_stop = True
            elif trainer.global_rank == trainer.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def _save(self, trainer, *args):
        trainer.save_checkpoint(f"{self.folder}/end")


def check_places(rank, world_size, folder):
    cell = ("zero2" if world_size > 1 else "zero3", {}, True, "32-true")

    def goes_on(path, at, **settings):
        again, _, got = run(cell, world_size, rank, folder, resume=path, **settings)
        assert again.seen == module.seen[at:], (path, at, again.seen, module.seen)
        assert_same(got, want, path)

    validating = {"limit_val_batches": 1, "val_check_interval": 2}
    at = SaveAt(f"{folder}/val", (2, 6), "on_validation_end")
    module, _, want = run(cell, world_size, rank, folder, at, **validating)
    goes_on(f"{folder}/val/2", 2, **validating)
    goes_on(f"{folder}/val/6", 6, **validating)
    module, _, want = run(cell, world_size, rank, folder)
    run(cell, world_size, rank, folder, SaveAt(f"{folder}/start", (4,), "on_train_batch_start"))
    goes_on(f"{folder}/start/4", 3)
    # Inside an epoch: by max_steps, by should_stop inside a window, by SIGTERM, which lets the window end.
    _, trainer, _ = run(cell, world_size, rank, folder, max_steps=3)
    trainer.save_checkpoint(f"{folder}/steps")
    goes_on(f"{folder}/steps", 10)
    for how, hook, after, at in (
        ("stop", "on_train_epoch_end", 8, 8), ("stop", "on_train_end", 3, 3), ("term", "on_train_end", 7, 10)
    ):  # fmt: skip
        place = f"{folder}/{how}-{hook}"
        run(cell, world_size, rank, folder, Ends(place, after, how, hook))
        goes_on(f"{place}/end", at)
    for hook in ("on_after_backward", "on_before_optimizer_step"):
        with pytest.raises(
            CheckpointError, match=r"inside batch \d, whose gradients are added up with those of earlier"
        ):
            run(cell, world_size, rank, folder, SaveAt(f"{folder}/refused", (2, 4), hook))
    # Of a window's first batch nothing is stored: it will be repeated.
    run(cell, world_size, rank, folder, SaveAt(f"{folder}/first", (5,), "on_after_backward"))
    assert CheckpointReader(f"{folder}/first/5").content["window"] is None


@pytest.mark.conformance("D1")
@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_goes_on_inside_the_epoch_and_window_in_which_it_ended(world_size, tmp_path):
    run_ranks(check_places, world_size, init=False, folder=str(tmp_path), timeout_s=120)


class Stream(IterableDataset):
    """Batches whose number nobody knows."""

    def __init__(self, rank):
        self.batches = list(rows(rank).dataset)

    def __iter__(self):
        return iter(self.batches)


class FailsAt(SaveAt):
    """An error after the backward of some batch; its checkpoint is made on the way out."""

    def on_after_backward(self, trainer, module):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 in self.at:
            raise RuntimeError("a cable was pulled")

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(f"{self.folder}/error")


def check_odd_ends(rank, world_size, folder):
    cell = ("zero3", {}, True, "32-true")
    # Without a length Lightning reads a batch ahead; the last window is short all the same.
    stream = DataLoader(Stream(rank), batch_size=None)
    place = f"{folder}/stream"
    module, _, want = run(cell, 1, rank, folder, SaveAt(place, (5, 6)), train=stream)
    again, _, got = run(cell, 1, rank, folder, resume=f"{place}/5", train=stream)
    assert again.seen == module.seen[5:]
    assert_same(got, want, "unknown length")
    # Nothing is stored of a window that has ended.
    for at, there in ((5, True), (6, False)):
        reader = CheckpointReader(f"{place}/{at}")
        assert (reader.content["window"] is not None) == there == any("gradient/" in n for n in reader.names())
        assert not reader.names("final/")
    # A batch that failed after its backward is repeated: its gradients must not count twice.
    with pytest.raises(RuntimeError, match="a cable"), pytest.warns(UserWarning, match="saved without accumulated"):
        run(cell, 1, rank, folder, FailsAt(folder, (3,)))
    assert CheckpointReader(f"{folder}/error").content["window"] is None
    # The window goes on where another number of batches is asked for, and is divided by what it had.
    whole = -0.1 * (1 + 2 + 3 + 4) / 4
    assert fit_scalar(folder, SaveAt(f"{folder}/factor", (2,)), accumulate_grad_batches=4) == pytest.approx([whole])
    for number, want in ((4, whole), (8, whole), (2, -0.1 * (1 + 2 + 3) / 3 - 0.1 * 4)):
        again = fit_scalar(folder, resume=f"{folder}/factor/2", accumulate_grad_batches=number)
        assert again == pytest.approx([want]), number


def fit_scalar(folder, callback=None, resume=None, targets=(1.0, 2.0, 3.0, 4.0), kind=Scalar, world=1, **settings):
    """One weight w = 0 under SGD with rate 0.1, whose slope is the batch; returns w after each epoch."""
    after = []
    ends = pl.callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, module: after.append(module.weight()))
    callbacks = [ends, *([callback] if callback else [])]
    trainer = make_trainer("zero2", world, folder, callbacks=callbacks, **settings)
    trainer.fit(kind(lambda m, t: m.w * t.sum()), batches(*[tokens(1, t) for t in targets]), ckpt_path=resume)
    return after


def test_what_a_checkpoint_of_a_window_holds(tmp_path):
    run_ranks(check_odd_ends, 1, init=False, folder=str(tmp_path))


class Skips(Scalar):
    """Leaves the first epoch inside a window."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, 2) else None


def check_skip(rank, world_size, folder):
    after = fit_scalar(
        folder, kind=Skips, world=world_size, targets=(100.0, 1.0, 1.0, 1.0), max_epochs=2, accumulate_grad_batches=4
    )
    assert after == pytest.approx([0.0, -0.1 * (100 + 1 + 1 + 1) / 4])


@pytest.mark.case("C031")
def test_a_window_that_an_epoch_cut_off_does_not_leak_into_the_next(tmp_path):
    run_ranks(check_skip, 2, init=False, folder=str(tmp_path))
