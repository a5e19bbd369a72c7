"""`shardlight bench collectives`: what it times gives right results, and its figures are those of calls side by side."""

import pytest
import torch.distributed as dist
from command import run_command
from harness import preload, run_ranks
from shardlight import cli
from shardlight.framework.bench import collectives, diff
from shardlight.framework.bench.collectives import BARS, OPERATIONS, QUICK, VOLUMES, WAYS, Volume, whole_bytes
from shardlight.framework.bench.contenders.exchange import GLOO, MEMCPY, Buffers, engine_way, measure
from shardlight.framework.bench.results import UNITS, meets, read
from shardlight.ops.built import OPS_VARIABLE, why_not_shared
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.pages import Pages
from typer.testing import CliRunner

preload(collectives.MODULE)


@pytest.mark.parametrize("variables", [{}, {OPS_VARIABLE: "reference"}], ids=["as built", "reference"])
def test_quick_measures_every_way_and_prints_what_it_writes(tmp_path, variables):
    reason = f"{OPS_VARIABLE}=reference is set" if variables else why_not_shared()
    line = ["bench", "collectives", "--quick", "--strict", "--json", "made/result.json"]
    outcome = run_command(line, tmp_path, variables, timeout_s=240)
    assert outcome.left_running == () and (tmp_path / "made/result.json").exists(), outcome.output
    result = read(tmp_path / "made/result.json")
    ways = WAYS if reason is None else [way for way in WAYS if way != collectives.OURS]
    rows = {(row.case, row.who, row.metric): row.value for row in result.rows}
    cases = [f"{operation} {volume.name}" for operation in OPERATIONS for volume in QUICK]
    whos = {who for way in ways for who in (way, f"{way} rank 0", f"{way} rank 1")}
    assert {(case, who) for case, who, _ in rows} == {(case, who) for case in cases for who in whos}
    for case in cases:
        for way in ways:
            time_us = rows[case, way, "call_us"]
            assert time_us > 0
            assert (f"{time_us:.1f} us" if time_us < 1000 else f"{time_us / 1000:.2f} ms") in outcome.output
        assert rows[case, "gloo", "speed_to_gloo"] == 1.0
        assert rows.get((case, "memcpy", "speed_to_memcpy")) == (None if case.endswith("256 B") else 1.0)
    short = [bar.name for bar in result.bars if bar.holds is False]
    assert outcome.code == (3 if short else 0), outcome.output
    assert outcome.output.count("FALLS SHORT") == len(short)
    unmeasured = {bar.name for bar in result.bars if bar.holds is None}
    wanted = {spec.name for case, specs in BARS.items() for spec in specs if reason or case not in cases}
    assert unmeasured == wanted
    assert outcome.output.count("not measured: no shared memory") == (len(BARS) + 6 if reason else 0)
    assert (reason or "not with --quick") in outcome.output
    assert diff.compare(result, result).changes == []


def right_and_wrong(rank, world_size):
    """Every way is right, and one that does nothing, or leaves out a rank, is found."""
    ways = {"ours": engine_way(Collectives(dist.group.WORLD)), "gloo": GLOO}
    ways["over gloo"] = engine_way(Collectives(dist.group.WORLD, transport="gloo"))
    numel = whole_bytes(Volume(name="", nbytes=10_000, rounds=1), world_size) // 4

    def zeroed_last(buffers, operation):
        GLOO[operation](buffers)
        if rank == world_size - 1:
            (buffers.shard_S if operation == "reduce-scatter" else buffers.full_N)[-1] = 0

    for operation in OPERATIONS:
        buffers = Buffers(numel, rank, world_size, Pages())
        found = measure(ways, operation, buffers, 2, 3, dist.barrier)
        assert list(found) == [*ways, MEMCPY]
        assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in found.values())
        nothing = {"does nothing": {operation: lambda buffers: None}}
        with pytest.raises(ArithmeticError, match=f"{operation} of {4 * numel} bytes by does nothing: wrong on rank"):
            measure(nothing, operation, buffers, 1, 1, dist.barrier)
        last = {"one element": {operation: lambda buffers, operation=operation: zeroed_last(buffers, operation)}}
        if rank == world_size - 1:
            with pytest.raises(ArithmeticError, match="by one element: wrong on rank 2"):
                measure(last, operation, buffers, 1, 0, lambda: None)
        else:
            last["one element"][operation](buffers)
        dist.barrier()


def test_every_way_is_held_to_the_right_result():
    run_ranks(right_and_wrong, 3)


def test_the_slower_rank_counts_and_ratios_are_of_rounds_side_by_side():
    slow = [1.0, 3.0, 2.0]  # a machine that is slower in some rounds
    way = {"shardlight": 0.1, "gloo": 0.6, "memcpy": 0.05}
    rank = {name: [seconds * s for s in slow] for name, seconds in way.items()}
    faster = {name: [value / 2 for value in seconds] for name, seconds in rank.items()}
    samples = collectives.samples_of([faster, rank], 100_000)
    assert samples.median("shardlight", "call_us") == pytest.approx(0.2e6)
    assert samples.median("shardlight rank 0", "call_us") == pytest.approx(0.1e6)
    assert samples.median("shardlight", "buffer_bytes_per_s") == pytest.approx(500_000)
    assert samples.median("shardlight", "speed_to_gloo") == pytest.approx(6)
    assert samples.median("shardlight", "speed_to_memcpy") == pytest.approx(0.5)
    result = collectives.report({"all-gather 1 MiB": samples, "all-reduce 256 B": samples}, 2, True, None)
    judged = {bar.name: (bar.value, bar.holds) for bar in result.bars if bar.holds is not None}
    assert judged == {
        "speed of all-gather 1 MiB / gloo's": (pytest.approx(6), True),
        "speed of all-gather 1 MiB / memcpy's": (pytest.approx(0.5), True),
        "time of all-reduce 256 B / gloo's": (pytest.approx(1 / 6), False),
    }


def test_bars_are_of_known_ways_and_metrics_and_sizes_divide_by_the_ranks():
    specs = [spec for specs in BARS.values() for spec in specs]
    assert len({spec.name for spec in specs}) == len(specs) == 3 + 3 * 2 * 2 + 3
    for spec in specs:
        assert {spec.who, spec.against} <= set(WAYS) and spec.metric in UNITS
        meets(1.0, spec.target)
    for ranks in (2, 3, 7, 100):
        for volume in VOLUMES:
            whole = whole_bytes(volume, ranks)
            assert whole % (4 * ranks) == 0 and 0 < whole <= max(volume.nbytes, 4 * ranks)


def test_one_rank_alone_is_refused():
    outcome = CliRunner().invoke(cli.app, ["bench", "collectives", "--ranks", "1"])
    assert (outcome.exit_code, outcome.stderr) == (2, "--ranks 1: collectives take at least 2.\n")
