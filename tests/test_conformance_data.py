"""Rows E of the conformance matrix, for data parallelism: what each rank reads, and what all of them log."""

import random
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from harness import run_ranks
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

F64 = {"dtype": torch.float64}


def gather(trainer, value):
    return trainer.strategy.engine.collectives.gather_objects(value, "test")


# --- E1, E2, E4: which samples a rank reads, and its random numbers


class Random(Dataset):
    """Item i is i and a random number of each of the three generators of the process that reads it."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.tensor([i, random.random(), torch.rand(()).item(), i], **F64)


class Reads(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1) for _ in range(2)])
        self.rows = {}

    def training_step(self, batch, batch_idx):
        self.rows.setdefault(self.current_epoch, []).extend(batch.tolist())
        x = batch[:, :1]
        for layer in self.layers:
            x = layer(x)
        return x.mean() * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Save(pl.Callback):
    """Saves after a step, and stops there."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def read(strategy, world, folder, workers, resume=None, **kwargs):
    pl.seed_everything(3, workers=True, verbose=False)
    module = Reads()
    trainer = make_trainer(strategy, world, folder, use_distributed_sampler=True, max_epochs=2, **kwargs)
    context = "fork" if workers else None  # the start method of a rank's own start would import torch in each worker
    loader = DataLoader(Random(), batch_size=2, num_workers=workers, shuffle=True, multiprocessing_context=context)
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer, module.rows


def check_reading(rank, world_size, folder, cells):
    orders = []
    for strategy, workers in cells:
        where = f"{strategy} {workers} workers"
        trainer, rows = read(strategy, world_size, folder, workers)
        everyone = gather(trainer, rows)
        for epoch in (0, 1):
            mine = [[r[0] for r in seen[epoch]] for seen in everyone]
            assert sorted(i for m in mine for i in m) == list(range(16)), (where, epoch, mine)
            assert all(len(m) == 16 // world_size for m in mine)
            for column in (1, 2) if workers else ():
                # Workers of different ranks, and of different epochs, draw different numbers.
                drawn = [r[column] for seen in everyone for r in seen[epoch]]
                assert len(set(drawn)) == len(drawn), (where, column, drawn)
        assert [r[0] for r in rows[0]] != [r[0] for r in rows[1]], where
        again = read(strategy, world_size, folder, workers)[1]
        assert again == rows, where  # the seed says everything
        orders.append([[r[0] for r in rows[e]] for e in (0, 1)])
        # E11: on from the middle of an epoch and from its end, the same samples follow.
        for stop in (16 // world_size // 2 - 1, 16 // world_size // 2):
            path = f"{folder}/{strategy}-{workers}-{stop}"
            _, first = read(strategy, world_size, folder, workers, callbacks=[Save(stop, path)])
            _, second = read(strategy, world_size, folder, workers, resume=path)
            for column in (0, 1, 2) if not workers else (0,):
                both = [r[column] for part in (first, second) for e in sorted(part) for r in part[e]]
                assert both == [r[column] for e in (0, 1) for r in rows[e]], (where, stop, column)
    assert all(order == orders[0] for order in orders), "the order of the data depends on the strategy"


@pytest.mark.conformance("E1")
@pytest.mark.conformance("E2")
@pytest.mark.conformance("E4")
@pytest.mark.conformance("E11")
@pytest.mark.parametrize("world_size,cells", [(1, [("single", 0)]), (2, [("zero3", 0), ("ddp", 1)])])
def test_ranks_share_the_samples_of_each_epoch_and_a_resumed_run_goes_on(world_size, cells, tmp_path):
    run_ranks(check_reading, world_size, init=False, folder=str(tmp_path), cells=cells, timeout_s=120)


@pytest.mark.conformance("E1")
@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_reading_under_every_strategy(world_size, tmp_path):
    cells = [(s, workers) for s in strategies(world_size) for workers in (0, 2)]
    run_ranks(check_reading, world_size, init=False, folder=str(tmp_path), cells=cells, timeout_s=600)


# --- E3, E9, E11: iterable data that ranks share by themselves


class Counted(IterableDataset):
    """Rank r of n has r, r + n, r + 2n, ...; keeps its position as its own state."""

    def __init__(self, rank, world, total):
        self.numbers = list(range(rank, total, world))

    def __iter__(self):
        return iter([torch.tensor([float(n), 0, 0, 0], **F64) for n in self.numbers])


def check_iterable(rank, world_size, folder, plans):
    warnings.filterwarnings("ignore", message="the training data of rank .* ended after")
    for strategy in plans:
        for total in (8, 9):
            module = Reads()
            trainer = make_trainer(strategy, world_size, folder, use_distributed_sampler=True, max_epochs=2)
            trainer.fit(module, DataLoader(Counted(rank, world_size, total), batch_size=1))
            want = list(range(rank, total, world_size))[: total // world_size]
            assert {e: [r[0] for r in rows] for e, rows in module.rows.items()} == {0: want, 1: want}, (strategy, total)
            assert trainer.global_step == 2 * (total // world_size)
        path, module = f"{folder}/iterable-{strategy}", Reads()
        trainer = make_trainer(strategy, world_size, folder, max_epochs=1, callbacks=[Save(3, path)])
        trainer.fit(module, DataLoader(Counted(rank, world_size, 12), batch_size=1))
        module = Reads()
        trainer = make_trainer(strategy, world_size, folder, max_epochs=1)
        trainer.fit(module, DataLoader(Counted(rank, world_size, 12), batch_size=1), ckpt_path=path)
        assert [r[0] for r in module.rows[0]] == list(range(rank, 12, world_size))[3:], strategy


@pytest.mark.conformance("E3")
@pytest.mark.conformance("E9")
@pytest.mark.conformance("E11")
@pytest.mark.parametrize("world_size,plans", [(1, ["zero2"]), (2, ["zero1", "zero3"])])
def test_iterable_data_is_read_as_each_rank_gives_it(world_size, plans, tmp_path):
    run_ranks(check_iterable, world_size, init=False, folder=str(tmp_path), plans=plans)


# --- E5, E6, E10: what is logged

SUMS = {"sum": sum, "mean": lambda v: sum(v) / len(v), "min": min, "max": max}


def value(loader: int, batch: int, rank: int) -> float:
    return float(torch.rand((), generator=torch.Generator().manual_seed(1000 * loader + 10 * batch + rank), **F64))


class Logs(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1) for _ in range(2)])
        self.mean, self.rated = torchmetrics.MeanMetric(), torchmetrics.Accuracy(task="binary")
        self.auc = torchmetrics.AUROC(task="binary")
        self.steps = []

    def out(self, batch):
        x = batch[:, :1]
        for layer in self.layers:
            x = layer(x)
        return x

    def say(self, stage, batch, v):
        for how in SUMS:
            self.log(f"{stage}/{how}", v, reduce_fx=how, sync_dist=True, on_step=False, on_epoch=True, batch_size=1)
        self.mean.update(v)
        target = (batch[:, 0] > 0.3).int()
        self.rated(batch[:, 0], target)
        self.auc.update(batch[:, 0], (batch[:, 0] > 0.6).int())
        for name, metric in {"metric": self.mean, "accuracy": self.rated, "auc": self.auc}.items():
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True)

    def training_step(self, batch, batch_idx):
        v = value(9, batch_idx, self.global_rank)
        self.log("both", v, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=1)
        self.log("alone", v, rank_zero_only=True) if self.global_rank == 0 else None
        return self.out(batch).mean() * 0

    def on_train_batch_end(self, *args):
        self.steps.append(float(self.trainer.callback_metrics["both_step"]))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.out(batch)
        self.say("val", batch, value(dataloader_idx, batch_idx, self.global_rank))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def rows_of(loader: int, batch: int, rank: int) -> torch.Tensor:
    return torch.rand(4, 1, generator=torch.Generator().manual_seed(77 + 1000 * loader + 10 * batch + rank), **F64)


def expected(world: int, loader: int, count: int) -> dict[str, float]:
    cells = [(m, r) for m in range(count) for r in range(world)]
    values = [value(loader, m, r) for m, r in cells]
    want = {how: f(values) for how, f in SUMS.items()} | {"metric": sum(values) / len(values)}
    # One process that adds up its batches: a sum over batches and ranks, and one metric of all samples.
    x = torch.cat([rows_of(loader, m, r) for m, r in cells])[:, 0]
    want["accuracy"] = float(((x > 0.5) == (x > 0.3)).double().mean())
    want["auc"] = float(torchmetrics.AUROC(task="binary")(x, (x > 0.6).int()))
    return want


def check_logs(rank, world_size, folder, plans):
    for strategy in plans:
        module = Logs()
        trainer = make_trainer(strategy, world_size, folder, log_every_n_steps=1)
        loaders = [[rows_of(n, m, rank) for m in range(count)] for n, count in ((0, 3), (1, 2))]
        train = [rows_of(9, m, rank) for m in range(2)]
        trainer.fit(module, batches(*train), [batches(*x) for x in loaders])
        got = {k: float(v) for k, v in trainer.callback_metrics.items()}
        per_step = [sum(value(9, m, r) for r in range(world_size)) / world_size for m in range(2)]
        assert module.steps == pytest.approx(per_step) and got["both_epoch"] == pytest.approx(sum(per_step) / 2)
        assert ("alone" in got) == (rank == 0), (strategy, got)
        assert {"both_step", "both_epoch"} <= trainer.progress_bar_metrics.keys()
        for n, count in ((0, 3), (1, 2)):
            for how, want in expected(world_size, n, count).items():
                if how in SUMS:
                    assert got[f"val/{how}/dataloader_idx_{n}"] == pytest.approx(want), (strategy, n, how)
        trainer.test(module, batches(*loaders[0]), verbose=False)
        got = {k: float(v) for k, v in trainer.callback_metrics.items()}
        for how, want in expected(world_size, 0, 3).items():
            assert got[f"val/{how}"] == pytest.approx(want), (strategy, how, got)


@pytest.mark.conformance("E5")
@pytest.mark.conformance("E6")
@pytest.mark.conformance("E10")
@pytest.mark.parametrize("world_size,plans", [(1, ["zero3"]), (2, ["zero3", "ddp"])])
def test_what_is_logged_is_what_one_process_would_log(world_size, plans, tmp_path):
    run_ranks(check_logs, world_size, init=False, folder=str(tmp_path), plans=plans)


@pytest.mark.conformance("E5")
@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_logging_under_every_strategy(world_size, tmp_path):
    run_ranks(check_logs, world_size, init=False, folder=str(tmp_path), plans=strategies(world_size), timeout_s=300)


# --- E7: a plateau, also over a resume (C074): 1, 1, then resumed 1, 1


class Plateau(Reads):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        # The ranks' own values go up and down; their mean is 1 in every epoch.
        self.log("val", 1.0 + (0.5 if self.global_rank else -0.5) * (self.trainer.world_size > 1), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val", "interval": "epoch"}}


class Rates(pl.Callback):
    def __init__(self):
        self.rates = []

    def on_train_epoch_start(self, trainer, module):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def check_plateau(rank, world_size, folder, plans):
    one = torch.ones(1, 1, **F64)

    def fit(epochs, resume=None, save=None):
        rates = Rates()
        trainer = make_trainer(strategy, world_size, folder, max_epochs=epochs, callbacks=[rates])
        trainer.fit(Plateau(), batches(one), batches(one), ckpt_path=resume)
        if save:
            trainer.save_checkpoint(save)
        assert len({tuple(r) for r in gather(trainer, rates.rates)}) == 1
        return rates.rates

    for strategy in plans:
        whole = fit(5)
        assert whole == [1.0, 1.0, 1.0, 1.0, 0.1], (strategy, whole)
        path = f"{folder}/plateau-{strategy}"
        assert fit(2, save=path) + fit(5, resume=path) == whole, strategy


@pytest.mark.case("C074")
@pytest.mark.conformance("E7")
@pytest.mark.parametrize("world_size,plans", [(1, ["zero1"]), (2, ["zero1", "zero3"])])
def test_a_plateau_drops_on_all_ranks_and_at_the_same_evaluation_after_a_resume(world_size, plans, tmp_path):
    run_ranks(check_plateau, world_size, init=False, folder=str(tmp_path), plans=plans)
