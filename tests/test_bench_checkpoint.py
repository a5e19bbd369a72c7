"""`shardlight bench checkpoint`: what it times saves and loads the right values, and its figures are of turns side by side."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command import run_command
from harness import preload, run_ranks
from shardlight import cli
from shardlight.framework.bench import checkpoint, diff
from shardlight.framework.bench.checkpoint import BARS, LOADS, OURS, RAW, SAME, files_of, loading, note, saving
from shardlight.framework.bench.contenders.checkpoint import PERIOD, check, fill, obey, values_of
from shardlight.framework.bench.crew import BenchRequestError
from shardlight.framework.bench.results import UNITS, Samples, meets, read
from shardlight.framework.bench.sizes import SIZES, Size
from typer.testing import CliRunner

TOY = Size(name="toy", vocabulary=37, width=8, blocks=1, heads=2, sequence=8, batch=2)
preload(checkpoint.MODULE)


@pytest.mark.parametrize("peers", ["", pytest.param("torch.save,dcp", marks=pytest.mark.long)])
def test_quick_measures_every_case_and_prints_what_it_writes(peers, tmp_path):
    line = ["bench", "checkpoint", "--quick", "--strict", "--against", peers, "--json", "made/result.json"]
    outcome = run_command(line, tmp_path, {}, timeout_s=240)
    assert outcome.left_running == () and outcome.code == 0, outcome.output
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    result = read(tmp_path / "made/result.json")
    rows = {(row.case, row.who, row.metric): row.value for row in result.rows}
    named = [peer for peer in peers.split(",") if peer]
    cases = {saving("zero3"): {OURS, RAW, *named}, saving("ddp"): {OURS, RAW}}
    for load in LOADS:
        if load.ranks < 3:
            cases.setdefault(loading(load.strategy, load.ranks), {f"{OURS} {SAME}"}).add(load.who)
    cases[loading("zero3", 2)] |= {f"{peer} {SAME}" for peer in named}
    cases[loading("zero3", 1)] |= {"dcp from 2 ranks", f"dcp {SAME}"} if named else set()
    assert {case: {w for c, w, _ in rows if c == case and " rank " not in w} for case in cases} == cases
    assert {case for case, _, _ in rows} == set(cases)
    for case, whos in cases.items():
        for who in whos:
            assert rows[case, who, "save_ms" if case.startswith("save") else "load_ms"] > 0
    for strategy in ("zero3", "ddp"):
        case = saving(strategy)
        assert rows[case, OURS, "written_bytes"] == rows[case, RAW, "written_bytes"] > 12 * SIZES["tiny"].numel
        assert 0 < rows[case, OURS, "checksum_cpu_share"] < 1 and rows[case, OURS, "time_to_raw"] > 0
    assert [bar.reason for bar in result.bars] == [""] * len(result.bars)  # not in the file
    assert outcome.output.count("not measured: asked for at small and medium") == len(result.bars) == 6
    assert diff.compare(result, result).changes == []


def every_contender(rank, world_size, place):
    """Each saves, and loads what it saved; ours also what it saved under another strategy."""
    made = {}

    def tell(what, who, name="", **more):
        dist.barrier()
        return obey({"do": what, "who": who, "folder": str(place / name), **more}, TOY, made)

    for who in ("zero3", "ddp", "raw zero3", "dcp", "torch.save"):
        tell("build", who)
        check(who, made[who])
        if rank == 0 and who in ("raw zero3", "torch.save"):
            (place / who).mkdir()
        took = tell("save", who, who, files=[{"a": 1000}, {"b": 1 << 20}, {}])
        assert took["seconds"] > 0 and took["cpu_s"] > 0 and "peak_memory_bytes" in took["memory"]
    assert tell("verify", "zero3", "zero3")["seconds"] > 0 and tell("checksum", "zero3")["cpu_s"] >= 0
    for who, name in (
        ("zero3", "zero3"),
        ("zero3", "ddp"),
        ("ddp", "zero3"),
        ("dcp", "dcp"),
        ("torch.save", "torch.save"),
    ):
        tell("load and check", who, name)
        assert tell("load", who, name)["seconds"] > 0
        check(who, made[who])
    spoilt = next(part for part, _, _ in made["zero3"].parts() if part.numel())
    spoilt.view(-1)[-1] += 1
    tell("save", "zero3", "spoilt")
    with pytest.raises(ArithmeticError, match=f"zero3: wrong values on rank {rank} of {world_size}, in tensor"):
        check("zero3", made["zero3"])
    with pytest.raises(ArithmeticError, match="zero3 from spoilt: wrong values on rank"):
        tell("load and check", "zero3", "spoilt")
    fill(made["zero3"])
    check("zero3", made["zero3"])


def test_every_contender_saves_and_loads_known_values(tmp_path):
    run_ranks(every_contender, 2, place=tmp_path)
    assert {p.name: p.stat().st_size for p in (tmp_path / "raw zero3").iterdir()} == {"a": 1000, "b": 1 << 20}


def test_values_tell_their_place_and_tensor():
    assert values_of(3, PERIOD - 1, 2).tolist() == [20_014 + PERIOD - 1, 20_014, 20_015]
    assert not set(values_of(PERIOD, 0, 1).tolist()) & set(values_of(PERIOD, 5, 2).tolist())
    assert torch.equal(values_of(100, 0, 450)[40:], values_of(60, 40, 450))


def answers(*seconds):
    return [
        {"seconds": s, "cpu_s": s / 2, "memory": {"peak_memory_bytes": 8, "steady_memory_bytes": 1}} for s in seconds
    ]


def test_the_slower_rank_counts_and_ratios_are_of_rounds_side_by_side():
    saved, loaded, load = Samples(), Samples(), LOADS[0]
    for number, slow in enumerate([1.0, 3.0, 2.0]):  # a disk that is slower in some rounds
        for samples, who, metric, seconds in (
            (saved, OURS, "save_ms", 0.5),
            (saved, RAW, "save_ms", 0.4),
            (loaded, f"{OURS} {SAME}", "load_ms", 0.2),
            (loaded, load.who, "load_ms", 0.3),
        ):
            note(samples, who, f"round {number}", metric, answers(seconds * slow / 2, seconds * slow))
    measured = {saving("zero3"): saved, loading(load.strategy, load.ranks): loaded}
    result = checkpoint.report(measured, SIZES["small"], True, [], Path.cwd())
    assert result.value(OURS, "save_ms") == pytest.approx(1000) and result.value(f"{OURS} rank 0", "save_ms") == 500
    assert result.value(OURS, "cpu_ms") == pytest.approx(750) and result.value(OURS, "peak_memory_bytes") == 8
    assert result.value(OURS, "steady_memory_bytes") is None
    assert result.value(OURS, "time_to_raw") == pytest.approx(1.25) and result.value(RAW, "time_to_raw") is None
    assert result.value(load.who, "time_to_same") == pytest.approx(1.5)
    judged = {bar.name: (bar.value, bar.holds) for bar in result.bars if bar.holds is not None}
    assert judged == {
        "speed of writing zero3 / plain writes'": (pytest.approx(0.8), False),
        "load, zero3 on 2 ranks from ddp on 2 / same shape": (pytest.approx(1.5), False),
    }


def test_memory_is_no_disk(monkeypatch):
    monkeypatch.setattr(checkpoint, "file_system", lambda folder: "tmpfs")
    result = checkpoint.report({}, SIZES["small"], False, [], Path("/x"))
    reasons = [bar.reason for bar in result.bars if "writing" in bar.name]
    assert reasons == ["/x is memory (tmpfs), no disk"] * 2


def test_plain_writes_get_the_files_of_the_rank_that_wrote_them():
    sizes = {"manifest.json": 5, "rank-00000.safetensors": 70, "rank-00001.safetensors": 80}
    assert files_of(sizes, 2) == [{"manifest.json": 5, "rank-00000.safetensors": 70}, {"rank-00001.safetensors": 80}]


def test_bars_are_of_known_metrics():
    specs = [spec for specs in BARS.values() for spec in specs]
    assert len({spec.name for spec in specs}) == len(specs) == 2 + len(LOADS)
    for spec in specs:
        assert spec.metric in UNITS
        meets(1.0, spec.target)


def test_what_cannot_be_measured_is_said(tmp_path, monkeypatch):
    for arguments, message in (
        (["--against", "dpc"], "--against dpc: no such peer. Did you mean 'dcp'?\n"),
        (["--size", "smal"], "--size smal: no such size. Did you mean 'small'?\n"),
        (["--folder", str(tmp_path / "none")], f"--folder {tmp_path / 'none'}: there is no such folder.\n"),
    ):
        outcome = CliRunner().invoke(cli.app, ["bench", "checkpoint", *arguments])
        assert (outcome.exit_code, outcome.stderr) == (2, message)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10, 9, 1_000_000))
    with pytest.raises(BenchRequestError, match="has 0.0 GB left, and medium needs"):
        checkpoint.run(SIZES["medium"], folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
