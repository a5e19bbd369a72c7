"""Checkpoints of a pipeline: names are the bare model's, and any number of stages opens them."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from shardlight.strategies import Pipeline, Single, ZeRO3, read_state_dict
from shardlight.strategies.errors import CheckpointError
from shardlight.strategies.notices import Notice
from test_pipeline import STEPS, Module, batch, trainer
from torch.utils.data import DataLoader

STATE = 2 * STEPS


def _loader(world, stages, rank, first, steps):
    pipelines, place = world // stages, rank % (world // stages)
    # Two batches a step over all ranks, on however many pipelines.
    per_step = 2 // pipelines
    numbers = [
        n
        for step in range(first, first + steps)
        for n in range(2 * step + place * per_step, 2 * step + (place + 1) * per_step)
    ]
    return DataLoader([batch(n) for n in numbers], batch_size=None), per_step


def _strategy(layout):
    return ZeRO3() if layout is None else Pipeline(**layout)


def train_body(rank, world, folder, layout, source=None, target=None, steps=STEPS):
    """Trains `steps` steps from a checkpoint or from the start; returns this rank's weights by name."""
    warnings.filterwarnings("ignore", category=Notice)  # that other ranks go on
    module = Module()
    stages = 1 if layout is None else layout["stages"]
    loader, accumulate = _loader(world, stages, rank, 0 if source is None else STEPS, steps)
    fit = trainer(
        _strategy(layout), world, folder, accumulate_grad_batches=accumulate, max_epochs=2, limit_val_batches=0
    )
    fit.fit_loop.max_epochs = 1 if source is None else 2
    fit.fit(module, loader, DataLoader([batch(99)], batch_size=None), ckpt_path=source)
    if target is not None:
        fit.save_checkpoint(target)
    with fit.strategy.gathered():
        return {n: p.detach().clone() for n, p in module.named_parameters()}


LAYOUTS = {
    "pipeline2": (2, {"stages": 2, "micro_batches": 4}),
    "pipeline2x2": (4, {"stages": 2, "micro_batches": 4, "zero": 2}),
    "pipeline4": (4, {"stages": 4, "schedule": "zb_h1", "micro_batches": 4, "zero": 0}),
    "interleaved": (2, {"stages": 2, "schedule": "interleaved_1f1b", "micro_batches": 2, "zero": 3}),
    "zero3": (2, None),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights after all steps without a stop, under zero3; and of the first half."""
    folder = tmp_path_factory.mktemp("whole")
    half = str(folder / "half")
    run_ranks(train_body, 2, timeout_s=120, init=False, folder=str(folder), layout=None, target=half)
    ranks = run_ranks(train_body, 2, timeout_s=120, init=False, folder=str(folder), layout=None, source=half)
    return half, ranks[0]


@pytest.mark.parametrize("saved_by", [name for name in LAYOUTS if name != "zero3"])
def test_training_goes_on_from_a_pipeline_under_any_layout(saved_by, whole, tmp_path):
    half, end = whole
    world, layout = LAYOUTS[saved_by]
    target = str(tmp_path / "checkpoint")
    run_ranks(train_body, world, timeout_s=120, init=False, folder=str(tmp_path), layout=layout, target=target)
    there, expected = read_state_dict(target), read_state_dict(half)
    assert set(there) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(there[name], value, rtol=1e-9, atol=1e-9)
    others = {"pipeline2": ("pipeline4", "zero3"), "pipeline4": ("interleaved",)}.get(saved_by, ("zero3",))
    for name in others:
        world, layout = LAYOUTS[name]
        ranks = run_ranks(
            train_body, world, timeout_s=120, init=False, folder=str(tmp_path), layout=layout, source=target
        )
        got = {n: p for rank in ranks for n, p in rank.items()}
        assert set(got) == set(end)
        for key, value in end.items():
            torch.testing.assert_close(got[key], value, rtol=1e-8, atol=1e-8, msg=lambda m, k=(name, key): f"{k}: {m}")


def test_a_pipeline_goes_on_from_other_strategies(whole, tmp_path):
    half, end = whole
    world, layout = LAYOUTS["pipeline2x2"]
    ranks = run_ranks(train_body, world, timeout_s=120, init=False, folder=str(tmp_path), layout=layout, source=half)
    got = {n: p for rank in ranks for n, p in rank.items()}
    for key, value in end.items():
        torch.testing.assert_close(got[key], value, rtol=1e-8, atol=1e-8)


def open_window_body(rank, world, folder):
    module = Module()
    fit = trainer(Pipeline(stages=2), world, folder, accumulate_grad_batches=2, limit_val_batches=0)
    saves = []

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx % 2:
                trainer.save_checkpoint(f"{folder}/step-{batch_idx}")
                saves.append(batch_idx)
            else:
                with pytest.raises(CheckpointError, match="inside an accumulation window"):
                    trainer.save_checkpoint(f"{folder}/open-{batch_idx}")

    fit.callbacks.append(Saves())
    fit.fit(module, DataLoader([batch(n) for n in range(4)], batch_size=None), DataLoader([batch(9)], batch_size=None))
    return saves


def test_a_checkpoint_inside_an_accumulation_window_is_refused(tmp_path):
    assert run_ranks(open_window_body, 2, timeout_s=60, init=False, folder=str(tmp_path)) == [[1, 3]] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-3"]


class SavedInside(Module):
    """Saves after the first batch of a window."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0 and self.trainer.world_size == 1:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/inside")


def inside_body(rank, world, folder):
    warnings.filterwarnings("ignore", category=Notice)
    strategy = Pipeline(stages=world) if world > 1 else Single()
    fit = trainer(strategy, world, folder, accumulate_grad_batches=2, limit_val_batches=0)
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    loader = DataLoader([batch(n) for n in range(2)], batch_size=None)
    if world == 1:
        return fit.fit(SavedInside(), loader)
    with pytest.raises(
        CheckpointError, match="saved inside an accumulation window, whose gradients ranks that have parts"
    ):
        fit.fit(SavedInside(), loader, ckpt_path=f"{folder}/inside")


def test_a_window_that_another_strategy_left_open_is_refused(tmp_path):
    for world in (1, 2):
        run_ranks(inside_body, world, timeout_s=60, init=False, folder=str(tmp_path))
