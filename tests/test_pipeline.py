"""The pipeline strategy under Lightning's Trainer: losses, norms and weights of one process."""

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from models import OPTIMIZERS, TinyGPT
from shardlight.strategies import Pipeline
from torch.nn import functional as F
from torch.utils.data import DataLoader

STEPS = 3
ROWS = 8


def batch(number, rows=ROWS):
    g = torch.Generator().manual_seed(number)
    return torch.randint(17, (rows, 10), generator=g), torch.randint(17, (rows, 10), generator=g)


class Module(pl.LightningModule):
    def __init__(self, tied=True, layers=4, optimizer="adamw", recorded=None):
        super().__init__()
        torch.manual_seed(0)
        self.model = TinyGPT(layers=layers, tied=tied).double()
        self.optimizer_name = optimizer
        self.losses, self.norms = [], []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten()), sync_dist=True)

    def on_before_optimizer_step(self, optimizer):
        strategy = self.trainer.strategy
        if hasattr(strategy, "gradient_norm"):
            self.norms.append(float(strategy.gradient_norm()))
            self.losses.append(strategy.window_loss)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer_name](self.parameters())


def trainer(strategy, world, folder, **kwargs):
    settings = dict(
        accelerator="cpu",
        devices=world,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        precision="64-true",
        max_epochs=1,
        num_sanity_val_steps=0,
    )
    return pl.Trainer(strategy=strategy, **{**settings, **kwargs})


def reference(data, accumulate, clip, pipelines=1, **kwargs):
    """One process on the joined batches."""
    module = Module(**kwargs)
    optimizer = module.configure_optimizers()
    losses, norms = [], []
    for first in range(0, STEPS * accumulate, accumulate):
        total = 0.0
        for number in range(first, first + accumulate):
            for pipeline in range(pipelines):
                x, y = data(number * pipelines + pipeline)
                loss = F.cross_entropy(module.model(x).flatten(0, 1), y.flatten()) / (accumulate * pipelines)
                loss.backward()
                total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf")).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {n: p.detach() for n, p in module.named_parameters()}


def settings_body(rank, world, folder, cases):
    for case in cases:
        options, accumulate, clip, optimizer = case
        stages = options["stages"]
        pipelines, place = world // stages, rank % (world // stages)
        module = Module(optimizer=optimizer)
        fit = trainer(
            Pipeline(**options),
            world,
            folder,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip,
        )
        data = [batch(number * pipelines + place) for number in range(STEPS * accumulate)]
        fit.fit(module, DataLoader(data, batch_size=None), DataLoader([batch(99, 7)], batch_size=None))
        losses, norms, weights = reference(batch, accumulate, clip, pipelines, optimizer=optimizer)
        note = f"{case} on {world} ranks"
        torch.testing.assert_close(
            module.losses, losses, rtol=1e-10, atol=1e-12, msg=lambda m, n=note: f"{n} losses: {m}"
        )
        torch.testing.assert_close(module.norms, norms, rtol=1e-10, atol=1e-12, msg=lambda m, n=note: f"{n} norms: {m}")
        with torch.no_grad():
            whole = Module()
            whole.load_state_dict(weights, strict=False)
            there = F.cross_entropy(whole.model(batch(99, 7)[0]).flatten(0, 1), batch(99, 7)[1].flatten())
        torch.testing.assert_close(fit.callback_metrics["val_loss"].double(), there, rtol=1e-6, atol=1e-6)
        with fit.strategy.gathered():
            own = {n: p.detach().clone() for n, p in module.named_parameters()}
        assert own and len(own) < len(weights)
        for name, value in own.items():
            torch.testing.assert_close(
                value, weights[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=note: f"{n} {name}: {m}"
            )


CASES = {
    2: [
        ({"stages": 2, "schedule": "1f1b", "micro_batches": 4}, 1, None, "adamw"),
        ({"stages": 2, "schedule": "gpipe", "micro_batches": 5, "zero": 3}, 2, 0.5, "sgd"),
        ({"stages": 2, "schedule": "interleaved_1f1b", "micro_batches": 4}, 1, 0.5, "sgd"),
        ({"stages": 2, "schedule": "zb_h1", "micro_batches": 4, "zero": 0}, 2, None, "sgd"),
        ({"stages": 2, "schedule": "zbv", "micro_batches": 5}, 1, 0.5, "adamw"),
        ({"stages": 2, "schedule": "1f1b", "micro_batches": 1}, 1, None, "sgd"),
    ],
    3: [({"stages": 3, "schedule": "1f1b", "micro_batches": 4}, 2, 0.5, "adamw")],
    4: [
        ({"stages": 2, "schedule": "1f1b", "micro_batches": 4, "zero": 1}, 2, 0.5, "adamw"),
        ({"stages": 2, "schedule": "zb_h1", "micro_batches": 5, "zero": 2}, 1, 0.5, "sgd"),
        ({"stages": 2, "schedule": "zbv", "micro_batches": 4, "zero": 3}, 2, None, "sgd"),
        ({"stages": 4, "schedule": "1f1b", "micro_batches": 4}, 1, 0.5, "sgd"),
    ],
}


@pytest.mark.parametrize("world", CASES)
def test_any_layout_gives_the_numbers_of_one_process(world, tmp_path):
    run_ranks(settings_body, world, timeout_s=240, init=False, folder=str(tmp_path), cases=CASES[world])
