"""The strategies under Lightning's Trainer: same weights as a plain loop, with accumulation and clipping."""

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from loops import IN_MEMORY
from models import MODELS, OPTIMIZERS, make, reference
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
    for strategy in [s for s in IN_MEMORY if s != "single" or world_size == 1]:
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


@pytest.mark.conformance("A1")
@pytest.mark.conformance("A2")
@pytest.mark.conformance("A3")
@pytest.mark.conformance("A5")
@pytest.mark.conformance("A6")
@pytest.mark.conformance("C12")
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


class Clips(Module):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        strategy = self.trainer.strategy
        largest = float(strategy.gradient_norm(float("inf")))
        assert float(strategy.clip_by_norm(optimizer, largest / 2, float("inf"))) == largest
        assert float(strategy.gradient_norm(float("inf"))) == pytest.approx(largest / 2, rel=1e-4)


def public_numbers(rank, world_size, folder):
    state = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        module = Clips("tiny_gpt", "adamw")
        trainer = make_trainer(strategy, world_size, folder)
        loader = DataLoader(Batches("tiny_gpt", rank, 2), batch_size=None)
        trainer.fit(module, loader, loader)
        assert trainer.strategy.wire_bytes == trainer.strategy.engine.collectives.bytes_sent > 0
        assert (trainer.strategy.data_rank, trainer.strategy.data_world_size) == (rank, world_size)
        state[strategy] = trainer.strategy.model_state_bytes()
    assert state["ddp"] > state["zero1"] > state["zero2"] > state["zero3"] > 0, state


@pytest.mark.case("C025")
def test_what_a_strategy_tells_and_clips_by_the_largest_element(tmp_path):
    run_ranks(public_numbers, 2, init=False, folder=str(tmp_path))
