"""`shardlight check`: what can be known before a run, without importing torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from shardlight import cli
from typer.testing import CliRunner

EXAMPLE = Path(__file__).parents[1] / "examples" / "language_model" / "config.yaml"
QUIET = """
import sys
from shardlight.cli import main
sys.argv = ["shardlight", *sys.argv[1:]]
try: main()
finally: print([m for m in ("torch", "lightning") if m in sys.modules])
"""


def here(*arguments: str) -> tuple[int, str, str]:
    """Calls the command in this process: (exit code, standard output, standard error)."""
    result = CliRunner().invoke(cli.app, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("verb", ["check", "fit"])
def test_faults_are_shown_without_importing_torch(tmp_path, verb):
    command = [sys.executable, "-c", QUIET, verb, str(EXAMPLE), "module.widht=3", "trainer.devices=0"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert (made.returncode, made.stdout) == (2, "[]\n")
    assert made.stderr.splitlines() == [
        "command line: module.widht is not a parameter of examples.language_model.model.LanguageModel. "
        "Did you mean 'width'?",
        "command line: trainer.devices is 0; it must be at least 1.",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "outline"),
    [
        ([], "zero3 on 2 ranks, 8 samples per step (batch_size 4 x 1 micro-batch x 2 ranks), 90 steps"),
        (["strategy=single", "trainer.devices=1", "trainer.global_batch_size=12", "trainer.max_epochs=1"],
         "single on 1 rank, 12 samples per step (batch_size 4 x 3 micro-batches x 1 rank), 90 steps or 1 epoch, "
         "whichever ends first"),
        (["trainer.max_steps=null", "trainer.max_epochs=2", "trainer.limit_train_batches=5", "trainer.accumulate_grad_batches=2"],
         "zero3 on 2 ranks, 16 samples per step (batch_size 4 x 2 micro-batches x 2 ranks), 3 steps per epoch at most, "
         "2 epochs"),
    ],
)  # fmt: skip
def test_a_config_without_faults_is_told_in_one_line(overrides, outline):
    assert here("check", str(EXAMPLE), *overrides) == (0, f"{EXAMPLE}: {outline}. No faults.\n", "")
