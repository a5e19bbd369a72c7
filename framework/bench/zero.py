"""The benchmark `zero`: one GPT under every strategy of the ZeRO table and under the peers' versions of it.

Two ranks, one thread each, the peers on gloo and ours on what it takes by itself (`collectives: auto`); the same bare
training loop around each, taking turns. Then the strategies under Lightning's Trainer beside the same ones in the bare
loop.
"""

import importlib.util
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardlight.framework.bench import meters
from shardlight.framework.bench.crew import BenchRequestError
from shardlight.framework.bench.results import Bar, BarSpec, Result, Row, Samples, interval_of_median
from shardlight.framework.bench.rotation import Contender, Rotation, Say, groups
from shardlight.framework.bench.sizes import SIZES, Size
from shardlight.framework.faults import suggest
from shardlight.framework.launch import Sweeper
from shardlight.ops.memory import available_bytes

_HOME = "shardlight.framework.bench.contenders"
REFERENCE = "single"
BASE = "ddp"
"""Whose step time the others' are divided by."""
OURS = [
    Contender(name=f"shardlight-{row}", module=f"{_HOME}.ours", state_bytes=18, ours=True)
    for row in ("ddp", "zero1", "zero2", "zero3")
]
PEERS = {
    "ddp": [Contender(name="ddp", module=f"{_HOME}.torch_ddp", state_bytes=16)],
    "fsdp2": [Contender(name="fsdp2", module=f"{_HOME}.fsdp2", state_bytes=22)],
    "deepspeed": [
        Contender(name=f"deepspeed-zero{stage}", module=f"{_HOME}.deepspeed_zero", state_bytes=30, package="deepspeed")
        for stage in (1, 2, 3)
    ],
}
TRAINED = [
    Contender(name=f"trainer-{name}", module=f"{_HOME}.trainer", state_bytes=18, ours=name != "ddp")
    for name in ("ddp", "shardlight-zero1", "shardlight-zero2", "shardlight-zero3")
]
MEDIUM = (REFERENCE, "ddp", "fsdp2", "deepspeed-zero3", "shardlight-zero2", "shardlight-zero3")
"""Who is measured at medium, where a step takes seconds, and memory lets only some stand side by side."""
STARTS = 3
"""Of each contender that has a bar on its start-up."""
QUICK_ROUNDS = 3
MEMORY_SHARE = 0.85
"""Of the memory that can be had: how much the contenders of a group may take together."""


def _bars() -> list[BarSpec]:
    small, medium = ("small",), ("medium",)
    made = [
        BarSpec(
            name=f"step of {z} / {peer}'s at {sizes[0]}",
            target=f"<= {target}",
            metric="step_ms",
            who=f"shardlight-{z}",
            against=against,
            sizes=sizes,
        )
        for z, peer, against, target, sizes in (
            ("zero1", "DDP", "ddp", "1.10", small),
            ("zero2", "DDP", "ddp", "0.85", small),
            ("zero3", "FSDP2", "fsdp2", "0.80", small),
            ("zero3", "DeepSpeed ZeRO-3", "deepspeed-zero3", "0.80", small),
            ("zero3", "DDP", "ddp", "1.20", medium),
            ("zero3", "FSDP2", "fsdp2", "0.55", medium),
            ("zero3", "DeepSpeed ZeRO-3", "deepspeed-zero3", "0.55", medium),
        )
    ]
    made += [
        BarSpec(
            name=f"bytes sent by {c.name.removeprefix('shardlight-')} / the table's",
            target="<= 1.01",
            metric="sent_bytes",
            who=c.name,
            over="table_sent_bytes",
            sizes=tuple(size for size in SIZES if size != "medium" or c.name in MEDIUM),
        )
        for c in OURS
    ]
    made += [
        BarSpec(
            name=f"peak memory of zero3 / {peer}'s",
            target=target,
            metric="peak_memory_bytes",
            who="shardlight-zero3",
            against=against,
            sizes=("medium",),
        )
        for peer, against, target in (("FSDP2", "fsdp2", "<= 0.65"), ("DDP", "ddp", "<= 0.60"))
    ]
    for z in ("zero1", "zero2", "zero3"):
        made += [
            BarSpec(
                name=f"start-up of {z} - DDP's, s",
                target="<= 1.0",
                metric="startup_s",
                who=f"shardlight-{z}",
                against="ddp",
                how="difference",
                sizes=("tiny", "small"),
            ),
            BarSpec(
                name=f"Python calls per step of {z}",
                target="<= 12000",
                metric="python_calls",
                who=f"shardlight-{z}",
                sizes=("tiny",),
            ),
            BarSpec(
                name=f"step of {z} under the Trainer / in the bare loop",
                target="<= 1.05",
                metric="step_ms",
                who=f"trainer-shardlight-{z}",
                against=f"shardlight-{z}",
                sizes=small,
            ),
        ]
    return made


BARS = _bars()
"""What is asked for, at 2 ranks of one host; the peers are on gloo."""


def choose(against: Sequence[str] | None, quick: bool) -> tuple[list[Contender], list[str]]:
    """Returns the contenders in the bare loop, and the names of peers that are not installed.

    Raises: BenchRequestError: there is no such peer.
    """
    unknown = [name for name in against or () if name not in PEERS]
    if unknown:
        raise BenchRequestError(f"--against {unknown[0]}: no such peer.{suggest(unknown[0], PEERS)}")
    wanted = ([BASE] if quick else list(PEERS)) if against is None else list(dict.fromkeys(against))
    missing = [name for name in wanted if not all(_installed(c) for c in PEERS[name])]
    peers = [c for name in wanted if name not in missing for c in PEERS[name]]
    reference = Contender(name=REFERENCE, module=f"{_HOME}.torch_ddp", processes=1)
    return [reference, *peers, *OURS], missing


def _installed(contender: Contender) -> bool:
    return contender.package is None or importlib.util.find_spec(contender.package) is not None


def run(
    size: Size,
    against: Sequence[str] | None = None,
    quick: bool = False,
    say: Say = lambda text: None,
    limit_s: float = 600.0,
    traces: Path | None = None,
) -> Result:
    """Runs the benchmark.

    Args:
        size: one of SIZES, or another.
        against: names of PEERS; None: all that are installed, with `quick` DDP.
        quick: a few rounds, and contenders share processes: no start-up, no memory of processes, no Trainer.
        say: told what happens.
        limit_s: for a start, or a turn, of any contender.
        traces: an existing folder, for Chrome traces of a few steps of ours: "CONTENDER-rankN.json".
    Raises: BenchRequestError: there is no such peer, or memory does not suffice; BenchError: a contender failed.
    """
    bare, missing = choose(against, quick)
    if size.name == "medium":
        bare = [c for c in bare if c.name in MEDIUM]
    if quick:
        size = replace(size, rounds=QUICK_ROUNDS, steps_per_turn=1)
    trained = (
        [] if quick or size.name == "medium" else [c for c in TRAINED if _bare_of(c.name) in {b.name for b in bare}]
    )
    folder = Path(tempfile.mkdtemp(prefix="shardlight-bench-"))
    sweeper = Sweeper(folder)
    try:
        rotation = Rotation(size, folder, sweeper, say, limit_s, traces)
        if quick:
            rotation.run_hosted(_shared(bare))
        else:
            _run_alone(rotation, bare, trained)
    finally:
        sweeper.finish()
    return report(rotation.samples, size, [*bare, *trained], missing, quick, rotation.other_cores)


def _shared(contenders: list[Contender]) -> dict[str, list[Contender]]:
    """By module: the contenders that share processes."""
    found: dict[str, list[Contender]] = {}
    for contender in contenders:
        # Optional packages stay apart: the others' processes do not import them.
        module = contender.module if contender.package else f"{_HOME}.together"
        found.setdefault(module, []).append(contender)
    return found


def _bare_of(name: str) -> str:
    return name.removeprefix("trainer-")


def _run_alone(rotation: Rotation, bare: list[Contender], trained: list[Contender]) -> None:
    size, names = rotation.size, {c.name for c in [*bare, *trained]}
    specs = [s for s in BARS if size.name in s.sizes and s.against is not None and {s.who, s.against} <= names]
    starting = {name for s in specs if s.metric == "startup_s" for name in (s.who, s.against)}
    rotation.start_again([c for c in bare if c.name in starting], STARTS - 1)
    base = BASE if BASE in names else REFERENCE
    together = [(c.name, base) for c in bare] + [(s.who, s.against or s.who) for s in specs if s.metric != "startup_s"]
    together += [(c.name, _bare_of(c.name)) for c in trained]
    memory = available_bytes()
    limit = float("inf") if memory is None else MEMORY_SHARE * memory
    for group in groups([*bare, *trained], together, size, limit):
        rotation.run_group(group)


def report(
    samples: Samples, size: Size, contenders: list[Contender], missing: list[str], quick: bool, other_cores: list[float]
) -> Result:
    """Makes rows and bars of what was measured."""
    intervals, case = {}, f"zero {size.name}"
    for contender in contenders:
        name = contender.name
        difference = samples.loss_difference(name, REFERENCE)
        if difference is not None and name != REFERENCE:
            samples.add(name, "loss_difference", "", difference)
        base = _bare_of(name) if name.startswith("trainer-") else BASE
        ratios = samples.pairs(BarSpec(name="", target="", metric="step_ms", who=name, against=base))
        if ratios and name != base:
            samples.add(name, "step_ratio", "", statistics.median(ratios))
            intervals[name] = interval_of_median(ratios)
    bars = [_judge(samples, spec, missing, quick) for spec in BARS if size.name in spec.sizes]
    notes = [f"{name} is not installed: left out, and not measured." for name in missing]
    if other_cores:
        cores = statistics.median(other_cores)
        notes.append(f"Other programs had {cores:.2f} cores in the median round. Ratios are of turns side by side.")
    if quick:
        notes.append("--quick: contenders share processes; start-up, memory of processes and the Trainer are left out.")
    machine = meters.machine() | {"size": size.name, "quick": quick, "left_out": missing}
    rows: list[Row] = samples.rows(case)
    return Result(machine, rows, bars, missing, notes, intervals)


def _judge(samples: Samples, spec: BarSpec, missing: list[str], quick: bool) -> Bar:
    absent = [name for name in missing if spec.against is not None and spec.against in {c.name for c in PEERS[name]}]
    if absent:
        return samples.judge(spec, f"{absent[0]} is not installed")
    return samples.judge(spec, "not with --quick" if quick else "left out by --against")


__all__ = ["BARS", "PEERS", "SIZES", "choose", "report", "run"]
