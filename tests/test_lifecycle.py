"""A rank that raises, exits, is killed or never comes ends the run soon, its own words first, and nothing is left.

C005, C008, C097. Every test also checks, through `conftest.py`, that no temporary file is left.
"""

import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
from command import TORCHRUN, Outcome, run_command, run_together, slurm_variables, torchrun_variables
from harness import free_port
from lightning.pytorch import Trainer
from shardlight.strategies import STRATEGIES

END_S = 30.0  # between a rank's failure and the end of the run
CONFIG = """
module: {class: faulty.FaultyModule}
data: {class: faulty.FaultyData}
strategy: {name: zero3, timeout_s: 20.0}
trainer: {accelerator: cpu, devices: 2, max_steps: 5, num_sanity_val_steps: 0, enable_progress_bar: false}
"""
WORDS = {"raise": "ValueError: boom", "exit": "exit code 7", "kill": "killed by signal 9 (SIGKILL)"}


@pytest.fixture
def project(tmp_path) -> Path:
    """A user's project: a config and the module it names."""
    shutil.copy(Path(__file__).with_name("faulty.py"), tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def fit(project: Path, *overrides: str, **options) -> Outcome:
    return run_command(["fit", "config.yaml", *overrides], project, **options)


def fault(place: str, step: int, how: str, rank: int = 1) -> list[str]:
    """The overrides that make the module go wrong."""
    return [f"module.where={place}", f"module.step={step}", f"module.how={how}", f"module.rank={rank}"]


def check_failed(project: Path, outcome: Outcome, within_s: float = END_S) -> None:
    """The run failed, ended soon after the fault, and nothing runs any more."""
    assert outcome.code not in (0, None), outcome.output
    struck = project / "struck"
    assert struck.exists(), outcome.output
    assert outcome.ended_s - float(struck.read_text()) < within_s, outcome.output
    struck.unlink()
    assert outcome.left_running == ()


def check_cause(project: Path, outcome: Outcome, words: str, rank: int = 1, world_size: int = 2) -> None:
    """As `check_failed`; and the cause is the first thing said about any failure."""
    check_failed(project, outcome)
    said = f"rank {rank} of {world_size} failed: "
    assert said in outcome.output, outcome.output
    before, _, after = outcome.output.partition(said)
    assert words in after, outcome.output
    for other in ("Traceback", "Error"):
        assert other not in before, outcome.output


def check_a_run_works(project: Path, *overrides: str) -> None:
    again = fit(project, *overrides)
    assert again.code == 0, again.output
    assert again.left_running == ()


@pytest.mark.case("C008")
@pytest.mark.conformance("C8")
@pytest.mark.parametrize(
    "strategy,step,how",
    [("zero3", 0, "raise"), ("zero2", 4, "raise"), ("zero1", 2, "exit"), ("ddp", 2, "kill"), ("zero3", 4, "kill")],
)
def test_a_rank_that_fails_in_a_training_step_ends_the_run(project, strategy, step, how):
    outcome = fit(project, f"strategy={strategy}", *fault("training_step", step, how))
    check_cause(project, outcome, WORDS[how])
    assert how != "raise" or 'raise ValueError("boom")' in outcome.output  # its traceback, with the user's line


@pytest.mark.case("C008")
def test_after_a_failure_a_second_run_works_at_once(project):
    check_cause(project, fit(project, *fault("training_step", 1, "kill")), WORDS["kill"])
    check_a_run_works(project)


@pytest.mark.case("C008")
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("step", [0, 2, 4])
@pytest.mark.parametrize("how", ["raise", "exit", "kill"])
@pytest.mark.parametrize("devices", [2, 4])
def test_every_way_to_fail_in_every_strategy(project, strategy, step, how, devices):
    overrides = [f"strategy={strategy}", f"trainer.devices={devices}", "data.count=40"]
    check_cause(project, fit(project, *overrides, *fault("training_step", step, how)), WORDS[how], world_size=devices)
    check_a_run_works(project, *overrides)


@pytest.mark.case("C008")
def test_four_ranks_end_when_one_is_killed(project):
    overrides = ["trainer.devices=4", "data.count=40", *fault("training_step", 2, "kill", rank=2)]
    check_cause(project, fit(project, *overrides), WORDS["kill"], rank=2, world_size=4)


@pytest.mark.case("C008")
@pytest.mark.conformance("C8")
@pytest.mark.conformance("C9")
@pytest.mark.parametrize("place,how", [("validation_step", "raise"), ("validation_step", "kill"), ("setup", "raise")])
def test_a_rank_that_fails_outside_training_ends_the_run(project, place, how):
    check_cause(project, fit(project, *fault(place, 0, how)), WORDS[how])


@pytest.mark.case("C008")
@pytest.mark.parametrize(
    "workers,how,words",
    [
        (0, "raise", "boom"),
        (0, "kill", "SIGKILL"),
        pytest.param(1, "raise", "boom", marks=pytest.mark.long),
        pytest.param(1, "exit", "DataLoader worker", marks=pytest.mark.long),
        (1, "kill", "DataLoader worker"),
    ],
)
def test_a_loader_that_fails_ends_the_run(project, workers, how, words):
    overrides = [f"data.workers={workers}", "data.rank=1", "data.step=2", f"data.how={how}"]
    check_cause(project, fit(project, *overrides), words)


@pytest.mark.case("C008")
def test_the_first_rank_may_be_the_one_that_fails(project):
    check_cause(project, fit(project, *fault("training_step", 2, "raise", rank=0)), WORDS["raise"], rank=0)


def test_a_rank_that_hangs_is_given_up_after_the_timeout(project):
    outcome = fit(project, "strategy.timeout_s=3", *fault("training_step", 1, "hang"))
    check_failed(project, outcome)
    assert "CollectiveError" in outcome.output


@pytest.mark.case("C005")
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("how", ["save", "gather"])
def test_a_collective_call_on_one_rank_only_is_refused(project, strategy, how):
    overrides = [f"strategy.name={strategy}", "strategy.timeout_s=10"]
    outcome = fit(project, *overrides, *fault("on_train_batch_end", 1, how, rank=0))
    check_failed(project, outcome, within_s=10 + 5)
    assert "all ranks" in outcome.output
    assert not list(project.rglob("alone.ckpt/manifest.json")), "half a checkpoint looks complete"


@pytest.mark.case("C097")
@pytest.mark.parametrize("missing", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_that_never_come_are_counted(project, missing):
    """Of 4 ranks that torchrun's variables announce, fewer start; those that did say how many arrived."""
    line, port = ["fit", "config.yaml", "trainer.devices=4", "strategy.timeout_s=3"], free_port()
    places = [torchrun_variables(rank, 4, port) for rank in range(4 - missing)]
    outcomes = run_together([line] * len(places), project, places)
    for outcome in outcomes:
        assert outcome.code not in (0, None)
        assert outcome.seconds < 3 + 5, outcome.output
        assert f"{4 - missing} of 4" in outcome.output
        assert outcome.left_running == ()


@pytest.mark.case("C097")
def test_a_rank_beyond_the_world_size_is_an_error(project):
    outcome = fit(project, variables=torchrun_variables(2, world_size=2))
    assert outcome.code == 2 and outcome.seconds < 5
    assert "RANK is 2" in outcome.output and "WORLD_SIZE is 2" in outcome.output


@pytest.mark.case("C097")
def test_another_world_size_than_the_configs_is_an_error_with_both_numbers(project):
    outcome = fit(project, variables=torchrun_variables(0, world_size=3))
    assert outcome.code == 2 and outcome.seconds < 5
    assert "started 3" in outcome.output and "= 2" in outcome.output


@pytest.mark.conformance("G")
def test_a_slurm_job_trains(project):
    job = random.randrange(10**6)  # the port follows from it
    places = [slurm_variables(rank, 2, job) for rank in range(2)]
    outcomes = run_together([["fit", "config.yaml"]] * 2, project, places)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert sum("Run folder" in outcome.output for outcome in outcomes) == 1


def under_torchrun(project: Path, *overrides: str) -> Outcome:
    """Two ranks; torchrun itself leaves a folder in the temporary folder, so it gets its own."""
    (project / "tmp").mkdir()
    line = [*TORCHRUN, "--nproc-per-node", "2", "-m", "shardlight.cli", "fit", "config.yaml", *overrides]
    return run_command(line, project, {"TMPDIR": str(project / "tmp")}, cold=True, timeout_s=150)


@pytest.mark.case("C008")
@pytest.mark.long
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_failing_rank_ends_a_run_under_torchrun(project, how):
    outcome = under_torchrun(project, *fault("training_step", 2, how))
    check_failed(project, outcome)
    assert how != "raise" or "ValueError: boom" in outcome.output


@pytest.mark.long
@pytest.mark.conformance("G")
def test_torchrun_trains(project):
    outcome = under_torchrun(project)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("Run folder") == 1
    assert outcome.left_running == ()


SCRIPT = """
import lightning.pytorch as pl, torch
from faulty import FaultyData, FaultyModule
import shardlight.strategies

if __name__ == "__main__":
    options = dict(max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = pl.Trainer(strategy="zero3", accelerator="cpu", devices=2, **options)
    trainer.fit(FaultyModule(), FaultyData())
    print(f"rank {trainer.global_rank} of {trainer.world_size} made {trainer.global_step} steps")
"""


@pytest.mark.conformance("G")
@pytest.mark.parametrize("launcher", [(), pytest.param((*TORCHRUN, "--nproc-per-node", "2"), marks=pytest.mark.long)])
def test_a_plain_script_trains_on_the_ranks_its_trainer_asks_for(project, launcher):
    """Without a launcher Lightning starts the second rank by running the script again."""
    (project / "script.py").write_text(SCRIPT)
    (project / "tmp").mkdir()
    line = [*(launcher or [sys.executable]), "script.py"]
    outcome = run_command(line, project, {"TMPDIR": str(project / "tmp")}, cold=True, timeout_s=150)
    assert outcome.code == 0 and outcome.left_running == (), outcome.output
    for rank in (0, 1):
        assert f"rank {rank} of 2 made 2 steps" in outcome.output, outcome.output


@pytest.mark.conformance("G")
def test_ranks_are_not_spawned():
    """Spawned ranks would hand back rank 0's shards as if they were the weights."""
    for name in ("zero3", "ddp"):
        with pytest.raises(TypeError, match="start_method"):
            STRATEGIES[name](start_method="spawn")
        assert STRATEGIES[name]()._start_method == "popen"
    with pytest.raises(ValueError, match="zero3_spawn"):
        Trainer(strategy="zero3_spawn", accelerator="cpu", logger=False, enable_checkpointing=False)


@pytest.mark.conformance("G")
def test_a_typo_ends_the_command_before_anything_is_launched(project):
    outcome = fit(project, "trainer.max_step=3")
    assert outcome.code == 2 and outcome.left_running == ()
    assert "Did you mean" in outcome.output and "max_steps" in outcome.output
    assert not (project / "runs").exists()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_a_signal_to_the_command_ends_its_workers(project, number):
    outcome = fit(project, "trainer.max_steps=1000000", "data.count=2000", signals=[(4.0, number)])
    assert outcome.code in (-number, 128 + number), outcome.output
    assert outcome.seconds < END_S
    assert outcome.left_running == ()


@pytest.mark.conformance("C10")
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 2])
def test_sigterm_finishes_the_step_saves_and_ends_well(project, devices):
    options = (f"trainer.devices={devices}", "trainer.accumulate_grad_batches=3", "checkpoint.save_top_k=1")
    options += ("data.count=2000",)  # the rest of the epoch needs the data that it began with
    outcome = fit(project, "trainer.max_steps=1000000", *options, signals=[(4.0, signal.SIGTERM)])
    assert outcome.code == 0, outcome.output
    assert outcome.left_running == () and outcome.seconds < END_S
    (saved,) = (p for p in project.rglob("step-*") if (p / "manifest.json").exists())
    assert int(saved.name.removeprefix("step-")) > 0
    again = fit(project, f"trainer.max_steps={int(saved.name.removeprefix('step-')) + 1}", *options, f"resume={saved}")
    assert again.code == 0, again.output


@pytest.mark.conformance("G")
def test_a_real_command_line_trains_and_a_killed_rank_ends_it(project):
    check_cause(project, fit(project, *fault("training_step", 2, "kill"), cold=True, timeout_s=90), WORDS["kill"])
