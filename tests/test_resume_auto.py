"""`resume: auto`: the newest complete checkpoint of all runs of a name, past those that are not; what is left is tidied."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import RanksFailedError, run_ranks
from shardlight.framework.resume import VARIABLE, Choice, Resume, choose, hold, tidy_up
from shardlight.strategies.checkpoint.candidates import find, tidy
from shardlight.strategies.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from shardlight.strategies.errors import CheckpointError
from test_conformance_lifecycle import Net, data
from test_lightning_fit import make_trainer


def put(path: Path, step: int | None = None) -> Path:
    """A checkpoint with one empty tensor file."""
    path.mkdir(parents=True)
    content = {
        "optimizers": [],
        "step": step if step is not None else int(path.name.strip(".").split("-")[1].split(".")[0]),
    }
    files = [StoredFile("rank-00000.safetensors", 3, (0,))]
    (path / "rank-00000.safetensors").write_bytes(b"abc")
    (path / MANIFEST).write_bytes(Manifest(content, files, {}).to_bytes())
    return path


def names(found, root: Path) -> list[str]:
    return [str(p.relative_to(root)) for p in found.paths]


def test_the_newest_run_comes_first_and_in_it_the_highest_step(tmp_path):
    for where in ("000/checkpoints/step-90", "001/checkpoints/step-9", "001/checkpoints/step-10"):
        put(tmp_path / where)
    put(tmp_path / "001/checkpoints/last", step=10)
    (tmp_path / "002").mkdir()
    found = find([tmp_path / n for n in ("002", "001", "000")])
    assert names(found, tmp_path) == [f"001/checkpoints/{n}" for n in ("last", "step-10", "step-9")]
    assert found.skipped == ()
    assert find([]).paths == () == find([tmp_path / "002", tmp_path / "nowhere"]).paths


def test_a_link_counts_once_and_as_what_it_points_to(tmp_path):
    home = put(tmp_path / "000/checkpoints/step-5").parent
    (home / "last").symlink_to("step-5")
    (home / "gone").symlink_to("step-6")
    found = find([tmp_path / "000"])
    assert names(found, tmp_path) == ["000/checkpoints/step-5"]
    assert found.skipped == (f"{home}/gone is skipped: it is a link to step-6, which is not there.",)


def test_each_that_is_skipped_is_named_with_the_reason(tmp_path):
    home = tmp_path / "001/checkpoints"
    for step in (20, 30, 40, 50, 60):
        put(home / f"step-{step}")
    (home / "step-10").mkdir()  # older than the one that is chosen
    (home / "step-60" / MANIFEST).unlink()
    data = (home / "step-50" / MANIFEST).read_bytes()
    (home / "step-50" / MANIFEST).write_bytes(data.replace(b'"step":50', b'"step":51'))
    (home / "step-40" / "rank-00000.safetensors").unlink()
    (home / "step-30" / "rank-00000.safetensors").write_bytes(b"ab")
    put(tmp_path / "000/checkpoints/step-70")
    found = find([tmp_path / "001", tmp_path / "000"])
    assert names(found, tmp_path) == ["001/checkpoints/step-20", "000/checkpoints/step-70"]
    assert [line.removeprefix(f"{home}/") for line in found.skipped] == [
        "step-60 is skipped: it has no manifest.json.",
        "step-50 is skipped: manifest.json is damaged: it does not have the SHA-256 it says.",
        "step-40 is skipped: rank-00000.safetensors is missing.",
        "step-30 is skipped: rank-00000.safetensors has 2 bytes, not 3.",
    ]


def test_weights_alone_are_enough_for_an_evaluation_only(tmp_path):
    path = put(tmp_path / "000/checkpoints/step-5")
    (path / MANIFEST).write_bytes(Manifest({"step": 5}, [], {}).to_bytes())
    assert find([tmp_path / "000"], training=False).paths == (path,)
    assert find([tmp_path / "000"]).skipped == (f"{path} is skipped: it holds weights only.",)


def test_a_run_without_a_whole_one_is_passed_over_and_said(tmp_path):
    (tmp_path / "001/checkpoints/.step-8.writing").mkdir(parents=True)
    put(tmp_path / "000/checkpoints/step-4")
    found = find([tmp_path / "001", tmp_path / "000"])
    assert names(found, tmp_path) == ["000/checkpoints/step-4"]
    assert found.skipped == (f"{tmp_path}/001/checkpoints/.step-8.writing is skipped: it has no manifest.json.",)


CUT = ["step-20", ".step-20.writing", ".step-20.replaced"]


@pytest.mark.conformance("D12")
@pytest.mark.parametrize("there", range(27))
def test_whatever_a_killed_save_leaves_the_newest_whole_one_is_found_and_never_removed(tmp_path, there):
    """Each of the three names: not there, cut off, complete. What is in place is newer than what was replaced."""
    home = tmp_path / "000/checkpoints"
    put(home / "step-10")
    state = {}
    for place, name in enumerate(CUT):
        state[name] = ("none", "cut", "whole")[there // 3**place % 3]
        if state[name] != "none":
            put(home / name, 20)
        if state[name] == "cut":
            (home / name / MANIFEST).unlink()
    whole = [n for n in CUT if state[n] == "whole"]
    before = find([tmp_path / "000"])
    assert before.paths[0].name == (whole[0] if whole else "step-10")
    marks = {n: (home / n).stat().st_ino for n in whole}
    tidy(home)
    after = find([tmp_path / "000"])
    left = {p.name for p in home.iterdir()}
    if not whole:
        assert after.paths[0].name == "step-10" and left <= {"step-10", "step-20"}
    elif state["step-20"] == "cut":  # nobody knows what it is: nothing is touched
        assert after.paths[0].name == whole[0] and set(whole) <= left
    else:
        assert after.paths[0].name == "step-20" and left == {"step-10", "step-20"}
        assert (home / "step-20").stat().st_ino == marks[whole[0]]
    again = sorted(left)
    tidy(home)
    assert sorted(p.name for p in home.iterdir()) == again


def test_what_has_other_names_is_left_alone(tmp_path):
    home = put(tmp_path / "000/checkpoints/step-4").parent
    (home / ".cache").mkdir()
    (home / ".notes.writing").write_text("a file")
    (home / "notes.txt").write_text("")
    tidy(home)
    tidy(tmp_path / "nowhere")
    assert {p.name for p in home.iterdir()} == {".cache", ".notes.writing", "notes.txt", "step-4"}
    assert len(find([tmp_path / "000"]).paths) == 1


def config(folder: Path | str, resume: str | None = "auto", init_from=None) -> SimpleNamespace:
    """What of a config is looked at."""
    resume = None if resume is None else SimpleNamespace(path=resume, skip=())
    return SimpleNamespace(run=SimpleNamespace(dir=str(folder), name="a"), resume=resume, init_from=init_from)


def test_what_a_run_that_lives_is_writing_is_left_alone(tmp_path):
    for number in ("000", "001"):
        put(tmp_path / f"a/{number}/checkpoints/step-4")
        (tmp_path / f"a/{number}/checkpoints/.step-8.writing").mkdir()
        (tmp_path / f"a/{number}/config.yaml").touch()
    (tmp_path / "a/002/checkpoints/.step-2.writing").mkdir(parents=True)  # its config is still to be written
    with hold(tmp_path / "a/001"):
        tidy_up(config(tmp_path))
        left = sorted(str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob(".*.writing"))
        assert left == ["001/checkpoints/.step-8.writing", "002/checkpoints/.step-2.writing"]
    tidy_up(config(tmp_path))
    assert [p.parent.parent.name for p in (tmp_path / "a").rglob(".*.writing")] == ["002"]
    tidy_up(config(tmp_path / "nowhere"))


def test_what_is_chosen_for_which_command(tmp_path):
    assert choose(config(tmp_path, None), "fit") == Choice()
    fresh = choose(config(tmp_path), "fit")
    assert fresh.paths == () and fresh.notes[-1].endswith("a: a fresh start.")
    weights = SimpleNamespace(path=put(tmp_path / "weights", 1))
    assert choose(config(tmp_path, init_from=weights), "test").paths == ()
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in"):
        choose(config(tmp_path), "test")
    path = put(tmp_path / "a/000/checkpoints/step-4")
    assert choose(config(tmp_path), "test").paths == (str(path),)
    assert choose(config(tmp_path, str(path)), "test") == Choice((str(path),))
    assert choose(config(tmp_path), "fit", {VARIABLE: '["told"]'}).paths == ("told",)


def other_disks(rank, world_size, folder):
    trainer = make_trainer("zero1", world_size, folder, callbacks=[Resume(config(folder), ("x",) * rank)])
    trainer.fit(Net(), data(rank), data(rank, 1))


def test_ranks_that_do_not_see_the_same_disk_are_told(tmp_path):
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1 finds x and rank 0 none: run.dir \(.*\) must be on a disk"):
        run_ranks(other_disks, 2, init=False, folder=str(tmp_path))
