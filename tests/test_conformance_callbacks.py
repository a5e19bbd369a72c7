"""Row F of the conformance matrix: Lightning's callbacks and our ShardedEMA do under every strategy what they say."""

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from safetensors.torch import load_file
from shardlight.strategies import ShardedEMA
from shardlight.strategies.checkpoint import export_safetensors
from test_cases_training import batches
from test_lightning_fit import make_trainer
from torch import nn

F64 = {"dtype": torch.float64}
ONE = torch.ones(1, **F64)

# --- ShardedEMA: seven weights that go from 0 to 1 in the first step and stay there


class Seven(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(7))
        self.more = nn.Parameter(torch.zeros(1030))  # on two ranks some of it lies on each
        self.frozen = nn.Parameter(torch.full((3,), 5.0), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.count += 1
        slope = -1.0 if self.trainer.global_step == 0 else 0.0
        return ((self.w * slope).sum() + (self.more * slope).sum()) * batch.sum()

    def look(self, batch, batch_idx):
        values = {round(v, 12) for v in torch.cat([self.w, self.more]).tolist()}
        self.seen.append([*sorted(values), self.count.item()])

    validation_step = test_step = look

    def predict_step(self, batch, batch_idx):
        self.look(batch, batch_idx)
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)


class Steps(pl.Callback):
    """Notes the average after each step, and what was sent by then."""

    def __init__(self, save=None):
        self.averages, self.calls, self.save = [], [], save

    def on_train_batch_end(self, trainer, module, *args):
        ema = next((c for c in trainer.callbacks if isinstance(c, ShardedEMA)), None)
        parts = [] if ema is None else [*ema.average("w").tolist(), *ema.average("more").tolist()]
        self.averages.append([round(v, 12) for v in parts])
        self.calls.append(sum(trainer.strategy.engine.collectives.calls.values()))
        if self.save == trainer.global_step:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/saved")


def weights(trainer, module):
    with trainer.strategy.gathered():
        return sorted({*module.w.tolist(), *module.more.tolist()})


def run_ema(rank, world_size, folder, plans):
    sent = {}
    for strategy in plans:
        home = f"{folder}/{strategy}-{world_size}"
        Path(home).mkdir(exist_ok=True)
        for with_ema in (True, False):
            module, steps, ema = Seven(), Steps(save=2 if with_ema else None), ShardedEMA(0.9)
            trainer = make_trainer(strategy, world_size, home, callbacks=[*([ema] if with_ema else []), steps])
            trainer.fit(module, batches(ONE, ONE), batches(ONE))
            sent[with_ema] = [b - a for a, b in zip(steps.calls, steps.calls[1:], strict=False)]
            if not with_ema:
                break
            # Each rank's part of the seven, after one step and after two.
            assert {v for part in steps.averages[:1] for v in part} <= {0.1}, (strategy, steps.averages)
            assert {v for part in steps.averages[1:] for v in part} <= {0.19}, (strategy, steps.averages)
            parts = trainer.strategy.engine.collectives.gather_objects(len(steps.averages[0]), "parts")
            assert sum(parts) == 7 + 1030 and all(parts), (strategy, parts)
            trainer.validate(module, batches(ONE), verbose=False)
            trainer.test(module, batches(ONE), verbose=False)
            trainer.predict(module, batches(ONE))
            assert module.seen == [[0.19, 2.0]] * 4, (strategy, module.seen)
            assert weights(trainer, module) == [1.0], strategy
            with ema.averaged(trainer):
                assert weights(trainer, module) == pytest.approx([0.19], abs=1e-15)
            assert weights(trainer, module) == [1.0], strategy
        assert sent[True] == sent[False], (strategy, sent)
        if rank == 0:
            export_safetensors(f"{home}/saved", f"{home}/w.safetensors")
            assert load_file(f"{home}/w.safetensors")["w"].tolist() == [1.0] * 7


def go_on(rank, world_size, folder, saved_by, plans):
    for strategy in plans:
        home = f"{folder}/{saved_by}"
        warnings.filterwarnings("ignore", message=".* was saved by 2 ranks and goes on with 1")
        module, steps, ema = Seven(), Steps(), ShardedEMA(0.9)
        trainer = make_trainer(strategy, world_size, home, callbacks=[ema, steps], max_epochs=2)
        trainer.fit(module, batches(ONE, ONE), batches(ONE), ckpt_path=f"{home}/saved")
        got = [sorted({v for v in part}) for part in steps.averages]
        assert got == [[0.271], [0.3439]], (strategy, got)
        assert ema.updates == 4 and weights(trainer, module) == [1.0]
        assert module.seen == [[0.3439, 4.0]], module.seen
        module = Seven()
        trainer = make_trainer(strategy, world_size, home, callbacks=[ShardedEMA(0.9)])
        trainer.test(module, batches(ONE), ckpt_path=f"{home}/saved", verbose=False)
        assert module.seen == [[0.19, 2.0]], module.seen
        assert weights(trainer, module) == [1.0]


@pytest.mark.case("C071")
@pytest.mark.conformance("F")
def test_average_of_sharded_weights(tmp_path):
    run_ranks(run_ema, 2, init=False, folder=str(tmp_path), plans=["ddp", "zero1", "zero2", "zero3"])
    run_ranks(run_ema, 1, init=False, folder=str(tmp_path), plans=["single"])
    run_ranks(go_on, 2, init=False, folder=str(tmp_path), saved_by="zero3-2", plans=["zero3", "ddp"])
    run_ranks(go_on, 1, init=False, folder=str(tmp_path), saved_by="zero2-2", plans=["single", "zero3"])
    for saved_by in ("zero3-2", "zero1-2", "single-1"):
        saved, out = tmp_path / saved_by / "saved", tmp_path / "average.safetensors"
        assert export_safetensors(saved, out, ema=True) == 4
        exported = load_file(out)
        assert exported["w"].tolist() == pytest.approx([0.19] * 7, abs=1e-15) and exported["w"].dtype == torch.float64
        assert exported["frozen"].tolist() == [5.0] * 3 and exported["count"].item() == 2
