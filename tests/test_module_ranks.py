"""TrainingModule and RunSummary on several ranks: token-exact means, optimizer steps, the figures of all ranks."""

import json
import math

import pytest
import torch
from harness import run_ranks
from lightning.pytorch import Callback, Trainer
from shardlight.framework.module import TrainingModule
from shardlight.framework.optim import OptimizerConfig, ScheduleConfig
from shardlight.framework.summary import RunSummary
from shardlight.strategies import STRATEGIES
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

VOCABULARY = 7


class Model(TrainingModule):
    def __init__(self, name="sgd", lr=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, VOCABULARY).double()
        self.optimizer_config = OptimizerConfig(name=name, lr=lr)

    def training_step(self, batch, batch_idx):
        loss = self.token_loss(self.table(batch["tokens"]), batch["labels"])
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/bpb", self.token_loss(self.table(batch["tokens"]), batch["labels"], unit="bits"))


class StepLR(Model):
    """A user's own optimizer and schedule."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Rates(Callback):
    """The learning rate after 0, 1, ... optimizer steps."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.setdefault(trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer, pl_module):
        self.seen[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]


def batches(count):
    """`count` sequences of 6 tokens; sequence i has i % 4 labels that do not count."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for index in range(count):
        tokens, labels = torch.randint(VOCABULARY, (2, 6), generator=generator)
        labels[: index % 4] = -100
        result.append({"tokens": tokens, "labels": labels})
    return result


def trainer(world_size, folder, strategy="zero3", **options):
    return Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=STRATEGIES[strategy](),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **options,
    )


def rates_body(rank, world_size, folder):
    data = DataLoader(batches(8 * world_size), batch_size=1)
    seen = []
    configured = Model()
    configured.schedule_config = ScheduleConfig(name="linear", warmup_steps=1)
    for module in (StepLR(), configured):
        rates = Rates()
        trainer(world_size, folder, accumulate_grad_batches=2, callbacks=[rates], limit_val_batches=0).fit(
            module, data, data
        )
        seen.append(list(rates.seen.items()))
    return seen


@pytest.mark.case("C010")
@pytest.mark.parametrize("world_size", [2, 4])
def test_schedules_move_per_optimizer_step_whatever_the_number_of_ranks(world_size, tmp_path):
    for users, configured in run_ranks(rates_body, world_size, init=False, folder=tmp_path):
        assert [step for step, _ in users] == [step for step, _ in configured] == [0, 1, 2, 3, 4]
        assert [rate for _, rate in users] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
        assert [rate for _, rate in configured] == pytest.approx([0.5, 1, 2 / 3, 1 / 3, 0])


def losses_body(rank, world_size, folder):
    data = batches(4 * world_size)
    results = {}
    for strategy in ("ddp", "zero3"):
        module = Model(lr=0.5)
        run = trainer(world_size, folder, strategy, accumulate_grad_batches=2, callbacks=[RunSummary(folder)])
        run.fit(module, DataLoader(data, batch_size=1), DataLoader(data, batch_size=1))
        with run.strategy.gathered():
            weight = module.table.weight.detach().clone()
        metrics = {name: value.item() for name, value in run.callback_metrics.items()}
        results[strategy] = (weight, metrics)
    return results


def reference(world_size):
    """One process on the joined windows: weights, mean loss of the epoch in nats, loss and norm of the last window."""
    module, data = Model(lr=0.5), batches(4 * world_size)
    # Lightning shuffles what it trains on over ranks, whatever the loader says.
    data = [data[index] for index in DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)]
    losses = []
    for start in range(0, len(data), 2 * world_size):
        window = data[start : start + 2 * world_size]
        tokens, labels = (torch.stack([item[name] for item in window]) for name in ("tokens", "labels"))
        loss_sum = F.cross_entropy(module.table(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum().item()
        (gradient,) = torch.autograd.grad(loss_sum / count, module.table.weight)
        losses.append((loss_sum.item(), count))
        with torch.no_grad():
            module.table.weight -= 0.5 * gradient
    tokens, labels = (torch.stack([item[name] for item in data]) for name in ("tokens", "labels"))
    validation = F.cross_entropy(module.table(tokens).flatten(0, 1), labels.flatten()).item() / math.log(2)
    return {
        "weight": module.table.weight.detach(),
        "train/loss": sum(loss for loss, _ in losses) / sum(count for _, count in losses),
        "loss": losses[-1][0] / losses[-1][1],
        "grad_norm": gradient.norm().item(),
        "val/bpb": validation,
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_norm_and_epoch_means_are_those_of_one_process_token_by_token(world_size, tmp_path):
    expected = reference(world_size)
    weight = expected.pop("weight")
    for results in run_ranks(losses_body, world_size, init=False, folder=tmp_path):
        for got_weight, metrics in results.values():
            torch.testing.assert_close(got_weight, weight, rtol=0, atol=1e-10)
            # Lightning keeps logged values in float32.
            assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["world_size"], summary["strategy"], summary["steps"]) == (world_size, "zero3", 2)
    assert len(summary["peak_memory_bytes"]) == world_size
    assert all(50 * 2**20 < peak < 64 * 2**30 for peak in summary["peak_memory_bytes"])
    assert summary["val_bpb"] == pytest.approx(expected["val/bpb"], rel=1e-6)
    assert summary["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert summary["tokens_per_s"] > 0
