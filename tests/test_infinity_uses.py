"""Whatever a training does under zero3 it does with its state on disk, to the last bit; and nothing grows with the steps."""

import gc
import random
import shutil
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from harness import RanksFailedError, run_ranks
from models import TinyGPT, token_batch, token_loss
from shardlight.framework.exports import WeightExports
from shardlight.strategies import STRATEGIES, load_weights
from shardlight.strategies.checkpoint.candidates import find
from shardlight.strategies.checkpoint.exact import compare_exactly
from shardlight.strategies.checkpoint.export import export_safetensors
from shardlight.strategies.checkpoint.reader import CheckpointReader
from test_cases_leaks import OPEN, Census, Model, census
from test_cases_training import batches
from test_checkpoint_kill import LAST, train
from test_combinations import quiet, run
from test_infinity_faults import swap_files
from test_lightning_fit import make_trainer
from torch import nn
from torch.utils.data import DataLoader

ROWS = (
    {"precision": "32-true", "accumulate": 2, "clip": 0.5, "keep_gathered": "window"},
    {"precision": "16-mixed", "accumulate": 1, "keep_gathered": "backward", "keep_small": 36},
    {"precision": "bf16-true", "accumulate": 2, "recompute": "blocks", "keep_gathered": "auto"},
    {"precision": "bf16-mixed", "accumulate": 2, "shard_group": 1, "moments_dtype": "bfloat16"},
    {"precision": "bf16-mixed", "accumulate": 1, "compile": "blocks", "clip": 0.5, "reduce_dtype": "float32"},
)
"""With an average of the weights (ShardedEMA) in each."""


def options_together(rank, world, folder, rows):
    quiet()
    for row in rows:
        want = run(rank, world, folder, "zero3", **row)
        got = run(rank, world, folder, "infinity", **row, disk=f"{folder}/swap", staging_bytes=4096)
        for name, value in want.items():
            assert torch.equal(got[name], value), f"{row}: {name} is off by {(got[name] - value).abs().max():.2g}"


@pytest.mark.parametrize("rows", [slice(0, 2), pytest.param(slice(2, None), marks=pytest.mark.long)])
def test_options_change_nothing_with_state_on_disk(rows, tmp_path):
    run_ranks(options_together, 2, init=False, folder=str(tmp_path), rows=ROWS[rows], timeout_s=120)
    assert not list((tmp_path / "swap").iterdir())


class Everything(pl.LightningModule):
    """Manual optimization of two optimizers, weights looked at and changed between steps, and every evaluation."""

    def __init__(self, given=None):
        super().__init__()
        self.automatic_optimization = False
        self.model, self.given, self.seen = None, given, []

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(0)
            self.model = TinyGPT()
            self.model.extra = nn.Parameter(torch.ones(1))
            if self.given is not None:
                load_weights(self.model, self.given)

    def loss(self, batch):
        return token_loss(self.model, batch) + self.model.extra.square().sum()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            first.step()
            first.zero_grad()
        second.step()
        second.zero_grad()
        if batch_idx == 2:
            self.seen.append(self.model.head.weight.norm().item())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            with self.trainer.strategy.gathered(self.model), torch.no_grad():
                self.model.positions.weight.mul_(0.5)
        moments = [s["exp_avg"] for s in self.optimizers()[0].state.values() if "exp_avg" in s]
        self.seen += [m.double().sum().item() for m in moments]

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.loss(batch).item())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])

    def configure_optimizers(self):
        some = [p for n, p in self.model.named_parameters() if "blocks" in n]
        rest = [p for n, p in self.model.named_parameters() if "blocks" not in n]
        return torch.optim.AdamW(some, 1e-2), torch.optim.SGD(rest, 0.1, momentum=0.9)


def everything(rank, world, folder):
    torch.manual_seed(1)
    given = TinyGPT()
    given.extra = nn.Parameter(torch.full((1,), 2.0))
    data = [token_batch(1000 * m + rank, 4, torch.float32) for m in range(4)]
    loader = DataLoader(data, batch_size=None)
    found = {}
    for name in ("zero3", "infinity"):
        options = {"disk": f"{folder}/swap", "staging_bytes": 4096} if name == "infinity" else {}
        module, home = Everything(dict(given.state_dict())), f"{folder}/{name}"
        trainer = make_trainer(
            STRATEGIES[name](**options), world, home, precision="32-true", val_check_interval=2,
            callbacks=[WeightExports(Path(home), 2, "fp32")],
        )  # fmt: skip
        trainer.fit(module, loader, loader)
        trainer.test(module, loader)
        predictions = trainer.predict(module, loader)
        trainer.save_checkpoint(f"{home}/saved")
        with trainer.strategy.gathered():
            weights = {n: p.detach().clone() for n, p in module.named_parameters()}
        if rank == 0:
            export_safetensors(f"{home}/saved", f"{home}/exported")
        found[name] = module.seen, predictions, weights
    (seen, predictions, weights), (others, other_predictions, other_weights) = found.values()
    assert seen == others and len(seen) > 20
    assert all(map(torch.equal, predictions, other_predictions))
    assert all(torch.equal(other_weights[n], w) for n, w in weights.items())
    if rank == 0:
        files = [p.relative_to(f"{folder}/zero3") for p in Path(f"{folder}/zero3").rglob("*.safetensors")]
        assert sum("exports" in str(f) for f in files) >= 2, files
        for file in (*files, "exported"):
            assert Path(folder, "zero3", file).read_bytes() == Path(folder, "infinity", file).read_bytes(), file


def test_looking_changing_evaluating_and_exporting_give_the_same_bits(tmp_path):
    run_ranks(everything, 2, init=False, folder=str(tmp_path), timeout_s=120)


def on_disk(folder):
    return STRATEGIES["infinity"](disk=f"{folder}/swap", staging_bytes=4096)


def never_stopped(rank, world, folder):
    return train("zero3", world, f"{folder}/zero3"), train(on_disk(folder), world, f"{folder}/infinity")


def killed(rank, world, folder, home, after_s, who):
    train(on_disk(folder), world, home, kill_after_s=after_s if who in (rank, None) else None)


def resumed(rank, world, folder, runs):
    for home, resume in runs.items():
        train(on_disk(folder), world, home, resume)


def differences(want, home):
    """But for the name of the strategy."""
    found = map(str, compare_exactly(want, CheckpointReader(Path(home) / "checkpoints" / LAST)))
    return [text for text in found if "strategy" not in text]


@pytest.mark.parametrize("seeds", [1, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_on_disk_resumes_to_the_last_bit_also_after_a_kill(seeds, tmp_path):
    """Also inside an accumulation window and inside an epoch, in processes of their own."""
    took = run_ranks(never_stopped, 2, init=False, folder=str(tmp_path), timeout_s=120)[0][1]
    want, first = CheckpointReader(tmp_path / "zero3/checkpoints" / LAST), tmp_path / "infinity"
    assert differences(want, first) == []
    shutil.rmtree(first / "checkpoints" / LAST)
    runs = {str(first): str(first / "checkpoints/batch-15")}
    for seed in range(seeds):
        rng, home = random.Random(seed), tmp_path / str(seed)
        after_s = rng.uniform(took / 3, took / 2) if seed == 0 else rng.uniform(0, took)
        try:
            who = rng.choice([0, 1, None])
            run_ranks(
                killed, 2, init=False, folder=str(tmp_path), home=str(home), after_s=after_s, who=who, timeout_s=120
            )
        except RanksFailedError:
            assert not list((tmp_path / "swap").iterdir())
        found = find([home])
        runs[str(home)] = str(found.paths[0]) if found.paths else None
    run_ranks(resumed, 2, init=False, folder=str(tmp_path), runs=runs, timeout_s=60 * len(runs))
    for home, resume in runs.items():
        assert differences(want, home) == [], f"{home}, resumed from {resume}"


def steady(rank, world, folder):
    gc.freeze()
    batch = [token_batch(m, 2, torch.float64) for m in range(60)]
    after, start = [], None
    for fit in range(2):
        module, seen = Model(), Census()
        trainer = make_trainer(on_disk(folder), world, folder, log_every_n_steps=1, callbacks=[seen])
        trainer.fit(module, batches(*batch[: 60 if fit == 1 else 20]), batches(*batch[:2]))
        if fit == 1:
            counts = [count for _, count in seen.counts]
            assert [step for step, _ in seen.counts] == [20, 40, 60]
            assert counts[0] == counts[1] == counts[2], counts
            assert seen.resident_mb[2] - seen.resident_mb[0] < 5, seen.resident_mb
            assert len(swap_files()) == 1
        del trainer, module, seen
        after.append(census(nn.Identity()))
        assert not swap_files(), "the engine's file goes with it"
        start = start or after[0]
        for what in (*OPEN, "hooks"):
            assert after[-1][what] == start[what], (what, start, after)
    module = Model()
    for _ in range(2):
        trainer = make_trainer(on_disk(folder), world, folder)
        trainer.fit(module, batches(*batch[:2]), batches(*batch[:2]))
        assert len(swap_files()) == 1, "another Trainer takes the module over, and the file of the first goes"


@pytest.mark.case("C082")
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_nothing_grows_with_the_steps_or_the_fits_on_disk(world, tmp_path):
    run_ranks(steady, world, init=False, folder=str(tmp_path), timeout_s=120)
