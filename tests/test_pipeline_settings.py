"""Settings of a Trainer that meet the pipeline: precisions, compilation, recomputation, `schedule: auto`, adapters."""

import os
import signal
import warnings

import pytest
import torch
from harness import RanksFailedError, run_ranks
from lightning.pytorch import LightningModule
from shardlight.strategies import Pipeline, Single
from test_master_weights import MixedFP16
from test_pipeline import Module, batch, trainer
from torch.utils.data import DataLoader

STEPS = 3


class Float(Module):
    """In fp32."""

    validation_step = LightningModule.validation_step

    def __init__(self, **kwargs):
        super().__init__(optimizer="sgd", **kwargs)
        self.model.float()

    def on_before_optimizer_step(self, optimizer):
        self.losses.append(self.trainer.strategy.window_loss)
        self.norms.append(float(self.trainer.strategy.gradient_norm()))


class Adapted(Float):
    """With low-rank adapters of peft in the attention and the feed-forward part; all else is frozen."""

    def __init__(self):
        super().__init__(tied=False)
        peft = pytest.importorskip("peft")
        linear = [n for n, m in self.model.named_modules() if isinstance(m, torch.nn.Linear) and n.startswith("blocks")]
        torch.manual_seed(1)
        made = peft.get_peft_model(self.model, peft.LoraConfig(r=2, target_modules=linear, init_lora_weights=False))
        self.model = made


SETTINGS = {
    # By name: the module, options of the strategy, of the Trainer, and how close losses and norms come to one process.
    "auto": (Float, {"schedule": "auto"}, {"precision": "32-true"}, 1e-5),
    "bf16-mixed": (Float, {"schedule": "zb_h1"}, {"precision": "bf16-mixed"}, 2e-2),
    "16-mixed": (Float, {"schedule": "zb_h1", "loss_scale": 256.0}, {"precision": "16-mixed"}, 2e-2),
    "bf16-true": (Float, {"schedule": "zbv"}, {"precision": "bf16-true"}, 5e-2),
    "compiled": (
        Float,
        {"schedule": "zb_h1", "compile": "blocks", "compile_backend": "aot_eager"},
        {"precision": "32-true"},
        1e-5,
    ),
    "recomputed": (Float, {"schedule": "zb_h1", "recompute": "blocks"}, {"precision": "32-true"}, 1e-5),
    "recomputed zero3": (Float, {"schedule": "zbv", "recompute": "blocks", "zero": 3}, {"precision": "32-true"}, 1e-5),
    "adapters": (Adapted, {"schedule": "zb_h1"}, {"precision": "32-true"}, 1e-5),
    "adapters zero3": (Adapted, {"schedule": "1f1b", "zero": 3}, {"precision": "32-true"}, 1e-5),
    "anomalies": (Float, {"schedule": "zb_h1"}, {"precision": "32-true", "detect_anomaly": True}, 1e-5),
}


ALIKE = ("compile", "compile_backend", "recompute", "loss_scale")
"""Options that one process has, too."""


def settings_body(rank, world, folder, names):
    found = {}
    for name in names:
        module_class, options, settings, _ = SETTINGS[name]
        module = module_class()
        ours = {key: value for key, value in options.items() if key in ALIKE}
        strategy = Pipeline(stages=2, micro_batches=2, **options) if world > 1 else Single(**ours)
        pipelines = max(1, world // 2)
        if settings["precision"] == "16-mixed":
            settings = {"precision": None, "plugins": MixedFP16()}
        fit = trainer(strategy, world, folder, **settings, gradient_clip_val=0.5)
        data = [batch(number * pipelines + rank % pipelines) for number in range(STEPS)]
        with warnings.catch_warnings():
            # torch.compile itself looks at it.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            fit.fit(module, DataLoader(data, batch_size=None))
        found[name] = module.losses, module.norms, [n for n, p in module.named_parameters() if p.requires_grad]
    return found


def test_settings_of_a_trainer_give_the_numbers_of_one_process(tmp_path):
    settings = {"timeout_s": 240, "init": False, "folder": str(tmp_path), "names": list(SETTINGS)}
    (expected,) = run_ranks(settings_body, 1, **settings)
    for ours in run_ranks(settings_body, 2, **settings):
        for name, (losses, norms, _) in ours.items():
            near = SETTINGS[name][3]
            assert len(losses) == STEPS
            assert losses == pytest.approx(expected[name][0], rel=near), name
            assert norms == pytest.approx(expected[name][1], rel=near), name


class Failing(Module):
    """On rank 1: a hook of a block raises, or the process stops for good."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.model.blocks[3].register_forward_hook(self._hook)

    def _hook(self, *_):
        if self.how == "stopped" and self.trainer.global_rank == 1 and self.trainer.global_step == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def on_before_optimizer_step(self, optimizer):
        if self.how == "raises" and self.trainer.global_rank == 1 and self.trainer.global_step == 1:
            raise RuntimeError("a hook failed")

    def on_train_batch_end(self, *args):
        if self.how == "later" and self.trainer.global_rank == 0 and self.trainer.global_step == 1:
            raise RuntimeError("a hook failed")


def failing_body(rank, world, folder, how):
    fit = trainer(Pipeline(stages=2, micro_batches=2, schedule="zb_h1", timeout_s=2), world, folder)
    fit.fit(Failing(how), DataLoader([batch(n) for n in range(4)], batch_size=None), DataLoader([batch(9)], None))


@pytest.mark.conformance("C8")
@pytest.mark.parametrize(("how", "failed", "said"), [("raises", 1, "peer was lost"), ("later", 0, "peer was lost")])
def test_an_exception_in_a_hook_of_one_stage_ends_the_others(how, failed, said, tmp_path):
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(failing_body, 2, timeout_s=30, init=False, folder=str(tmp_path), how=how)
    assert "a hook failed" in caught.value.reports[failed] and said in caught.value.reports[1 - failed]


@pytest.mark.conformance("C8")
def test_a_stage_that_stops_ends_the_others_when_their_time_is_over(tmp_path):
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(failing_body, 2, timeout_s=30, init=False, folder=str(tmp_path), how="stopped")
    assert list(caught.value.reports) == [0], "rank 1 is still there, stopped"
    assert "2000ms" in caught.value.reports[0] and "Look at the other ranks' output" in caught.value.reports[0]
