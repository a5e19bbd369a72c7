"""`shardlight checkpoint show|verify|diff`: what is in a checkpoint, whether it is whole, how two of them differ."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from shardlight import cli
from shardlight.strategies.checkpoint import diff as differing
from shardlight.strategies.checkpoint import layouts
from shardlight.strategies.checkpoint.codec import encode
from shardlight.strategies.checkpoint.diff import compare, largest_difference
from shardlight.strategies.checkpoint.dtypes import TORCH_DTYPES
from shardlight.strategies.checkpoint.exact import compare_exactly, first_other_bits
from shardlight.strategies.checkpoint.manifest import CHUNK_BYTES
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.show import DTYPES, describe, kind_of
from shardlight.strategies.checkpoint.verify import verify
from test_checkpoint_format import cut, of_every_dtype, write_checkpoint
from typer.testing import CliRunner


def here(*arguments):
    result = CliRunner().invoke(cli.app, ["checkpoint", *map(str, arguments)])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.exit_code, result.stdout, result.stderr


LOSSES = 2 + torch.arange(1, 8, dtype=torch.float64) / 100
TRAINER = {
    "epoch": 1, "global_step": 7, "losses": LOSSES,
    "loops": {"fit_loop": {"position": 3}}, "lr_schedulers": [{"last_epoch": 7, "_last_lr": [0.1, 0.2]}],
    "callbacks": {
        "ModelCheckpoint{'monitor': None}": {
            "dirpath": "/runs/a/checkpoints", "best_model_path": "/runs/a/checkpoints/step-7", "best_k_models": {},
            "last_model_path": "", "kth_best_model_path": "", "best_model_score": None, "kth_value": torch.tensor(1.0),
            "current_score": torch.tensor(0.5),
        },
        "Timer": {"time_elapsed": {"train": 12.5}}, "Mine": {"seen": {3, 4}, "rates": {1: 0.1}, "rate": -0.0},
    },
}  # fmt: skip


def rank_state(rank):
    order = {"epoch": 1, "indices": torch.arange(6) + 10 * rank}
    return {"now": {"torch": torch.arange(8, dtype=torch.uint8), "python": (3, (1, 2), None)}, "order": order}


def make(path, ranks=2, change=None, **content):
    """Writes a checkpoint of a run of two ranks; `change(tensors, trainer, rank_states)` edits it before."""
    g = torch.Generator().manual_seed(0)
    tensors = {"model/a.weight": torch.randn(6, 5, generator=g), "model/a.bias": torch.randn(5, generator=g)}
    tensors |= {"model/n": torch.tensor(3), "ema/a.weight": torch.randn(6, 5, generator=g).double()}
    tensors |= {"optimizer/0/a.weight/exp_avg": torch.randn(6, 5, generator=g), "gradient/a.bias": torch.ones(5)}
    trainer, states = _copy(TRAINER), [rank_state(r) for r in range(ranks)]
    if change is not None:
        change(tensors, trainer, states)
    plain: dict[str, torch.Tensor] = {}
    held = [[] for _ in range(ranks)]
    optimizer = {"class": "AdamW", "groups": [{"options": {"lr": 0.1}, "params": ["a.weight"]}]}
    whole = {
        "step": 7, "epoch": 1, "strategy": "zero3", "world_size": ranks, "mesh": {"shard": ranks, "replicate": 1},
        "saved_at": "2026-01-02T03:04:05.678+00:00", "versions": {"shardlight": "0.1.0", "torch": "2.13.0"},
        "aliases": {"tied": "a.weight"}, "trainable": ["a.weight", "a.bias"], "window": None, "hf": None,
        "optimizers": [optimizer | {"states": {"a.weight": {"scalars": {}, "tensors": ["exp_avg"]}}}],
        "trainer": encode(trainer, "trainer", plain), "config": {"run": {"dir": str(path)}},
        "ranks": [encode(state, f"rank/{rank}", plain) for rank, state in enumerate(states)],
    }  # fmt: skip
    for name, tensor in tensors.items():
        edges = [tensor.numel() * r // ranks for r in range(1, ranks)]
        for rank, part in enumerate(cut(name, tensor, edges)):
            if part[1].numel():
                held[rank].append(part)
    held[0] += [(name, tensor, None, 0) for name, tensor in plain.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_checkpoint(path, held, whole | content)


def _copy(value):
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value


# --- show


def test_show_says_what_it_is_and_lists_tensors(tmp_path):
    path = make(tmp_path / "step-7", hf=[{"prefix": "net.", "config": {"architectures": ["Llama"]}, "adapters": None}])
    code, out, err = here("show", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(path)
    assert lines[1] == "step 7, epoch 1, zero3 on 2 ranks, saved 2026-01-02T03:04:05.678+00:00"
    assert lines[2] == "shardlight 0.1.0, torch 2.13.0"
    assert lines[3] == "optimizer 0: AdamW, 1 group, 1 parameters, 1 with state (exp_avg)"
    assert lines[4] == "Llama at 'net.': export --to hf"
    assert lines[5].endswith(
        "in 2 files: weights 148 B, optimizer state 120 B, averages 240 B, accumulated gradients 20 B, other state 176 B"
    )
    assert ["model/a.weight", "6x5", "float32", "120", "B", "2"] in [line.split() for line in lines]
    assert ["model/n", "1", "value", "int64", "8", "B", "1"] in [line.split() for line in lines]
    assert here("show", path, "--limit", "2")[1].endswith("... and 11 more: --all\n")
    assert "more: --all" not in here("show", path, "--limit", "2", "--all")[1]
    found = json.loads(here("show", path, "--json")[1])
    assert found == json.loads(json.dumps(describe(path))) and len(found["tensors"]) == 13
    assert found["tensors"][0] == {
        "name": "model/a.weight",
        "shape": [6, 5],
        "dtype": "float32",
        "bytes": 120,
        "pieces": 2,
    }


def test_what_a_file_says_cannot_control_the_terminal(tmp_path):
    path = write_checkpoint(
        tmp_path / "c", [[("model/\x1b[31mred[/b]", torch.ones(2), None, 0)]], {"world_size": 1, "strategy": "\x1b]0;x"}
    )
    for arguments in (["show", path], ["verify", path], ["diff", path, path]):
        code, out, err = here(*arguments)
        assert code == 0 and "\x1b" not in out + err
    assert "model/\\x1b[31mred[/b]" in here("show", path)[1]


def test_kinds_of_tensors_go_by_their_names():
    names = {
        "model/a": "weights",
        "optimizer/0/a/b": "optimizer state",
        "ema/a": "averages",
        "trainer.x": "other state",
    }
    names |= {
        "gradient/a": "accumulated gradients",
        "rank/12/gradient/a": "accumulated gradients",
        "rank/1.now": "other state",
    }
    assert {name: kind_of(name) for name in names} == names
    assert {n: str(d).removeprefix("torch.") for n, d in TORCH_DTYPES.items()} == DTYPES


LIGHT = """
import sys
from shardlight.cli import main
sys.argv = ["shardlight", "checkpoint", *sys.argv[1:]]
try: main()
finally: print([m for m in ("torch", "lightning", "omegaconf") if m in sys.modules])
"""


def test_show_and_verify_need_no_torch(tmp_path):
    path = make(tmp_path / "a")
    for verb in ("show", "verify"):
        run = subprocess.run([sys.executable, "-c", LIGHT, verb, path], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0 and run.stdout.splitlines()[-1] == "[]", run.stdout + run.stderr


# --- verify


@pytest.fixture
def large(tmp_path):
    """A checkpoint with a file of several chunks."""
    tensors = [("model/a", torch.arange(CHUNK_BYTES, dtype=torch.int32), None, 0)]
    return write_checkpoint(tmp_path / "run" / "checkpoints" / "step-1", [tensors], {"step": 1})


@pytest.fixture(autouse=True)
def folders(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_verify_names_the_bytes_that_are_damaged(large):
    code, out, _ = here("verify", large)
    assert (code, out) == (0, f"{large}: 1.0 MB, as it was saved\n")
    file = large / "rank-00000.safetensors"
    for at in (5, CHUNK_BYTES + 7, 2 * CHUNK_BYTES, file.stat().st_size - 1):
        flip(file, at)
    (large / "notes.txt").write_text("mine")
    code, out, _ = here("verify", large)
    assert code == 1 and out.splitlines() == [
        f"{large}: BROKEN",
        f"  {file} is damaged between byte 0 and 786,432: it does not have the CRC-32 it was saved with.",
        f"  {file} is damaged between byte 1,048,576 and {file.stat().st_size:,}: it does not have the CRC-32 it was "
        "saved with.",
        "  not a part of it: notes.txt",
    ]
    os.truncate(file, 100)
    assert here("verify", large)[1].splitlines()[1].startswith(f"  {file} has 100 bytes, not 1,04")
    file.unlink()
    assert here("verify", large)[1].splitlines()[1] == f"  {file} is missing."
    (large / "manifest.json").write_text("{}")
    assert "manifest.json is damaged, or not a manifest" in here("verify", large)[1]


def test_every_flipped_bit_is_found(tmp_path):
    path = make(tmp_path / "a")
    for file in path.iterdir():
        for at in range(0, file.stat().st_size, max(1, file.stat().st_size // 40)):
            flip(file, at)
            assert verify(path).faults, (file.name, at)
            flip(file, at)
    assert verify(path).faults == ()


def test_verify_of_a_run_folder_is_a_line_for_each_checkpoint(large, tmp_path):
    run = tmp_path / "run"
    for number in (10, 9):
        shutil.copytree(large, large.with_name(f"step-{number}"))
    (large.parent / "last").symlink_to("step-10")
    (large.parent / ".step-11.writing").mkdir()
    code, out, _ = here("verify", run)
    assert code == 0 and [line.split("/")[-1].split(":")[0] for line in out.splitlines()] == [
        "step-1",
        "step-9",
        "step-10",
    ]
    flip(large.parent / "step-9" / "rank-00000.safetensors", 3)
    (large.parent / "step-12").mkdir()
    code, out, _ = here("verify", run / "checkpoints")
    assert code == 1 and [line.split(": ")[1] for line in out.splitlines()[:2]] == ["1.0 MB, as it was saved", "BROKEN"]
    code, out, _ = here("verify", run)
    assert code == 1 and "step-12 is not a complete checkpoint: it has no manifest.json" in out


def test_a_wrong_path_says_what_to_pass(large, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "old.ckpt").write_text("")
    cases = [(large / "rank-00000.safetensors", f"is a file, and checkpoints here are folders: pass {large}.")]
    cases += [
        (large / "manifest.json", f"pass {large}."),
        (tmp_path / "old.ckpt", ""),
    ]
    cases += [(tmp_path / "none", "there is no such folder."), (tmp_path / "empty", "is not a complete checkpoint")]
    for path, text in cases:
        for arguments, wanted in ((["show", path], 1), (["verify", path], 1), (["diff", large, path], 2)):
            code, out, err = here(*arguments)
            assert code == wanted and text in err and not out and "Traceback" not in err, (arguments, out, err)
    for verb in ("show", "verify"):
        assert "a .ckpt file of Lightning holds has no manifest" in "".join(map(str, here(verb, tmp_path / "old.ckpt")))
    run = tmp_path / "run"
    for arguments in (["show", run], ["show", run / "checkpoints"], ["diff", run, large]):
        assert f"is a folder of checkpoints: pass one of them, such as {large}." in here(*arguments)[2]


# --- diff


def test_diff_tells_how_much_tensors_differ_on_any_number_of_ranks(tmp_path):
    def change(tensors, trainer, states):
        tensors["model/a.weight"][2, 3] += 0.5
        tensors["optimizer/0/a.weight/exp_avg"] += 1
        tensors["model/n"] += 2
        tensors["model/extra"] = torch.ones(1)
        tensors["ema/a.weight"] = tensors["ema/a.weight"].float()
        tensors["model/a.bias"] = torch.ones(6)

    a, b = make(tmp_path / "a"), make(tmp_path / "b", ranks=3, change=change)
    found = {d.kind: d for d in compare(CheckpointReader(a), CheckpointReader(b))}
    assert set(found) == {"weights", "optimizer state", "averages", "accumulated gradients"}
    weights = found["weights"]
    assert (weights.same, weights.differing, weights.largest, weights.only_second) == (0, 3, 2.0, ["model/extra"])
    assert weights.worst[0] == (2.0, "model/n") and weights.worst[1][0] == pytest.approx(0.5, abs=1e-6)
    assert {name for _, name in weights.worst} == {"model/n", "model/a.weight", "model/tied"}
    assert weights.shapes == {"model/a.bias": ((5,), (6,))}
    assert found["averages"].dtypes == {"ema/a.weight": ("float64", "float32")} and found["averages"].largest < 1e-6
    assert found["optimizer state"].largest == pytest.approx(1) and found["accumulated gradients"].same == 1
    code, out, _ = here("diff", a, b)
    assert code == 0
    for line in ("only in B: model/extra", "other shape: model/a.bias (5,) and (6,)", f"A: step 7 ({a})"):
        assert line in out.splitlines()
    assert ["weights", "0", "3", "2", "0", "1", "1", "0"] in [line.split() for line in out.splitlines()]


STRANGE = [
    {"hf": "x"}, {"hf": [{"prefix": 3, "config": []}]}, {"optimizers": {"a": 1}}, {"aliases": ["a"]}, {"files": 3},
    {"aliases": {"b": "gone"}}, {"trainer": {"__kind__": "tensor"}}, {"ranks": 7}, {"mesh": [2]}, {"trainable": 5},
    {"hf": [{"prefix": "../", "config": {}}, {"prefix": "b.", "config": {}}]}, {"versions": 3}, {"window": {"a": {}}},
]  # fmt: skip


@pytest.mark.parametrize("content", STRANGE, ids=map(str, STRANGE))
def test_a_manifest_that_says_strange_things_is_no_traceback(tmp_path, content):
    path, good = make(tmp_path / "a", **content), make(tmp_path / "b")
    commands = [["show", path], ["verify", path], ["diff", path, good], ["diff", "--exact", path, good]]
    for arguments in commands:
        code, out, err = here(*arguments)
        assert code in (0, 1, 2) and "Traceback" not in out + err and out + err, arguments
    for arguments in ([], ["--only", "trainable"], ["--to", "hf"]):
        result = CliRunner().invoke(cli.app, ["export", str(path), "--out", str(tmp_path / "out"), *arguments])
        assert isinstance(result.exception, SystemExit | None), (arguments, result.exception)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "out") == ["a", "b", "run"]


def test_the_largest_difference_knows_what_is_no_number():
    nan, inf = math.nan, math.inf
    cases = [
        ([1.0, nan, inf], [1.0, nan, inf], 0.0),
        ([1.0, nan], [1.5, nan], 0.5),
        ([1.0], [nan], nan),
        ([inf], [1.0], inf),
    ]
    for a, b, want in cases:
        got = largest_difference(torch.tensor(a), torch.tensor(b))
        assert got == want or (math.isnan(got) and math.isnan(want))
    assert largest_difference(torch.tensor([1 + 1j]), torch.tensor([1 + 3j])) == 2.0
    assert largest_difference(torch.tensor([True, False]), torch.tensor([True, True])) == 1.0
    assert largest_difference(torch.tensor([], dtype=torch.bfloat16), torch.tensor([])) == 0.0
    huge = torch.tensor([2**62], dtype=torch.int64)
    assert largest_difference(huge, huge + 1) >= 0.0 and largest_difference(huge, huge) == 0.0


def test_diff_holds_a_part_of_a_pair_at_a_time(tmp_path, monkeypatch):
    paths = [make(tmp_path / name) for name in "ab"]
    monkeypatch.setattr(layouts, "CHUNK_BYTES", 16)
    read, sizes = CheckpointReader.read, []

    def recorded(reader, name, start=0, stop=None):
        found = read(reader, name, start, stop)
        sizes.append(found.nbytes)
        return found

    monkeypatch.setattr(CheckpointReader, "read", recorded)
    readers = [CheckpointReader(path) for path in paths]
    assert all(d.differing == 0 for d in differing.compare(*readers)) and compare_exactly(*readers) == []
    assert max(sizes) == 16 and len(sizes) > 100


# --- diff --exact


def exact(tmp_path, change=None, **content):
    a, b = make(tmp_path / "a"), make(tmp_path / "b", change=change, **content)
    code, out, err = here("diff", "--exact", a, b)
    assert err == "" and code == (out != "the same\n")
    for path in (a, b):
        shutil.rmtree(path)
    return out.splitlines()


def test_what_has_to_differ_between_two_runs_is_not_compared(tmp_path):
    def elsewhere(tensors, trainer, states):
        keeper = trainer["callbacks"]["ModelCheckpoint{'monitor': None}"]
        keeper |= {"dirpath": "/runs/b/checkpoints", "best_model_path": "/runs/b/checkpoints/step-7"}
        keeper |= {"kth_value": torch.tensor(9.0), "best_model_score": torch.tensor(3.0)}
        trainer["callbacks"]["Timer"]["time_elapsed"]["train"] = 99.0
        trainer["callbacks"]["Mine"]["seen"] = {4, 3}
        states[0]["now"] = dict(reversed(states[0]["now"].items()))

    changed = {"saved_at": "later", "versions": {}, "config": None, "strategy": "ddp", "mesh": {"shard": 1}}
    assert exact(tmp_path) == exact(tmp_path, elsewhere, **changed) == ["the same"]


def put(path, value):
    """A change of one value in the Trainer's state."""

    def change(tensors, trainer, states):
        *places, last = path
        inner = trainer
        for place in places:
            inner = inner[place]
        inner[last] = value

    return change


def loss(at, value):
    return put(["losses"], LOSSES.index_fill(0, torch.tensor([at]), value))


def put_bits(name, index, bits):
    def change(tensors, trainer, states):
        tensors[name].view(torch.int32)[index] = bits

    return change


def order(rank, at):
    def change(tensors, trainer, states):
        states[rank]["order"]["indices"][at] = 99

    return change


def random(tensors, trainer, states):
    states[1]["now"]["torch"][3] = 0


def gone(tensors, trainer, states):
    del tensors["gradient/a.bias"]


def moved(tensors, trainer, states):
    trainer["callbacks"]["Mine"]["rates"][1] = 0.2
    del trainer["callbacks"]["Timer"]
    trainer["callbacks"]["ModelCheckpoint{'monitor': None}"]["kth_value"] += 1


DIFFERENCES = [
    (loss(6, 2.32), ["loss log: differs first at step 7: 2.07 and 2.32"]),
    (put(["losses"], LOSSES[:5]), ["loss log: has 7 and 5 entries"]),
    (put(["losses"], LOSSES.flip(0)[:3]), ["loss log: differs first at step 1: 2.01 and 2.07"]),
    (put(["loops", "fit_loop", "position"], 4), ["loop counters fit_loop.position: 3 and 4"]),
    (put(["loops", "fit_loop", "position"], 3.0), ["loop counters fit_loop.position: 3 and 3.0"]),
    (put(["lr_schedulers", 0, "_last_lr", 1], 0.25), ["schedulers 0._last_lr.1: 0.2 and 0.25"]),
    (put(["callbacks", "Mine", "rate"], 0.0), ["callbacks Mine.rate: -0.0 and 0.0"]),
    (put(["callbacks", "Mine", "seen"], {3, 5}), ["callbacks Mine.seen: a set and a set"]),
    (order(1, 4), ["rank 1: sample order differs (indices: differs first at [4]: 14 and 99)"]),
    (random, ["rank 1: random numbers differ (torch)"]),
    (gone, ["accumulated gradients: 'a.bias' is only in the first"]),
    (moved, ["callbacks ModelCheckpoint{'monitor': None}.kth_value: is 1.0 and 2.0 (and 2 more)"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "want"), DIFFERENCES, ids=[want[0].split(":")[0] for _, want in DIFFERENCES])
def test_the_first_difference_is_said_in_words(tmp_path, change, want):
    assert exact(tmp_path, change) == want


def test_weights_are_compared_bit_by_bit_with_the_payload_of_nans(tmp_path):
    a = make(tmp_path / "a", change=put_bits("model/a.weight", (2, 3), 0x7FC00000))
    b = make(tmp_path / "b", change=put_bits("model/a.weight", (2, 3), 0x7FC00001))
    assert here("diff", "--exact", a, a)[1] == "the same\n"
    code, out, _ = here("diff", "--exact", a, b)
    assert code == 1 and out == (
        "weights: 'a.weight' differs first at [2, 3]: nan (bits 7fc00000) and nan (bits 7fc00001)\n"
    )
    assert all(d.differing == 0 for d in compare(CheckpointReader(a), CheckpointReader(b)))


def test_other_numbers_of_ranks_are_not_the_same_run(tmp_path):
    a, b = make(tmp_path / "a"), make(tmp_path / "b", ranks=3)
    code, out, _ = here("diff", "--exact", a, b)
    assert code == 1 and out == "world size: 2 and 3 ranks\n"


def test_bits_of_every_dtype_are_compared(tmp_path):
    for dtype, tensor in of_every_dtype(6):
        other = tensor.clone()
        assert first_other_bits(tensor, other) is None
        other.view(torch.uint8)[4 * dtype.itemsize] ^= 1
        assert first_other_bits(tensor, other) == 4, dtype
