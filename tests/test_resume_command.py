"""`fit resume=auto` and `--skip` as a user types them: cut off, damaged, of another run, fresh."""

import shutil
from pathlib import Path

import pytest
import torch
from command import run_command
from safetensors.torch import load_file
from shardlight.strategies.checkpoint.export import export_safetensors
from shardlight.strategies.checkpoint.manifest import Manifest
from test_cli import here, in_process, project  # noqa: F401

QUICK = ("trainer.num_sanity_val_steps=0", "trainer.limit_val_batches=0", "checkpoint.every_n_steps=2")
QUICK += ("checkpoint.save_top_k=-1", "trainer.enable_progress_bar=false", "data.count=40")
HERE = "runs/here/000/checkpoints"


@pytest.fixture
def fit(in_process):  # noqa: F811
    def fit(*arguments: str, code: int = 0) -> list[str]:
        got, out, err = in_process("fit", "config.yaml", *QUICK, *arguments)
        assert got == code, (out, err)
        return (out + err).splitlines()

    return fit


def flip(file: str | Path) -> None:
    data = bytearray(Path(file).read_bytes())
    data[-1] ^= 1
    Path(file).write_bytes(data)


def weights(saved: str) -> dict[str, torch.Tensor]:
    export_safetensors(saved, "out.safetensors")
    return load_file("out.safetensors")


def equal(a: str, b: str) -> bool:
    other = weights(b)
    return all(torch.equal(tensor, other[name]) for name, tensor in weights(a).items())


def test_a_run_goes_on_from_the_newest_whole_checkpoint_of_its_name(fit, project):  # noqa: F811
    out = fit("trainer.max_steps=8", "resume=auto", "run.name=whole")
    assert out[0] == "resume: auto: there is no whole checkpoint in runs/whole: a fresh start."
    fit("trainer.max_steps=4")
    Path(HERE, ".step-6.writing").mkdir()
    Path(HERE, "step-2").rename(Path(HERE, ".step-2.replaced"))
    out = fit("trainer.max_steps=8", "--ckpt", "auto")
    assert out[0] == f"{HERE}/.step-6.writing is skipped: it has no manifest.json."
    assert f"Resumed from {HERE}/step-4: step 4, epoch 0, 4 batches into it." in out
    # Tidied; and a run removes none of the files of the run that it goes on from.
    assert {p.name for p in Path(HERE).iterdir()} == {"step-2", "step-4"}
    newest = "runs/here/001/checkpoints/step-8"
    assert equal("runs/whole/000/checkpoints/step-8", newest)
    stored = Manifest.read(Path(newest)).content["config"]
    assert (stored["run"]["name"], stored["resume"]) == ("here", {"path": "auto", "skip": []})
    # The files of the newest one are damaged, which only their checksums tell; two ranks go on from the one before.
    flip(f"{newest}/rank-00000.safetensors")
    Path(newest).with_name("step-7").mkdir()
    line = ["fit", "config.yaml", *QUICK, "resume=auto", "trainer.max_steps=7"]
    done = run_command(line, project, {"OMP_NUM_THREADS": "1"}, timeout_s=120)
    assert done.code == 0 and f"{newest} is skipped: rank-00000.safetensors is damaged between byte 0" in done.output
    assert "step-7 is skipped: it has no manifest.json." in done.output, "what lies between is named as well"
    assert sum(line.startswith("runs/") and "is skipped: " in line for line in done.output.splitlines()) == 2
    assert "Warning" not in done.output and ".py" not in done.output, "plain lines"
    Path(newest).with_name("step-7").rmdir()
    # Six batches of one rank are three of two.
    assert "Resumed from runs/here/001/checkpoints/step-6: step 6, epoch 0, 3 batches into it." in done.output
    for path in Path("runs/here").rglob("rank-00000.safetensors"):
        if path.parent.name != "step-8":
            flip(path)
    with pytest.warns(UserWarning, match=r"is skipped: rank-0000.\.safetensors is damaged") as said:
        fit("trainer.max_steps=2", "resume=auto")
    assert sum("is skipped" in str(w.message) for w in said) >= 3
    assert equal("runs/whole/000/checkpoints/step-2", "runs/here/003/checkpoints/step-2")
    code, _, err = here("validate", "config.yaml", "--ckpt", "auto", "run.name=nothing")
    assert (code, err) == (1, "CheckpointError: resume: auto: there is no whole checkpoint in runs/nothing.\n")


def test_the_step_that_a_run_goes_on_from_is_not_saved_again_within_the_next_window(fit):
    line = ("run.name=windows", "trainer.accumulate_grad_batches=2", "resume=auto")
    fit("trainer.max_steps=2", *line)
    fit("trainer.max_steps=3", *line)
    assert sorted(p.name for p in Path("runs/windows").rglob("step-*")) == ["step-2", "step-3"]


def test_what_files_tell_is_said_before_anything_starts(fit, project):  # noqa: F811
    fit("trainer.max_steps=2", "run.name=saved")
    saved = Path("runs/saved/000/checkpoints/step-2")
    Path("empty").mkdir()
    Path("torn.safetensors").write_bytes((saved / "rank-00000.safetensors").read_bytes()[:-9])
    short = shutil.copytree(saved, Path("short"))
    (short / "manifest.json").write_bytes((saved / "manifest.json").read_bytes()[:-9])
    for arguments, text in [
        (("--ckpt", "empty"), "empty is not a complete checkpoint: it has no manifest.json."),
        (("--ckpt", "runs/saved/000/checkpoints"), f"is a folder of checkpoints: pass one of them, such as {saved}."),
        (("--ckpt", f"{saved}/manifest.json"), f"is a file, and checkpoints here are folders: pass {saved}."),
        (("--ckpt", "short"), "manifest.json is damaged: it does not have the SHA-256 it says."),
        (("init_from=short",), "manifest.json is damaged: it does not have the SHA-256 it says."),
        (("init_from=empty",), "empty holds 0 safetensors files and 0 index files"),
        (("init_from=torn.safetensors",), "torn.safetensors cannot be read as a safetensors file"),
        (("init_from=empty", "--ckpt", "auto"), "empty holds 0 safetensors files and 0 index files"),
    ]:
        for verb, devices in (("fit", 2), ("fit", 1), ("test", 2)):
            code, out, err = here(verb, "config.yaml", *arguments, f"trainer.devices={devices}")
            assert (code, out) == (1, "") and err.startswith("CheckpointError: ") and text in err, (arguments, out, err)
            assert err.count("\n") == 1 and [p.name for p in Path("runs").iterdir()] == ["saved"], "no run began"


def test_tensors_that_are_skipped_stay_as_the_fresh_module_has_them(fit):
    fit("trainer.max_steps=2", "seed=1")
    saved = f"{HERE}/step-2"
    out = fit("trainer.max_steps=3", "--ckpt", saved, "--skip", "model.0", code=1)
    assert f"skip: 'model.0' is no tensor of the model or of {saved}. Write 'model.0.*' for all below it." in out[-1]
    shown = "\n".join(fit("trainer.max_steps=3", "--ckpt", saved, "--skip", "model.0.*", "--skip", "a", "--print"))
    assert 'skip: ["model.0.*", a]' in shown and f"path: {saved}" in shown
