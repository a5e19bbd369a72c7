"""The benchmark `collectives`: what the engine exchanges with, beside gloo, and beside plain copies of memory.

The ranks of one host, one thread each. Of every operation and size all ways take turns in the same processes.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardlight.framework.bench import meters
from shardlight.framework.bench.crew import BenchRequestError, Crew
from shardlight.framework.bench.results import Bar, BarSpec, Result, Row, Samples
from shardlight.framework.bench.rotation import Say
from shardlight.framework.launch import Sweeper

MODULE = "shardlight.framework.bench.contenders.exchange"
OPERATIONS = ("all-gather", "reduce-scatter", "all-reduce")
OURS, BASE, LIMIT = "shardlight", "gloo", "memcpy"
WAYS = (OURS, "shardlight-on-gloo", BASE, LIMIT)
"""Shared memory; what the engine does over gloo; gloo's own collectives; every rank copying such a buffer at once."""


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A size of the whole buffer, and how often it is measured."""

    name: str
    nbytes: int
    rounds: int
    calls: int = 1
    """In a row; their mean counts."""


VOLUMES = (
    Volume(name="256 B", nbytes=256, rounds=31, calls=50),
    Volume(name="1 MiB", nbytes=1 << 20, rounds=61),
    Volume(name="16 MiB", nbytes=16 << 20, rounds=31),
    Volume(name="128 MiB", nbytes=128 << 20, rounds=15),
)
SMALL_BYTES = 1 << 16
"""Below, latency is what counts."""
QUICK = (
    Volume(name="256 B", nbytes=256, rounds=7, calls=10),
    Volume(name="1 MiB", nbytes=1 << 20, rounds=7),
    Volume(name="16 MiB", nbytes=16 << 20, rounds=5),
)


def _bars() -> dict[str, list[BarSpec]]:
    """By case."""
    found: dict[str, list[BarSpec]] = {}
    for operation in OPERATIONS:
        for volume in VOLUMES:
            case = f"{operation} {volume.name}"
            if volume.nbytes < SMALL_BYTES:
                asked = [(f"time of {case} / gloo's", "<= 0.1", OURS, BASE)]
            elif operation == "all-reduce":
                asked = [(f"speed of {case} / gloo's", ">= 3", BASE, OURS)]
            else:
                asked = [
                    (f"speed of {case} / gloo's", ">= 5", BASE, OURS),
                    (f"speed of {case} / memcpy's", ">= 0.35", LIMIT, OURS),
                ]
            found[case] = [
                BarSpec(name=name, target=target, metric="call_us", who=who, against=against)
                for name, target, who, against in asked
            ]
    return found


BARS = _bars()
"""What is asked for, at 2 ranks with a core each."""


def run(ranks: int = 2, quick: bool = False, say: Say = lambda text: None, limit_s: float = 600.0) -> Result:
    """Runs the benchmark.

    Args:
        ranks: processes, all on this host.
        quick: few rounds, and no large buffer.
        say: told what happens.
        limit_s: for the start, and for each operation and size.
    Raises: BenchRequestError: there are fewer than two ranks; BenchError: a rank failed, or a result was wrong.
    """
    if ranks < 2:
        raise BenchRequestError(f"--ranks {ranks}: collectives take at least 2.")
    folder = Path(tempfile.mkdtemp(prefix="shardlight-bench-"))
    sweeper = Sweeper(folder)
    measured: dict[str, Samples] = {}
    cpu_s, began_s, busy_before_s, own_before_s = 0.0, 0.0, None, 0.0
    try:
        say(f"starting {ranks} ranks")
        with Crew("collectives", ranks, {"module": MODULE}, folder / "crew", sweeper, limit_s) as crew:
            why_not = crew.ask({"do": "look"})[0]["why_not"]
            began_s, busy_before_s, own_before_s = time.monotonic(), meters.busy_s(), meters.cpu_s()
            for operation, volume in _cases(quick):
                case = f"{operation} {volume.name}"
                say(case)
                nbytes = whole_bytes(volume, ranks)
                request = {"do": "measure", "operation": operation, "bytes": nbytes}
                answers = crew.ask(request | {"calls": volume.calls, "rounds": volume.rounds})
                measured[case] = samples_of([answer["seconds"] for answer in answers], nbytes)
                cpu_s += sum(answer["cpu_s"] for answer in answers)
            busy_s, own_s, lasted_s = meters.busy_s(), meters.cpu_s(), time.monotonic() - began_s
    finally:
        sweeper.finish()
    notes = [] if why_not is None else [f"No shared memory: {why_not}. The engine exchanges over gloo."]
    if busy_s is not None and busy_before_s is not None:
        others = (busy_s - busy_before_s - (own_s - own_before_s) - cpu_s) / lasted_s
        notes.append(f"Other programs had {max(0.0, others):.2f} cores. Ratios are of calls side by side.")
    return report(measured, ranks, quick, why_not, notes)


def _cases(quick: bool) -> Iterator[tuple[str, Volume]]:
    for operation in OPERATIONS:
        for volume in QUICK if quick else VOLUMES:
            yield operation, volume


def whole_bytes(volume: Volume, ranks: int) -> int:
    """Returns the size of a buffer of fp32 that divides by the ranks; at most that of the volume where one fits in."""
    return max(1, volume.nbytes // (4 * ranks)) * 4 * ranks


def samples_of(seconds: list[dict[str, list[float]]], nbytes: int) -> Samples:
    """Returns the samples of one case: time, speed, and how that compares with gloo's and with a copy's.

    Args:
        seconds: of each rank: by way, those of each round.
        nbytes: of the whole buffer.
    """
    samples = Samples()
    for who in seconds[0]:
        for number, of_ranks in enumerate(zip(*(of_rank[who] for of_rank in seconds), strict=True)):
            samples.add_ranks(who, f"round {number}", [{"call_us": 1e6 * value} for value in of_ranks])
            samples.add(who, "buffer_bytes_per_s", f"round {number}", nbytes / max(of_ranks))
    for who in seconds[0]:
        # Copying a few bytes takes what a call takes, and says nothing of memory.
        bases = [("speed_to_gloo", BASE), ("speed_to_memcpy", LIMIT)][: 2 if nbytes >= SMALL_BYTES else 1]
        for metric, base in bases:
            pairs = samples.pairs(BarSpec(name="", target="", metric="call_us", who=base, against=who))
            samples.add(who, metric, "", statistics.median(pairs))
    return samples


def report(
    measured: dict[str, Samples], ranks: int, quick: bool, why_not: str | None, notes: list[str] | None = None
) -> Result:
    """Makes rows and bars of what was measured, by case."""
    reason = "not with --quick" if why_not is None else f"no shared memory: {why_not}"
    bars: list[Bar] = [measured.get(c, Samples()).judge(spec, reason) for c, specs in BARS.items() for spec in specs]
    rows: list[Row] = [row for case, samples in measured.items() for row in samples.rows(case)]
    machine = meters.machine() | {"ranks": ranks, "quick": quick}
    return Result(machine, rows, bars, notes=notes or [])
