"""A run that goes on in the middle of an epoch sees each sample once, on whatever ranks and in whatever batches."""

import hashlib
import math
import warnings
from array import array
from collections import Counter
from dataclasses import dataclass

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import run_ranks
from shardlight.framework.data import TokenDataset, write_tokens
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.trainer_state import load_rank, load_trainer
from shardlight.strategies.errors import CheckpointError
from test_lightning_fit import make_trainer
from test_sample_order import Pairs, ShuffledPairs
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

F64 = {"dtype": torch.float64}
WORLDS = (1, 2, 3, 4)


class Rows(Dataset):
    """Item i is (i, x, y)."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.tensor([float(i)], **F64), torch.randn(7, generator=g, **F64), torch.randn(3, generator=g, **F64)


class Numbers(IterableDataset):
    """Samples without a length; each rank has its own share."""

    def __init__(self, rank=0, world=1, length=12):
        self.numbers = range(rank, length, world)

    def __iter__(self):
        return (Rows(0)[i] for i in self.numbers)


class Windows(TokenDataset):
    """The shipped data set: window i of tokens 0, 1, 2, ... is known by its first token."""

    def __getitem__(self, i):
        return Rows(0)[int(super().__getitem__(i)["tokens"][0]) // self.sequence_length]


class Module(pl.LightningModule):
    """Notes what it has seen: (epoch, batch_idx, indices) of each batch, and how often epochs end and are validated."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.seen, self.epochs_ended, self.validated, self.stepped_after = [], [], [], []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, [int(i) for i in batch[0].flatten()]))
        return nn.functional.mse_loss(self.layers(batch[1]), batch[2])

    def on_train_batch_end(self, *args):
        self.stepped_after.append(self.trainer.global_step)

    def on_train_epoch_end(self):
        self.epochs_ended.append(self.current_epoch)

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)

    def indices(self, epoch):
        return [i for e, _, indices in self.seen if e == epoch for i in indices]


class Save(pl.Callback):
    """Saves after a number of steps, and stops there."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step and not trainer.fit_loop.epoch_loop._should_accumulate():
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@dataclass(frozen=True)
class Cell:
    """One kind of loader; `batch` is the batch size of each rank by number of ranks, or of all."""

    name: str
    length: int
    stop: int
    batch: int | dict[int, int]
    shuffle: bool = True
    workers: int = 0
    accumulate: int = 1
    worlds: tuple[int, ...] = WORLDS
    befores: tuple[int, ...] = WORLDS
    """Of `worlds`, those that save."""
    drop_last: bool = False
    strategy: str = "zero1"

    def batch_size(self, world):
        return self.batch if isinstance(self.batch, int) else self.batch[world]

    def path(self, folder, world):
        return f"{folder}/{self.name}-{world}"

    def had(self, world):
        """Samples that all ranks have had at the stop."""
        return self.stop * self.accumulate * world * self.batch_size(world)


CELLS = (
    # Every rank's share divides: each sample exactly once.
    Cell("same global batch", 48, 2, {1: 12, 2: 6, 3: 4, 4: 3}, strategy="zero2", befores=(2, 4)),
    Cell("nothing divides", 23, 2, 2, shuffle=False),
    Cell("other windows", 60, 2, {1: 3, 2: 2, 3: 3}, accumulate=2, worlds=(1, 2, 3)),
    Cell("workers", 24, 1, 3, workers=2, worlds=(2, 3), strategy="zero3"),
    Cell("drop last", 31, 1, {1: 4, 3: 2}, drop_last=True, worlds=(1, 3)),
)


def fit(cell, world, folder, epochs=2, resume=None, callbacks=(), **kwargs):
    module = Module()
    torch.manual_seed(11)
    trainer = make_trainer(
        cell.strategy, world, folder, max_epochs=epochs, use_distributed_sampler=True, callbacks=list(callbacks),
        accumulate_grad_batches=cell.accumulate, **kwargs,
    )  # fmt: skip
    dataset = Windows(f"{folder}/tokens.npy", 4) if cell.workers else Rows(cell.length)
    loader = DataLoader(
        dataset, cell.batch_size(world), shuffle=cell.shuffle, num_workers=cell.workers,
        drop_last=cell.drop_last, multiprocessing_context="fork" if cell.workers else None,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(Rows(world), 1), ckpt_path=resume)
    return trainer, module


def everyone(trainer, value):
    return trainer.strategy.engine.collectives.gather_objects(value, "test")


def saves(cell, world, folder):
    trainer, module = fit(cell, world, folder, callbacks=[Save(cell.stop, cell.path(folder, world))])
    return everyone(trainer, module.indices(0))


def goes_on(cell, before, world, folder):
    """What was saved by `before` ranks goes on with `world`: each sample comes once, and the counters are right."""
    where = f"{cell.name}: {before} -> {world}"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was saved by . ranks and goes on with")
        trainer, module = fit(cell, world, folder, resume=cell.path(folder, before))
    had = [i for r in range(before) for i in torch.load(f"{cell.path(folder, before)}.had")[r]]
    assert len(set(had)) == len(had) == cell.had(before), where
    size = cell.batch_size(world)
    left = cell.length - len(had)
    each = math.ceil(left / world) // (size if cell.drop_last else 1) * (size if cell.drop_last else 1)
    batches = [b for e, b, _ in module.seen if e == 0]
    after = everyone(trainer, module.indices(0))
    got = [i for indices in after for i in indices]
    assert all(len(indices) == each for indices in after), (where, after)
    count = Counter(had + got)
    # What does not go round is filled up with repeated samples, as a DistributedSampler does.
    assert len(had) + len(got) - len(count) == max(0, world * each - left) < world, (where, count)
    assert max(count.values()) <= 2
    dropped = world * size - 1 if cell.drop_last else 0
    assert cell.length - dropped <= len(count) <= cell.length, (where, sorted(count))
    # The epoch ends when its data ends; the windows are whole but for the last; the next epoch is an ordinary one.
    assert batches == list(range(batches[0], batches[0] + math.ceil(each / size))), (where, batches)
    assert batches[0] % cell.accumulate == 0, (where, batches)
    steps = [cell.stop + n // cell.accumulate for n in range(1, len(batches))]
    assert module.stepped_after[: len(steps)] == steps, (where, module.stepped_after)
    ordinary = math.ceil(cell.length / world)
    ordinary = ordinary // size if cell.drop_last else math.ceil(ordinary / size)
    assert [b for e, b, _ in module.seen if e == 1] == list(range(ordinary)), where
    assert trainer.num_training_batches == ordinary and trainer.val_check_batch == ordinary, where
    rest_steps = math.ceil(len(batches) / cell.accumulate) + math.ceil(ordinary / cell.accumulate)
    assert trainer.global_step == cell.stop + rest_steps, (where, trainer.global_step)
    assert module.epochs_ended == [0, 1] and module.validated == [0, 1], where
    whole = Counter(i for indices in everyone(trainer, module.indices(1)) for i in indices)
    if not cell.drop_last:
        assert sorted(whole) == list(range(cell.length)) and sum(whole.values()) - cell.length < world, where
    return trainer


def compare_with_whole(trainer, cell, world, folder):
    """With the same global batch the losses are those of the run that never stopped; see C001."""
    trainer.save_checkpoint(f"{folder}/end")
    losses = load_trainer(CheckpointReader(f"{folder}/end"))["losses"]
    whole = torch.load(f"{folder}/whole.losses")
    per_epoch = cell.length // 12
    # One process shuffles by itself, so the second epoch's order is another one there.
    known = per_epoch if world == 1 else 2 * per_epoch
    assert losses.shape == whole.shape and losses.dtype == torch.float64
    torch.testing.assert_close(losses[:known], whole[:known], rtol=1e-9, atol=1e-12)


def check(rank, world_size, folder, befores, first, every):  # not `every`: as many ranks as before are elsewhere
    for cell in [c for c in CELLS if world_size in c.worlds]:
        if first and world_size in cell.befores:
            had = saves(cell, world_size, folder)
            if rank == 0:
                torch.save(had, f"{cell.path(folder, world_size)}.had")
            if cell is CELLS[0] and world_size == 2:
                trainer, _ = fit(cell, world_size, folder)
                trainer.save_checkpoint(f"{folder}/whole")
                if rank == 0:
                    losses = load_trainer(CheckpointReader(f"{folder}/whole"))["losses"]
                    torch.save(losses, f"{folder}/whole.losses")
        chosen = [b for b in befores if b in cell.worlds and b in cell.befores and (every or b != world_size)]
        for before in chosen if every or cell is CELLS[0] or world_size < 4 else chosen[-1:]:
            trainer = goes_on(cell, before, world_size, folder)
            if cell is CELLS[0] and before > 1:
                compare_with_whole(trainer, cell, world_size, folder)


@pytest.mark.case("C001")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_sample_once_from_any_number_of_ranks_to_any_other(every, tmp_path):
    write_tokens(tmp_path / "tokens.npy", [np.arange(24 * 4 + 1)])
    options = {"init": False, "folder": str(tmp_path), "every": every, "timeout_s": 200}
    for world in WORLDS:
        run_ranks(check, world, befores=range(1, world + 1), first=True, **options)
    for world in (1, 2, 3):
        run_ranks(check, world, befores=range(world + 1, 5), first=False, **options)


# --- one process, two ranks: what else a position has to survive


def alone(folder, loader, resume=None, save=None, module=None, **kwargs):
    """Fits on one process; `save`: (step, path). Returns trainer and module."""
    module = module() if isinstance(module, type) else module or Module()
    torch.manual_seed(11)
    callbacks = [*kwargs.pop("callbacks", ()), *([Save(*save)] if save else [])]
    trainer = make_trainer(
        "zero1", 1, folder, callbacks=callbacks, **{"max_epochs": 3, "limit_val_batches": 0, **kwargs}
    )
    trainer.fit(module, loader, DataLoader(Rows(1), 1), ckpt_path=resume)
    return trainer, module


def read(module):
    return [(e, indices) for e, _, indices in module.seen]


def order(path, rank=0):
    return load_rank(CheckpointReader(path), rank)["order"]


def losses(path):
    return load_trainer(CheckpointReader(path))["losses"]


def check_same_as_whole(folder, name, make, **kwargs):
    """Stopped in the first and in the second epoch, and at an epoch's end: the same samples, losses and digest."""
    trainer, whole = alone(folder, make(), **kwargs)
    trainer.save_checkpoint(f"{folder}/{name}-whole")
    per_epoch = trainer.global_step // 3
    for stop in (1, per_epoch, per_epoch + 2):
        path = f"{folder}/{name}-{stop}"
        _, first = alone(folder, make(), save=(stop, path), **kwargs)
        trainer, second = alone(folder, make(), resume=path, **kwargs)
        where = f"{name}, stopped after {stop}"
        assert read(first)[:stop] + read(second) == read(whole), (where, read(first)[:stop], read(second), read(whole))
        trainer.save_checkpoint(f"{path}-end")
        assert order(f"{path}-end") == order(f"{folder}/{name}-whole"), where
        assert torch.equal(losses(f"{path}-end"), losses(f"{folder}/{name}-whole")), where
    return whole


class Both(Module):
    """Trains on a batch of each of two loaders."""

    def training_step(self, batch, batch_idx):
        return super().training_step([torch.cat(parts) for parts in zip(*batch, strict=True)], batch_idx)


class Scheduled(Module):
    """Asks for the number of steps before anything is restored, as a schedule does."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 12
        return super().configure_optimizers()


class Plateau(Module):
    """Its rate falls at the end of every epoch but the first."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


class SavesInside(pl.Callback):
    """Saves in the middle of a batch, which has not been trained on then."""

    def __init__(self, path):
        self.path = path

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def check_alone(rank, world_size, folder):
    def shuffled(**kwargs):
        return DataLoader(Rows(8), 2, shuffle=True, **kwargs)

    seen = read(check_same_as_whole(folder, "shuffled", shuffled))
    assert len({tuple(i for e, b in seen if e == epoch for i in b) for epoch in range(3)}) == 3
    check_same_as_whole(folder, "own generator", lambda: shuffled(generator=torch.Generator().manual_seed(5)))
    sampler = lambda: RandomSampler(Rows(8), generator=torch.Generator().manual_seed(6))  # noqa: E731
    check_same_as_whole(folder, "own sampler", lambda: DataLoader(Rows(8), 2, sampler=sampler()))
    again = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    check_same_as_whole(folder, "persistent", lambda: shuffled(**again))
    check_same_as_whole(folder, "no batches", lambda: DataLoader(Rows(5), batch_size=None, shuffle=True))
    check_same_as_whole(folder, "iterable", lambda: DataLoader(Numbers(), 2))
    check_same_as_whole(folder, "limited iterable", lambda: DataLoader(Numbers(), 2), limit_train_batches=4)
    check_same_as_whole(folder, "batch sampler", lambda: DataLoader(Rows(8), batch_sampler=Pairs(8)))
    check_same_as_whole(folder, "limited", shuffled, limit_train_batches=3)
    pairs = lambda: [DataLoader(Rows(n), batch_sampler=ShuffledPairs(n)) for n in (8, 4)]  # noqa: E731
    check_same_as_whole(folder, "two of an order that nobody knows", pairs, module=Both)

    # A loader of persistent workers that was used for a fit serves the next one.
    loader = shuffled(**again)
    assert len(alone(folder, loader)[1].seen) == len(alone(folder, loader)[1].seen) == 12

    _, whole = alone(folder, shuffled())
    _, second = alone(folder, shuffled(), resume=f"{folder}/shuffled-1", module=Scheduled())
    assert read(second) == read(whole)[1:]

    _, first = alone(
        folder, shuffled(), module=Plateau(), limit_val_batches=1, save=(6, f"{folder}/plateau"), max_epochs=5
    )
    whole_rates = [0.01, 0.01, 0.005, 0.0025, 0.00125]
    _, second = alone(
        folder, shuffled(), module=Plateau(), limit_val_batches=1, resume=f"{folder}/plateau", max_epochs=5
    )
    assert first.rates[:1] + second.rates == whole_rates, (first.rates, second.rates)

    alone(folder, shuffled(), callbacks=[SavesInside(f"{folder}/inside")])
    _, second = alone(folder, shuffled(), resume=f"{folder}/inside")
    assert read(second) == read(whole)[1:]
    assert order(f"{folder}/inside")[0]["batches"] == 1

    # Stopped by a number of steps in the middle of an epoch: Lightning counts the epoch as done.
    trainer, first = alone(folder, shuffled(), max_steps=6)
    trainer.save_checkpoint(f"{folder}/steps")
    for more in ({"max_steps": 12}, {}):
        trainer, second = alone(folder, shuffled(), resume=f"{folder}/steps", **more)
        assert read(first) + read(second) == read(whole), more
        assert trainer.current_epoch == 3 and second.epochs_ended == [1, 2]

    # Another batch size: the rest of the order in the new batches, then ordinary epochs.
    _, second = alone(folder, DataLoader(Rows(8), 3, shuffle=True), resume=f"{folder}/shuffled-1")
    rest = [i for e, batch in read(whole)[1:] if e == 0 for i in batch]
    assert read(second)[:2] == [(0, rest[:3]), (0, rest[3:])] and len(second.seen) == 2 + 3 + 3

    with pytest.raises(CheckpointError, match=r"the training data \(DataLoader of Rows\) has 7 samples and had 8"):
        alone(folder, DataLoader(Rows(7), 2, shuffle=True), resume=f"{folder}/shuffled-1")
    with pytest.warns(UserWarning, match=r"the training data \(DataLoader of Rows\) has 10 samples and had 8"):
        _, second = alone(folder, DataLoader(Rows(10), 2, shuffle=True), resume=f"{folder}/shuffled-1")
    assert read(second)[:3] == read(whole)[1:4] and sorted(second.indices(1)) == list(range(10))
    with pytest.warns(UserWarning, match=r"has 6 samples and had 8 .*: each rank passes over its first 1 batches"):
        alone(folder, DataLoader(Rows(6), batch_sampler=Pairs(6)), resume=f"{folder}/batch sampler-1")


def test_one_process_goes_on_with_any_loader(tmp_path):
    run_ranks(check_alone, 1, init=False, folder=str(tmp_path), timeout_s=300)


def alone_on(world, folder, loader, resume=None, save=None, **kwargs):
    module, callbacks = Module(), [SavesAfter(*save)] if save else []
    torch.manual_seed(11)
    settings = {"max_epochs": 1, "limit_val_batches": 0, **kwargs}
    trainer = make_trainer("zero2", world, folder, callbacks=callbacks, **settings)
    trainer.fit(module, loader, DataLoader(Rows(1), 1), ckpt_path=resume)
    return trainer, module


class SavesAfter(pl.Callback):
    """Saves after a number of batches, and goes on."""

    def __init__(self, batches, path):
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)


class Two(Module):
    """Reads a long and a short loader, which comes round several times."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch["short"], batch_idx)
        self.short, self.seen = [*getattr(self, "short", []), self.seen[-1]], self.seen[:-1]
        return super().training_step(batch["long"], batch_idx)


def pair_of_loaders(world, folder, **kwargs):
    module, resume = Two(), kwargs.pop("resume", None)
    trainer = make_trainer("zero2", world, folder, use_distributed_sampler=True, **kwargs)
    loaders = {"long": DataLoader(Rows(24), 2, shuffle=True), "short": DataLoader(Rows(8), 2, shuffle=True)}
    trainer.fit(module, loaders, DataLoader(Rows(world)), ckpt_path=resume)
    return trainer, module


def of_unknown_order(rank, world):
    return {
        "numbers": DataLoader(Numbers(rank, world, 16), 2),
        "pairs": DataLoader(Rows(16), batch_sampler=Pairs(16)),
        "each": DataLoader(Rows(16), 2, sampler=RandomSampler(Rows(16))),
    }


WINDOW = Cell("window", 48, 0, 2, accumulate=4)


def two_save(rank, world_size, folder):
    trainer, module = fit(Cell("digest", 24, 0, 3), 2, folder)
    trainer.save_checkpoint(f"{folder}/digest")
    digest = b""
    for _, _, indices in module.seen:
        digest = hashlib.sha256(digest + array("q", indices).tobytes()).digest()
    assert order(f"{folder}/digest", rank) == [{"epoch": 1, "batches": 8, "samples": 24, "digest": digest.hex()}]

    trainer, module = fit(WINDOW, 2, folder, epochs=1, callbacks=[SavesAfter(6, f"{folder}/window")])
    trainer.save_checkpoint(f"{folder}/window-whole")
    window = everyone(trainer, module.seen[:6])
    trainer, module = pair_of_loaders(2, folder, callbacks=[SavesAfter(3, f"{folder}/two")])
    two = everyone(trainer, [module.seen[:3], module.short[2:3]])
    for name, loader in of_unknown_order(rank, 2).items():
        alone_on(2, folder, loader, save=(2, f"{folder}/{name}"))
    return [window, two]


def one_goes_on(rank, world_size, folder, window, two):
    expected = pytest.warns(UserWarning, match="was saved by 2 ranks and goes on with 1")
    # Saved inside a window of 4 x 2 ranks: as a window of 8 it takes 4 more micro-batches, and the losses are the same.
    with expected:
        one = Cell("window", 48, 0, 2, accumulate=8)
        trainer, module = fit(one, 1, folder, epochs=1, resume=f"{folder}/window")
    assert [b for _, b, _ in module.seen] == list(range(12, 24)) and trainer.global_step == 3
    assert module.stepped_after == [1] * 3 + [2] * 8 + [3]
    assert sorted(i for part in [*window, module.seen] for _, _, batch in part for i in batch) == list(range(48))
    trainer.save_checkpoint(f"{folder}/window-end")
    torch.testing.assert_close(losses(f"{folder}/window-end"), losses(f"{folder}/window-whole"), rtol=1e-9, atol=0.0)

    with expected:
        _, module = pair_of_loaders(1, folder, resume=f"{folder}/two")
    assert [b for _, b, _ in module.seen] == list(range(6, 12))
    had = [i for long, _ in two for _, _, batch in long for i in batch]
    assert sorted(had + [i for _, _, batch in module.seen for i in batch]) == list(range(24))
    short = [i for _, part in two for _, _, batch in part for i in batch]
    assert sorted(short + [i for _, _, batch in module.short[:2] for i in batch]) == list(range(8))

    whys = {"numbers": "the data set is iterable", "pairs": "batches come from a Pairs", "each": "did not share one"}
    for name, loader in of_unknown_order(0, 1).items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, module = alone_on(1, folder, loader, resume=f"{folder}/{name}")
        said = [str(w.message) for w in caught if str(w.message).startswith("the training data (DataLoader of")]
        assert len(said) == 1 and whys[name] in said[0] and "passes over its first 4 batches" in said[0], (name, said)
        # Eight samples on two ranks are passed over.
        assert len(module.seen) == 4, (name, module.seen)


def test_one_rank_goes_on_with_windows_and_loaders_of_two(tmp_path):
    (window, two), _ = run_ranks(two_save, 2, init=False, folder=str(tmp_path), timeout_s=200)
    run_ranks(one_goes_on, 1, init=False, folder=str(tmp_path), window=window, two=two, timeout_s=200)
