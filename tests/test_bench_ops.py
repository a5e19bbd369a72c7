"""`shardlight bench ops`: what it times are right steps, and its figures are those of steps side by side."""

import pytest
import torch
from command import run_command
from shardlight import cli
from shardlight.framework.bench import diff, ops
from shardlight.framework.bench.contenders.steps import Buffers, ours, torch_fused, traffic, verify
from shardlight.framework.bench.ops import BARS, BYTES, FIRST, INSTALL, MIXES, MUON, THREADS, case_of
from shardlight.framework.bench.results import UNITS, meets, read
from shardlight.ops.built import OPS_VARIABLE, why_not
from typer.testing import CliRunner

needs_native = pytest.mark.skipif(why_not() is not None, reason=f"compiled ops are not used: {why_not()}")
STEPS = [case_of(mix, threads) for threads in THREADS for mix in MIXES]


@needs_native
def test_quick_measures_every_case_and_prints_what_it_writes(tmp_path):
    line = ["bench", "ops", "--quick", "--strict", "--json", "made/result.json"]
    outcome = run_command(line, tmp_path, {}, timeout_s=240)
    assert outcome.left_running == () and (tmp_path / "made/result.json").exists(), outcome.output
    result = read(tmp_path / "made/result.json")
    rows = {(row.case, row.who, row.metric): row.value for row in result.rows}
    for case in STEPS:
        whos = ["shardlight", "same-traffic", *(["torch-fused"] if case.startswith("fp32") else [])]
        assert {who for found, who, _ in rows if found == case} == set(whos)
        for who in whos:
            time_us = rows[case, who, "call_us"]
            assert time_us > 0 and f"{time_us / 1000:.2f} ms" in outcome.output
        assert rows[case, "same-traffic", "speed_to_traffic"] == 1.0
    assert (FIRST, "shardlight adam", "first_call_ms") in rows
    short = [bar.name for bar in result.bars if bar.holds is False]
    assert outcome.code == (3 if short else 0), outcome.output
    assert outcome.output.count("FALLS SHORT") == len(short)
    assert {bar.name for bar in result.bars if bar.holds is None} == {
        spec.name for case, specs in BARS.items() for spec in specs if case != FIRST
    }
    assert outcome.output.count("not with --quick") == 4 * len(THREADS) + 1
    assert "not measured: with --install" in outcome.output
    assert diff.compare(result, result).changes == []


def test_what_cannot_be_measured_is_said(tmp_path):
    outcome = CliRunner().invoke(cli.app, ["bench", "ops", "--against", "depspeed"])
    assert (outcome.exit_code, outcome.stderr) == (2, "--against depspeed: no such peer. Did you mean 'deepspeed'?\n")
    outcome = run_command(["bench", "ops", "--quick"], tmp_path, {OPS_VARIABLE: "reference"}, timeout_s=120)
    assert outcome.code == 2 and outcome.left_running == ()
    assert f"nothing to measure: {OPS_VARIABLE}=reference is set." in outcome.output
    result = ops.report({}, False, {"deepspeed": "is not installed"})
    reasons = [bar.reason for bar in result.bars if "DeepSpeed" in bar.name]
    assert reasons == ["deepspeed is not installed"] * 2 and result.missing == ["deepspeed"]


@needs_native
def test_a_step_that_is_not_torchs_is_found():
    b = Buffers(5000)
    for narrow in (False, True):
        verify("ours", ours(b, narrow), b, narrow)
        with pytest.raises(ArithmeticError, match="AdamW by same-traffic: not the step of"):
            verify("same-traffic", traffic(b, narrow), b, narrow)
    verify("torch", torch_fused(b), b, False)
    with pytest.raises(ArithmeticError, match="by no copy"):
        verify("no copy", torch_fused(b), b, True)


@needs_native
def test_the_same_traffic_reads_and_writes_everything(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for narrow in (False, True):
        b = Buffers(100_003)
        b.prepare()
        old = [t.clone() for t in (b.param_N, b.mean_N, b.square_N)]
        traffic(b, narrow)()
        want = [old[1], old[2], old[0] if narrow else b.grad_N - old[0]]
        assert all(torch.equal(a, w) for a, w in zip((b.param_N, b.mean_N, b.square_N), want, strict=True))
        assert torch.equal(b.copy_N, b.grad16_N if narrow else torch.zeros_like(b.copy_N))


def test_ratios_are_of_rounds_side_by_side():
    slow = [1.0, 3.0, 2.0]  # a machine that is slower in some rounds
    seconds = {
        who: [t * s for s in slow] for who, t in (("shardlight", 0.1), ("torch-fused", 0.2), ("same-traffic", 0.05))
    }
    samples = ops.samples_of(seconds, 1000)
    assert samples.median("shardlight", "call_us") == pytest.approx(0.2e6)
    assert samples.median("shardlight", "buffer_bytes_per_s") == pytest.approx(BYTES * 1000 / 0.2)
    assert samples.median("shardlight", "speed_to_traffic") == pytest.approx(0.5)
    judged = {
        b.name: (b.value, b.holds) for b in ops.report({STEPS[0]: samples}, False, {}).bars if b.holds is not None
    }
    assert judged == {
        f"speed of {STEPS[0]} / torch fused's": (pytest.approx(2), True),
        f"speed of {STEPS[0]} / the same traffic's": (pytest.approx(0.5), False),
    }


def test_bars_are_of_known_metrics():
    specs = [spec for specs in BARS.values() for spec in specs]
    assert len({spec.name for spec in specs}) == len(specs) and {FIRST, INSTALL, MUON} < BARS.keys()
    for spec in specs:
        assert spec.metric in UNITS
        meets(1.0, spec.target)
