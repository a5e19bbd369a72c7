"""`shardlight init`: what it refuses, what it leaves, and that every template's project is whole, trains and says so."""

import contextlib
import gc
import io
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import typer
from command import run_command
from harness import LAUNCH_VARIABLES, preload, run_ranks
from lightning.pytorch import Callback, seed_everything
from safetensors.torch import load_file
from shardlight import cli
from shardlight.framework import misplaced
from shardlight.framework.assemble import build_module, build_trainer
from shardlight.framework.config import load
from shardlight.framework.json_schema import config_schema
from shardlight.framework.source import read_yaml
from shardlight.templates import generate
from shardlight.templates.catalogue import ROOT, Template, find_templates, what_changed
from torch.utils.data import DataLoader
from typer.testing import CliRunner

preload("warm_transformers")
TEMPLATES = find_templates()
SMALL: dict[str, list[str]] = {
    "tabular": [],
    "classifier": ["module.width=8", "data.batch_size=8"],
    "finetune": ["module.width=32", "module.depth=2", "module.heads=2"],
    "language_model": ["module.width=32", "module.depth=2", "module.heads=2", "data.max_validation_bytes=5000"],
}
"""Overrides with which a project of a template is small enough for many runs."""
SMALL_DATA = {"language_model": ["data.folder=."]}
"""The same for the data, where its default takes a while to be found."""
NEEDED = {"classifier": ["sklearn"], "finetune": ["transformers", "peft"]}


def call(*arguments) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def projects(tmp_path_factory) -> dict[str, Path]:
    """A project of each template, in folders with a space in their names."""
    root = tmp_path_factory.mktemp("projects")
    made = {name: root / f"my {name}" for name in TEMPLATES}
    for name, folder in made.items():
        code, output = call("init", name, folder)
        assert code == 0, output
    return made


@pytest.fixture(params=TEMPLATES)
def name(request) -> str:
    for package in NEEDED.get(request.param, ()):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[dev]'")
    return request.param


@pytest.fixture
def project(name, projects) -> Path:
    return projects[name]


# --- the command


def test_every_template_is_listed_in_one_line():
    code, output = call("init", "--list")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == sorted(TEMPLATES)
    assert all(len(line) < 120 and TEMPLATES[line.split()[0]].about in line for line in output.splitlines())


def test_what_was_made_is_said_with_the_commands_that_follow(tmp_path, monkeypatch):
    code, output = call("init", "tabular", tmp_path / "My wine-shop")
    assert code == 0
    assert output.splitlines() == [
        f"{tmp_path}/My wine-shop: made from the template tabular; its package is my_wine_shop. Next:",
        f"  cd '{tmp_path}/My wine-shop'",
        "  shardlight fit config.yaml",
    ]
    missing = Template(name="tabular", about="", version=1, requires=("no-such-package>=2", "torch>=1"))
    monkeypatch.setattr("shardlight.templates.catalogue.find_templates", lambda: {"tabular": missing})
    lines = call("init", "tabular", tmp_path / "other")[1].splitlines()
    assert lines[1:] == ["  pip install 'no-such-package>=2'", f"  cd {tmp_path}/other", "  shardlight fit config.yaml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "TEMPLATE and DIR are missing: shardlight init TEMPLATE DIR. Templates: "),
        (["tabular"], "DIR is missing: "),
        (["tabula", "new"], "There is no template 'tabula'. Did you mean 'tabular'? --list shows all.\n"),
        (["tabular", "full"], "full is not empty: a.txt. Nothing was written. Name a new folder, or empty this one.\n"),
        (["tabular", "full/a.txt"], "full/a.txt is there already, and is no folder. Name another one.\n"),
        (["tabular", "full/a.txt/new"], "full/a.txt/new cannot be written (Not a directory).\n"),
        (["tabular", "7up"], "the package of 7up would be called '7up', which is no name of a Python package: "),
        (["tabular", "class"], "the package of class would be called 'class', which is no name of a Python package: "),
        (["tabular", "new", "--name", "a-b"], "--name is 'a-b', which is no name of a Python package: "),
        (["tabular", "torch"], "the package of torch would be called 'torch', which is the name of a package that is "),
        (["tabular", "tests"], "the package of tests would be called 'tests', which is the name of a folder of the "),
    ],
)
def test_a_mistake_in_the_call_is_said_before_anything_is_written(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("mine")
    code, output = call("init", *arguments)
    assert code == 2
    assert said in output and "Traceback" not in output
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "a.txt"]
    assert (tmp_path / "full" / "a.txt").read_text() == "mine"


def test_an_empty_repository_is_an_empty_folder_and_may_be_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "fresh" / ".git").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "fresh")
    code, output = call("init", "tabular", ".")
    assert code == 0
    assert output.splitlines() == [
        ".: made from the template tabular; its package is fresh. Next:",
        "  shardlight fit config.yaml",
    ]
    assert Path("fresh", "model.py").is_file() and Path(".git").is_dir()
    assert call("init", "tabular", ".")[0] == 2


@pytest.fixture
def templates(tmp_path) -> Path:
    """A copy of the templates, to be changed."""
    return Path(shutil.copytree(ROOT, tmp_path / "templates", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # copier leaves its iterator open
@pytest.mark.parametrize("there", [False, True])
def test_a_project_that_fails_leaves_nothing(tmp_path, templates, there):
    (templates / "tabular" / "project" / "zzz.md.jinja").write_text("{{ misspelt }}")
    folder = tmp_path / "deep" / "new"
    if there:
        folder.mkdir(parents=True)
    with pytest.raises(Exception, match="misspelt"):
        generate.generate(TEMPLATES["tabular"], folder, "new", templates)
    gc.collect()  # here, and not in a later test
    assert (list(folder.iterdir()) == []) if there else not (tmp_path / "deep").exists()


def test_no_template_runs_code():
    """copier would run tasks, migrations and extensions of Jinja, and names what to do by keys that begin with _."""
    allowed = {"_min_copier_version", "_subdirectory", "_exclude", "_envops"}
    assert {key for key in read_yaml(ROOT / "copier.yml")[0].plain() if key.startswith("_")} == allowed
    assert [path.relative_to(ROOT) for path in ROOT.rglob("copier.y*ml")] == [Path("copier.yml")]


def test_a_template_that_would_run_code_is_refused(tmp_path, templates):
    with (templates / "copier.yml").open("a") as file:
        file.write(f'_tasks: ["touch {tmp_path}/ran"]\n')
    with pytest.raises(Exception, match="unsafe"):
        generate.generate(TEMPLATES["tabular"], tmp_path / "new", "new", templates)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "new").exists()


# --- a project, and later versions of what it was made from


@pytest.mark.case("C100")
def test_a_project_of_an_older_template_is_told_what_changed(tmp_path, templates, monkeypatch):
    folder = tmp_path / "shop"
    assert call("init", "tabular", folder)[0] == 0
    config = folder / "config.yaml"
    made_by = TEMPLATES["tabular"].version
    assert what_changed(config) == []
    text = (
        (templates / "tabular" / "template.yml").read_text().replace(f"version: {made_by}", f"version: {made_by + 2}")
    )
    changes = f"changes:\n  {made_by}: before\n  {made_by + 1}: data.path is data.file\n  {made_by + 2}: and more\n"
    (templates / "tabular" / "template.yml").write_text(text.partition("changes:")[0] + changes)
    told = [f"{folder}/.shardlight.yaml: template tabular {made_by + 1}: data.path is data.file"]
    told += [f"{folder}/.shardlight.yaml: template tabular {made_by + 2}: and more"]
    assert what_changed(config, templates) == told
    monkeypatch.setattr("shardlight.templates.catalogue.find_templates", lambda root: find_templates(templates))
    for command in (["check", config], ["fit", config, "trainer.devices=0"]):
        output = call(*command)[1]
        assert output.splitlines()[:2] == told and len(output.splitlines()) == 3
    for record in ("template: gone\nversion: 1\n", "version: x\n", "", "- 1\n", "a: [\n"):
        (folder / ".shardlight.yaml").write_text(record)
        assert what_changed(config, templates) == []


@pytest.mark.case("C100")
def test_a_key_of_an_earlier_version_is_told_its_new_name(tmp_path, monkeypatch):
    """No key has another name yet: the table that a rename goes into is empty."""
    assert misplaced.RENAMED == {}
    renamed = {"trainer.clip": "is called trainer.gradient_clip_val since shardlight 0.2"}
    monkeypatch.setattr(misplaced, "RENAMED", renamed)
    assert call("init", "tabular", tmp_path / "shop")[0] == 0
    config = tmp_path / "shop" / "config.yaml"
    text = config.read_text()
    line = text[: text.index("gradient_clip_val")].count("\n") + 1
    config.write_text(text.replace("gradient_clip_val", "clip"))
    code, output = call("check", config)
    assert (code, output) == (
        2,
        f"{config}:{line}: trainer.clip is called trainer.gradient_clip_val since shardlight 0.2.\n",
    )


# --- what every template makes


@pytest.mark.case("C100")
def test_a_projects_config_has_no_faults_and_a_comment_on_every_key(project):
    code, output = call("check", project / "config.yaml")
    assert code == 0 and output.count("\n") == 1 and output.endswith("No faults.\n"), output
    lines = (project / "config.yaml").read_text().splitlines()
    keys = [line for line in lines if ":" in line and not line.lstrip().startswith("#")]
    bare = [line for line in keys if "#" not in line and not line.endswith(":")]
    assert bare == []
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install -e '.[dev]'")
    values = read_yaml(project / "config.yaml")[0].plain()
    jsonschema.Draft202012Validator(config_schema()).validate(values)


WRONG = {
    "tabular": ("data.path=wine.csv", "data.path: there is no file wine.csv. Relative paths start at PROJECT."),
    "classifier": (
        "module.width=30",
        "module.width is 30, but my_classifier.model.Classifier needs width % 8 == 0. Write width 24 or 32.",
    ),
    "finetune": ("data.model=llama", "data.model: there is no folder llama. Relative paths start at PROJECT."),
    "language_model": (
        "module.heads=5",
        "module.heads is 5, but my_language_model.model.LanguageModel needs width % heads == 0, and width is 192. "
        "Write heads 4 or 6, or width 190 or 200.",
    ),
}
"""What a class of a template refuses, and what is said of it."""


def test_a_value_that_its_classes_refuse_is_found_by_the_check(project, name):
    override, said = WRONG[name]
    code, output = call("check", project / "config.yaml", override)
    assert (code, output) == (2, f"command line: {said}\n".replace("PROJECT", str(project)))


def test_a_project_has_all_that_a_project_has_and_nothing_of_the_template(project, name):
    package = f"my_{name}"
    files = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    files = {path for path in files if not path.startswith(("runs/", ".pytest_cache/")) and "__pycache__" not in path}
    wanted = {"README.md", "config.yaml", "pyproject.toml", ".gitignore", ".shardlight.yaml", "tests/test_project.py"}
    assert {*wanted, f"{package}/model.py", f"{package}/data.py"} <= files
    for path in files:
        text = (project / path).read_text()
        assert "{{" not in text and "{%" not in text and not path.endswith(".jinja"), path
    record = read_yaml(project / ".shardlight.yaml")[0].plain()
    assert (record["template"], record["version"]) == (name, TEMPLATES[name].version)
    readme = (project / "README.md").read_text()
    lines = re.findall(r"^shardlight (.*?)(?:\s{2,}#.*)?$", readme, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:  # as the command would parse it
        group = typer.main.get_command(cli.app)
        context = group.make_context("shardlight", [], resilient_parsing=True)
        command, found, rest = group.resolve_command(context, shlex.split(line, comments=True))
        found.make_context(command, rest, parent=context)
    assert all(f"`{strategy}`" in readme for strategy in ("single", "ddp", "zero1", "zero2", "zero3"))
    assert package in readme and "shardlight fit config.yaml" in readme


class Recorder(Callback):
    """Keeps every batch, and the loss of every window."""

    def __init__(self):
        self.batches, self.losses = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.losses.append(float(trainer.strategy.window_loss))


def train(project: str, overrides: list[str], strategy: str, world_size: int, batches: list | None) -> Recorder:
    overrides = [*overrides, f"strategy={strategy}", f"trainer.devices={world_size}", "trainer.limit_val_batches=0"]
    overrides += ["trainer.max_steps=3", "trainer.accumulate_grad_batches=2", "trainer.enable_progress_bar=false"]
    config = load(f"{project}/config.yaml", [*overrides, "checkpoint=null", "schedule.warmup_steps=1"]).config
    seed_everything(config.seed, workers=True, verbose=False)
    module, data, record = build_module(config), config.data.build(), Recorder()
    if batches is not None:
        data.train_dataloader = lambda: DataLoader(batches, batch_size=None)
    with contextlib.chdir(project):
        trainer = build_trainer(config, "validate", Path(project, "runs"), launched=world_size > 1)
        trainer.callbacks.append(record)
        trainer.fit(module, datamodule=data)
    return record


def under_all(rank, world_size, project, overrides, strategies, batches):
    records = {strategy: train(project, overrides, strategy, world_size, batches) for strategy in strategies}
    return {strategy: record.losses for strategy, record in records.items()}, records[strategies[0]].batches


def joined(batches: list):
    """The batches of all ranks as one; what is padded to the longest of a batch is padded to the longest of all."""
    if isinstance(batches[0], dict):
        return {key: joined([batch[key] for batch in batches]) for key in batches[0]}
    if isinstance(batches[0], list | tuple):
        return [joined(list(parts)) for parts in zip(*batches, strict=True)]
    if batches[0].dim() == 2 and not batches[0].is_floating_point():
        length = max(batch.shape[1] for batch in batches)
        fill = -100 if any((batch == -100).any() for batch in batches) else 0
        batches = [torch.nn.functional.pad(batch, (0, length - batch.shape[1]), value=fill) for batch in batches]
    return torch.cat(batches)


@pytest.mark.case("C100")
def test_losses_are_equal_under_every_strategy(project, name, tmp_path, monkeypatch):
    """Those of two ranks, and of one process on the joined batches."""
    monkeypatch.setenv("SHARDLIGHT_CACHE", str(tmp_path))
    common = {"project": str(project), "overrides": [*SMALL[name], *SMALL_DATA.get(name, ())]}
    sharded = ["ddp", "zero1", "zero2", "zero3"]
    (losses, first), (_, second) = run_ranks(
        under_all, 2, init=False, timeout_s=200, strategies=sharded, batches=None, **common
    )
    both = [joined([*pair]) for pair in zip(first, second, strict=True)]
    ((alone, _),) = run_ranks(under_all, 1, init=False, timeout_s=100, strategies=["single"], batches=both, **common)
    assert len(alone["single"]) == 3
    (one_pipeline, _), _ = run_ranks(
        under_all, 2, init=False, timeout_s=100, strategies=["pipeline"], batches=both, **common
    )
    losses |= one_pipeline
    for strategy in losses:
        assert losses[strategy] == pytest.approx(alone["single"], rel=1e-5), strategy


def run_tests(rank, world_size, project):
    for variable in LAUNCH_VARIABLES:
        os.environ.pop(variable, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of plugins that are imported already
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.chdir(project):
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-W", "error", f"--basetemp={project}/.tmp", project])
    assert code == 0, output.getvalue()
    return output.getvalue()


def test_the_model_of_the_language_model_template_is_the_examples():
    template = ROOT / "language_model" / "project" / "{{name}}" / "model.py"
    assert template.read_text() == (ROOT.parent / "examples" / "language_model" / "model.py").read_text()


@pytest.mark.case("C100")
def test_its_own_tests_are_green(project):
    (output,) = run_ranks(run_tests, 1, timeout_s=120, project=str(project))
    assert "passed" in output and "skipped" not in output


def reload(rank, world_size, project, checkpoint, exported):
    """The module in Python, without ranks, from its checkpoint alone."""
    kind = load(f"{project}/config.yaml").config.module.target
    state = kind.load_from_checkpoint(checkpoint).state_dict()
    exported = load_file(exported)
    assert exported and all(torch.equal(state[key], value) for key, value in exported.items())
    return {key: float(value.sum()) for key, value in state.items()}


@pytest.mark.case("C100")
def test_it_trains_resumes_and_exports_by_the_command_line(project, name, tmp_path):
    """The smallest as it was generated, from another working directory."""
    overrides = [*SMALL[name], "run.dir=runs", *(["schedule.warmup_steps=1"] if SMALL[name] else [])]
    short = ["trainer.max_steps=4"] if SMALL[name] else []
    variables = {"SHARDLIGHT_CACHE": str(tmp_path)}
    outcome = run_command(["fit", project / "config.yaml", *overrides, *short], tmp_path, variables, timeout_s=120)
    assert outcome.code == 0 and outcome.left_running == (), outcome.output
    assert "warning" not in outcome.output.lower(), outcome.output
    runs = tmp_path / "runs" / f"my_{name}"
    summary = json.loads((runs / "000" / "summary.json").read_text())
    steps = summary["steps"]
    more = [f"trainer.max_steps={steps + 2}", "trainer.max_epochs=1000", "resume=auto", "strategy=zero2"]
    outcome = run_command(["fit", project / "config.yaml", *overrides, *more], tmp_path, variables, timeout_s=120)
    assert outcome.code == 0, outcome.output
    assert json.loads((runs / "001" / "summary.json").read_text())["steps"] == steps + 2
    checkpoint = runs / "001" / "checkpoints" / f"step-{steps + 2}"
    assert call("export", checkpoint, "--out", tmp_path / "model.safetensors")[0] == 0
    files = {"checkpoint": str(checkpoint), "exported": str(tmp_path / "model.safetensors")}
    (sums,) = run_ranks(reload, 1, project=str(project), **files)
    if name == "tabular":
        table = (project / "data" / "wine.csv").read_text().splitlines()
        (tmp_path / "new.csv").write_text("\n".join(line.rpartition(",")[0] for line in table[:6]))
        predict = ["predict", project / "config.yaml", "run.dir=runs", f"data.path={tmp_path}/new.csv"]
        outcome = run_command([*predict, "--ckpt", checkpoint], tmp_path, timeout_s=120)
        assert outcome.code == 0, outcome.output
        assert load_file(runs / "002" / "predictions.safetensors")["class"].tolist() == [0] * 5
        assert sums["model.mean"] > 100  # taken from the rows, and kept
        assert summary["metrics"]["val/accuracy"] > 0.9
