"""A whole config: every fault at once with place and mend, batch arithmetic, misplaced keys, contradictions."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from shardlight.framework.config import config_from_dict, load, load_config, to_dict
from shardlight.framework.faults import ConfigError
from shardlight.framework.schema import ResumeConfig
from shardlight.framework.show import dump
from shardlight.framework.world import check_devices
from shardlight.strategies import EngineOptions

OPTIONS = ", ".join(sorted(field.name for field in dataclasses.fields(EngineOptions)))
MODEL = """
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from shardlight.framework.module import TrainingModule
class Model(TrainingModule):
    def __init__(self, width: int, rate: float = 0.5, name: str = "m"):
        super().__init__()
    def training_step(self, batch): pass
    test_step = training_step
class Plain(LightningModule):
    def training_step(self, batch): pass
    def configure_optimizers(self): return None
class Own(TrainingModule):
    def training_step(self, batch): pass
    def configure_optimizers(self): return None
class Data(LightningDataModule):
    def __init__(self, batch_size: int = 2, path: str | None = None):
        super().__init__()
    def train_dataloader(self): pass
    test_dataloader = train_dataloader
class Unsized(LightningDataModule):
    def train_dataloader(self): pass
class Stop(Callback):
    def __init__(self, patience: int): pass
"""
GOOD = """\
module: {class: PKG.Model, width: 8}
data:
  class: PKG.Data
  batch_size: 2
optimizer: {name: sgd, lr: 0.1}
trainer:
  devices: 2
  max_steps: 10
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with one module of classes; gives a function that writes config.yaml, PKG standing for the module."""
    package = f"shardlight_test_{tmp_path.name.replace('-', '_')}"
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / f"{package}.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)

    def write(text: str = GOOD, name: str = "config.yaml") -> str:
        (tmp_path / name).write_text(text.replace("PKG", package))
        return name

    write.package = package
    yield write
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


def faults_of(path: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def test_a_good_config_is_frozen_dataclasses(project):
    config = load_config(project(), ["trainer.max_steps=1e2", "strategy=zero2", "callbacks.s={class: PKG.Stop, patience: 3}".replace("PKG", project.package)])  # fmt: skip
    assert (config.trainer.max_steps, config.trainer.world_size, config.seed) == (100, 2, 0)
    assert (config.strategy.name, config.optimizer.lr, config.schedule, config.resume) == ("zero2", 0.1, None, None)
    assert (config.module.target.__name__, dict(config.module.arguments)) == ("Model", {"width": 8})
    assert config.module.argument("rate") == 0.5 and config.module.argument("width") == 8
    assert dict(config.callbacks["s"].arguments) == {"patience": 3}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3
    with pytest.raises(TypeError):
        config.module.arguments["width"] = 3


def test_the_strategy_follows_the_processes_where_none_is_named(project):
    assert load(project()).origin("strategy.name") == "default for 2 processes"
    assert load_config(project()).strategy.name == "ddp"
    assert load_config(project(), ["trainer.devices=1"]).strategy.name == "single"


def test_every_value_has_its_origin(project):
    project("trainer: {max_steps: 3, log_every_n_steps: 5}\n", "base.yaml")
    loaded = load(project("extends: base.yaml\n" + GOOD), ["seed=3"])
    paths = ["trainer.max_steps", "trainer.log_every_n_steps", "seed", "trainer.precision", "run.name"]
    assert {path: loaded.origin(path) for path in paths} == {
        "trainer.max_steps": "config.yaml:9", "trainer.log_every_n_steps": "base.yaml:1", "seed": "command line",
        "trainer.precision": "default", "run.name": "the config's folder",
    }  # fmt: skip
    assert loaded.config.extends == ("base.yaml",)


def test_what_is_saved_loads_to_the_same_config(project):
    config = load_config(
        project(), ["strategy=ddp", "strategy.units=[Linear]", "vars.x=1e-5", "optimizer.lr=1e-5", "run.name='on'"]
    )
    Path("saved.yaml").write_text(dump(to_dict(config)))
    assert load_config("saved.yaml") == config
    assert config_from_dict(to_dict(config)) == config


@pytest.mark.case("C017")
def test_file_command_line_and_python_give_one_result(project):
    text = GOOD.replace("0.1", '"1e-5"').replace("10", "1e4")
    by_file = load_config(project(text))
    by_line = load_config(project(), ['optimizer.lr="1e-5"', "trainer.max_steps=1e4"])
    by_python = config_from_dict(
        {
            "module": {"class": f"{project.package}.Model", "width": 8.0},
            "data": {"class": f"{project.package}.Data", "batch_size": 2},
            "optimizer": {"name": "sgd", "lr": "1e-5"},
            "trainer": {"devices": "2", "max_steps": 1e4},
        }
    )
    assert by_file == by_line == by_python
    assert (by_file.optimizer.lr, by_file.trainer.max_steps) == (1e-5, 10000)
    bad = ["seed=010", "run.name=on", "run.dir=true", "optimizer.lr=nan", "trainer.max_epochs=12:30"]
    assert set(faults_of(project(), *bad)) == {
        "command line: seed: 010 has a leading zero, which some readers take as octal. "
        "Write 10, or '010' in quotes for text.",
        "command line: optimizer.lr must be a number, got 'nan' (text).",
        "command line: run.dir must be text, got true (true or false). Write 'true' in quotes.",
        "command line: trainer.max_epochs must be a whole number, got '12:30' (text).",
    }
    assert load_config(project(), ["run.name=on"]).run.name == "on"


@pytest.mark.case("C002")
def test_the_global_batch_is_checked_before_anything_is_made(project):
    batches = ["trainer.global_batch_size=16", "trainer.accumulate_grad_batches=2"]
    assert faults_of(project(), *batches) == [
        "command line: trainer.global_batch_size is 16, but data.batch_size 2 x trainer.accumulate_grad_batches 2 x "
        "trainer.devices 2 x trainer.num_nodes 1 = 8. Make them agree, or leave one out."
    ]
    loaded = load(project(GOOD + "  global_batch_size: 16\n"))
    assert loaded.config.trainer.accumulate_grad_batches == 4
    assert loaded.origin("trainer.accumulate_grad_batches") == "from trainer.global_batch_size, config.yaml:9"
    assert faults_of(project(GOOD + "  global_batch_size: 15\n")) == [
        "config.yaml:9: trainer.global_batch_size 15 is not divisible by 4 = data.batch_size 2 x trainer.devices 2 x "
        "trainer.num_nodes 1."
    ]
    assert load_config(project(), ["trainer.global_batch_size=8", "trainer.accumulate_grad_batches=2"])
    assert load_config(project(), ["trainer.accumulate_grad_batches=3"]).trainer.global_batch_size is None
    assert load_config(project()).trainer.accumulate_grad_batches == 1


@pytest.mark.case("C002")
def test_the_global_batch_needs_a_batch_size(project):
    text = GOOD.replace("  batch_size: 2\n", "") + "  global_batch_size: 16\n"
    assert load_config(project(text)).trainer.accumulate_grad_batches == 4
    assert faults_of(project(text.replace("PKG.Data", "PKG.Unsized"))) == [
        "config.yaml:8: trainer.global_batch_size needs data.batch_size, a positive whole number, but "
        f"{project.package}.Unsized has no such argument."
    ]
    assert faults_of(project(text), "data.batch_size=0") == [
        "command line: data.batch_size is 0; it must be at least 1."
    ]
    assert len(faults_of(project(text.replace("PKG.Data", "PKG.Dat")))) == 1


@pytest.mark.case("C023")
def test_no_key_is_dropped_in_silence(project):
    text = GOOD + "  gradient_cliping: 1.0\n  reduce: window\nstrategy: {name: zero3, overlap_com: true}\n"
    assert faults_of(project(text), "+strategy.stagee=3", "optimiser.lr=1") == [
        "config.yaml:9: trainer.gradient_cliping is not a key of trainer. Did you mean 'gradient_clip_val'?",
        "config.yaml:10: trainer.reduce is an option of strategy zero3, not of trainer: move it to strategy.reduce.",
        f"config.yaml:11: strategy.overlap_com is not an option of zero3. Choose from: {OPTIONS}.",
        "command line: +strategy.stagee starts with '+', which overrides here do not have. Write strategy.stagee=3.",
        "command line: optimiser is not a key of the config. Did you mean 'optimizer'?",
        f"command line: strategy.stagee is not an option of zero3. Choose from: {OPTIONS}.",
    ]


@pytest.mark.case("C023")
def test_a_setting_in_two_places_names_both(project):
    text = GOOD + "  accumulate_grad_batches: 2\nstrategy:\n  name: zero3\n  accumulate_grad_batches: 4\n"
    assert faults_of(project(text)) == [
        "config.yaml:12: strategy.accumulate_grad_batches = 4 contradicts trainer.accumulate_grad_batches = 2 "
        "(config.yaml:9). It is a key of trainer, not of strategy: remove strategy.accumulate_grad_batches."
    ]
    assert faults_of(project(text.replace("batches: 4", "batches: 2"))) == [
        "config.yaml:12: strategy.accumulate_grad_batches is a key of trainer, not of strategy: remove it."
    ]
    assert faults_of(project(text), "strategy.gradient_accumulation_steps=3")[1] == (
        "command line: strategy.gradient_accumulation_steps = 3 contradicts trainer.accumulate_grad_batches = 2 "
        "(config.yaml:9). It is called trainer.accumulate_grad_batches here: "
        "remove strategy.gradient_accumulation_steps."
    )


@pytest.mark.case("C023")
@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("max_epochs=1", "max_epochs is a key of trainer, not of the top level: move it to trainer.max_epochs."),
        ("trainer.seed=1", "trainer.seed is a key of the top level, not of trainer: move it to seed."),
        ("trainer.path=x", "trainer.path is a parameter of data, not of trainer: move it to data.path."),
        ("data.rate=1", "data.rate is a parameter of module, not of data: move it to module.rate."),
        ("trainer.warmup_steps=1",
         "trainer.warmup_steps is a key of schedule, not of trainer: move it to schedule.warmup_steps."),
        ("trainer.max_grad_norm=1",
         "trainer.max_grad_norm is called trainer.gradient_clip_val here: "
         "move it to trainer.gradient_clip_val."),
        ("run.precision=x", "run.precision is a key of trainer, not of run: move it to trainer.precision."),
        ("module.widht=x", "module.widht is not a parameter of PKG.Model. Did you mean 'width'?"),
        ("checkpoint.name=x",
         "checkpoint.name is not a key of checkpoint. Choose from: "
         "every_n_steps, export_dtype, export_every_n_steps, mode, monitor, save_last, save_top_k."),
        ("strategy.tp=4", "strategy.name is missing: one of single, ddp, zero1, zero2, zero3, infinity, pipeline, tensor, mesh."),
        ("strategy=zero4", "strategy.name must be a strategy, got 'zero4' (text). Did you mean 'zero3'?"),
        ("strategy=3", "strategy must be a name or a mapping, got 3 (number)."),
        ("strategy.name=[1]",
         "strategy.name must be a strategy, got a list. Choose from: ddp, infinity, mesh, pipeline, single, tensor, zero1, zero2, zero3."),
        ("strategy={name: zero2, timeout_s: -1}", "strategy.timeout_s=-1.0 must be above 0 seconds."),
        ("strategy={name: zero1, keep_small: 8}", "strategy.keep_small is for zero3, infinity, pipeline, tensor and mesh: the weights of zero1 are always there. Leave it out."),
        ("strategy={name: zero3, keep_small: many}", "strategy.keep_small must be a whole number, got 'many' (text)."),
        ("strategy={name: zero3, collectives: shm}", "strategy.collectives must be one of auto, gloo; got 'shm' (text)."),
        ("trainer.precision=fp16-mixed", "trainer.precision must be one of 32-true, 64-true, bf16-mixed, 16-mixed, bf16-true; got 'fp16-mixed' (text). Did you mean 'bf16-mixed'?"),
        ("strategy={name: zero2, loss_scale: 8.0}", "strategy.loss_scale is for trainer.precision 16-mixed, which is 32-true here. Leave it out, or change the precision."),
        ("strategy={name: zero2, compile_backend: eager}", "strategy.compile_backend is for compile: blocks. Leave it out, or set compile."),
        ("trainer.precision=32", "trainer.precision must be one of 32-true, 64-true, bf16-mixed, 16-mixed, bf16-true; got 32 (number). Did you mean '32-true'?"),
        ("optimizer.lr=-1", "optimizer.lr is -1.0; it must be at least 0, and finite."),
        ("optimizer.weight_decay=1e999", "optimizer.weight_decay is inf; it must be at least 0 and finite, or null for the default."),
        ("optimizer.betas=[0.9, 0.9]", "optimizer.betas is for adamw, adam, lamb, lion, muon, and sgd has weight_decay, momentum, nesterov."),
        ("optimizer={name: muon, lr: 0.02}", None),
        ("checkpoint.save_top_k=3", "checkpoint.save_top_k is 3; without monitor it must be -1, 0 or 1."),
        ("resume=.", "resume: . is the folder of a run. Its checkpoints are in checkpoints/ there."),
        ("resume=gone", "resume: there is no checkpoint gone."),
        ("callbacks=3", "callbacks must be a mapping of names to {class: ...}, got 3 (number)."),
        ("callbacks.x.patience=1", "callbacks.x.class is missing: the import path of a Callback."),
        ("vars=3", "vars must be a mapping of keys, got 3 (number)."),
        ("run=3", "run must be a mapping of keys, got 3 (number)."),
        ("seed=-5", "seed is -5; it must be from 0 to 4294967295."),
        ("run.name=../etc", "run.name is '../etc'; it must be the name of one folder, without slashes."),
        ("trainer.limit_train_batches=0", "trainer.limit_train_batches is 0; nothing would be trained."),
        ("trainer.max_steps=null", None),
        ("optimizer=null", None),
    ],
)  # fmt: skip
def test_a_fault_says_where_what_and_the_mend(project, override, fault):
    expected = {
        "trainer.max_steps=null": "config.yaml:6: trainer.max_steps is missing: set it, or trainer.max_epochs.",
        "optimizer=null": f"command line: optimizer is missing: {project.package}.Model has no configure_optimizers of "
        "its own. Write {name: adamw, lr: 3e-4}.",
        "optimizer={name: muon, lr: 0.02}": "config.yaml:5: optimizer.adamw_lr is missing; set the learning rate of "
        "embeddings, norms, biases and head, such as 3e-4, or adjust_lr to match_rms_adamw, which takes lr for all.",
    }
    Path("checkpoints").mkdir()
    text = expected.get(override) or f"command line: {fault}".replace("PKG", project.package)
    assert faults_of(project(), override) == [text]


@pytest.mark.case("C023")
def test_a_dotted_key_in_the_file_is_told_to_nest(project):
    assert faults_of(project(GOOD + "trainer.max_epochs: 3\n")) == [
        "config.yaml:9: trainer.max_epochs is not a key: nest it, 'trainer: {max_epochs: ...}'."
    ]


@pytest.mark.case("C097")
def test_an_unknown_axis_and_a_bad_product_are_found_before_launch(project):
    assert faults_of(project(), "strategy=zero3", "strategy.tensor=4") == [
        f"command line: strategy.tensor is not an option of zero3. Choose from: {OPTIONS}."
    ]
    assert faults_of(project(), "strategy=single") == [
        "command line: strategy single runs in one process, but trainer.devices 2 x trainer.num_nodes 1 = 2. "
        "Choose ddp, zero1, zero2, zero3, infinity, pipeline, tensor, mesh, or set both to 1."
    ]


def test_what_only_training_needs_is_not_asked_of_the_rest(project):
    text = GOOD.replace("  max_steps: 10\n", "").replace("optimizer: {name: sgd, lr: 0.1}\n", "")
    assert len(faults_of(project(text))) == 2
    assert load(project(text), verb="test").config.optimizer is None


def test_an_optimizer_that_nobody_takes_is_a_fault(project):
    text = GOOD.replace("PKG.Model, width: 8", "PKG.Plain") + "schedule: {name: constant}\n"
    why = f"is set, but {project.package}.Plain is no TrainingModule: it makes its own. Remove it."
    assert faults_of(project(text)) == [f"config.yaml:5: optimizer {why}", f"config.yaml:9: schedule {why}"]
    own = GOOD.replace("PKG.Model, width: 8", "PKG.Own").replace("optimizer: {name: sgd, lr: 0.1}\n", "")
    assert load_config(project(own)).optimizer is None


def test_sections_that_may_be_off_and_sections_that_are_empty(project):
    config = load_config(project(GOOD + "checkpoint: null\nrun:\ncallbacks:\nvars:\nstrategy:\n"))
    assert config.checkpoint is None and config.run.dir == "runs" and not config.callbacks
    assert load_config(project(), ["callbacks.off=null"]).callbacks == {"off": None}


def test_an_existing_checkpoint_can_be_resumed(project, tmp_path):
    (tmp_path / "step-1").mkdir()
    assert load_config(project(), ["resume=step-1"]).resume == ResumeConfig(path="step-1")
    assert load_config(project(), ["resume=auto"]).resume == ResumeConfig(path="auto")
    given = {"path": "step-1", "skip": ["head.*"]}
    config = load_config(project(GOOD + f"resume: {json.dumps(given)}\n"), ["resume=auto"])
    assert config.resume == ResumeConfig(path="auto", skip=("head.*",)) and to_dict(config)["resume"]["path"] == "auto"
    assert faults_of(project(), "resume.skip=[a]")[0].startswith("command line: resume.path is missing")


def test_a_broken_value_is_reported_once(project):
    text = GOOD + "strategy: {name: '${vars.no}'}\nseed: '${vars.no}'\n"
    assert faults_of(project(text)) == [
        "config.yaml:9: strategy.name: '${vars.no}' cannot be resolved: Interpolation key 'vars.no' not found.",
        "config.yaml:10: seed: '${vars.no}' cannot be resolved: Interpolation key 'vars.no' not found.",
    ]
    assert len(faults_of(project(GOOD + "strategy: '${vars.no}'\nmodule.class: 1\n"))) == 2
    assert len(faults_of(project(), "module.class='${vars.no}'")) == 1
    assert len(faults_of(project(), "strategy=[1", "trainer=3")) == 2


def test_a_warmup_that_does_not_fit_is_found_before_launch(project):
    text = GOOD + "schedule:\n  name: cosine\n  warmup_steps: 10\n"
    with pytest.raises(ConfigError) as caught:
        load_config(project(text))
    assert str(caught.value) == (
        "config.yaml:11: schedule.warmup_steps 10 does not fit into trainer.max_steps 10. Lower it, or train longer."
    )
    assert load_config(project(text), ["schedule.total_steps=11"]).schedule.total_steps == 11
    assert load_config(project(text), ["schedule.name=constant"]).schedule.warmup_steps == 10


def test_cuda_without_a_device_is_found_before_launch(project, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    loaded = load(project(), ["trainer.accelerator=cuda"])
    with pytest.raises(ConfigError) as caught:
        check_devices(loaded)
    assert str(caught.value) == (
        "command line: trainer.accelerator is cuda, but PyTorch sees no CUDA device. Set cpu or auto."
    )


def test_what_a_verb_needs_is_looked_for_in_both_classes(project):
    config = project()
    for verb, module, data in (
        ("validate", "validation_step", "val_dataloader"),
        ("predict", None, "predict_dataloader"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(config, verb=verb)
        expected = (
            [f"config.yaml:1: module.class: {project.package}.Model has no {module}, which {verb} needs."]
            if module
            else []
        )
        expected.append(f"config.yaml:3: data.class: {project.package}.Data has no {data}, which {verb} needs.")
        assert str(caught.value).splitlines() == expected
    assert load(config, verb="test").config
