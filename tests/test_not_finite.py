"""A gradient that is inf or NaN on one rank: no rank steps, schedules stand still, and too many in a row are an error."""

from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from loops import IN_MEMORY
from shardlight.strategies import STRATEGIES, MixedFP16, ZeRO2
from shardlight.strategies.errors import GradientError, StrategyError
from test_lightning_fit import make_trainer
from torch import nn
from torch.utils.data import DataLoader


class Scalar(pl.LightningModule):
    """One weight and one bias; the gradient of the weight is what the batch says."""

    def __init__(self, bad, rank):
        super().__init__()
        self.w, self.bad, self.rank = nn.Parameter(torch.ones(3)), bad, rank
        self.rates = []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return (self.w * (float("inf") if batch_idx in self.bad and self.rank == 0 else 1.0)).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.8)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(rank, world_size, folder, bad, precision, **options):
    out = {}
    for name, strategy in STRATEGIES.items():
        if name in ("pipeline", "tensor", "mesh") or (name == "single" and world_size > 1):  # these need layers to cut
            continue
        module = Scalar(bad, rank)
        more = {"disk": f"{folder}/swap"} if name == "infinity" else {}
        trainer = make_trainer(strategy(**options, **more), world_size, folder, precision=precision)
        with _warned(rank):
            trainer.fit(module, DataLoader(torch.zeros(5, 1)))
        with trainer.strategy.gathered():
            weights = module.w.detach().float().clone()
        steps = [float(s["step"]) for s in trainer.optimizers[0].state.values()]
        finite = all(torch.isfinite(v).all() for s in trainer.optimizers[0].state.values() for v in s.values())
        out[name] = weights.tolist(), steps, finite, module.rates, trainer.strategy.not_finite_steps
        assert trainer.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"] == 5 - len(bad)
    return out


def _warned(rank):
    return nullcontext() if rank else pytest.warns(UserWarning, match="skipped on all ranks: the gradients of 'w' are")


@pytest.mark.case("C058")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_bad_step_is_skipped_by_all(world_size, precision, tmp_path):
    results = run_ranks(fit, world_size, init=False, folder=str(tmp_path), bad=[2], precision=precision)
    for by_strategy in results:
        for name, (weights, steps, finite, rates, skipped) in by_strategy.items():
            assert finite and skipped == 1, name
            assert all(s == 4 for s in steps), name
            assert rates == pytest.approx([0.8, 0.4, 0.2, 0.2, 0.1]), name
            # Adam's step is the rate when all gradients are equal.
            assert weights == pytest.approx([1 - 0.8 - 0.4 - 0.2 - 0.1] * 3, abs=1e-5), name


def fit_to_the_end(rank, world_size, folder):
    module = Scalar(range(100), rank)
    trainer = make_trainer(ZeRO2(max_not_finite_steps=3), world_size, folder, precision="bf16-mixed")
    with _warned(rank):
        with pytest.raises(GradientError, match="the gradients of 'w' were inf or NaN in 3 steps in a row"):
            trainer.fit(module, DataLoader(torch.zeros(50, 1)))
    with trainer.strategy.gathered():
        assert module.w.tolist() == [1, 1, 1]
    return trainer.global_step


@pytest.mark.case("C058")
def test_too_many_in_a_row_end_training(tmp_path):
    run_ranks(fit_to_the_end, 2, init=False, folder=str(tmp_path))


def overflow(rank, world_size, folder):
    for name in [s for s in IN_MEMORY if s != "single" or world_size == 1]:
        fp16 = {"precision": None, "plugins": MixedFP16()}
        module = Scalar([1], rank)
        trainer = make_trainer(STRATEGIES[name](loss_scale=8.0), world_size, folder, **fp16)
        with _warned(rank):
            trainer.fit(module, DataLoader(torch.zeros(4, 1)))
        (state,) = trainer.optimizers[0].state.values() or [{"step": torch.tensor(3.0)}]
        assert float(state["step"]) == 3 and trainer.strategy.not_finite_steps == 1, name
        assert trainer.precision_plugin.loss_scale.scale == 4.0, name
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1), name
        assert module.rates == pytest.approx([0.8, 0.4, 0.4, 0.2]), name
        with trainer.strategy.gathered():
            # Adam's step is the rate when all gradients are equal.
            assert module.w.tolist() == pytest.approx([1 - 0.8 - 0.4 - 0.2] * 3, abs=1e-5), name

        chosen = STRATEGIES[name](loss_scale=8.0, max_not_finite_steps=2)
        module, fp16 = Scalar(range(100), rank), {"precision": None, "plugins": MixedFP16()}
        trainer = make_trainer(chosen, world_size, folder, **fp16)
        at_minimum = r"inf or NaN in 2 steps in a row with the loss scale at its minimum \(1\)"
        with _warned(rank), pytest.raises(GradientError, match=at_minimum):
            trainer.fit(module, DataLoader(torch.zeros(50, 1)))
        # 8 to 4, to 2, to 1, and two more.
        assert trainer.strategy.not_finite_steps == len(module.rates) == 5, name


@pytest.mark.case("C011")
@pytest.mark.conformance("A9")
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_fp16_overflow_halves_the_scale_once_on_all_ranks_and_ends_at_the_minimum(world_size, tmp_path):
    run_ranks(overflow, world_size, init=False, folder=str(tmp_path))


def test_the_limit_is_checked():
    with pytest.raises(StrategyError, match="max_not_finite_steps=0 must be at least 1"):
        ZeRO2(max_not_finite_steps=0)
