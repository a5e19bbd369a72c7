"""Bars, their intervals and the files of a benchmark; how contenders are chosen and put together."""

import ast
import io
import json
import math
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from shardlight.framework.bench import diff, meters, zero
from shardlight.framework.bench.contenders.gpt import GPT, fixed_gpt, rows_of
from shardlight.framework.bench.crew import BenchError
from shardlight.framework.bench.results import (
    UNITS,
    Bar,
    BarSpec,
    Result,
    Row,
    Samples,
    exit_code,
    interval_of_median,
    meets,
    read,
)
from shardlight.framework.bench.rotation import Contender, groups
from shardlight.framework.bench.sizes import SIZES, Size
from shardlight.framework.bench.tables import comparison, tables
from shardlight.ops.memory import available_bytes

NANO = Size(name="nano", vocabulary=64, width=16, blocks=2, heads=2, sequence=16, batch=4, rounds=3)
MACHINE = {
    "processor": "p",
    "cores": 2,
    "python": "3",
    "torch": "2",
    "lightning": "2",
    "deepspeed": None,
    "size": "small",
}


def shown(parts) -> str:
    text = io.StringIO()
    for part in parts:
        Console(file=text, width=200).print(part)
    return text.getvalue()


@pytest.mark.parametrize(
    ("value", "target", "holds"),
    [(0.8, "<= 0.80", True), (0.81, "<= 0.80", False), (2.0, ">= 2", True), (1.9, ">= 2", False), (-1, "<= 1.0", True)],
)
def test_a_value_meets_its_target_or_falls_short(value, target, holds):
    assert meets(value, target) is holds


def test_a_target_of_another_form_is_refused():
    with pytest.raises(ValueError, match="<= NUMBER"):
        meets(1.0, "about 3")


@pytest.mark.parametrize(("count", "first"), [(2, 0), (5, 0), (6, 0), (8, 0), (9, 1), (15, 3), (25, 7)])
def test_the_interval_of_a_median_is_that_of_the_binomial(count, first):
    assert interval_of_median(range(count)) == (first, count - 1 - first)
    outside = 2 * sum(math.comb(count, k) for k in range(first + 1)) / 2**count
    if count >= 6:
        # x_(first) .. x_(n-1-first) misses the median when at most `first` values are on one side of it.
        assert outside <= 0.05
        assert outside + 2 * math.comb(count, first + 1) / 2**count > 0.05, "a narrower interval would do"


def test_a_single_value_has_no_interval():
    assert interval_of_median([3.0]) is None


def filled() -> Samples:
    samples = Samples()
    for turn in range(15):
        base = 100.0 * (1 + turn % 3)  # the machine is up to three times slower between turns
        samples.add_ranks("ddp", f"t{turn}", [{"step_ms": base, "cpu_ms": 1.0}, {"step_ms": base / 2, "cpu_ms": 2.0}])
        samples.add("shardlight-zero1", "step_ms", f"t{turn}", base * 1.05)
    samples.add("shardlight-zero1", "sent_bytes", "", 102.0)
    samples.add("shardlight-zero1", "table_sent_bytes", "", 100.0)
    return samples


STEP = BarSpec(name="step", target="<= 1.10", metric="step_ms", who="shardlight-zero1", against="ddp")


def test_a_ratio_is_of_turns_side_by_side_so_that_a_slower_minute_does_not_matter():
    bar = filled().judge(STEP)
    assert (bar.value, bar.holds, bar.pairs) == (pytest.approx(1.05), True, 15)
    assert bar.interval == pytest.approx((1.05, 1.05))


def test_only_turns_that_both_had_are_compared():
    samples = filled()
    samples.add("shardlight-zero1", "step_ms", "alone", 1e9)
    assert samples.judge(STEP).pairs == 15
    assert samples.judge(STEP).value == pytest.approx(1.05)


def test_a_difference_and_a_share_of_the_table_are_bars_as_well():
    samples = filled()
    apart = BarSpec(name="d", target="<= 1", metric="step_ms", who="shardlight-zero1", against="ddp", how="difference")
    assert samples.judge(apart).value == pytest.approx(10.0)
    assert samples.judge(apart).holds is False
    share = BarSpec(name="s", target="<= 1.01", metric="sent_bytes", who="shardlight-zero1", over="table_sent_bytes")
    assert samples.judge(share).value == pytest.approx(1.02)
    assert samples.judge(share).holds is False


def test_a_bar_that_was_not_measured_neither_holds_nor_falls_short():
    bar = filled().judge(BarSpec(name="n", target="<= 1", metric="step_ms", who="fsdp2", against="ddp"), "left out")
    assert (bar.value, bar.holds, bar.pairs, bar.interval, bar.reason) == (None, None, 0, None, "left out")


def test_the_slower_rank_counts_and_cpu_time_is_of_all():
    samples = filled()
    assert samples.median("ddp", "step_ms") == 200.0
    assert samples.median("ddp rank 1", "step_ms") == 100.0
    assert samples.median("ddp", "cpu_ms") == 3.0


def test_losses_are_compared_step_by_step():
    samples = Samples()
    samples.add_losses("single", 0, [[3.0, 2.0, 1.0]])
    samples.add_losses("ddp", 0, [[2.5, 1.5], [3.5, 2.75]])
    assert samples.losses["ddp"] == {0: 3.0, 1: 2.125}
    assert samples.loss_difference("ddp", "single") == 0.125
    assert samples.loss_difference("nobody", "single") is None


def test_the_file_has_the_agreed_shape_and_is_read_back(tmp_path):
    samples = filled()
    result = Result(MACHINE, samples.rows("zero small"), [samples.judge(STEP), Bar("n", None, "<= 1", None, 0, None)])
    result.write(tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    assert list(found) == ["machine", "rows", "bars"]
    assert all(list(row) == ["case", "who", "metric", "value", "unit"] for row in found["rows"])
    assert all(list(bar) == ["name", "value", "target", "holds", "pairs", "interval"] for bar in found["bars"])
    assert found["bars"][0]["target"] == "<= 1.10"
    again = read(tmp_path / "a.json")
    assert again.rows == result.rows and again.machine == result.machine
    assert [bar.holds for bar in again.bars] == [True, None]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"machine": {}, "rows": [{"a": 1}], "bars": []}'])
def test_another_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(ValueError, match=r"b.json: not a result"):
        read(tmp_path / "b.json")


def test_strict_tells_a_short_bar_from_an_absent_peer():
    good, short = (Bar("b", 1.0, "<= 2", holds, 1, None) for holds in (True, False))
    unknown = Bar("b", None, "<= 2", None, 0, None)
    assert exit_code(Result({}, [], [good, unknown]), []) == 0
    assert exit_code(Result({}, [], [good, short]), []) == 3
    assert exit_code(Result({}, [], [short], missing=["deepspeed"]), ["deepspeed"]) == 4
    assert exit_code(Result({}, [], [good], missing=["deepspeed"]), ["ddp"]) == 0, "was not named"


def test_every_metric_that_a_bar_asks_for_has_a_unit_and_every_contender_exists():
    known = {c.name for c in [*zero.OURS, *zero.TRAINED, *(c for peers in zero.PEERS.values() for c in peers)]}
    for spec in zero.BARS:
        assert {spec.metric, spec.over or spec.metric} <= UNITS.keys()
        assert {spec.who, spec.against or spec.who} <= known
        assert set(spec.sizes) <= SIZES.keys()
        meets(1.0, spec.target)
    assert len({spec.name for spec in zero.BARS}) == len(zero.BARS)


def test_a_peer_that_is_not_installed_is_said_and_its_bars_are_not_measured(monkeypatch):
    gone = [Contender(name="deepspeed-zero3", module="none", package="a_package_that_nobody_has")]
    monkeypatch.setitem(zero.PEERS, "deepspeed", gone)
    contenders, missing = zero.choose(["ddp", "deepspeed"], quick=False)
    assert missing == ["deepspeed"]
    assert [c.name for c in contenders][:2] == ["single", "ddp"] and "deepspeed-zero3" not in [
        c.name for c in contenders
    ]
    result = zero.report(filled(), SIZES["small"], contenders, missing, False, [0.5])
    (bar,) = [bar for bar in result.bars if "DeepSpeed" in bar.name]
    assert bar.holds is None
    text = shown(tables(result))
    assert "deepspeed is not installed" in text and "not measured: deepspeed is not installed" in text
    assert "1.05 [1.05, 1.05]" in text and "0.50 cores" in text


def test_a_bar_that_falls_short_is_printed_as_such():
    samples = filled()
    bars = [samples.judge(STEP), samples.judge(BarSpec(name="low", target="<= 1.00", metric="step_ms", who="ddp"))]
    lines = shown(tables(Result(MACHINE, samples.rows("zero small"), bars))).splitlines()
    assert any("FALLS SHORT" in line and line.startswith("low") for line in lines)
    assert any(line.rstrip().endswith("yes") and line.startswith("step") for line in lines)


def test_an_unknown_peer_is_refused_with_a_suggestion():
    with pytest.raises(BenchError, match="--against fsdp: no such peer. Did you mean 'fsdp2'"):
        zero.choose(["fsdp"], quick=False)


def test_without_against_all_peers_are_wanted_and_quick_wants_ddp():
    names = {c.name for c in zero.choose(None, quick=False)[0]} | set(zero.choose(None, quick=False)[1])
    assert {"ddp", "fsdp2"} <= names and names & {"deepspeed", "deepspeed-zero1"}
    assert [c.name for c in zero.choose(None, quick=True)[0]][:2] == ["single", "ddp"]
    assert "fsdp2" not in {c.name for c in zero.choose(None, quick=True)[0]}


def test_groups_fit_into_memory_and_hold_each_pair():
    made = [Contender(name=name, module="m", state_bytes=n) for name, n in (("a", 10), ("b", 20), ("c", 30), ("d", 30))]
    cost = {c.name: c.memory_bytes(SIZES["medium"]) for c in made}
    pairs = [("a", "a"), ("b", "a"), ("c", "a"), ("d", "a"), ("d", "c")]
    for limit in (sum(cost.values()), cost["c"] + cost["d"]):
        found = groups(made, pairs, SIZES["medium"], limit)
        assert all(sum(cost[c.name] for c in group) <= limit for group in found)
        assert all(any(set(pair) <= {c.name for c in group} for group in found) for pair in pairs)
    assert [[c.name for c in g] for g in groups(made, pairs, SIZES["medium"], sum(cost.values()))] == [
        ["a", "b", "c", "d"]
    ]
    with pytest.raises(BenchError, match="c and d at medium need about .* GB of memory together"):
        groups(made, pairs, SIZES["medium"], cost["c"] + cost["d"] - 1)


@pytest.mark.parametrize("size", [NANO, *SIZES.values()], ids=lambda size: size.name)
def test_the_stated_number_of_parameters_is_the_models(size):
    with torch.device("meta"):
        model = GPT(size)
    assert sum(p.numel() for p in model.parameters()) == size.numel


def test_weights_and_tokens_are_the_same_each_time_and_ranks_share_the_rows():
    first, second = fixed_gpt(NANO), fixed_gpt(NANO)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all(), name
    tokens, labels = rows_of(NANO, 7, 0, 1)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    halves = [rows_of(NANO, 7, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([half[0] for half in halves]), tokens)
    assert torch.equal(torch.cat([half[1] for half in halves]), labels)
    assert not torch.equal(rows_of(NANO, 8, 0, 1)[0], tokens)


MEMORY = """
from shardlight.framework.bench import meters
base = b"1" * 50_000_000
meters.reset_peak()
before = meters.memory()
kept = b"1" * 20_000_000
freed = b"1" * 100_000_000
del freed
print(meters.above(before, meters.memory()))
"""


@pytest.mark.skipif(meters.memory() is None, reason="the system does not tell a process's proportional set size")
def test_memory_is_what_came_after_the_base_and_the_peak_holds_what_was_freed():
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=60, check=True)
    found = ast.literal_eval(run.stdout)
    assert found["steady_memory_bytes"] == pytest.approx(20e6, abs=3e6)
    assert found["peak_memory_bytes"] == pytest.approx(120e6, abs=6e6)
    assert meters.above(None, None) == {}


def test_calls_are_counted_as_cprofile_counts_them():
    probe = meters.CallProbe()
    probe.start()
    for _ in range(100):
        math.floor(1.5)
        meets(1.0, "<= 2")  # calls str.partition as well, and float is a type
    assert 300 <= probe.stop() <= 410


def test_other_programs_and_the_machine_are_told():
    assert meters.machine()["torch"] == torch.__version__
    if meters.busy_s() is not None:
        began = meters.busy_s()
        sum(i * i for i in range(3_000_000))
        assert meters.busy_s() > began
        assert available_bytes() > 0 and meters.loopback_bytes() >= 0


def result_with(**figures) -> Result:
    rows = [Row("zero tiny", who, metric, value, UNITS[metric]) for (who, metric), value in figures["rows"].items()]
    return Result(figures.get("machine", MACHINE), rows, figures.get("bars", []))


def test_diff_names_what_got_worse_and_what_got_better():
    old = result_with(
        rows={
            ("a", "step_ms"): 100.0,
            ("a", "step_ratio"): 1.0,
            ("a", "tokens_per_s"): 100.0,
            ("a", "sent_bytes"): 1000.0,
            ("b", "python_calls"): 1000.0,
            ("b", "collectives"): 20.0,
            ("b rank 0", "collectives"): 20.0,
            ("b", "page_faults"): 0.0,
            ("gone", "step_ms"): 1.0,
        },
        bars=[Bar("x", 1.0, "<= 1", True, 1, None), Bar("y", 2.0, "<= 1", False, 1, None)],
    )
    new = result_with(
        rows={
            ("a", "step_ms"): 140.0,  # noise
            ("a", "step_ratio"): 1.2,  # worse
            ("a", "tokens_per_s"): 40.0,  # worse
            ("a", "sent_bytes"): 1001.0,  # worse: counted
            ("b", "python_calls"): 1040.0,  # noise
            ("b", "collectives"): 19.0,  # better
            ("b", "page_faults"): 7.0,  # noise
            ("b rank 0", "collectives"): 30.0,  # of a single rank
        },
        bars=[Bar("x", 1.5, "<= 1", False, 1, None), Bar("y", 1.0, "<= 1", True, 1, None)],
        machine={**MACHINE, "torch": "9"},
    )
    found = diff.compare(old, new)
    assert [(c.who, c.metric) for c in found.changes if c.worse] == [
        ("a", "sent_bytes"),
        ("a", "step_ratio"),
        ("a", "tokens_per_s"),
    ]
    assert [(c.who, c.metric) for c in found.changes if not c.worse] == [("b", "collectives")]
    assert found.compared == 7 and found.only_old == ["gone: step_ms (zero tiny)"] and found.only_new == []
    assert found.bars == ["x: held, and falls short now", "y: holds now"]
    assert found.machines == ["torch: 2 before, 9 now"]
    text = shown(comparison(found))
    assert "worse" in text and "tokens_per_s" in text and "Bar: x: held, and falls short now" in text


def test_diff_of_a_result_with_itself_finds_nothing():
    same = result_with(rows={("a", "step_ms"): 100.0, ("a", "loss_difference"): 0.0})
    found = diff.compare(same, same)
    assert found.changes == [] and found.compared == 2
    assert "Nothing is worse" in shown(comparison(found))
