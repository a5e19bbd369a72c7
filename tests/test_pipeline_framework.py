"""What the framework adds to a run, under pipeline: predictions, exports, averages, initial weights, the summary."""

import json
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from lightning.pytorch import Callback, LightningModule
from safetensors.torch import load_file
from shardlight.framework.exports import WeightExports
from shardlight.framework.initial_weights import InitialWeights
from shardlight.framework.predictions import PredictionWriter
from shardlight.framework.schema import InitFromConfig
from shardlight.framework.summary import RunSummary
from shardlight.strategies import Pipeline, ShardedEMA, read_state_dict
from shardlight.strategies.checkpoint.export import export
from test_pipeline import Module, batch, trainer
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, DECAY, STEPS = 7, 0.5, 2


class Predicting(Module):
    validation_step = LightningModule.validation_step

    def predict_step(self, batch, batch_idx):
        scores = self.model(batch[0])[:, -1]
        return {"scores": scores, "likeliest": scores.argmax(-1)}


class Averages(Callback):
    """What averages of this rank's parameters are, by hand."""

    def __init__(self):
        self.kept = {}

    def _now(self, trainer, module):
        with trainer.strategy.gathered():
            return {name: p.detach().clone() for name, p in module.named_parameters()}

    def on_train_start(self, trainer, module):
        self.kept = self._now(trainer, module)

    def on_train_batch_end(self, trainer, module, *args):
        now = self._now(trainer, module)
        self.kept = {name: DECAY * old + (1 - DECAY) * now[name] for name, old in self.kept.items()}


def framework_body(rank, world, folder, options, start):
    folder = Path(folder)
    averages, summary = Averages(), RunSummary(folder)
    callbacks = [
        InitialWeights(InitFromConfig(path=start)),
        averages,
        ShardedEMA(DECAY),
        summary,
        WeightExports(folder, STEPS, "fp32"),
        PredictionWriter(folder),
    ]
    module = Predicting()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)  # that initial weights are those of the file shows
    fit = trainer(Pipeline(**options), world, folder, callbacks=callbacks, use_distributed_sampler=True)
    fit.fit(module, DataLoader(TensorDataset(*batch(0, STEPS * 2 * (world // 2))), batch_size=2))
    fit.save_checkpoint(folder / "saved")
    rows = DataLoader(TensorDataset(batch(1, SAMPLES)[0]), batch_size=2)
    fit.predict(module, rows, return_predictions=False)
    return averages.kept, summary._meter.seconds


@pytest.mark.parametrize(
    ("world", "options"), [(2, {"micro_batches": 2, "schedule": "zbv"}), (4, {"micro_batches": 2, "zero": 3})]
)
def test_what_a_run_leaves_is_that_of_the_whole_model(world, options, tmp_path):
    start = Predicting()
    torch.save(start.state_dict(), tmp_path / "start.ckpt")
    settings = {"folder": str(tmp_path), "options": options, "start": str(tmp_path / "start.ckpt")}
    ranks = run_ranks(framework_body, world, timeout_s=120, init=False, **settings)
    weights = read_state_dict(tmp_path / "saved")
    assert set(weights) == set(start.state_dict())
    moved = max((weights[name] - value).abs().max() for name, value in start.state_dict().items())
    assert 0 < moved < 0.1, "training began with the weights of the file"
    exported = {}
    for file in (tmp_path / "exports" / f"step-{STEPS}").glob("*.safetensors"):
        exported |= load_file(file)
    assert set(exported) == set(weights)
    for name, value in weights.items():
        torch.testing.assert_close(exported[name], value.float(), rtol=0, atol=0)
    export(tmp_path / "saved", tmp_path / "ema.safetensors", ema=True)
    averages = load_file(tmp_path / "ema.safetensors")
    by_hand = {name: value for kept, _ in ranks for name, value in kept.items()}
    for name, value in by_hand.items():
        torch.testing.assert_close(averages[name].double(), value, rtol=1e-6, atol=1e-6)
    whole = Predicting()
    whole.load_state_dict({name: averages.get(name, value) for name, value in weights.items()})
    expected = whole.predict_step((batch(1, SAMPLES)[0],), 0)
    made = load_file(tmp_path / "predictions.safetensors")
    assert made.keys() == expected.keys()
    torch.testing.assert_close(made["scores"], expected["scores"], rtol=1e-6, atol=1e-6)
    assert torch.equal(made["likeliest"], expected["likeliest"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["strategy"] == "pipeline" and len(summary["peak_memory_bytes"]) == world
    samples = STEPS * 2 * (world // 2)
    assert summary["tokens_per_s"] * ranks[0][1] == pytest.approx(samples, rel=0.01), "each once"
