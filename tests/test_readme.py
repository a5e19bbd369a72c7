"""The README is true: its commands run, its example project trains, and what it refers to exists."""

import ast
import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from command import run_command
from shardlight import cli

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
PROGRAMS = ("pip", "pytest", "shardlight", "torchrun", "srun", "python")

# What the README's example leaves to the reader: a model and data.
LEFT_OUT = """
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
class GPT(nn.Sequential):
    def __init__(self, vocab_size: int, width: int):
        super().__init__(nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size))
class TextData(LightningDataModule):
    def __init__(self, batch_size: int):
        super().__init__()
        self.batch_size = batch_size
    def train_dataloader(self):
        tokens = torch.arange(17 * 256).view(256, 17) % 250
        samples = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
        return torch.utils.data.DataLoader(samples, batch_size=self.batch_size)
"""


def commands() -> list[str]:
    """Every command in the README's plain blocks, one program each, without the words that explain it."""
    lines = [line for language, block in BLOCKS if language in ("", "sh", "bash") for line in block.splitlines()]
    lines = [re.split(r"\s{2,}", line.strip())[0] for line in lines if line.startswith(PROGRAMS)]
    return [part for line in lines for part in line.split(" && ")]


def shardlight_arguments() -> list[str]:
    """The arguments of every `shardlight` in the README, also of those behind a launcher."""
    found = [re.search(r"(?:^|\s)(?:shardlight|shardlight\.cli)\s+(.*)$", line) for line in commands()]
    return [match[1] for match in found if match]


def block(language: str, words: str) -> str:
    """The block of a language that contains some words."""
    (found,) = [text for name, text in BLOCKS if name == language and words in text]
    return found


def test_the_two_commands_of_a_fresh_machine_are_shown():
    assert "pip install -e . && shardlight fit examples/language_model/config.yaml\n" in TEXT
    assert 'pip install -e ".[dev]" && pytest -n 2\n' in TEXT
    assert len(shardlight_arguments()) >= 8


@pytest.mark.parametrize("line", shardlight_arguments())
def test_a_command_line_parses(line):
    group = typer.main.get_command(cli.app)
    outer = group.make_context("shardlight", [], resilient_parsing=True)
    name, command, rest = group.resolve_command(outer, shlex.split(line))
    command.make_context(name, rest, parent=outer)


@pytest.mark.parametrize("line", [line for line in shardlight_arguments() if "examples/" in line])
def test_a_command_on_an_example_resolves(line, tmp_path):
    arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(line)]
    outcome = run_command([*arguments, "--print"], tmp_path)
    assert outcome.code == 0, outcome.output
    for word in arguments:
        if "=" in word:
            assert word.split("=")[1] in outcome.output


def test_the_commands_for_a_project_run_in_the_order_shown(tmp_path):
    """`PATH` is the checkpoint that the first of them wrote."""
    shutil.copy(Path(__file__).with_name("faulty.py"), tmp_path)
    config = "module: {class: faulty.FaultyModule}\ndata: {class: faulty.FaultyData}\nstrategy: zero3\n"
    (tmp_path / "config.yaml").write_text(config + "trainer: {accelerator: cpu, devices: 2, max_steps: 3}\n")
    checkpoint = None
    for line in block("", "--dry-run").splitlines():
        command, _, rest = re.split(r"\s{2,}", line.strip())[0].partition(" ")
        assert command == "shardlight"
        arguments = [str(checkpoint) if word == "PATH" else word for word in shlex.split(rest)]
        outcome = run_command(
            [*arguments, *(["trainer.max_steps=5"] if "fit" in rest and "PATH" in rest else [])], tmp_path
        )
        assert outcome.code == 0, f"{line}\n{outcome.output}"
        assert outcome.left_running == ()
        if checkpoint is None and rest.startswith("fit"):
            (manifest,) = tmp_path.rglob("manifest.json")
            checkpoint = manifest.parent
    assert (tmp_path / "model.safetensors").stat().st_size > 58 * 4


def test_the_example_of_a_project_trains_as_shown(tmp_path):
    project = tmp_path / "my_project"
    project.mkdir()
    (project / "data.py").write_text(LEFT_OUT)
    (project / "model.py").write_text("from my_project.data import GPT\n" + block("python", "class LanguageModel"))
    (tmp_path / "config.yaml").write_text(block("yaml", "my_project.model.LanguageModel"))
    outcome = run_command(["fit", "config.yaml", "trainer.max_steps=2", "schedule.warmup_steps=1"], tmp_path)
    assert outcome.code == 0, outcome.output
    assert list(tmp_path.rglob("summary.json"))


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "python"])
def test_the_python_shown_is_python_and_its_imports_exist(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_the_files_it_names_exist(document):
    text = (ROOT / document).read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("http", "#"))]
    names = re.findall(r"`((?:framework|strategies|ops|tests|examples)/[\w/.]+\.\w+)`", text)
    missing = [name for name in {*links, *names} if not (ROOT / name).exists()]
    assert not missing
