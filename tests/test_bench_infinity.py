"""`shardlight bench infinity`: whoever takes more memory than it may is ended, and what is timed is the same work."""

import json
import math
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from command import run_command
from harness import RanksFailedError, preload, run_ranks
from shardlight import cli
from shardlight.framework.bench import diff, infinity, meters
from shardlight.framework.bench.contenders.gpt import rows_of
from shardlight.framework.bench.contenders.infinity import BUILDERS, SameRows, StepAlone, Watch, walled
from shardlight.framework.bench.crew import BenchRequestError
from shardlight.framework.bench.infinity import BARS, DEEPSPEED, IN_MEMORY, OURS, WALLS, ZERO3
from shardlight.framework.bench.results import UNITS, Samples, meets, read
from shardlight.framework.bench.sizes import SIZES, Size
from shardlight.framework.launch import STORE
from typer.testing import CliRunner

NANO = Size(name="nano", vocabulary=64, width=16, blocks=2, heads=2, sequence=16, batch=4, rounds=3)
preload(infinity.MODULE)


@pytest.mark.long
def test_quick_ends_what_takes_too_much_memory_and_trains_the_rest(tmp_path):
    line = ["bench", "infinity", "--quick", "--strict", "--json", "result.json"]
    outcome = run_command(line, tmp_path, timeout_s=400, cold=True)
    assert outcome.left_running == () and outcome.code == 0, outcome.output
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"], "swap files are gone"
    result = read(tmp_path / "result.json")
    rows = {(row.case, row.who, row.metric): row.value for row in result.rows}
    assert [rows["wall", who, "over_cap"] for who in infinity.WALLED] == [1, 1, 0]
    assert rows["wall", OURS, "cap_share"] <= 1 and rows["wall", OURS, "loss_share"] < 1
    for who in ("ddp", "zero3"):
        assert rows["wall", who, "cap_share"] > 1 and ("wall", who, "step_ms") not in rows
    assert rows["step", OURS, "loss_difference"] == 0
    numel = SIZES["tiny"].numel
    assert rows["stream", OURS, "optimizer_disk_bytes"] == pytest.approx(16 * numel / 2, rel=0.02)
    for words in ("oom", "trained", "went over the memory it may have while"):
        assert words in outcome.output
    assert outcome.output.count("not measured: asked for at small and medium") == len(result.bars)
    assert diff.compare(result, result).changes == []


def every_part(rank, world, folder):
    """The parts of the benchmark on ranks that are there already; returns what the streamed step moved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STORE, str(folder / "store"))
        alone = StepAlone(NANO)
        held = alone._on_disk
        weights = [b.shard for b in held.engine.buffers]
        moments = [v for s in held.optimizer.state.values() for v in s.values() if v.dim()]
        before = [t.clone() for t in (*weights, *moments)]
        assert alone.time("raw", 2)["step_ms"] > 0
        assert all(map(torch.equal, before, (*weights, *moments))), "plain traffic writes what it has read"
        found = alone.time("disk", 2)
        assert not any(map(torch.equal, before, weights))
        assert alone.time("memory", 2)["step_ms"] > 0
        for mine, other in zip(weights, alone._in_memory.engine.buffers, strict=True):
            assert torch.equal(mine.clone(), other.shard), "the same step"
        moved = sum(nbytes * (2 if written else 1) for r in alone._raw._ranges for _, _, nbytes, written in r)
        assert moved == sum(value for name, value in found.items() if name.endswith("_disk_bytes"))
        assert moved == 28 * sum(map(torch.Tensor.numel, weights)), "16 bytes read and 12 written a parameter"

        losses = {}
        for who, make in BUILDERS.items():
            contender = make(NANO)
            losses[who] = [contender.step(*rows_of(NANO, step, rank, world)) for step in range(3)]
        assert losses[OURS] == losses[IN_MEMORY] == losses[ZERO3]
        assert contender.counters()["optimizer_disk_bytes"] > 0

        watch = Watch(None, None)
        trained = SameRows(NANO, walled(4096)["infinity"], watch)
        losses = [trained.step(*rows_of(NANO, step, rank, world)) for step in range(4)]
        assert losses[3] < losses[0] - 1e-3, "on the same rows"
        gauges = trained.gauges()
        assert gauges["sampled_peak_bytes"] >= 0 and "held_bytes" in gauges


def test_what_is_timed_is_the_same_step(tmp_path):
    run_ranks(every_part, 2, folder=tmp_path)


def takes_memory(rank, world, verdict):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        Watch(64 << 20, Path(verdict))
        held = [torch.ones(1 << 20) for _ in range(8)]
        signal.sigtimedwait([], 0.2)
        assert not Path(verdict).exists(), "half of it is allowed"
        held += [torch.ones(1 << 20) for _ in range(12)]
        signal.sigtimedwait([], 30)
        raise AssertionError("it should have been ended")


@pytest.mark.skipif(meters.memory() is None, reason="the system does not tell")
def test_who_takes_more_than_it_may_is_ended_at_once(tmp_path):
    with pytest.raises(RanksFailedError, match=r"SIGKILL|signal 9|-9"):
        run_ranks(takes_memory, 1, verdict=str(tmp_path / "verdict"))
    found = json.loads((tmp_path / "verdict").read_text())
    assert found["rank"] == 0 and 64 << 20 < found["bytes"] < 100 << 20


def measured():
    """Figures of a run, written down: everyone's step takes the same, but for one round."""
    wall, depth, stream, step = (Samples() for _ in range(4))
    for who, over in (("ddp", 1), ("zero3", 1), (OURS, 0)):
        wall.add(who, "over_cap", "", over)
        wall.add(who, "cap_share", "", 1.01 if over else 0.9)
        wall.add(who, "state_share", "", 6.02)
    wall.add(OURS, "loss_share", "", 0.8)
    wall.add(OURS, "growth_share", "", 0.03)
    depth.add(OURS, "block_share", "", 0.01)
    for number, slow in enumerate((1.0, 3.0, 2.0)):
        for who, took_ms in ((OURS, 60), (DEEPSPEED, 100), (IN_MEMORY, 51), (ZERO3, 50)):
            step.add(who, "step_ms", f"round {number}", took_ms * slow)
        stream.add(OURS, "stream_share", f"round {number}", 0.85)
    return {"wall": wall, "depth": depth, "step": step, "stream": stream}


def test_bars_are_judged_by_part():
    result = infinity.report(
        measured(), SIZES["small"], WALLS["small"], False, ["ddp", "deepspeed"], [], ["said"], Path("/x")
    )
    assert [bar.holds for bar in result.bars] == [True, True, True, True, True, False, True, True, True, False]
    assert "said" in result.notes
    quick = infinity.report({}, SIZES["small"], WALLS["small"], True, ["ddp"], ["deepspeed"], [], Path("/x"))
    reasons = {bar.name: bar.reason for bar in quick.bars}
    assert reasons["step of infinity / DeepSpeed's from disk"] == "deepspeed is not installed, or cannot be built"
    assert reasons["peak memory per added block / its training state"] == "not with --quick"
    assert quick.machine["left_out"] == ["deepspeed"]


def test_a_loss_that_is_not_finite_does_not_hold():
    found = measured()
    found["wall"].add(OURS, "loss_share", "", math.inf)
    result = infinity.report(found, SIZES["small"], WALLS["small"], False, ["ddp"], [], [], Path("/x"))
    assert {bar.name: bar.holds for bar in result.bars}["loss of infinity, last step / first"] is False


def test_walls_are_as_high_as_is_asked_for_and_bars_of_known_metrics():
    for name in infinity.JUDGED:
        wall = WALLS[name]
        assert wall.state_bytes >= 6 * infinity.RANKS * wall.cap_bytes
        assert wall.steps > infinity.STEADY_FROM + 1, "steps that are steady"
    assert WALLS["medium"].cap_bytes == 512 << 20 and WALLS["medium"].model.numel > 400e6
    specs = [spec for specs in BARS.values() for spec in specs]
    assert len({spec.name for spec in specs}) == len(specs) == 10
    for spec in specs:
        assert spec.metric in UNITS
        meets(1.0, spec.target)


def test_what_cannot_be_measured_is_said(tmp_path, monkeypatch):
    for arguments, message in (
        (["--against", "deepsped"], "--against deepsped: no such peer. Did you mean 'deepspeed'?\n"),
        (["--size", "smal"], "--size smal: no such size. Did you mean 'small'?\n"),
        (["--folder", str(tmp_path / "none")], f"--folder {tmp_path / 'none'}: there is no such folder.\n"),
    ):
        outcome = CliRunner().invoke(cli.app, ["bench", "infinity", *arguments])
        assert (outcome.exit_code, outcome.stderr) == (2, message)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10, 9, 1_000_000))
    with pytest.raises(BenchRequestError, match="has 0.0 GB left, and medium needs"):
        infinity.run(SIZES["medium"], folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
