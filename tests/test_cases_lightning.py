"""Known traps around the Trainer: evaluation counts, logging by rank, BatchNorm, files of the logger."""

import shutil
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from command import run_command
from harness import run_ranks
from lightning.pytorch.loggers import TensorBoardLogger
from safetensors.torch import load_file
from shardlight.framework.predictions import PredictionWriter
from shardlight.strategies.checkpoint.export import export_safetensors
from shardlight.strategies.errors import CollectiveError, StrategyError
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

F64 = {"dtype": torch.float64}

# --- C022: 5 samples in batches of 2 on 2 ranks; only sample 0 is correct; the sum metric adds the indexes


class Evaluated(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        self.seen = []

    def answers(self, batch):
        for layer in self.layers:
            layer(batch[0].unsqueeze(1))  # weights that have to be gathered
        self.seen += batch[0].long().tolist()
        return batch[0]

    def test_step(self, batch, batch_idx):
        index = self.answers(batch)
        self.log("accuracy", (index == 0).double().mean(), batch_size=len(index), sync_dist=True)
        self.log("sum", index.sum(), reduce_fx="sum", sync_dist=True)
        self.log("count", float(len(index)), reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.answers(batch)


def check_evaluation(rank, world_size, folder):
    cases = [(5, 2, False), (6, 2, False), (512, 16, False), (7, 3, False), (9, 2, True)]
    for strategy in strategies(world_size):
        for samples, batch, drop_last in cases:
            data = TensorDataset(torch.arange(samples, **F64))
            loader = DataLoader(data, batch_size=batch, drop_last=drop_last)
            where = f"{strategy} {samples} samples, batch {batch}, drop_last {drop_last}"
            module, run_dir = Evaluated(), Path(folder) / f"{strategy}-{samples}-{batch}-{drop_last}"
            run_dir.mkdir(exist_ok=True)
            writer = PredictionWriter(run_dir)
            settings = {"use_distributed_sampler": True, "callbacks": [writer]}
            trainer = make_trainer(strategy, world_size, folder, **settings)
            trainer.test(module, loader, verbose=False)
            got = trainer.callback_metrics
            kept = range(samples)
            if drop_last:  # each rank leaves out its own incomplete batch, as asked
                per_rank = [list(kept)[r::world_size] for r in range(world_size)]
                kept = [i for mine in per_rank for i in mine[: len(mine) // batch * batch]]
            assert got["count"] == len(kept) and got["sum"] == sum(kept), (where, got)
            assert got["accuracy"] == pytest.approx(1 / len(kept)), (where, got)
            module.seen.clear()
            trainer.predict(module, loader)
            seen = [i for mine in trainer.strategy.engine.collectives.gather_objects(module.seen, "seen") for i in mine]
            assert sorted(seen) == list(range(samples)), where
            if rank == 0:
                (rows,) = (v for k, v in load_file(run_dir / "predictions.safetensors").items() if "index" not in k)
                assert rows.tolist() == list(range(samples)), where


@pytest.mark.case("C022")
@pytest.mark.conformance("E8")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_counts_once_and_in_order(world_size, tmp_path):
    run_ranks(check_evaluation, world_size, init=False, folder=str(tmp_path))


# --- C073


class Logging(pl.LightningModule):
    """Logs `name` (of this rank) at `hook`."""

    def __init__(self, name=None, value=0.0, hook="training_step", **options):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.name, self.value, self.hook, self.options = name, value, hook, options

    def say(self, hook):
        if self.hook == hook and self.name is not None:
            self.log(self.name, self.value, **self.options)

    def training_step(self, batch, batch_idx):
        self.say("training_step")
        return self.w + 0 * batch.sum()

    def on_train_epoch_end(self):
        self.say("on_train_epoch_end")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Validated(Logging):
    def validation_step(self, losses, batch_idx):
        self.log("val", losses.mean() + self.w * 0, batch_size=len(losses), sync_dist=True)


ONE = torch.ones(1, **F64)


def check_different_names(rank, world_size, folder):
    mine, value = (("a", 1.0), ("b", 9.0))[rank]
    for strategy in strategies(world_size):
        for options in ({"on_step": True}, {"on_step": False, "on_epoch": True}):
            module = Logging(mine, value, sync_dist=True, **options)
            with pytest.raises(CollectiveError, match=r"rank 0 is at .*log 'a' .*; rank 1 is at .*log 'b' "):
                make_trainer(strategy, world_size, folder).fit(module, batches(ONE, ONE))
        # Only rank 0 logs: with sync an error that names the value, without it rank 0's own affair.
        with pytest.raises(CollectiveError, match=r"rank 0 is at .*log 'a' .*; rank 1 is at '"):
            make_trainer(strategy, world_size, folder).fit(
                Logging("a" if rank == 0 else None, 1.0, sync_dist=True), batches(ONE, ONE)
            )
        for name, options in (("a" if rank == 0 else None, {"rank_zero_only": True}), (mine, {})):
            module = Logging(name, value, **options)
            trainer = make_trainer(strategy, world_size, folder)
            trainer.fit(module, batches(ONE, ONE))
            assert {k: float(v) for k, v in trainer.callback_metrics.items()} == ({name: value} if name else {})
        trainer = make_trainer(strategy, world_size, folder)
        trainer.fit(Logging("end", value, "on_train_epoch_end", sync_dist=True), batches(ONE, ONE))
        assert float(trainer.callback_metrics["end"]) == 5.0


@pytest.mark.case("C073")
@pytest.mark.conformance("E6")
def test_ranks_that_log_different_names_are_told(tmp_path):
    run_ranks(check_different_names, 2, init=False, folder=str(tmp_path))


def check_weighted_mean(rank, world_size, folder):
    """Rank 0: batches of 2 and 1 samples with loss 1; rank 1: one sample with loss 4: (2 + 1 + 4) / 4."""
    losses = [[torch.ones(2, **F64), torch.ones(1, **F64)], [torch.full((1,), 4.0, **F64)]][rank]
    for strategy in strategies(world_size):
        module = Validated()
        trainer = make_trainer(strategy, world_size, folder)
        trainer.fit(module, batches(ONE), batches(*losses))
        assert float(trainer.callback_metrics["val"]) == pytest.approx(1.75), strategy
        trainer.validate(module, batches(*losses), verbose=False)
        assert float(trainer.callback_metrics["val"]) == pytest.approx(1.75), strategy


@pytest.mark.case("C073")
@pytest.mark.conformance("E5")
def test_epoch_mean_counts_samples_of_uneven_ranks(tmp_path):
    run_ranks(check_weighted_mean, 2, init=False, folder=str(tmp_path), timeout_s=40)


# --- C092: data of rank 0 has mean 0, of rank 1 mean 4, and so on


class Normed(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 1)
        self.outputs = []

    def training_step(self, batch, batch_idx):
        return self.linear(self.norm(batch)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.linear(self.norm(batch)).sum().item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def check_batch_norm(rank, world_size, folder):
    x = torch.tensor([[-1.0], [1.0]], **F64)
    for strategy in strategies(world_size):
        module, path = Normed(), f"{folder}/{strategy}"
        trainer = make_trainer(strategy, world_size, folder)
        trainer.fit(module, batches(x + 4 * rank, x + 4 * rank), batches(x + 1))
        assert module.norm.running_mean.item() == pytest.approx(0.0, abs=1e-12), strategy
        engine, before = trainer.strategy.engine, trainer.strategy.engine.collectives.calls.copy()
        trainer.validate(module, batches(x + 1, x + 1), verbose=False)
        after = engine.collectives.calls - before
        assert set(after) <= {"gather_small", "all_gather", "gather_objects"}, (strategy, after)
        assert strategy == "zero3" or not after["all_gather"], (strategy, after)
        if rank == 0 and strategy != "zero3":  # evaluation by rank 0 alone
            before = engine.collectives.calls.copy()
            with torch.no_grad():
                module.eval()
                module.linear(module.norm(x))
            assert engine.collectives.calls == before, strategy
        seen = engine.collectives.gather_objects((module.outputs[-1], module.norm.running_var.item()), "outputs")
        assert len(set(seen)) == 1, (strategy, seen)
        trainer.save_checkpoint(path)
        other = Normed()
        again = make_trainer(strategy, world_size, folder)
        again.validate(other, batches(x + 1), ckpt_path=path, verbose=False)
        assert other.outputs == module.outputs[-1:], strategy
        if rank == 0:
            export_safetensors(path, f"{path}.safetensors")
            saved = load_file(f"{path}.safetensors")
            assert torch.equal(saved["norm.running_mean"], module.norm.running_mean), strategy
            assert torch.equal(saved["norm.running_var"], module.norm.running_var), strategy
            assert saved["norm.num_batches_tracked"].item() == 2, strategy


@pytest.mark.conformance("A13")
@pytest.mark.case("C092")
@pytest.mark.parametrize("world_size", [1, 2])
def test_batch_norm_statistics_are_rank_zeros_everywhere(world_size, tmp_path):
    run_ranks(check_batch_norm, world_size, init=False, folder=str(tmp_path))


def check_sync_batch_norm(rank, world_size, folder):
    with pytest.raises(StrategyError, match=r"SyncBatchNorm refuses CPU tensors"):
        make_trainer("zero3", 1, folder, sync_batchnorm=True).fit(Normed(), batches(ONE), batches(ONE))


@pytest.mark.conformance("A13")
@pytest.mark.case("C092")
def test_synchronised_batch_norm_is_refused_at_setup(tmp_path):
    run_ranks(check_sync_batch_norm, 1, init=False, folder=str(tmp_path))


# --- C098


class Noisy(Logging):
    def training_step(self, batch, batch_idx):
        warnings.warn("odd batch", stacklevel=1)
        self.log("synced", float(self.trainer.global_rank + batch_idx), sync_dist=True)
        self.log("plain", float(self.trainer.global_rank + batch_idx))
        return super().training_step(batch, batch_idx)


def fit_with_logger(rank, world_size, folder):
    for strategy in strategies(world_size):
        logger = TensorBoardLogger(folder, name=strategy)
        trainer = make_trainer(strategy, world_size, folder, logger=logger, log_every_n_steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Noisy(), batches(*[ONE] * 4))


@pytest.mark.case("C098")
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_one_event_file_with_synced_scalars(world_size, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(fit_with_logger, world_size, init=False, folder=str(tmp_path))
    for strategy in strategies(world_size):
        (events,) = tmp_path.glob(f"{strategy}/**/events.out.tfevents.*")
        read = EventAccumulator(str(events)).Reload()
        steps = [e.step for e in read.Scalars("synced")]
        assert steps == sorted(set(steps)) and len(steps) == 4, (strategy, steps)
        mean = (world_size - 1) / 2
        assert [e.value for e in read.Scalars("synced")] == pytest.approx([mean + i for i in range(4)])
        assert [e.value for e in read.Scalars("plain")] == pytest.approx([0, 1, 2, 3])


NOISY = """
import warnings
import faulty

class Noisy(faulty.FaultyModule):
    def training_step(self, batch, batch_idx):
        warnings.warn("an odd batch", stacklevel=1)
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.case("C098")
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_warning_of_a_step_is_shown_once(world_size, tmp_path):
    shutil.copy(Path(__file__).with_name("faulty.py"), tmp_path)
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "config.yaml").write_text(
        "module: {class: noisy.Noisy}\ndata: {class: faulty.FaultyData}\nstrategy: zero3\n"
        f"trainer: {{accelerator: cpu, devices: {world_size}, max_steps: 3, enable_progress_bar: false}}\n"
    )
    ended = run_command(["fit", "config.yaml"], tmp_path)
    assert ended.code == 0, ended.output
    assert ended.output.count("UserWarning: an odd batch") == 1, ended.output
    (events,) = tmp_path.glob("runs/**/events.out.tfevents.*")
