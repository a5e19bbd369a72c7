"""The files that start a run on several machines do so: each machine is played by processes of this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import free_port

LAUNCH = Path(__file__).parent.parent / "examples" / "several_machines"
CONFIG = Path(__file__).parent.parent / "examples" / "language_model" / "config.yaml"
SMALL = ["trainer.max_steps=12", "schedule.warmup_steps=2", "data.batch_size=2", "strategy=zero3"]
SRUN = """#!{python}
import os, subprocess, sys
ranks = int(os.environ["SLURM_NTASKS"])
places = [{{"SLURM_PROCID": str(r), "SLURM_LOCALID": "0", "SLURM_NODEID": str(r)}} for r in range(ranks)]
running = [subprocess.Popen(sys.argv[1:], env={{**os.environ, **place}}) for place in places]
sys.exit(max(task.wait() for task in running))
"""
"""As srun does it: one task per rank, each of which knows its place."""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """This process's, with the command on the path and a folder for what torchrun leaves."""
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "TMPDIR": str(folder), **variables}


def slurm(folder: Path, srun: str) -> dict[str, str]:
    """What sbatch sets for a job of two machines with a rank each."""
    (folder / "srun").write_text(srun)
    (folder / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1"}
    places = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1"}
    return environment(folder, **job, **places)


def losses(output: str) -> list[str]:
    return [line.split("loss ")[1].split()[0] for line in output.splitlines() if line.startswith("step ")]


def test_the_slurm_file_starts_a_task_per_rank_that_goes_on_by_itself(tmp_path):
    env = slurm(tmp_path, '#!/bin/bash\nprintf "%s\\n" "$@" > "$TMPDIR/given"\n')
    subprocess.run(["bash", str(LAUNCH / "slurm.sbatch"), str(CONFIG), *SMALL], env=env, check=True)
    command, verb, *given = (tmp_path / "given").read_text().splitlines()
    assert (command, verb) == ("shardlight", "fit")
    assert given == [str(CONFIG), *SMALL, "resume=auto", "trainer.num_nodes=2", "trainer.devices=1"]
    said = [line for line in (LAUNCH / "slurm.sbatch").read_text().splitlines() if line.startswith("#SBATCH --signal")]
    assert said == ["#SBATCH --signal=TERM@120"], "SIGTERM finishes the step and saves"
    checked = subprocess.run(
        [sys.executable, "-m", "shardlight.cli", "check", *given], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.long
def test_a_slurm_job_of_two_machines_trains_and_goes_on(tmp_path):
    env = slurm(tmp_path, SRUN.format(python=sys.executable))
    settings = [item for item in SMALL if not item.startswith("trainer.max_steps=")]
    line = ["bash", str(LAUNCH / "slurm.sbatch"), str(CONFIG), *settings]
    for steps in (12, 16):
        done = subprocess.run(
            [*line, f"trainer.max_steps={steps}"], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"step {steps}/{steps}" in done.stdout and "Run folder" in done.stdout, done.stdout
    assert "step-12" in done.stdout and not any(line.startswith("step 1/") for line in done.stdout.splitlines())


@pytest.mark.long
def test_torchrun_on_two_machines_trains_like_our_own_launcher(tmp_path):
    port = str(free_port())
    machines = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        env = environment(tmp_path / str(number), NODES="2", PER_NODE="1", HOST="127.0.0.1", PORT=port)
        line = [str(LAUNCH / "torchrun.sh"), str(CONFIG), *SMALL]
        machines.append(subprocess.Popen(line, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
    outputs = [machine.communicate(timeout=200)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert sum("Run folder" in output for output in outputs) == 1
    own = subprocess.run(
        [sys.executable, "-m", "shardlight.cli", "fit", str(CONFIG), *SMALL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert losses(own.stdout)[-1] == losses(max(outputs, key=len))[-1]


@pytest.mark.long
def test_ray_train_trains(tmp_path):
    pytest.importorskip("ray.train")
    env = environment(tmp_path, RAY_TMPDIR=str(tmp_path), RAY_DEDUP_LOGS="0")
    line = [sys.executable, str(LAUNCH / "ray_train.py"), str(CONFIG), *SMALL]
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "step 12/12" in done.stdout + done.stderr
    assert list((tmp_path / "runs").glob("*/*/checkpoints/step-12/manifest.json"))


def test_the_readme_shows_these_files():
    text = (Path(__file__).parent.parent / "README.md").read_text()
    for file in LAUNCH.iterdir():
        assert f"examples/several_machines/{file.name}" in text, file
