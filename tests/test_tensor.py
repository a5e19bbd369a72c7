"""Strategies tensor and mesh under Lightning's Trainer: losses, norms, weights and checkpoints of one process."""

import random
import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import run_ranks
from models import OPTIMIZERS, TinyGPT
from shardlight.strategies import MeshStrategy, Pipeline, TensorParallel, ZeRO3
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.errors import MeshError, StrategyError, TensorError
from shardlight.strategies.notices import Notice
from test_lightning_fit import make_trainer as trainer
from test_pipeline import STEPS, batch, reference
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Module(pl.LightningModule):
    def __init__(self, tied=True, layers=3, dropout=0.0):
        super().__init__()
        self.options = {"tied": tied, "layers": layers}
        self.losses, self.norms, self.predicted = [], [], []

    def configure_model(self):
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            self.model = TinyGPT(heads=12, **self.options)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten()), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(self.trainer.strategy.gradient_norm()))
        self.losses.append(self.trainer.strategy.window_loss)

    def configure_optimizers(self):
        return OPTIMIZERS["adamw"](self.parameters())


def built(**kwargs):
    """The module as a Trainer with precision 64-true builds it."""
    module = Module(**kwargs)
    torch.set_default_dtype(torch.float64)
    module.configure_model()
    torch.set_default_dtype(torch.float32)
    return module


def _strategy(options):
    return MeshStrategy(**options) if "tensor" in options else TensorParallel(**options)


def layouts(rank, world, folder, cases):
    for number, (options, accumulate, clip, kwargs) in enumerate(cases):
        strategy, module = _strategy(options), Module(**kwargs)
        lines = []
        strategy.on_cut = lines.append
        fit = trainer(strategy, world, folder, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
        replicas = world // (options.get("size", options.get("tensor", 1)) * options.get("pipeline", 1))
        place = strategy.data_rank
        assert strategy.data_world_size == replicas
        data = [batch(n * replicas + place) for n in range(STEPS * accumulate)]
        fit.fit(module, DataLoader(data, batch_size=None), DataLoader([batch(99, 7)], batch_size=None))
        losses, norms, weights = reference(batch, accumulate, clip, replicas, make=built, **kwargs)
        note = f"{options} on {world} ranks"
        torch.testing.assert_close(module.losses, losses, rtol=1e-10, atol=1e-12, msg=lambda m, n=note: f"{n}: {m}")
        torch.testing.assert_close(module.norms, norms, rtol=1e-10, atol=1e-12, msg=lambda m, n=note: f"{n}: {m}")
        assert any("heads" in line for line in lines), lines
        path = Path(folder) / f"{world}-{number}"
        fit.save_checkpoint(path)
        whole = built(**kwargs)
        whole.load_state_dict(weights, strict=False)
        saved = CheckpointReader(path)
        for name, value in whole.named_parameters():
            torch.testing.assert_close(
                saved.read(f"model/{name}"), value.data, rtol=1e-9, atol=1e-9, msg=f"{note} {name}"
            )
        with torch.no_grad():
            logits = whole.model(batch(99, 7)[0])
            there = F.cross_entropy(logits.flatten(0, 1), batch(99, 7)[1].flatten())
        torch.testing.assert_close(fit.callback_metrics["val_loss"].double(), there, rtol=1e-6, atol=1e-6)
        predicted = fit.predict(module, DataLoader([batch(99, 7)], batch_size=None))
        if strategy.has_results:
            assert type(predicted[0]) is torch.Tensor
            torch.testing.assert_close(predicted[0], logits, rtol=1e-9, atol=1e-9)


def cases(world):
    if world == 3:
        return [({"size": 3, "zero": 2, "norms": "sharded"}, 2, 0.5, {"tied": False})]
    if world == 2:
        rows = ((0, "sharded", True), (1, "whole", True), (3, "whole", False))
        return [
            ({"size": 2, "zero": z, "norms": n}, 1 + z % 2, 0.5 if z else None, {"tied": tied}) for z, n, tied in rows
        ]
    return [
        ({"size": 2, "zero": 2}, 1, None, {"tied": True}),
        ({"size": 2, "zero": 3, "norms": "sharded"}, 2, 0.5, {"tied": False}),
        ({"pipeline": 2, "tensor": 2, "zero": 1, "schedule": "1f1b"}, 2, 0.5, {"tied": True, "layers": 4}),
        ({"pipeline": 2, "tensor": 2, "zero": 3, "schedule": "zbv"}, 1, 0.5, {"tied": False, "layers": 4}),
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_layout_gives_the_numbers_of_one_process(tmp_path, world):
    run_ranks(layouts, world, timeout_s=200, init=False, folder=str(tmp_path), cases=cases(world))


MADE = {
    "tensor": lambda: TensorParallel(size=2, zero=1),
    "zero3": ZeRO3,
    "mesh": lambda: MeshStrategy(pipeline=2, zero=3),
}


def resumed(rank, world, folder, first, then):
    """Trains under one layout, and goes on under another from its checkpoint."""
    loaders = DataLoader([batch(n) for n in range(4)], batch_size=None), DataLoader([batch(99)], batch_size=None)
    fit = trainer(MADE[first](), world, folder, max_steps=2)
    fit.fit(Module(), *loaders)
    fit.save_checkpoint(f"{folder}/{first}")
    fit = trainer(MADE[then](), world, folder, max_epochs=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("always", category=Notice)
        fit.fit(Module(), *loaders, ckpt_path=f"{folder}/{first}")
    assert rank or any("groups of 2 that share matrices" in str(notice.message) for notice in told)
    fit.save_checkpoint(f"{folder}/{first}-{then}")


@pytest.mark.parametrize("first,then,batches", [("tensor", "zero3", [0, 1, 1, 2, 3]), ("mesh", "tensor", range(4))])
def test_training_goes_on_under_another_layout(tmp_path, first, then, batches):
    """Of two batches that one rank has read, two have read one each: the same, as this loader is not shared out."""
    run_ranks(resumed, 2, timeout_s=100, init=False, folder=str(tmp_path), first=first, then=then)
    found, module = CheckpointReader(tmp_path / f"{first}-{then}"), built()
    assert found.content["step"] == len(batches)
    optimizer = module.configure_optimizers()
    for x, y in map(batch, batches):
        F.cross_entropy(module.model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in module.named_parameters():
        torch.testing.assert_close(
            found.read(f"model/{name}"), value.data, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


class Heads(Module):
    def __init__(self, heads):
        super().__init__()
        self.model = TinyGPT(heads=heads)


class NoLayers(Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Conv1d(1, 1, 1)


def refused(rank, world, folder):
    loaders = DataLoader([batch(0)], batch_size=None), DataLoader([batch(1)], batch_size=None)
    for make, options, match in (
        (lambda: Heads(3), {}, "3 heads"),
        (NoLayers, {}, "NoLayers has no layer that is cut over 2 ranks"),
        (Module, {"plan": {"*.nothing": "row"}}, "nothing"),
    ):
        with pytest.raises(TensorError, match=match):
            trainer(TensorParallel(size=2, **options), world, folder).fit(make(), *loaders)
    with pytest.raises(MeshError, match="2 ranks do not divide into groups of 4 ranks"):
        trainer(TensorParallel(size=4), world, folder)


def test_what_cannot_be_cut_is_refused_by_name(tmp_path):
    run_ranks(refused, 2, init=False, folder=str(tmp_path))
    with pytest.raises(StrategyError, match="size=0 must be at least 1"):
        TensorParallel(size=0)
    with pytest.raises(StrategyError, match="a layer is cut by column, row, vocab, or whole"):
        TensorParallel(plan={"a": "b"})


class Unseeded(pl.LightningModule):
    """Random features that each process draws, and a step that goes by Python's random numbers."""

    def __init__(self):
        super().__init__()
        torch.seed()
        self.model = TinyGPT(heads=12)
        self.register_buffer("features", torch.randn(10, 12))
        self.order = torch.nn.Parameter(torch.randperm(17), requires_grad=False)
        self.drawn = []

    def training_step(self, batch, batch_idx):
        self.drawn += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        logits = self.model(self.order[batch[0]]) + self.features[0, 0]
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def unseeded(rank, world, folder):
    random.seed(rank)
    np.random.seed(rank)
    module = Unseeded()
    fit = trainer(TensorParallel(size=2), world, folder, precision="32-true")
    fit.fit(module, DataLoader([batch(n) for n in range(2)], batch_size=None))
    whole = {n: p.detach().clone() for n, p in module.named_parameters() if n.endswith("norm.weight") or n == "order"}
    return module.drawn, module.features.clone(), whole


def test_ranks_of_a_group_that_were_not_seeded_draw_and_hold_the_same(tmp_path):
    (drawn, features, whole), (others, there, same) = run_ranks(unseeded, 2, init=False, folder=str(tmp_path))
    assert drawn == others and len(drawn) == 6 and torch.equal(features, there)
    assert "order" in whole and all(torch.equal(value, same[name]) for name, value in whole.items())


class Rows(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        x, y = batch(index, 1)
        return x[0], y[0]


def uneven(rank, world, folder):
    """Of five samples one data rank has three and the other two: it is done while the first goes on."""
    found = []
    for strategy in (
        Pipeline(stages=2, micro_batches=2, zero=3),
        TensorParallel(size=2, zero=3),
        MeshStrategy(pipeline=2, tensor=1, micro_batches=1),
    ):
        fit = trainer(strategy, world, folder, use_distributed_sampler=True, limit_train_batches=1)
        fit.fit(Module(layers=4), DataLoader(Rows(), batch_size=2), DataLoader(Rows(), batch_size=1))
        loss = float(fit.callback_metrics["val_loss"])
        predicted = fit.predict(fit.lightning_module, DataLoader(Rows(), batch_size=1))
        rows = sum(len(p) for p in predicted if p is not None)
        found.append((loss, rows if strategy.has_results else 0))
    return found


def test_an_evaluation_of_unequal_lengths_ends(tmp_path):
    first, *others = run_ranks(uneven, 4, timeout_s=120, init=False, folder=str(tmp_path))
    losses = [[loss for loss, _ in ranks] for ranks in (first, *others)]
    assert all(loss == pytest.approx(losses[0][0], rel=1e-6) for ranks in losses for loss in ranks)
    # Two ranks of each mesh have the results of one data rank and two those of the other, or one each.
    rows = [sorted(ranks[n][1] for ranks in (first, *others)) for n in range(3)]
    assert rows == [[0, 0, 2, 3], [2, 2, 3, 3], [0, 0, 2, 3]]
