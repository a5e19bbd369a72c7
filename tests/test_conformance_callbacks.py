"""Row F of the conformance matrix: Lightning's callbacks and our ShardedEMA do under every strategy what they say."""

import importlib.util
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file
from shardlight.strategies import ShardedEMA
from shardlight.strategies.checkpoint import export_safetensors
from shardlight.strategies.errors import CheckpointError, StrategyError
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

F64 = {"dtype": torch.float64}
ONE = torch.ones(1, **F64)

# --- ShardedEMA: seven weights that go from 0 to 1 in the first step and stay there


class Seven(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(7))
        self.more = nn.Parameter(torch.zeros(1030))  # on two ranks some of it lies on each
        self.frozen = nn.Parameter(torch.full((3,), 5.0), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.count += 1
        slope = -1.0 if self.trainer.global_step == 0 else 0.0
        return ((self.w * slope).sum() + (self.more * slope).sum()) * batch.sum()

    def look(self, batch, batch_idx):
        values = {round(v, 12) for v in torch.cat([self.w, self.more]).tolist()}
        self.seen.append([*sorted(values), self.count.item()])

    validation_step = test_step = look

    def predict_step(self, batch, batch_idx):
        self.look(batch, batch_idx)
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)


class Steps(pl.Callback):
    """Notes the average after each step, and what was sent by then."""

    def __init__(self, save=None):
        self.averages, self.calls, self.save = [], [], save

    def on_train_batch_end(self, trainer, module, *args):
        ema = next((c for c in trainer.callbacks if isinstance(c, ShardedEMA)), None)
        parts = [] if ema is None else [*ema.average("w").tolist(), *ema.average("more").tolist()]
        self.averages.append([round(v, 12) for v in parts])
        self.calls.append(sum(trainer.strategy.engine.collectives.calls.values()))
        if self.save == trainer.global_step:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/saved")


def weights(trainer, module):
    with trainer.strategy.gathered():
        return sorted({*module.w.tolist(), *module.more.tolist()})


def run_ema(rank, world_size, folder, plans):
    sent = {}
    for strategy in plans:
        home = f"{folder}/{strategy}-{world_size}"
        Path(home).mkdir(exist_ok=True)
        for with_ema in (True, False):
            module, steps, ema = Seven(), Steps(save=2 if with_ema else None), ShardedEMA(0.9)
            trainer = make_trainer(strategy, world_size, home, callbacks=[*([ema] if with_ema else []), steps])
            trainer.fit(module, batches(ONE, ONE), batches(ONE))
            sent[with_ema] = [b - a for a, b in zip(steps.calls, steps.calls[1:], strict=False)]
            if not with_ema:
                break
            # Each rank's part of the seven, after one step and after two.
            assert {v for part in steps.averages[:1] for v in part} <= {0.1}, (strategy, steps.averages)
            assert {v for part in steps.averages[1:] for v in part} <= {0.19}, (strategy, steps.averages)
            parts = trainer.strategy.engine.collectives.gather_objects(len(steps.averages[0]), "parts")
            assert sum(parts) == 7 + 1030 and all(parts), (strategy, parts)
            trainer.validate(module, batches(ONE), verbose=False)
            trainer.test(module, batches(ONE), verbose=False)
            trainer.predict(module, batches(ONE))
            assert module.seen == [[0.19, 2.0]] * 4, (strategy, module.seen)
            assert weights(trainer, module) == [1.0], strategy
            with ema.averaged(trainer):
                assert weights(trainer, module) == pytest.approx([0.19], abs=1e-15)
            assert weights(trainer, module) == [1.0], strategy
        assert sent[True] == sent[False], (strategy, sent)
        if rank == 0:
            export_safetensors(f"{home}/saved", f"{home}/w.safetensors")
            assert load_file(f"{home}/w.safetensors")["w"].tolist() == [1.0] * 7


def go_on(rank, world_size, folder, saved_by, plans):
    for strategy in plans:
        home = f"{folder}/{saved_by}"
        warnings.filterwarnings("ignore", message=".* was saved by 2 ranks and goes on with 1")
        module, steps, ema = Seven(), Steps(), ShardedEMA(0.9)
        trainer = make_trainer(strategy, world_size, home, callbacks=[ema, steps], max_epochs=2)
        trainer.fit(module, batches(ONE, ONE), batches(ONE), ckpt_path=f"{home}/saved")
        got = [sorted({v for v in part}) for part in steps.averages]
        assert got == [[0.271], [0.3439]], (strategy, got)
        assert ema.updates == 4 and weights(trainer, module) == [1.0]
        # The validation that was due after the batch in whose end it was saved comes first.
        assert module.seen == [[0.19, 2.0], [0.3439, 4.0]], module.seen
        module = Seven()
        trainer = make_trainer(strategy, world_size, home, callbacks=[ShardedEMA(0.9)])
        trainer.test(module, batches(ONE), ckpt_path=f"{home}/saved", verbose=False)
        assert module.seen == [[0.19, 2.0]], module.seen
        assert weights(trainer, module) == [1.0]


@pytest.mark.case("C071")
@pytest.mark.conformance("F")
def test_average_of_sharded_weights(tmp_path):
    run_ranks(run_ema, 2, init=False, folder=str(tmp_path), plans=["ddp", "zero1", "zero2", "zero3"])
    run_ranks(run_ema, 1, init=False, folder=str(tmp_path), plans=["single"])
    run_ranks(go_on, 2, init=False, folder=str(tmp_path), saved_by="zero3-2", plans=["zero3", "ddp"])
    run_ranks(go_on, 1, init=False, folder=str(tmp_path), saved_by="zero2-2", plans=["single", "zero3"])
    for saved_by in ("zero3-2", "zero1-2", "single-1"):
        saved, out = tmp_path / saved_by / "saved", tmp_path / "average.safetensors"
        assert export_safetensors(saved, out, ema=True) == 4
        exported = load_file(out)
        assert exported["w"].tolist() == pytest.approx([0.19] * 7, abs=1e-15) and exported["w"].dtype == torch.float64
        assert exported["frozen"].tolist() == [5.0] * 3 and exported["count"].item() == 2


@pytest.mark.conformance("F")
def test_what_the_average_cannot_do_is_said(tmp_path):
    run_ranks(check_refusals, 1, init=False, folder=str(tmp_path))
    with pytest.raises(CheckpointError, match="has no averaged weights: train with the callback ShardedEMA"):
        export_safetensors(tmp_path / "plain", tmp_path / "out", ema=True)
    for wrong in ({"decay": 1.5}, {"every_n_steps": 0}, {"start_step": -1}):
        with pytest.raises(StrategyError, match="ShardedEMA: .* must be"):
            ShardedEMA(**wrong)


class SavesInValidation(pl.Callback):
    def on_validation_epoch_end(self, trainer, module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/x")


def check_refusals(rank, world_size, folder):
    ema = ShardedEMA(0.5, every_n_steps=2, start_step=1)
    trainer = make_trainer("zero3", 1, folder, callbacks=[ema, SavesInValidation()], precision="bf16-true")
    with pytest.raises(StrategyError, match=r"save it after the evaluation \(on_validation_end\)"):
        trainer.fit(Seven(), batches(*[torch.ones(1)] * 5), batches(torch.ones(1)))
    # The average begins after the first step, with 1, and is not of 16 bits.
    assert ema.updates == 2 and ema.average("w").tolist() == [1.0] * 7
    assert ema.average("w").dtype == torch.float32
    assert trainer.strategy.engine.owned_piece(trainer.lightning_module.w)[1].tolist() == [1.0] * 7
    with pytest.raises(
        StrategyError, match="ShardedEMA works with shardlight's strategies only, not with SingleDevice"
    ):
        make_trainer("auto", 1, folder, callbacks=[ShardedEMA()]).fit(Seven(), batches(ONE), batches(ONE))
    trainer = make_trainer("zero1", 1, folder)
    trainer.fit(Seven(), batches(ONE), batches(ONE))
    trainer.save_checkpoint(f"{folder}/plain")
    resumed = make_trainer("zero1", 1, folder, callbacks=[ShardedEMA()], max_epochs=2)
    with pytest.warns(UserWarning, match="the checkpoint has no average"):
        resumed.fit(Seven(), batches(ONE), batches(ONE), ckpt_path=f"{folder}/plain")
    copying = [lightning_callbacks.EMAWeightAveraging(), lightning_callbacks.StochasticWeightAveraging(0.1)]
    for strategy in strategies(1):
        module = Seven()
        with pytest.raises(
            StrategyError, match=r"(?s)EMAWeightAveraging does not .*ShardedEMA.*Stochastic.*ShardedEMA"
        ):
            make_trainer(strategy, 1, folder, callbacks=copying).fit(module, batches(ONE), batches(ONE))
        assert not module.count


# --- Lightning's callbacks; none of them changes what is trained


def x_of(batch: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(50 * batch + rank), **F64)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.frozen(x))

    def training_step(self, batch, batch_idx):
        loss = self(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0 + self.current_epoch + self.global_rank, sync_dist=True, batch_size=len(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def plain_net(world: int, windows: list[list[list[int]]]) -> Net:
    """One process: per epoch its windows, per window its batches."""
    net = Net().double()
    (optimizer,), (schedule,) = net.configure_optimizers()
    for epoch in windows:
        for window in epoch:
            optimizer.zero_grad()
            torch.stack([net(x_of(m, r)).square().mean() for m in window for r in range(world)]).mean().backward()
            optimizer.step()
        schedule.step()
    return net


class Notes(Logger):
    """Keeps what is logged, on rank 0."""

    name, version = "notes", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass

    def of(self, name):
        return [m[name] for _, m in self.rows if name in m]


WHOLE = [[[0], [1]]] * 3  # 3 epochs of 2 batches, each a step


def learning_rate_monitor(home):
    notes = Notes()
    trainer, _ = yield {"callbacks": [lightning_callbacks.LearningRateMonitor()], "logger": notes}, WHOLE
    assert notes.of("lr-SGD") == ([0.1, 0.05, 0.025] if trainer.is_global_zero else [])


def early_stopping(home):
    """Rank 1 alone would go on for longer: what is logged is the mean, which only grows."""
    callback = lightning_callbacks.EarlyStopping("val", patience=1)
    yield {"callbacks": [callback], "max_epochs": 9}, WHOLE[:2]
    assert callback.stopped_epoch == 1


def timer(home):
    callback = lightning_callbacks.Timer(duration={"seconds": 0.0001})
    trainer, _ = yield {"callbacks": [callback], "max_epochs": 9}, [[[0]]]
    assert callback.time_elapsed() > 0 and trainer.should_stop


def summaries(home):
    seen = []

    class Kept(lightning_callbacks.ModelSummary):
        @staticmethod
        def summarize(data, total, trainable, *args, **kwargs):
            seen.append((dict(data), total, trainable))

    class Rich(lightning_callbacks.RichModelSummary):
        summarize = staticmethod(Kept.summarize)

    trainer, _ = yield {"callbacks": [Kept(max_depth=2)], "enable_model_summary": True}, WHOLE
    rich = Rich(max_depth=2)
    rich.on_fit_start(trainer, trainer.lightning_module)
    for data, total, trainable in seen:
        counts = dict(zip(data["Name"], data["Params"], strict=True))
        assert (total, trainable) == (65, 45)
        assert {n: c.strip() for n, c in counts.items()} == {
            "blocks": "40", "blocks.0": "20", "blocks.1": "20", "frozen": "20", "head": "5",
        }  # fmt: skip
    assert len(seen) == (2 if trainer.is_global_zero else 0)


def throughput(home):
    notes = Notes()
    callback = lightning_callbacks.ThroughputMonitor(batch_size_fn=len, window_size=2)
    trainer, _ = yield {"callbacks": [callback], "logger": notes, "log_every_n_steps": 2}, WHOLE
    if trainer.is_global_zero:
        names = {name for _, row in notes.rows for name in row}
        assert notes.of("train/device/batches_per_sec"), names


def accumulation(home):
    callback = lightning_callbacks.GradientAccumulationScheduler({0: 2, 1: 1})
    trainer, _ = yield {"callbacks": [callback]}, [[[0, 1]], [[0], [1]], [[0], [1]]]
    assert trainer.global_step == 5


def checkpoints(home):
    callback = lightning_callbacks.ModelCheckpoint(
        home, "{epoch}", monitor="val", mode="min", save_top_k=2, save_last=True
    )
    trainer, module = yield {"callbacks": [callback], "enable_checkpointing": True}, WHOLE
    trainer.strategy.barrier()
    assert sorted(p.name for p in Path(home).iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert callback.best_model_path == f"{home}/epoch=0.ckpt"
    trainer.validate(module, batches(ONE), ckpt_path="best", verbose=False)


def progress_bar(home):
    trainer, _ = yield {"callbacks": [lightning_callbacks.TQDMProgressBar()], "enable_progress_bar": True}, WHOLE
    assert "loss" in trainer.progress_bar_metrics


def rich_progress_bar(home):
    trainer, _ = yield {"callbacks": [lightning_callbacks.RichProgressBar()], "enable_progress_bar": True}, WHOLE
    assert "loss" in trainer.progress_bar_metrics


def simple_profiler(home):
    profiler = SimpleProfiler(home, "simple")
    yield {"profiler": profiler}, WHOLE
    assert len(profiler.recorded_durations["run_training_batch"]) == 6, profiler.recorded_durations.keys()


def advanced_profiler(home):
    trainer, _ = yield {"profiler": AdvancedProfiler(home, "advanced")}, WHOLE
    (report,) = Path(home).glob(f"*advanced*{trainer.global_rank}*")
    assert "run_training_batch" in report.read_text()


def pytorch_profiler(home):
    trainer, _ = yield {"profiler": PyTorchProfiler(home, "torch")}, WHOLE
    names = [p.name for p in Path(home).iterdir()]
    assert [n for n in names if f"torch-{trainer.global_rank}" in n], names


def device_stats(home):
    notes = Notes()
    callback = lightning_callbacks.DeviceStatsMonitor(cpu_stats=importlib.util.find_spec("psutil") is not None)
    yield {"callbacks": [callback], "logger": notes, "log_every_n_steps": 1}, WHOLE


def hooks_by_name(home):
    calls = []
    callback = lightning_callbacks.LambdaCallback(
        on_train_epoch_end=lambda trainer, module: calls.append(trainer.global_step),
        on_before_optimizer_step=lambda trainer, module, optimizer: calls.append(module.head.weight.grad.shape),
    )
    yield {"callbacks": [callback]}, WHOLE
    assert calls == [(1, 4), (1, 4), 2, (1, 4), (1, 4), 4, (1, 4), (1, 4), 6]


def average(home):
    ema = ShardedEMA(0.5)
    yield {"callbacks": [ema]}, WHOLE
    assert ema.updates == 6


def learning_rate_finder(home):
    """Trains for a while, and then everything is as it was."""
    finder = lightning_callbacks.LearningRateFinder(num_training_steps=4, update_attr=False)
    trainer, _ = yield {"callbacks": [finder]}, WHOLE
    results = trainer.strategy.engine.collectives.gather_objects(finder.optimal_lr.results["lr"], "results")
    assert len(results[0]) == 4 and all(r == results[0] for r in results)
    assert not list(Path(home).glob(".lr_find*"))


LIGHTNINGS = [
    learning_rate_monitor,
    early_stopping,
    timer,
    summaries,
    throughput,
    accumulation,
    checkpoints,
    progress_bar,
]
LIGHTNINGS += [rich_progress_bar, simple_profiler, advanced_profiler, pytorch_profiler, device_stats, hooks_by_name]
LIGHTNINGS += [average, learning_rate_finder]


def check_callbacks(rank, world_size, folder, cells):
    for message in ("The `srun` command", ".*LR finder stopped early", ".*is not set. The learning rate will not be"):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", message=".*you need to define a `flops_per_batch` attribute")
    warnings.filterwarnings("ignore", message="The PyTorch Profiler default schedule will be overridden")
    for number, strategy in cells:
        use = LIGHTNINGS[number]
        where, home = f"{use.__name__} under {strategy}", f"{folder}/{use.__name__}-{strategy}"
        Path(home).mkdir(exist_ok=True)
        case = use(home)
        settings, windows = next(case)
        module = Net()
        trainer = make_trainer(strategy, world_size, home, **{"max_epochs": 3, **settings})
        data, val = batches(x_of(0, rank), x_of(1, rank)), batches(ONE)
        trainer.fit(module, data, val)
        steps = trainer.strategy.engine.collectives.gather_objects(trainer.global_step, "steps")
        assert set(steps) == {sum(map(len, windows))}, (where, steps)
        want = plain_net(world_size, windows)
        with trainer.strategy.gathered():
            for (name, a), b in zip(module.named_parameters(), want.parameters(), strict=True):
                torch.testing.assert_close(
                    a.detach(), b.detach(), rtol=1e-10, atol=1e-10, msg=lambda m: f"{where} {name} {m}"
                )
        try:
            case.send((trainer, module))
        except StopIteration:
            continue
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error


PAIRWISE = [(n, ["zero3", "zero1", "ddp", "zero2"][n % 4]) for n in range(len(LIGHTNINGS))]
PAIRWISE += [(LIGHTNINGS.index(u), "zero3") for u in (early_stopping, checkpoints, learning_rate_finder)]


@pytest.mark.conformance("F")
@pytest.mark.conformance("D13")
@pytest.mark.conformance("E7")
def test_callbacks_of_lightning_do_what_they_say_and_change_nothing(tmp_path):
    run_ranks(check_callbacks, 2, init=False, folder=str(tmp_path), cells=PAIRWISE, timeout_s=150)


@pytest.mark.conformance("F")
@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_callback_of_lightning_under_every_strategy(world_size, tmp_path):
    cells = [(n, s) for n in range(len(LIGHTNINGS)) for s in strategies(world_size)]
    run_ranks(check_callbacks, world_size, init=False, folder=str(tmp_path), cells=cells, timeout_s=600)


def check_batch_size_finder(rank, world_size, folder):
    finder = lightning_callbacks.BatchSizeFinder(mode="power", steps_per_trial=1, max_trials=1)
    trainer = make_trainer("zero3", world_size, folder, callbacks=[finder])
    with pytest.raises(MisconfigurationException, match="Batch size finder is not supported with distributed"):
        trainer.fit(Net(), batches(x_of(0, rank)), batches(ONE))


@pytest.mark.conformance("F")
def test_the_batch_size_finder_is_refused_by_lightning_on_several_ranks(tmp_path):
    run_ranks(check_batch_size_finder, 2, init=False, folder=str(tmp_path))


# --- BasePredictionWriter: both intervals, every sample once, with its index


class Written(lightning_callbacks.BasePredictionWriter):
    def __init__(self, interval):
        super().__init__(interval)
        self.batch, self.epoch = [], []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
        self.batch += list(zip(indices, prediction.tolist(), strict=True))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        for batch, rows in zip(predictions, indices[0], strict=True):
            self.epoch += list(zip(rows, batch.tolist(), strict=True))


class Echo(Net):
    def predict_step(self, batch, batch_idx):
        self(torch.zeros(1, 4, **F64))
        return batch[0] * 10


def check_writers(rank, world_size, folder, plans):
    for strategy in plans:
        for samples in (5, 4):
            writer = Written("batch_and_epoch")
            trainer = make_trainer(strategy, world_size, folder, callbacks=[writer], use_distributed_sampler=True)
            trainer.predict(Echo(), DataLoader(TensorDataset(torch.arange(samples, **F64)), batch_size=2))
            assert writer.batch == writer.epoch == [(i, 10.0 * i) for i in range(rank, samples, world_size)], strategy


@pytest.mark.conformance("F")
@pytest.mark.conformance("E8")
@pytest.mark.parametrize("world_size", [1, 2])
def test_prediction_writers_get_each_sample_once_with_its_index(world_size, tmp_path):
    run_ranks(check_writers, world_size, init=False, folder=str(tmp_path), plans=["zero3", "ddp"])
