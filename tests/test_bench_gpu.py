"""`shardlight bench gpu`: its checks run on CPU too, find what is wrong, and say where there is no GPU."""

from dataclasses import replace

import pytest
import torch
from command import run_command
from shardlight import cli
from shardlight.framework.bench import diff, gpu
from shardlight.framework.bench.contenders import gpu_ops, gpu_training
from shardlight.framework.bench.gpu import BARS, EXTENTS, LIMITS, PLANS, samples_of_speed
from shardlight.framework.bench.results import UNITS, meets, read
from shardlight.ops.built import why_not
from shardlight.ops.registry import OPS
from typer.testing import CliRunner

WITHOUT_A_GPU = ("peak_allocated_bytes", "call_us")
CPU = torch.device("cpu")


def test_the_checks_hold_on_a_cpu_and_are_written(tmp_path):
    outcome = run_command(["bench", "gpu", "--device", "cpu", "--strict", "--json", "r.json"], tmp_path, timeout_s=240)
    assert outcome.code == 0 and outcome.left_running == (), outcome.output
    result = read(tmp_path / "r.json")
    specs = {spec.name: spec for of_case in BARS.values() for spec in of_case}
    unmeasured = {bar.name for bar in result.bars if bar.holds is None}
    unnative = {n for n, s in specs.items() if why_not() and s.metric == "bytes_apart"}
    assert unmeasured == unnative | {n for n, s in specs.items() if s.metric in WITHOUT_A_GPU}
    assert all(bar.holds for bar in result.bars if bar.name not in unmeasured)
    assert f"{len(specs) - len(unmeasured)} of {len(specs)} bars hold." in outcome.output
    rows = {(row.case, row.who, row.metric): row.value for row in result.rows}
    assert all(rows[precision, plan, "state_bytes"] > 1e6 for precision in LIMITS for plan in PLANS)
    assert rows["AdamW", "op masters", "buffer_bytes_per_s"] > 0
    assert "they say nothing of a GPU" in outcome.output and diff.compare(result, result).changes == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_said(tmp_path):
    outcome = run_command(["bench", "gpu", "--strict", "--json", "r.json"], tmp_path, timeout_s=120)
    assert outcome.code == 4 and "PyTorch sees no CUDA device: nothing was measured." in outcome.output
    assert read(tmp_path / "r.json").bars == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")
def test_the_checks_hold_on_a_gpu():
    result = gpu.run("cuda")
    assert [bar for bar in result.bars if bar.holds is False] == []


def test_another_device_is_refused():
    outcome = CliRunner().invoke(cli.app, ["bench", "gpu", "--device", "tpu"])
    assert (outcome.exit_code, outcome.stderr) == (2, "--device tpu: use cuda or cpu.\n")


def test_a_wrong_op_is_found(monkeypatch):
    kind, ours, states = gpu_ops.RULES["sgd nesterov"]
    calls = []

    def wrong(batch, lr):
        # On every second run of three steps, as if one device computed otherwise.
        calls.append(lr)
        ours(replace(batch, scale=1.01 if (len(calls) - 1) // gpu_ops.STEPS % 2 == 0 else 1.0), lr=lr)

    monkeypatch.setattr(gpu_ops, "RULES", {"sgd nesterov": (kind, wrong, states)})
    found = gpu_ops.check(CPU)["sgd nesterov fp32"]
    assert found["error_ratio"] > 1 and found["bytes_apart"] > 0


def test_wrong_training_is_found(monkeypatch):
    size = EXTENTS["cpu"].size
    step = gpu_training._Ours.step

    def wrong(self, tokens_BT, labels_BT):
        for group in self.optimizer.param_groups:
            group["lr"] = 4e-4
        return step(self, tokens_BT, labels_BT)

    monkeypatch.setattr(gpu_training._Ours, "step", wrong)
    found = gpu_training.check(CPU, size, "bf16-true", ["zero3"], 3)["zero3"]
    assert found["weights_apart"] > LIMITS["bf16-true"][1]
    assert found["state_bytes"] == pytest.approx(found["table_state_bytes"], rel=0.03)


def test_speeds_are_of_rounds_side_by_side_and_bars_of_known_metrics():
    seconds = {"op fp32": [1.0, 3.0], "op masters": [2.0, 2.0], "torch fused": [1.1, 3.3], "copy": [0.9, 2.7]}
    result = gpu.report({"AdamW": samples_of_speed(seconds, 28)}, "cuda", "some GPU", None)
    judged = {bar.name: (bar.value, bar.holds) for bar in result.bars if bar.holds is not None}
    assert judged == {
        "speed of the fp32 step / torch fused": (pytest.approx(1.1), True),
        "speed of the fp32 step / a copy": (pytest.approx(0.9), False),
        "speed of the step with masters / a copy": (pytest.approx(0.9), True),
    }
    result = gpu.report({"AdamW": samples_of_speed(seconds, 28)}, "cuda", "some GPU", "it was not built")
    assert {bar.holds for bar in result.bars} == {None} and "references ran: it was not built" in result.notes[0]
    for specs in BARS.values():
        for spec in specs:
            meets(1.0, spec.target)
            assert spec.metric in UNITS
    assert {op.split()[0] for op in gpu_ops.RULES} - {"adamw"} <= set(OPS)
    assert {(op, dtype) for op in (*gpu_ops.RULES, "sums") for dtype in gpu_ops.DTYPES} == {
        (op, dtype) for op in gpu.OPS for dtype in gpu.DTYPES
    }
