"""What people do with a Trainer, under pipeline: data, monitors, precisions, losses over the batch, killed ranks."""

import os
import signal
import warnings

import pytest
import torch
import torchmetrics
from harness import RanksFailedError, run_ranks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from shardlight.strategies import Pipeline, Single
from shardlight.strategies.errors import PipelineError, StrategyError
from test_cases_pipeline import Layers, fitted, rows
from test_pipeline import Module, batch, trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Contrastive(Layers):
    """Every sample is compared with all others of the batch."""

    def loss(self, batch):
        x, _ = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = F.normalize(x, dim=-1)
        return F.cross_entropy(x @ x.T / 0.1, torch.arange(len(x)).roll(1))

    def validation_step(self, batch, batch_idx):
        self.loss(batch)


def contrastive_body(rank, world, folder):
    module = Contrastive()
    data = [rows(n) for n in range(4)]
    strategy = Pipeline(stages=world, schedule="gpipe", micro_batches=3, loss_over="batch") if world > 1 else Single()
    fitted(module, strategy, world, folder, data, [rows(9)], accumulate_grad_batches=2)
    return module.gradients, module.norms, module.logged


def test_a_loss_over_the_whole_batch_is_that_of_one_process(tmp_path):
    (expected,) = run_ranks(contrastive_body, 1, timeout_s=60, init=False, folder=str(tmp_path))
    for gradients, norms, logged in run_ranks(contrastive_body, 2, timeout_s=60, init=False, folder=str(tmp_path)):
        assert norms == pytest.approx(expected[1], rel=1e-10) and logged == pytest.approx(expected[2], rel=1e-10)
        for here, there in zip(gradients, expected[0], strict=True):
            for name, gradient in here.items():
                torch.testing.assert_close(gradient, there[name], rtol=1e-10, atol=1e-13)


def test_a_loss_over_the_batch_needs_gpipe():
    with pytest.raises(StrategyError, match="loss_over='batch' needs schedule 'gpipe'"):
        Pipeline(stages=2, schedule="1f1b", loss_over="batch")


class Augmented(Dataset):
    """Noise is drawn where a sample is read, so it differs from process to process."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return index, torch.randn(7, dtype=torch.float64), f"sample {index}"


class Noted(Layers):
    """Notes what its steps are given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        index, x, names = batch
        assert list(names) == [f"sample {i}" for i in index.tolist()]
        self.seen.append((index.tolist(), x.clone()))
        return super().training_step((x, torch.ones(len(x), dtype=torch.float64)), batch_idx)


def same_batch_body(rank, world, folder, workers):
    torch.manual_seed(rank)
    module = Noted()
    fit = trainer(
        Pipeline(stages=2, micro_batches=2),
        world,
        folder,
        use_distributed_sampler=True,
        limit_val_batches=0,
        max_epochs=2,
    )
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    fit.fit(module, DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers))
    return module.seen


@pytest.mark.conformance("E1", "E2")
@pytest.mark.parametrize("workers", [0, 1])
def test_all_stages_see_the_batch_of_the_first_and_pipelines_see_different_ones(workers, tmp_path):
    ranks = run_ranks(same_batch_body, 4, timeout_s=120, init=False, folder=str(tmp_path), workers=workers)
    for place in (0, 1):
        first, second = ranks[place], ranks[2 + place]
        assert [i for i, _ in first] == [i for i, _ in second] and len(first) == 8
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))
    for epoch in (slice(0, 4), slice(4, 8)):
        indices = sorted(i for place in (0, 1) for part, _ in ranks[place][epoch] for i in part)
        assert indices == list(range(16))


class Stream(IterableDataset):
    def __iter__(self):
        return (rows(n) for n in range(3))


class Measured(Layers):
    """Logs a mean, a sum, a maximum and a metric object."""

    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanAbsoluteError()
        self.kept = torchmetrics.CatMetric()
        self.epochs = []

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        out = x
        for layer in self.layers:
            out = torch.tanh(layer(out))
        self.error(out, x)
        self.kept.update(out[:, 0])
        self.log("mae", self.error, on_step=False, on_epoch=True)
        self.log("mean", out.mean(), sync_dist=True)
        self.log("largest", out.max(), reduce_fx="max", sync_dist=True)
        self.log("rows", torch.tensor(float(len(x))), reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_end(self):
        self.epochs.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})
        self.log("kept", self.kept.compute().sum(), sync_dist=True)
        self.kept.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=5.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "mae"}}


def monitored_body(rank, world, folder):
    module = Measured()
    strategy = Pipeline(stages=2, micro_batches=3) if world > 1 else Single()
    stop = EarlyStopping("mae", patience=1, min_delta=0.01)
    best = ModelCheckpoint(folder, "{epoch}", monitor="mae", save_top_k=1)
    val = [rows(9), rows(10, 5)]
    kwargs = {"callbacks": [stop, best], "enable_checkpointing": True, "max_epochs": 6}
    fit = fitted(module, strategy, world, f"{folder}/{world}", [rows(n) for n in range(2)], val, **kwargs)
    rate = fit.optimizers[0].param_groups[0]["lr"]
    metrics = {k: float(v) for k, v in fit.callback_metrics.items()}
    return module.epochs, metrics, fit.current_epoch, rate, os.path.basename(best.best_model_path)


@pytest.mark.conformance("E5", "E7")
def test_logs_monitors_and_metrics_are_those_of_one_process_on_all_stages(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (expected,) = run_ranks(monitored_body, 1, timeout_s=60, init=False, folder=str(tmp_path / "a"))
    for found in run_ranks(monitored_body, 2, timeout_s=60, init=False, folder=str(tmp_path / "b")):
        assert found[2:] == expected[2:]
        assert found[1] == pytest.approx(expected[1], rel=1e-6)
        for here, there in zip(found[0], expected[0], strict=True):
            assert here == pytest.approx(there, rel=1e-6)


def mixed_body(rank, world, folder, precision):
    module = Layers().float()
    data = [(x.float(), k.float()) for x, k in (rows(n) for n in range(4))]
    strategy = Pipeline(stages=2, micro_batches=4, zero=2) if world > 1 else Single()
    fitted(module, strategy, world, folder, data, [data[0]], precision=precision, gradient_clip_val=0.05)
    return module.norms, module.logged


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_other_precisions_come_close_to_one_process(precision, tmp_path):
    settings = {"timeout_s": 60, "init": False, "folder": str(tmp_path), "precision": precision}
    (expected,) = run_ranks(mixed_body, 1, **settings)
    rel = 1e-5 if precision == "32-true" else 2e-2
    for norms, logged in run_ranks(mixed_body, 2, **settings):
        assert norms == pytest.approx(expected[0], rel=rel) and logged == pytest.approx(expected[1], rel=rel)


class Killed(Module):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def killed_body(rank, world, folder):
    fitted(Killed(), Pipeline(stages=2), world, folder, [batch(n) for n in range(6)], [batch(9)])


def test_a_stage_that_dies_ends_the_other(tmp_path):
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(killed_body, 2, timeout_s=30, init=False, folder=str(tmp_path))
    assert "a peer was lost" in caught.value.reports[0]


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Module):
    def backward(self, loss):
        loss.backward()


class Uncut(Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(3, 3)


def refused_body(rank, world, folder):
    for module, said in (
        (Manual(), "Manual uses manual optimization"),
        (OwnBackward(), "OwnBackward.backward is overridden"),
        (Uncut(), "no list of like blocks"),
    ):
        with pytest.raises(PipelineError, match=said):
            fitted(module, Pipeline(stages=2), world, folder, [batch(0)], [batch(1)])


def test_what_a_pipeline_cannot_do_is_refused_at_setup(tmp_path):
    run_ranks(refused_body, 2, timeout_s=60, init=False, folder=str(tmp_path))


class Predicting(Module):
    def predict_step(self, batch, batch_idx):
        return {"row": batch[0][:, 0], "mean": self.model(batch[0]).mean(dim=(1, 2))}


def predict_body(rank, world, folder):
    module = Predicting()
    fit = trainer(Pipeline(stages=2, micro_batches=3) if world > 1 else Single(), world, folder)
    warnings.filterwarnings("ignore", "predict returned None")
    return fit.predict(module, DataLoader([batch(1), batch(2, 5), batch(3, 1)], batch_size=None))


def test_predictions_are_those_of_one_process_on_the_last_stage(tmp_path):
    (expected,) = run_ranks(predict_body, 1, timeout_s=60, init=False, folder=str(tmp_path))
    first, last = run_ranks(predict_body, 2, timeout_s=60, init=False, folder=str(tmp_path))
    assert first == [None] * 3
    for here, there in zip(last, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-12)


class Dropping(Module):
    def __init__(self):
        super().__init__()
        self.model.blocks = nn.ModuleList([nn.Sequential(block, nn.Dropout(0.5)) for block in self.model.blocks])


def dropout_body(rank, world, folder, recompute):
    module = Dropping()
    torch.manual_seed(7)
    data = [batch(n) for n in range(3)]
    fitted(module, Pipeline(stages=2, recompute=recompute), world, folder, data, [batch(9)])
    return module.losses, module.norms, torch.initial_seed()


def test_dropout_draws_the_same_in_a_repeated_forward_and_in_a_repeated_run(tmp_path):
    runs = [
        run_ranks(dropout_body, 2, timeout_s=60, init=False, folder=str(tmp_path), recompute=recompute)
        for recompute in ("no", "no", "blocks")
    ]
    for run in runs[1:]:
        for here, there in zip(run, runs[0], strict=True):
            torch.testing.assert_close(here[0], there[0], rtol=1e-12, atol=0)
            torch.testing.assert_close(here[1], there[1], rtol=1e-10, atol=0)


class Everything(Predicting):
    def test_step(self, batch, batch_idx):
        self.log("test", self.model(batch[0]).mean(), sync_dist=True)


def entry_points_body(rank, world, folder):
    module = Everything()
    data, val = DataLoader([batch(n) for n in range(2)], batch_size=None), DataLoader([batch(9)], batch_size=None)
    strategy = Pipeline(stages=2) if world > 1 else Single()
    fit = trainer(strategy, world, folder, max_epochs=1)
    warnings.filterwarnings("ignore", "predict returned None")
    before = fit.validate(module, val, verbose=False)
    fit.fit(module, data, val)
    between = fit.test(module, val, verbose=False)
    predictions = fit.predict(module, val)
    fit.fit_loop.max_epochs = 2
    fit.fit(module, data, val)
    after = fit.validate(module, val, verbose=False)
    if world > 1:
        other = trainer(Single() if world == 1 else "zero3", world, folder)
        with pytest.raises(StrategyError, match="is cut by another strategy object"):
            other.validate(module, val, verbose=False)
        other = trainer(Pipeline(stages=2), world, folder)
        with pytest.raises(StrategyError, match="is cut by another strategy object"):
            other.validate(module, val, verbose=False)
    return before, between, after, module.losses, predictions


def test_all_entry_points_of_one_trainer_work_one_after_the_other(tmp_path):
    (expected,) = run_ranks(entry_points_body, 1, timeout_s=60, init=False, folder=str(tmp_path))
    for found in run_ranks(entry_points_body, 2, timeout_s=60, init=False, folder=str(tmp_path)):
        for here, there in zip(found[:3], expected[:3], strict=True):
            assert here[0] == pytest.approx(there[0], rel=1e-6)
        assert found[3] == pytest.approx(expected[3], rel=1e-10)


class Whole(Module):
    def configure_optimizers(self):
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2])


def shared_body(rank, world, folder):
    with pytest.raises(PipelineError, match="shard_group: 1: 'model.tokens.weight' is on several stages"):
        fitted(Module(), Pipeline(stages=2, shard_group=1), world, folder, [batch(0)], [batch(1)])
    with pytest.raises(StrategyError, match="Muon needs 'model.tokens.weight' whole, which is on several"):
        fitted(Whole(), Pipeline(stages=2), world, folder, [batch(0)], [batch(1)])


def test_what_shared_parameters_cannot_have_is_refused(tmp_path):
    run_ranks(shared_body, 4, timeout_s=60, init=False, folder=str(tmp_path))
