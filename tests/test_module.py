"""TrainingModule under stock Lightning: weighted losses, epoch means, optimizer steps, what the strategy is told."""

import math

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from shardlight.framework.module import TrainingModule
from shardlight.framework.optim import OptimizerConfig, ScheduleConfig
from shardlight.strategies.errors import ShardlightError
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

# What stock Lightning says about small runs like these.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]

VOCABULARY = 7


class Model(TrainingModule):
    """Predicts a label from a token; batches are {"tokens": (B, T), "labels": (B, T)}."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def training_step(self, batch, batch_idx):
        loss = self.token_loss(self.table(batch["tokens"]), batch["labels"])
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/bpb", self.token_loss(self.table(batch["tokens"]), batch["labels"], unit="bits"))


class Recording(SingleDeviceStrategy):
    """A stock strategy that offers what ours offer, and writes down what it is told."""

    def __init__(self):
        super().__init__(device="cpu")
        self.weights = []
        self.window_loss = 1.5

    def weigh_loss(self, weight):
        self.weights.append(weight)

    def gradient_norm(self):
        return torch.tensor(2.5, dtype=torch.float64)


def batches(count, ignored=0):
    """`count` batches of one sequence of 6 tokens; batch i has i * ignored labels that do not count."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for index in range(count):
        tokens, labels = torch.randint(VOCABULARY, (2, 6), generator=generator)
        labels[: index * ignored] = -100
        result.append({"tokens": tokens, "labels": labels})
    return result


def loader(data):
    return DataLoader(data, batch_size=1)


def trainer(tmp_path, **options):
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "default_root_dir": tmp_path,
    }
    return Trainer(**{**settings, **options})


def model(**optimizer):
    torch.manual_seed(0)
    module = Model()
    module.optimizer_config = OptimizerConfig(**{"name": "sgd", "lr": 0.1, **optimizer})
    return module


def test_token_loss_is_the_mean_over_valid_labels():
    logits, labels = torch.randn(2, 3, VOCABULARY), torch.randint(VOCABULARY, (2, 3))
    labels[0, 1] = labels[1, 2] = -100
    loss = Model().token_loss(logits, labels)
    expected = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(Model().token_loss(logits, labels, unit="bits"), expected / math.log(2))


def test_token_loss_takes_another_ignore_index_and_no_batch_dim():
    logits, labels = torch.randn(3, VOCABULARY), torch.tensor([0, 6, 2])
    loss = Model().token_loss(logits, labels, ignore_index=0)
    torch.testing.assert_close(loss, F.cross_entropy(logits[1:], labels[1:]))


def test_token_loss_is_computed_in_float32_at_least():
    labels = torch.zeros(3, dtype=torch.int64)
    assert Model().token_loss(torch.zeros(3, VOCABULARY, dtype=torch.bfloat16), labels).dtype == torch.float32
    assert Model().token_loss(torch.zeros(3, VOCABULARY, dtype=torch.float64), labels).dtype == torch.float64


def test_token_loss_without_a_valid_label_is_zero_with_a_graph():
    logits = torch.randn(2, VOCABULARY, requires_grad=True)
    loss = Model().token_loss(logits, torch.full((2,), -100))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_token_loss_names_shapes_that_do_not_belong_together():
    with pytest.raises(ValueError, match=r"logits \(2, 3, 7\) and labels \(3, 2\) do not belong together"):
        Model().token_loss(torch.zeros(2, 3, VOCABULARY), torch.zeros(3, 2, dtype=torch.int64))


@pytest.mark.parametrize("weight", [4, 4.0, torch.tensor(4)])
def test_weighted_divides_the_sum(weight):
    loss_sum = torch.tensor(6.0, requires_grad=True)
    mean = Model().weighted(loss_sum, weight)
    mean.backward()
    assert (mean.item(), mean.dtype, loss_sum.grad.item()) == (1.5, torch.float32, 0.25)


def test_the_strategy_is_told_the_weight_in_training_only(tmp_path):
    strategy = Recording()
    data = loader(batches(3, ignored=2))
    trainer(tmp_path, strategy=strategy).fit(model(), data, data)
    assert [weight.item() for weight in strategy.weights] == [6, 4, 2]


def test_epoch_means_are_means_over_tokens(tmp_path):
    data = batches(3, ignored=2)
    module = model(lr=0.0)
    run = trainer(tmp_path)
    run.fit(module, loader(data), loader(data))
    tokens = torch.stack([batch["tokens"] for batch in data])
    labels = torch.stack([batch["labels"] for batch in data])
    mean = F.cross_entropy(module.table(tokens).flatten(0, 1), labels.flatten()).item()
    assert run.callback_metrics["train/loss_epoch"].item() == pytest.approx(mean, rel=1e-6)
    assert run.callback_metrics["val/bpb"].item() == pytest.approx(mean / math.log(2), rel=1e-6)


class LogCalls(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"step": loss})
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("plain", loss.detach() * 2, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.token_loss(self.table(batch["tokens"]), batch["labels"])
        self.log("val", loss)
        self.log_dict({"val_dict": loss})
        self.log("val_local", loss, sync_dist=False, batch_size=3)
        self.log("val_step", loss, on_step=True)
        self.log("val_rank_zero", loss, rank_zero_only=True)
        self.log("val_plain", 1.0)


def test_defaults_of_log_for_weighted_losses(tmp_path, monkeypatch):
    stock_log, seen = LightningModule.log, {}

    def log(self, name, value, **options):
        seen[name] = (options["sync_dist"], options["batch_size"])
        stock_log(self, name, value, **options)

    monkeypatch.setattr(LightningModule, "log", log)
    module = LogCalls()
    module.optimizer_config = OptimizerConfig(name="sgd", lr=0.1)
    trainer(tmp_path).fit(module, loader(batches(1)), loader(batches(1)))
    assert seen == {
        "train/loss": (False, 6),  # a step value is logged: no collective in every step
        "step": (False, 6),
        "epoch": (True, 6),
        "plain": (False, None),  # not the tensor that token_loss returned
        "val": (True, 6),
        "val_dict": (True, 6),
        "val_local": (False, 3),
        "val_step": (False, 6),
        "val_rank_zero": (False, 6),
        "val_plain": (False, None),
    }


class Losses(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def test_loss_and_gradient_norm_of_the_window_are_logged(tmp_path):
    losses = Losses()
    run = trainer(tmp_path, strategy=Recording(), callbacks=[losses], accumulate_grad_batches=2)
    run.fit(model(), loader(batches(2)))
    assert "loss" not in losses.seen[0]
    assert (losses.seen[1]["loss"], losses.seen[1]["grad_norm"]) == (1.5, 2.5)
    assert run.progress_bar_metrics["loss"] == 1.5


def test_a_stock_strategy_logs_neither(tmp_path):
    run = trainer(tmp_path)
    run.fit(model(), loader(batches(2)))
    assert not {"loss", "grad_norm"} & set(run.callback_metrics)


class Rates(Callback):
    """The learning rate after 0, 1, ... optimizer steps."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.setdefault(trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer, pl_module):
        self.seen[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]


class StepLR(Model):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.case("C010")
def test_a_users_schedule_moves_per_optimizer_step(tmp_path):
    rates = Rates()
    run = trainer(tmp_path, callbacks=[rates], accumulate_grad_batches=2)
    run.fit(StepLR(), loader(batches(8)))
    assert list(rates.seen) == [0, 1, 2, 3, 4]
    assert list(rates.seen.values()) == pytest.approx([1, 1, 0.1, 0.1, 0.01])


@pytest.mark.case("C010")
def test_warmup_and_total_of_the_config_are_optimizer_steps(tmp_path):
    rates = Rates()
    module = model(lr=1.0)
    module.schedule_config = ScheduleConfig(name="linear", warmup_steps=1)
    # 7 micro-batches in windows of 2, the last one short: 4 optimizer steps.
    trainer(tmp_path, callbacks=[rates], accumulate_grad_batches=2).fit(module, loader(batches(7)))
    assert list(rates.seen.values()) == pytest.approx([0.5, 1, 2 / 3, 1 / 3, 0])


def test_max_steps_end_the_schedule(tmp_path):
    rates = Rates()
    module = model(lr=1.0)
    module.schedule_config = ScheduleConfig(name="linear")
    trainer(tmp_path, callbacks=[rates], max_steps=2).fit(module, loader(batches(7)))
    assert list(rates.seen.values()) == pytest.approx([1, 0.5, 0])


def test_without_config_and_override_the_error_says_what_to_set(tmp_path):
    with pytest.raises(ShardlightError, match="Model has no optimizer: set optimizer in the config"):
        trainer(tmp_path).fit(Model(), loader(batches(1)))
