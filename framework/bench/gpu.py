"""The benchmark `gpu`: every check that needs a GPU, in one run of some minutes on one of them.

The ops beside fp64, PyTorch and the CPU's bits; the engine beside plain PyTorch in each precision, with its memory; the
step of AdamW beside PyTorch's fused one and beside a copy of as many bytes. One process.
"""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardlight.framework.bench import meters
from shardlight.framework.bench.crew import BenchRequestError, Crew
from shardlight.framework.bench.results import Bar, BarSpec, Result, Row, Samples
from shardlight.framework.bench.rotation import Say
from shardlight.framework.bench.sizes import SIZES, Size
from shardlight.framework.launch import Sweeper

MODULE = "shardlight.framework.bench.contenders.gpu"
DEVICES = ("cuda", "cpu")
PLANS = ("zero1", "zero2", "zero3")
TORCH = "torch"
LIMITS = {"fp32": (1e-4, 1e-3), "bf16-mixed": (5e-3, 2e-2), "bf16-true": (4e-2, 2e-2)}
"""By precision: how far a loss, and the weights relative to their way, may be from plain PyTorch's. A GPU adds up in an
order that changes, and a loss in bf16 has steps of 0.03.
"""
OPS = ("adamw", "adam amsgrad", "sgd nesterov", "adagrad", "rmsprop centered", "lion", "sums")
DTYPES = ("fp32", "fp64", "bf16", "fp16")
CASE_OPS, CASE_SPEED = "ops", "AdamW"


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is done on a device."""

    size: Size
    steps: int
    numel: int
    """Parameters of the step that is timed."""
    rounds: int


EXTENTS = {
    "cuda": Extent(size=SIZES["small"], steps=5, numel=1 << 27, rounds=15),
    "cpu": Extent(
        size=Size(name="trial", vocabulary=256, width=64, blocks=2, heads=2, sequence=32, batch=4),
        steps=3,
        numel=1 << 16,
        rounds=3,
    ),
}


def _bars() -> dict[str, list[BarSpec]]:
    """By case."""
    ops = [f"{op} {dtype}" for op in OPS for dtype in DTYPES]
    found = {
        CASE_OPS: [
            BarSpec(name=f"bytes of {op} that differ from the CPU's", target="<= 0", metric="bytes_apart", who=op)
            for op in ops
        ]
        + [
            BarSpec(name=f"error of {op} / allowed", target="<= 1", metric="error_ratio", who=op)
            for op in ops
            if not op.startswith("sums")
        ]
    }
    for precision, (loss, weights) in LIMITS.items():
        found[precision] = []
        for plan in PLANS:
            asked = (
                ("loss", f"<= {loss:g}", {"metric": "loss_apart"}),
                ("weights", f"<= {weights:g}", {"metric": "weights_apart"}),
                ("state / the table's", "<= 1.03", {"metric": "state_bytes", "over": "table_state_bytes"}),
                ("peak memory / torch's", "<= 1.20", {"metric": "peak_allocated_bytes", "against": TORCH}),
            )
            found[precision] += [
                BarSpec(name=f"{precision} {plan}: {what}", target=target, who=plan, **rest)
                for what, target, rest in asked
            ]
    found[CASE_SPEED] = [
        BarSpec(name=f"speed of {name}", target=target, metric="call_us", who=who, against=against)
        for name, target, who, against in (
            ("the fp32 step / torch fused", ">= 0.97", "torch fused", "op fp32"),
            ("the fp32 step / a copy", ">= 0.92", "copy", "op fp32"),
            ("the step with masters / a copy", ">= 0.85", "copy", "op masters"),
        )
    ]
    return found


BARS = _bars()
"""What is asked for, on one GPU."""


def run(device: str = "cuda", say: Say = lambda text: None, limit_s: float = 300.0) -> Result:
    """Runs the benchmark.

    Args:
        device: cuda, or cpu: the same checks on a trial's sizes; its speed is not judged.
        say: told what happens.
        limit_s: for each check.
    Returns: figures and bars; without any, and `missing` names it, where there is no such device.
    Raises: BenchRequestError: another device; BenchError: a check could not be made.
    """
    if device not in DEVICES:
        raise BenchRequestError(f"--device {device}: use {' or '.join(DEVICES)}.")
    extent = EXTENTS[device]
    folder = Path(tempfile.mkdtemp(prefix="shardlight-bench-"))
    sweeper = Sweeper(folder)
    measured: dict[str, Samples] = {}
    try:
        with Crew("gpu", 1, {"module": MODULE, "device": device}, folder / "crew", sweeper, limit_s) as crew:
            look = crew.ask({"do": "look"})[0]
            if look["missing"] is not None:
                return _absent(device, look["missing"])
            say(f"ops on {look['name']}")
            measured[CASE_OPS] = _samples(crew.ask({"do": "ops"})[0]["figures"])
            for precision in LIMITS:
                say(f"{', '.join(PLANS)} in {precision}")
                request = {"do": "train", "size": vars(extent.size), "precision": precision, "plans": PLANS}
                measured[precision] = _samples(crew.ask(request | {"steps": extent.steps})[0]["figures"])
            say(f"AdamW over {extent.numel:,} parameters")
            request = {"do": "speed", "numel": extent.numel, "rounds": extent.rounds}
            measured[CASE_SPEED] = samples_of_speed(crew.ask(request)[0]["seconds"], 28 * extent.numel)
    finally:
        sweeper.finish()
    return report(measured, device, look["name"], look["reference"])


def _absent(device: str, reason: str) -> Result:
    note = f"{reason}: nothing was measured. `--device cpu` tries the checks themselves."
    return Result(meters.machine() | {"device": None}, [], [], [device], [note])


def _samples(figures: Mapping[str, Mapping[str, float]]) -> Samples:
    samples = Samples()
    for who, found in figures.items():
        for metric, value in found.items():
            samples.add(who, metric, "", value)
    return samples


def samples_of_speed(seconds: Mapping[str, list[float]], nbytes: int) -> Samples:
    """Returns the samples of steps and copies. Args: seconds: by way, of each round; nbytes: that a call moves."""
    samples = Samples()
    for who, values in seconds.items():
        for number, value in enumerate(values):
            samples.add(who, "call_us", f"round {number}", 1e6 * value)
        samples.add(who, "buffer_bytes_per_s", "", nbytes / statistics.median(values))
    return samples


def report(measured: Mapping[str, Samples], device: str, name: str, reference: str | None) -> Result:
    """Makes rows and bars of what was measured.

    Args:
        reference: why the PyTorch references ran; None: compiled code did.
    """
    bars: list[Bar] = []
    for case, specs in BARS.items():
        for spec in specs:
            bits_or_speed = spec.metric in ("bytes_apart", "call_us")
            if reference is not None and bits_or_speed:
                bars.append(Samples().judge(spec, f"no compiled ops: {reference}"))
            elif device == "cpu" and spec.metric in ("call_us", "peak_allocated_bytes"):
                bars.append(Samples().judge(spec, "on CPU"))
            else:
                bars.append(measured.get(case, Samples()).judge(spec))
    rows: list[Row] = [row for case, samples in measured.items() for row in samples.rows(case)]
    notes = [] if reference is None else [f"The PyTorch references ran: {reference}."]
    if device == "cpu":
        notes.append("--device cpu: the checks are tried on a small model; they say nothing of a GPU.")
    return Result(meters.machine() | {"device": name}, rows, bars, notes=notes)
