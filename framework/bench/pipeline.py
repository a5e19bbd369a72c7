"""The benchmark `pipeline`: what schedules leave idle, and one GPT in two stages beside torch's and DeepSpeed's.

Part bubble: stages that sleep instead of computing, with every schedule, at 2 and 4 ranks, held to the simulator. Part
training: the benchmark's GPT in micro-batches of a row, on gloo, a thread per rank, all contenders taking turns; a
simulator that is given the costs of plain stages, measured in turn as well, says how long it has to take.
"""

import importlib.util
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardlight.framework.bench import meters
from shardlight.framework.bench.crew import BenchRequestError, Crew
from shardlight.framework.bench.results import Bar, BarSpec, Result, Row, Samples, interval_of_median
from shardlight.framework.bench.rotation import Contender, Rotation, Say
from shardlight.framework.bench.sizes import SIZES, Size
from shardlight.framework.faults import suggest
from shardlight.framework.launch import Sweeper
from shardlight.strategies.engine.pipeline.costs import Costs
from shardlight.strategies.engine.pipeline.schedules import SCHEDULES, build
from shardlight.strategies.engine.pipeline.simulate import simulate

_HOME = "shardlight.framework.bench.contenders"
MODULE, BUBBLE_MODULE = f"{_HOME}.pipeline", f"{_HOME}.bubble"
REFERENCE, OURS = "single", "shardlight-1f1b"
COUNTS = (2, 4)
"""Ranks of the part bubble."""
STAGES, MICRO_BATCHES = 2, 8
TRAINED = ("1f1b", "zb_h1")
"""Schedules of ours in the part training."""
ALONE = [Contender(name=REFERENCE, module=MODULE, processes=1)] + [
    Contender(name=f"{who}-{name}", module=MODULE, processes=STAGES, ours=who == "shardlight")
    for name in TRAINED
    for who in ("shardlight", "simulated")
]
PEERS = {
    "torch": [Contender(name=f"torch-{name}", module=MODULE, processes=STAGES) for name in ("1f1b", "gpipe")],
    "deepspeed": [
        Contender(name="deepspeed-1f1b", module=f"{_HOME}.deepspeed_pipeline", processes=STAGES, package="deepspeed")
    ],
}
QUICK_ROUNDS = 2
OF_THE_SIMULATOR = ("pipeline_ms", "activation_bytes")
"""What is said of its turns; that it takes time to measure costs is nobody's business."""


@dataclass(frozen=True, kw_only=True)
class Sleeps:
    """How long a micro-batch sleeps on a rank, about as long as one of the size small computes, and how often."""

    forward_s: float = 0.1
    input_s: float = 0.1
    weight_s: float = 0.1
    rounds: int = 5


QUICK_SLEEPS = Sleeps(forward_s=0.04, input_s=0.04, weight_s=0.04, rounds=1)


def bubble_bars(ranks: int) -> list[BarSpec]:
    """Returns the bars of the part bubble."""
    return [
        BarSpec(
            name=f"bubble of {name} at {ranks} ranks - the simulator's, points",
            target="<= 2",
            metric="bubble_above",
            who=name,
        )
        for name in SCHEDULES
    ]


def _training_bars() -> list[BarSpec]:
    small = ("small",)
    made = [
        BarSpec(
            name=f"{what} at small",
            target=target,
            metric=metric,
            who=who,
            against=against,
            sizes=small,
        )
        for what, target, metric, who, against in (
            ("forwards and backwards of 1f1b / the simulator's", "<= 1.05", "pipeline_ms", OURS, "simulated-1f1b"),
            ("step of 1f1b / DeepSpeed's", "<= 1.00", "step_ms", OURS, "deepspeed-1f1b"),
            ("step of 1f1b / torch's", "<= 1.00", "step_ms", OURS, "torch-1f1b"),
            ("step of zb_h1 / of 1f1b", "<= 0.95", "step_ms", "shardlight-zb_h1", OURS),
        )
    ]
    made += [
        BarSpec(
            name=f"activations of stage {stage} under {name}: how far from the simulator's",
            target="<= 0.10",
            metric="activation_apart",
            who=f"shardlight-{name} rank {stage}",
        )
        for name in TRAINED
        for stage in range(STAGES)
    ]
    return made


TRAINING_BARS = _training_bars()
"""What is asked for, at two ranks with a core each."""


def choose(against: Sequence[str] | None, quick: bool) -> tuple[list[Contender], list[str]]:
    """Returns the contenders of the part training, and the names of peers that are not installed.

    Raises: BenchRequestError: there is no such peer.
    """
    unknown = [name for name in against or () if name not in PEERS]
    if unknown:
        raise BenchRequestError(f"--against {unknown[0]}: no such peer.{suggest(unknown[0], PEERS)}")
    wanted = (["torch"] if quick else list(PEERS)) if against is None else list(dict.fromkeys(against))
    missing = [n for n in wanted if any(c.package and importlib.util.find_spec(c.package) is None for c in PEERS[n])]
    peers = [c for name in wanted if name not in missing for c in PEERS[name][: 1 if quick else None]]
    return [*ALONE, *peers], missing


def run(
    size: Size,
    against: Sequence[str] | None = None,
    quick: bool = False,
    say: Say = lambda text: None,
    limit_s: float = 600.0,
) -> Result:
    """Runs the benchmark.

    Args:
        size: one of SIZES, or another whose batch divides into the micro-batches.
        against: names of PEERS; None: all that are installed, with `quick` torch.
        quick: a few rounds, and short sleeps.
        say: told what happens.
        limit_s: for a start, or a turn, of any contender.
    Raises: BenchRequestError: there is no such peer; BenchError: a contender failed.
    """
    contenders, missing = choose(against, quick)
    if quick:
        size = replace(size, rounds=QUICK_ROUNDS, steps_per_turn=1)
    folder = Path(tempfile.mkdtemp(prefix="shardlight-bench-"))
    sweeper = Sweeper(folder)
    try:
        bubbles = _bubbles(QUICK_SLEEPS if quick else Sleeps(), folder, sweeper, say, limit_s)
        rotation = Rotation(size, folder, sweeper, say, limit_s)
        crews: dict[str, list[Contender]] = {}
        for contender in contenders:
            crews.setdefault(contender.module, []).append(contender)
        rotation.run_hosted(crews)
    finally:
        sweeper.finish()
    return report(bubbles, rotation.samples, size, contenders, missing, quick, rotation.other_cores)


def _bubbles(sleeps: Sleeps, folder: Path, sweeper: Sweeper, say: Say, limit_s: float) -> dict[int, Samples]:
    """Measures the part bubble, by number of ranks."""
    found: dict[int, Samples] = {ranks: Samples() for ranks in COUNTS}
    seconds = (sleeps.forward_s, sleeps.input_s, sleeps.weight_s)
    say(f"starting {max(COUNTS)} ranks")
    job = {"module": BUBBLE_MODULE, "counts": COUNTS}
    with Crew("bubble", max(COUNTS), job, folder / "bubble", sweeper, limit_s) as crew:
        for ranks in COUNTS:
            for name in SCHEDULES:
                say(f"bubble of {name} at {ranks} ranks")
                asked = {"schedule": name, "ranks": ranks, "micro_batches": MICRO_BATCHES, "seconds": seconds}
                answers = crew.ask({"do": "bubble", "rounds": sleeps.rounds, **asked}, ranks)
                add_bubbles(found[ranks], name, sleeps, answers)
    return found


def add_bubbles(samples: Samples, name: str, sleeps: Sleeps, answers: Sequence[dict[str, list[float]]]) -> None:
    """Notes a schedule's bubble of each round. Args: answers: of each rank, see contenders/bubble.py."""
    ranks = len(answers)
    schedule = build(name, ranks, MICRO_BATCHES)
    share = ranks / schedule.stages
    costs = Costs.uniform(schedule.stages, sleeps.forward_s * share, sleeps.input_s * share, sleeps.weight_s * share)
    theory = simulate(schedule, costs)
    samples.add(name, "theory_ms", "", 1000 * theory.makespan)
    samples.add(name, "theory_bubble", "", theory.bubble)
    for number in range(len(answers[0]["step_s"])):
        step_s = max(answer["step_s"][number] for answer in answers)
        bubble = 1 - sum(answer["slept_s"][number] for answer in answers) / (ranks * step_s)
        for metric, value in (
            ("step_ms", 1000 * step_s),
            ("bubble", bubble),
            ("bubble_above", 100 * (bubble - theory.bubble)),
        ):
            samples.add(name, metric, f"round {number}", value)


def report(
    bubbles: dict[int, Samples],
    samples: Samples,
    size: Size,
    contenders: list[Contender],
    missing: list[str],
    quick: bool,
    other_cores: list[float],
) -> Result:
    """Makes rows and bars of what was measured."""
    intervals = {}
    for contender in contenders:
        name = contender.name
        if name.startswith("simulated-"):
            _leave_only(samples, name)
            continue
        difference = samples.loss_difference(name, REFERENCE)
        if difference is not None and name != REFERENCE:
            samples.add(name, "loss_difference", "", difference)
        ratios = samples.pairs(BarSpec(name="", target="", metric="step_ms", who=name, against=OURS))
        if ratios and name != OURS:
            samples.add(name, "step_ratio", "", statistics.median(ratios))
            intervals[name] = interval_of_median(ratios)
    _hold_activations(samples)
    rows: list[Row] = [row for ranks, found in bubbles.items() for row in found.rows(f"bubble {ranks} ranks")]
    rows += samples.rows(f"training {size.name}")
    # Beside short sleeps the runtime's own time, which does not depend on them, is no matter of the schedule.
    bars: list[Bar] = [
        Samples().judge(spec, "not with --quick") if quick else found.judge(spec)
        for ranks, found in bubbles.items()
        for spec in bubble_bars(ranks)
    ]
    for spec in TRAINING_BARS:
        if size.name in spec.sizes:
            absent = spec.against is not None and spec.against.partition("-")[0] in missing
            bars.append(samples.judge(spec, "not installed" if absent else "left out"))
    notes = [f"{name} is not installed: left out, and not measured." for name in missing]
    if other_cores:
        cores = statistics.median(other_cores)
        notes.append(f"Other programs had {cores:.2f} cores in the median round. Ratios are of turns side by side.")
    machine = meters.machine() | {"size": size.name, "quick": quick, "left_out": missing}
    return Result(machine, rows, bars, missing, notes, intervals)


def _leave_only(samples: Samples, name: str) -> None:
    for who, metric in list(samples.values):
        if who.partition(" rank ")[0] == name and metric not in OF_THE_SIMULATOR:
            del samples.values[who, metric]


def _hold_activations(samples: Samples) -> None:
    """Notes how far each stage's activations are from the simulator's, as a share of those."""
    for name in TRAINED:
        for stage in range(STAGES):
            who = f"shardlight-{name} rank {stage}"
            held = samples.median(who, "activation_bytes")
            wanted = samples.median(f"simulated-{name} rank {stage}", "activation_bytes")
            if held is not None and wanted:
                samples.add(who, "activation_apart", "", abs(held / wanted - 1))


__all__ = ["PEERS", "SIZES", "choose", "report", "run"]
