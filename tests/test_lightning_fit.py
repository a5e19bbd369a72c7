"""The strategies under Lightning's Trainer: same weights as a plain loop, with accumulation and clipping."""

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from models import MODELS, OPTIMIZERS, make, reference
from shardlight.strategies import STRATEGIES
from torch.utils.data import DataLoader, Dataset


class Batches(Dataset):
    """Item m is micro-batch m of this rank, already batched."""

    def __init__(self, name, rank, count):
        self.name, self.rank, self.count = name, rank, count

    def __len__(self):
        return self.count

    def __getitem__(self, m):
        return MODELS[self.name][2](1000 * m + self.rank, 4, torch.float64)


class Module(pl.LightningModule):
    def __init__(self, name, optimizer):
        super().__init__()
        self.name, self.optimizer_name = name, optimizer
        self.model = make(name)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = MODELS[self.name][1](self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer_name]([p for p in self.parameters() if p.requires_grad])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", MODELS[self.name][1](self.model, batch), sync_dist=True, batch_size=4)


def make_trainer(strategy, world, folder, **kwargs):
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


def fit(rank, world_size, folder, name, optimizer, accumulate, clip):
    count = 3 * accumulate - (1 if accumulate > 1 else 0)
    _, _, weights = reference(name, world_size, 3, accumulate, clip, optimizer)
    for strategy in [s for s in STRATEGIES if s != "single" or world_size == 1]:
        module = Module(name, optimizer)
        trainer = make_trainer(strategy, world_size, folder, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
        trainer.fit(
            module,
            DataLoader(Batches(name, rank, count), batch_size=None),
            DataLoader(Batches(name, rank, 2), batch_size=None),
        )
        assert trainer.global_step == 3
        with trainer.strategy.gathered():
            for n, p in module.model.named_parameters():
                torch.testing.assert_close(
                    p.detach(), weights[n], rtol=1e-10, atol=1e-10, msg=lambda m: f"{strategy} {n}: {m}"
                )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("accumulate,clip", [(1, None), (2, 0.05)])
def test_fit_equals_a_plain_loop(world_size, accumulate, clip, tmp_path):
    for name in MODELS if world_size == 2 else ["tiny_gpt"]:
        run_ranks(
            fit,
            world_size,
            init=False,
            folder=str(tmp_path),
            name=name,
            optimizer="sgd",
            accumulate=accumulate,
            clip=clip,
        )
