"""The command: help without torch, faults without tracebacks, one run through every verb, other launchers."""

import json
import logging
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import typer
from command import run_command, run_together, torchrun_variables
from harness import free_port
from safetensors.torch import load_file, save_file
from shardlight import cli
from shardlight.commands.output import short_errors
from shardlight.framework import launch
from shardlight.framework.assemble import make_run_dir
from shardlight.framework.config import load_config
from shardlight.framework.schema import TrainerConfig
from shardlight.framework.world import World, adopt_slurm, check_world, find_world
from shardlight.ops.built import OPS_VARIABLE, library, why_not
from shardlight.strategies.errors import LaunchError
from test_config import OPTIONS
from typer.testing import CliRunner

COMMAND = [str(Path(sys.executable).parent / "shardlight")]
PROJECT = """
import torch
from faulty import FaultyData, FaultyModule
from torch.utils.data import DataLoader

class Model(FaultyModule):
    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return batch["number"]

class Data(FaultyData):
    def test_dataloader(self):
        return self.val_dataloader()

    def predict_dataloader(self):
        return DataLoader([{"number": torch.tensor(float(n))} for n in range(7)], batch_size=2)
"""
CONFIG = """\
module: {class: shardlight_test_cli.Model}
data: {class: shardlight_test_cli.Data}
strategy: zero3
trainer: {devices: 2, max_steps: 3, accelerator: cpu, num_sanity_val_steps: 1, log_every_n_steps: 1}
run: {name: here}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project as the working directory, with ranks that take one thread each."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "shardlight_test_cli.py").write_text(PROJECT)
    (tmp_path / "faulty.py").write_text((Path(__file__).parent / "faulty.py").read_text())
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("shardlight_test_cli", "faulty"):
        sys.modules.pop(name, None)


def here(*arguments: str) -> tuple[int, str, str]:
    """Calls the command in this process: (exit code, standard output, standard error)."""
    result = CliRunner().invoke(cli.app, arguments)
    return result.exit_code, result.stdout, result.stderr


def run(*arguments: str, env: dict[str, str] | None = None, command: list[str] = COMMAND) -> tuple[int, str, str]:
    """Calls the command as a user does."""
    whole = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
    made = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, check=False, env=whole)
    return made.returncode, made.stdout, made.stderr


def test_a_mistake_that_lightning_names_is_shown_without_its_traceback(capsys):
    class MisconfigurationException(Exception):
        pass

    with pytest.raises(typer.Exit), short_errors(debug=False):
        raise MisconfigurationException("`val_dataloader` is empty.")
    assert capsys.readouterr().err == "MisconfigurationException: `val_dataloader` is empty.\n"
    with pytest.raises(typer.Exit), short_errors(debug=True):
        raise MisconfigurationException("x")
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(KeyError), short_errors(debug=False):
        raise KeyError("a fault of the user's code keeps its traceback")


def test_help_is_quick_and_imports_no_torch():
    script = "import sys; sys.argv = ['shardlight', '--help']\nfrom shardlight.cli import main\ntry: main()\nfinally: print([m for m in ('torch', 'lightning', 'omegaconf') if m in sys.modules])"  # fmt: skip
    times = []
    for _ in range(3):
        start = time.monotonic()
        code, out, _ = run("-c", script, command=[sys.executable])
        times.append(time.monotonic() - start)
        assert code == 0 and out.splitlines()[-1] == "[]"
    # 0.3 s on an idle machine; tests share it with others.
    assert min(times) < 1.5
    for verb in ("fit", "validate", "test", "predict", "export", "schedule", "ops"):
        assert f"  {verb} " in out
        assert here(verb, "--help")[0] == 0


OPS = """
import sys
from pathlib import Path
from shardlight.cli import main
from shardlight.ops import built, registry
files = {"missing": None, "broken": Path("/dev/null"), "cut short": Path("cut.so")}
how = sys.argv[1]
if how in files:
    built.library = registry.library = lambda device="cpu": files[how]
sys.argv = ["shardlight", "ops", "--json", "found/ops.json"]
try: main()
finally: print([m for m in ("torch", "lightning", "omegaconf") if m in sys.modules])
"""


def test_ops_tells_what_is_used_and_why_without_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def found(how, env=None):
        code, out, err = run("-c", OPS, how, command=[sys.executable], env={OPS_VARIABLE: "", **(env or {})})
        assert (code, err, out.splitlines()[-1]) == (0, "", "[]")
        rows = json.loads(Path("found/ops.json").read_text())["ops"]
        assert all(row["op"] in out for row in rows)
        return {row["op"]: row for row in rows}

    off = found("as it is", {OPS_VARIABLE: "reference"})
    assert off["host_collectives"]["chosen"] == off["disk"]["chosen"] == "CPU: reference"
    assert off["adam"]["chosen"] == "CPU: reference; CUDA: reference"
    assert off["sums"]["why"].startswith("CPU: SHARDLIGHT_OPS=reference is set")
    missing, broken = found("missing"), found("broken")
    assert missing["adam"]["CPU"] == "not built" and "CPU: it was not built: install a C++" in missing["adam"]["why"]
    assert "run 'shardlight ops build'" in missing["lion"]["why"]
    assert broken["sgd"]["CPU"] == "built" and "cannot be loaded" in broken["sgd"]["why"]
    if why_not() is None:
        Path("cut.so").write_bytes(library().read_bytes()[:400_000])
        assert "CPU: it is not whole: install" in found("cut short")["adam"]["why"]
        assert found("as it is")["rmsprop"]["chosen"].startswith("CPU: native")


def test_what_ops_cannot_be_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (["ops"], ["fit", "config.yaml"]):
        code, _, err = run(*command, env={OPS_VARIABLE: "fast"})
        assert (code, err) == (
            1,
            "OpError: SHARDLIGHT_OPS=fast is not a choice. Set it to auto, native or reference.\n",
        )
    code, _, err = here("ops", "build", "--arch", "sm_80,h100")
    assert code == 1 and err == "OpError: --arch h100 is no architecture: they look like sm_80 or sm_90.\n"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    code, _, err = here("ops", "build")
    assert code == 1 and err.startswith("OpError: nvcc was not found: install the CUDA toolkit")


def test_the_version_is_printed():
    code, out, _ = here("--version")
    assert code == 0 and out.startswith("shardlight ") and out.count(".") == 2


def test_print_shows_values_and_origins_and_starts_nothing(project):
    code, out, err = here("fit", "config.yaml", "strategy=zero2", "--print")
    assert (code, err) == (0, "") and not (project / "runs").exists()
    lines = dict(line.split(":", 1) for line in out.splitlines())
    assert lines["seed"].split() == ["0", "#", "default"]
    assert lines["  name"] is not None and "zero2" in out and "# command line" in out
    assert lines["  max_steps"].split() == ["3", "#", "config.yaml:4"]
    (project / "printed.yaml").write_text(out)
    assert load_config("printed.yaml") == load_config("config.yaml", ["strategy=zero2"])


@pytest.mark.case("C023")
def test_faults_exit_with_two_all_at_once_and_without_a_traceback(project):
    code, out, err = here("fit", "config.yaml", "trainer.gradient_cliping=1", "+strategy.stagee=3")
    assert (code, out) == (2, "") and err.splitlines() == [
        "command line: +strategy.stagee starts with '+', which overrides here do not have. Write strategy.stagee=3.",
        "command line: trainer.gradient_cliping is not a key of trainer. Did you mean 'gradient_clip_val'?",
        f"command line: strategy.stagee is not an option of zero3. Choose from: {OPTIONS}.",
    ]
    code, _, err = here("fit", "none.yaml")
    assert (code, err) == (2, "none.yaml: cannot be read: No such file or directory.\n")
    code, _, err = here("validate", "config.yaml", "--ckpt", "no/such 010")
    assert (code, err) == (2, "command line: resume: there is no checkpoint no/such 010.\n")
    assert not (project / "runs").exists()


def test_debug_shows_the_traceback_too(project):
    code, _, err = here("fit", "none.yaml", "--debug")
    assert code == 2 and err.endswith("\nnone.yaml: cannot be read: No such file or directory.\n")


def test_a_trusted_package_may_be_named(project):
    fault = here("fit", "config.yaml", "module.class=torch.nn.Linear", "--print")[2]
    assert "or a package given with --trust torch." in fault
    fault = here("fit", "config.yaml", "module.class=torch.nn.Linear", "--print", "--trust", "torch")[2]
    assert fault == "command line: module.class: torch.nn.Linear is not a LightningModule.\n"


def test_several_nodes_need_another_launcher(project):
    code, _, err = here("fit", "config.yaml", "trainer.num_nodes=2")
    assert (code, err) == (
        2,
        "LaunchError: trainer.num_nodes is 2: start the processes on each node with torchrun or srun.\n",
    )


@pytest.mark.case("C097")
@pytest.mark.parametrize(
    ("env", "fault"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, "torchrun started 4 processes, but trainer.devices 2 x "
         "trainer.num_nodes 1 = 2. Start 2, or set trainer.devices or trainer.num_nodes."),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun started 1 process, but trainer.devices 2 x "
         "trainer.num_nodes 1 = 2. Start 2, or set trainer.devices or trainer.num_nodes."),
        ({"SLURM_NTASKS": "3", "SLURM_PROCID": "1"}, "SLURM started 3 processes, but trainer.devices 2 x "
         "trainer.num_nodes 1 = 2. Start 2, or set trainer.devices or trainer.num_nodes."),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4 and WORLD_SIZE is 4: ranks go from 0 to WORLD_SIZE - 1."),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "2"},
         "SLURM_PROCID is 2 and SLURM_NTASKS is 2: ranks go from 0 to SLURM_NTASKS - 1."),
        ({"WORLD_SIZE": "2"}, "RANK is '' in the environment, but must be a whole number: the launcher sets it."),
        ({"RANK": "0", "WORLD_SIZE": "two"},
         "WORLD_SIZE is 'two' in the environment, but must be a whole number: the launcher sets it."),
    ],
)  # fmt: skip
def test_another_number_of_processes_is_an_error_at_once(project, monkeypatch, env, fault):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert here("fit", "config.yaml") == (2, "", f"LaunchError: {fault}\n")
    assert not (project / "runs").exists()


def test_the_ranks_of_each_launcher_are_recognised():
    assert find_world({}) is None
    assert find_world({"RANK": "1", "WORLD_SIZE": "2"}) == World("torchrun", 1, 2)
    assert find_world({"RANK": "1", "WORLD_SIZE": "2", "SHARDLIGHT_STORE": "x"}) == World("shardlight", 1, 2)
    slurm = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    assert find_world(slurm) == World("SLURM", 0, 2)
    assert find_world({**slurm, "SLURM_JOB_NAME": "bash"}) is None
    assert find_world({"SLURM_NTASKS": "2"}) is None
    assert find_world({**slurm, "RANK": "1", "WORLD_SIZE": "4"}) == World("torchrun", 1, 4)
    check_world(World("SLURM", 0, 4), TrainerConfig(devices=2, num_nodes=2))
    with pytest.raises(LaunchError):
        check_world(World("SLURM", 0, 2), TrainerConfig(devices=2, num_nodes=2))


def test_slurms_variables_become_torchruns():
    env = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_NODELIST": "n[07-08]", "SLURM_JOB_ID": "98765"}
    adopt_slurm(env, 2)
    made = {
        name: env[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    assert made == {
        "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n07",
        "MASTER_PORT": "23765",
    }  # fmt: skip
    given = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "MASTER_ADDR": "a"}
    adopt_slurm(given, 1)
    assert (given["LOCAL_RANK"], given["NODE_RANK"], given["MASTER_ADDR"]) == ("0", "3", "a")


def test_a_run_from_the_first_step_to_the_exported_weights(project):
    """Fit, predict and export on two processes, as a user types it."""
    done = run_command(["fit", "config.yaml", "checkpoint.export_every_n_steps=3"], project)
    assert (done.code, done.output.splitlines()[-1]) == (0, "Run folder: runs/here/000"), done.output
    folder = project / "runs" / "here" / "000"
    expected = {"checkpoints", "config.yaml", "exports", "logs", "loss.png", "summary.json", "tensorboard"}
    assert {item.name for item in folder.iterdir()} == expected
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
    assert [item.name for item in (folder / "checkpoints").iterdir()] == ["step-3"]
    assert load_config(folder / "config.yaml") == load_config("config.yaml", ["checkpoint.export_every_n_steps=3"])
    saved = str(folder / "checkpoints" / "step-3")
    done = run_command(["predict", "config.yaml", "--ckpt", saved], project)
    assert done.code == 0, done.output
    predictions = load_file(project / "runs" / "here" / "001" / "predictions.safetensors")
    assert predictions["predictions"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    code, out, _ = here("export", saved, "--out", "out.safetensors")
    assert (code, out) == (0, "out.safetensors: 4 tensors, 552 B\n")
    code, out, _ = here("checkpoint", "verify", str(folder))
    assert code == 0 and out.startswith(f"{saved}: ") and out.endswith("KB, as it was saved\n")
    assert sum(tensor.numel() for tensor in load_file("out.safetensors").values()) == 58
    assert here("export", saved, "--dtype", "bf16", "--out", "bf16.safetensors")[0] == 0
    live = folder / "exports" / "step-3" / "model.safetensors"
    assert live.read_bytes() == Path("bf16.safetensors").read_bytes()


@pytest.mark.long
def test_a_dry_run_stops_before_the_first_step_and_leaves_nothing(project, temporary_folder):
    before = set(temporary_folder.iterdir())
    # Would raise in the first training step.
    code, out, err = run("fit", "config.yaml", "module.how=raise", "--dry-run")
    assert (code, out.splitlines()[-1]) == (0, "Dry run: everything is ready for the first step."), err
    assert not (project / "runs").exists() and set(temporary_folder.iterdir()) == before


@pytest.fixture
def in_process(project, monkeypatch):
    """One-process runs inside this process; what they set is put back."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK"):
        # Lightning sets them; this way they are gone again afterwards.
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield lambda *arguments: here(*arguments, "trainer.devices=1", "strategy=single")
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_one_process_runs_here(in_process, project, temporary_folder):
    before = set(temporary_folder.iterdir())
    code, out, _ = in_process("fit", "config.yaml", "module.how=raise", "--dry-run")
    assert (code, out.splitlines()[-1]) == (0, "Dry run: everything is ready for the first step.")
    assert not (project / "runs").exists() and set(temporary_folder.iterdir()) == before
    code, out, _ = in_process("fit", "config.yaml", "trainer.enable_progress_bar=false")
    assert (code, out.splitlines()[-1]) == (0, "Run folder: runs/here/000")
    saved = "runs/here/000/checkpoints/step-3"
    for verb, name in (("validate", "val/loss"), ("test", "test/loss")):
        code, out, _ = in_process(verb, "config.yaml", "--ckpt", saved)
        assert code == 0 and name in out
    assert in_process("predict", "config.yaml", "--ckpt", saved)[0] == 0
    made = load_file("runs/here/003/predictions.safetensors")
    assert made["predictions"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert in_process("fit", "runs/here/000/config.yaml", "trainer.max_steps=5", "--ckpt", saved)[0] == 0
    assert json.loads(Path("runs/here/004/summary.json").read_text())["steps"] == 5
    (project / "broken").mkdir()
    code, _, err = in_process("fit", "config.yaml", "--ckpt", "broken")
    assert code == 1 and err.startswith("CheckpointError: ") and "Traceback" not in err


@pytest.mark.case("C067")
@pytest.mark.case("C068")
def test_a_run_builds_deferred_under_zero3_and_starts_from_given_weights(in_process, project):
    zero3 = ("trainer.devices=1", "trainer.enable_progress_bar=false", "seed=5")
    assert in_process("fit", "config.yaml", "seed=5")[0] == 0
    assert here("fit", "config.yaml", *zero3)[0] == 0
    for number in (0, 1):
        saved = f"runs/here/{number:03d}/checkpoints/step-3"
        assert here("export", saved, "--out", f"{number}.safetensors")[0] == 0
    first, second = load_file("0.safetensors"), load_file("1.safetensors")
    assert all(torch.equal(first[n], t) for n, t in second.items())  # built deferred, by the same random numbers
    save_file({n.replace("model.", "net."): t for n, t in first.items()}, "renamed.safetensors")
    _, want, _ = here("validate", "config.yaml", *zero3, "--ckpt", saved)
    starts = (saved, "1.safetensors", "{path: renamed.safetensors, rename: {net.: model.}}")
    for start in starts:
        code, out, err = here("validate", "config.yaml", *zero3, f"init_from={start}")
        assert (code, out) == (0, want.replace("here/002", f"here/{3 + starts.index(start):03d}")), err
    code, _, err = here("validate", "config.yaml", *zero3, "init_from=renamed.safetensors")
    assert code == 1 and "missing there: 'model.0.weight' (5, 7)" in err and "Traceback" not in err
    code, _, err = here("validate", "config.yaml", *zero3, "init_from=nowhere")
    assert code == 2 and "init_from: there is no file or folder nowhere." in err


def test_checkpoints_follow_the_config_and_the_last_step_is_kept(in_process, project):
    arguments = ("fit", "config.yaml", "checkpoint.every_n_steps=2", "checkpoint.save_top_k=-1", "trainer.max_steps=5")
    assert in_process(*arguments, "data.count=40")[0] == 0
    kept = {item.name for item in (project / "runs" / "here" / "000" / "checkpoints").iterdir()}
    assert kept == {"step-2", "step-4", "step-5"}
    assert in_process("fit", "config.yaml", "checkpoint=null")[0] == 0
    assert not (project / "runs" / "here" / "001" / "checkpoints").exists()


def test_run_folders_are_counted_up_and_never_shared(project):
    config = load_config("config.yaml")
    (project / "runs" / "here").mkdir(parents=True)
    (project / "runs" / "here" / "007").mkdir()
    (project / "runs" / "here" / "notes").mkdir()
    made = [make_run_dir(config) for _ in range(2)]
    assert [str(item) for item in made] == ["runs/here/008", "runs/here/009"]
    assert load_config(made[1] / "config.yaml") == config


def test_a_run_folder_that_cannot_be_made_is_an_error_without_a_traceback(project):
    (project / "file").write_text("")
    code, out, err = here("fit", "config.yaml", "run.dir=file/below")
    assert code == 1 and "Traceback" not in err
    assert err.strip().endswith(
        "ShardlightError: run.dir: the folder file/below/here cannot be made (Not a directory): set run.dir to one that "
        "you can write to."
    )


def test_a_run_folder_taken_by_another_run_in_between_is_left_alone(project, monkeypatch):
    make, taken = Path.mkdir, []

    def race(path: Path, *arguments, **options) -> None:
        if path.name == "000" and not taken:
            taken.append(path)
            make(path)
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", race)
    assert str(make_run_dir(load_config("config.yaml"))) == "runs/here/001"


@pytest.mark.parametrize("debug", [False, True])
def test_local_workers_are_this_command_again(project, monkeypatch, debug):
    calls = []
    monkeypatch.setattr(launch, "run_workers", lambda *given, **options: calls.append((given, options)) or 9)
    monkeypatch.setattr(sys, "argv", ["shardlight", "fit", "config.yaml"])
    code, out, _ = here("fit", "config.yaml", *(["--debug"] if debug else []))
    assert (code, out) == (9, "Run folder: runs/here/000\n")
    ((command, world_size), options) = calls[0]
    assert world_size == 2 and command[0] == sys.executable
    assert command[-5:] == ["-P", "-m", "shardlight.cli", "fit", "config.yaml"]
    assert options["env"]["SHARDLIGHT_RUN_DIR"] == "runs/here/000" and options["expect_done"]
    assert options["log_dir"] == Path("runs/here/000/logs")
    assert ({"ConfigError", "CheckpointError"} <= set(options["terse"])) != debug


def test_the_variables_of_torchrun_make_ranks_of_the_commands(project):
    port = free_port()
    line = ["fit", "config.yaml", "strategy=zero2"]
    ended = run_together([line] * 2, project, [torchrun_variables(rank, 2, port) for rank in range(2)])
    assert [outcome.code for outcome in ended] == [0, 0], ended
    assert [outcome.output.count("Run folder: runs/here/000") for outcome in ended] == [1, 0], ended
    assert (project / "runs" / "here" / "000" / "checkpoints" / "step-3" / "manifest.json").is_file()


@pytest.mark.long
def test_torchrun_starts_the_ranks_as_well(project):
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "--standalone", "--no-python"]
    # torchrun leaves a folder of its own in the temporary folder.
    env = {"TMPDIR": str(project)}
    code, out, err = run("fit", "config.yaml", "strategy=zero2", command=[*torchrun, *COMMAND], env=env)
    assert code == 0 and out.splitlines()[-1] == "Run folder: runs/here/000", err
    assert (project / "runs" / "here" / "000" / "checkpoints" / "step-3" / "manifest.json").is_file()
    assert [item.name for item in (project / "runs" / "here").iterdir()] == ["000"]
