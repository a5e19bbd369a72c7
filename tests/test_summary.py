"""summary.json and loss.png: every figure, on one rank, with what is missing and what is not finite."""

import json
import math

import lightning
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from matplotlib.image import imread
from shardlight.framework.loss_plot import draw_losses, running_mean
from shardlight.framework.module import TrainingModule
from shardlight.framework.optim import OptimizerConfig
from shardlight.framework.summary import RunSummary, _strategy_name, write_json
from shardlight.strategies import STRATEGIES
from torch.utils.data import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


class Model(TrainingModule):
    """Its loss is 5 - (optimizer steps done)."""

    def __init__(self, metric="val/bpb"):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([5.0]))
        self.optimizer_config = OptimizerConfig(name="sgd", lr=1.0)
        self.metric = metric

    def training_step(self, batch, batch_idx):
        loss = self.weight.sum()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log(self.metric, self.weight.sum() / 2, batch_size=1)


class Data(LightningDataModule):
    unigram_bpb = 4.5

    def train_dataloader(self):
        return DataLoader([{"tokens": torch.zeros(10)}] * 4, batch_size=1)

    val_dataloader = train_dataloader


class TwoRanks(SingleDeviceStrategy):
    """Answers a gather as if a second rank had 1000 bytes more and twice the tokens."""

    def all_gather(self, tensor, group=None, sync_grads=False):
        self.gathers = getattr(self, "gathers", 0) + 1
        return torch.stack([tensor, tensor * torch.tensor([1, 2]) + torch.tensor([1000, 0])])


def fit(tmp_path, module=None, data=None, **options):
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    settings |= {"enable_model_summary": False, "enable_progress_bar": False, "max_steps": 4, "max_epochs": 1}
    trainer = Trainer(**{**settings, **options}, default_root_dir=tmp_path, callbacks=[RunSummary(tmp_path)])
    trainer.fit(module or Model(), data or Data())
    return trainer


def summary(tmp_path):
    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads((tmp_path / "summary.json").read_text(), parse_constant=no_constant)


def test_summary_has_every_figure(tmp_path):
    fit(tmp_path, val_check_interval=2)
    result = summary(tmp_path)
    assert result["steps"] == 4
    assert result["loss"] == 2.0  # of the last step: 5 - 3
    assert result["val_bpb"] == 0.5
    assert result["unigram_bpb"] == 4.5
    assert result["world_size"] == 1
    assert result["strategy"] == "single_device"
    assert result["metrics"] == {"train/loss": 2.0, "val/bpb": 0.5}
    assert 0 < result["wall_s"] < 60
    assert result["tokens_per_s"] > 0
    (peak,) = result["peak_memory_bytes"]
    assert isinstance(peak, int) and 50 * 2**20 < peak < 64 * 2**30
    assert set(result["versions"]) == {"python", "torch", "lightning", "omegaconf", "shardlight"}
    assert result["versions"]["lightning"] == lightning.__version__
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "summary.json"]


def test_what_there_is_not_is_null(tmp_path):
    class OnlyTraining(Data):
        unigram_bpb = None
        val_dataloader = LightningDataModule.val_dataloader

    fit(tmp_path, data=OnlyTraining())
    result = summary(tmp_path)
    assert (result["val_bpb"], result["unigram_bpb"], result["loss"]) == (None, None, 2.0)
    assert (tmp_path / "loss.png").exists()


def test_figures_of_all_ranks_come_with_one_gather(tmp_path):
    strategy = TwoRanks(device="cpu")
    fit(tmp_path, strategy=strategy, limit_val_batches=0)
    first, second = summary(tmp_path)["peak_memory_bytes"]
    assert second - first == 1000
    assert strategy.gathers == 1


def test_tokens_per_second_counts_all_ranks_and_no_pause(tmp_path, monkeypatch):
    now = [0.0]

    class Slow(Model):
        def on_train_batch_start(self, batch, batch_idx):
            now[0] += 2.0

        def validation_step(self, batch, batch_idx):
            now[0] += 100.0

    from shardlight.framework.meter import Meter

    monkeypatch.setattr("shardlight.framework.summary.Meter", lambda: Meter(clock=lambda: now[0]))
    fit(tmp_path, module=Slow(), strategy=TwoRanks(device="cpu"), val_check_interval=2)
    # 4 steps of 10 tokens on the first rank, 20 on the second, 2 s each.
    assert summary(tmp_path)["tokens_per_s"] == pytest.approx(15.0)


def test_ranks_with_the_same_data_count_their_tokens_once(tmp_path, monkeypatch):
    class Replicas(TwoRanks):
        data_world_size = 1

        def all_gather(self, tensor, group=None, sync_grads=False):
            return torch.stack([tensor, tensor])

    seen = []
    monkeypatch.setattr("shardlight.framework.summary.Meter.seconds", property(lambda self: 2.0))
    strategy = Replicas(device="cpu")
    monkeypatch.setattr(Trainer, "world_size", property(lambda self: 2))
    fit(tmp_path, strategy=strategy, limit_val_batches=0)
    seen.append(summary(tmp_path)["tokens_per_s"])
    assert seen == [20.0]  # 4 steps of 10 tokens in 2 s


def test_the_loss_of_the_window_is_taken_where_the_strategy_has_it(tmp_path):
    class WindowLoss(SingleDeviceStrategy):
        window_loss = 1.25

        def gradient_norm(self):
            return torch.tensor(1.0)

    fit(tmp_path, strategy=WindowLoss(device="cpu"), limit_val_batches=0)
    assert summary(tmp_path)["loss"] == 1.25
    assert summary(tmp_path)["metrics"]["loss"] == 1.25


def test_a_failed_run_writes_nothing(tmp_path):
    class Boom(Model):
        def training_step(self, batch, batch_idx):
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fit(tmp_path, module=Boom())
    assert list(tmp_path.iterdir()) == []


def test_wall_time_counts_from_the_start_that_is_given(tmp_path):
    import time

    callback = RunSummary(tmp_path, started=time.time() - 100)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        max_steps=1,
        callbacks=[callback],
        default_root_dir=tmp_path,
    )
    trainer.fit(Model(), Data())
    assert 100 < summary(tmp_path)["wall_s"] < 160


def test_numbers_that_are_not_finite_are_null(tmp_path):
    value = {"a": [1, math.nan, (math.inf,)], "b": {"c": -math.inf, "d": 2.5, "e": "text", "f": None, "g": True}}
    write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "a": [1, None, [None]],
        "b": {"c": None, "d": 2.5, "e": "text", "f": None, "g": True},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_our_strategies_go_by_their_name(name):
    assert _strategy_name(STRATEGIES[name]()) == name


def test_running_mean_has_no_bias_to_the_first_value():
    assert running_mean([1.0, 1.0, 1.0]) == pytest.approx([1, 1, 1])
    assert running_mean([0.0, 1.0]) == pytest.approx([0, 1 / 1.5])
    assert running_mean([]) == []


def test_running_mean_is_over_a_thirtieth_of_the_run():
    values = [0.0] * 290 + [1.0] * 10  # 300 values: a past of 1 - 1 / 10
    assert running_mean(values)[-1] == pytest.approx(1 - 0.9**10, rel=1e-9)


@pytest.mark.parametrize("validation_name", ["val/bpb", "val/loss", ""])
def test_plot_is_a_picture_with_a_line(tmp_path, validation_name):
    losses = [(step, 5 / step) for step in range(1, 30)]
    validation = [(15, 2.0), (29, 1.0)] if validation_name else []
    draw_losses(tmp_path / "loss.png", losses, validation, validation_name, 4.5)
    pixels = imread(tmp_path / "loss.png")
    assert pixels.shape == (540, 960, 4)
    blue = (pixels[..., 2] > pixels[..., 0] + 0.2).sum()
    orange = (pixels[..., 0] > pixels[..., 2] + 0.5).sum()
    assert blue > 500
    assert (orange > 100) == bool(validation_name)


def test_plot_of_nothing_is_empty_and_no_error(tmp_path):
    draw_losses(tmp_path / "loss.png", [], [], "")
    assert (tmp_path / "loss.png").stat().st_size > 1000
