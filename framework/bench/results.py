"""What a benchmark measured: samples, the rows and bars made of them, and their JSON."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

UNITS = {
    "step_ms": "ms",
    "tokens_per_s": "tokens/s",
    "step_ratio": "x",
    "startup_s": "s",
    "cpu_ms": "ms",
    "page_faults": "",
    "peak_memory_bytes": "B",
    "steady_memory_bytes": "B",
    "state_bytes": "B",
    "table_state_bytes": "B",
    "sent_bytes": "B",
    "table_sent_bytes": "B",
    "loopback_bytes": "B",
    "collectives": "",
    "engine_collectives": "",
    "python_calls": "",
    "loss_difference": "",
    "call_us": "us",
    "buffer_bytes_per_s": "B/s",
    "speed_to_gloo": "x",
    "speed_to_memcpy": "x",
    "error_ratio": "x",
    "bytes_apart": "B",
    "loss_apart": "",
    "weights_apart": "x",
    "peak_allocated_bytes": "B",
    "steady_allocated_bytes": "B",
    "speed_to_traffic": "x",
    "extra_ms": "ms",
    "first_call_ms": "ms",
    "install_s": "s",
    "save_ms": "ms",
    "load_ms": "ms",
    "verify_ms": "ms",
    "time_to_raw": "x",
    "time_to_same": "x",
    "written_bytes": "B",
    "checksum_cpu_share": "",
    "over_cap": "",
    "cap_bytes": "B",
    "sampled_peak_bytes": "B",
    "held_bytes": "B",
    "state_share": "x",
    "cap_share": "x",
    "growth_share": "x",
    "first_loss": "",
    "last_loss": "",
    "loss_share": "x",
    "block_bytes": "B",
    "block_share": "x",
    "compute_ms": "ms",
    "disk_wait_ms": "ms",
    "rank_wait_ms": "ms",
    "gathers_disk_bytes": "B",
    "parameters_disk_bytes": "B",
    "gradients_disk_bytes": "B",
    "optimizer_disk_bytes": "B",
    "stream_share": "x",
    "bubble": "",
    "theory_bubble": "",
    "theory_ms": "ms",
    "bubble_above": "points",
    "pipeline_ms": "ms",
    "activation_bytes": "B",
    "activation_apart": "",
}
"""Every metric and its unit. Of several ranks the largest value counts; `cpu_ms` and `loopback_bytes` are of all."""

CONFIDENCE = 0.95
FALLS_SHORT, ABSENT = 3, 4
"""Exit codes of `--strict`."""


@dataclass(frozen=True)
class Row:
    """One figure. `who` is a contender, or "NAME rank R" for that rank's own."""

    case: str
    who: str
    metric: str
    value: float
    unit: str


@dataclass(frozen=True)
class Bar:
    """A figure that is asked for. `value`, `holds` and `interval` are None where it was not measured.

    `value` is the median over `pairs` measurements, `interval` that of the median, `reason` why there is none.
    """

    name: str
    value: float | None
    target: str
    holds: bool | None
    pairs: int
    interval: tuple[float, float] | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class BarSpec:
    """A bar before it is measured: a contender's metric, by itself or held against another's.

    With `over` it is divided by another metric of the same contender.
    """

    name: str
    target: str
    metric: str
    who: str
    against: str | None = None
    how: Literal["ratio", "difference"] = "ratio"
    over: str | None = None
    sizes: tuple[str, ...] = ("tiny", "small", "medium")


def meets(value: float, target: str) -> bool:
    """Whether a value meets a target such as "<= 0.80" or ">= 2".

    Raises: ValueError: the target is of another form.
    """
    sign, _, limit = target.partition(" ")
    if sign == "<=":
        return value <= float(limit)
    if sign == ">=":
        return value >= float(limit)
    raise ValueError(f"target {target!r}: write '<= NUMBER' or '>= NUMBER'.")


def interval_of_median(values: Iterable[float]) -> tuple[float, float] | None:
    """Returns an interval that holds the median with a probability of at least 0.95; None for a single value.

    The ranks of ordered values that a binomial of probability 1/2 gives; it supposes no distribution. Fewer than six
    values cannot be that sure: then their range.
    Source: Conover 1999, Practical Nonparametric Statistics, section 3.2.
    Example: of 15 values the 4th and the 12th.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n < 2:
        return None
    below, tail = 0, 0.5**n
    while below + 1 <= (n - 1) // 2 and tail <= (1 - CONFIDENCE) / 2:
        below += 1
        tail += math.comb(n, below) * 0.5**n
    first = max(0, below - 1)
    return ordered[first], ordered[n - 1 - first]


@dataclass
class Samples:
    """Everything measured of the contenders of one case, by contender and metric; each value under the key of its turn.

    Values of two contenders under one key were measured beside each other.
    """

    values: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, who: str, metric: str, key: str, value: float) -> None:
        """Notes one value."""
        self.values.setdefault((who, metric), {})[key] = value

    def add_ranks(self, who: str, key: str, figures: list[Mapping[str, float]]) -> None:
        """Notes the figures of each rank: together the largest, but the sum of CPU times."""
        for metric in figures[0]:
            values = [f[metric] for f in figures]
            self.add(who, metric, key, sum(values) if metric == "cpu_ms" else max(values))
            if len(values) > 1:
                for rank, value in enumerate(values):
                    self.add(f"{who} rank {rank}", metric, key, value)

    def add_losses(self, who: str, first: int, losses: list[list[float]]) -> None:
        """Notes each step's loss of each rank, from step `first` on; all ranks have as many rows."""
        means = [statistics.fmean(step) for step in zip(*losses, strict=True)]
        self.losses.setdefault(who, {}).update(enumerate(means, first))

    def median(self, who: str, metric: str) -> float | None:
        """Returns the median of a metric, or None."""
        found = self.values.get((who, metric))
        return statistics.median(found.values()) if found else None

    def pairs(self, spec: BarSpec) -> list[float]:
        """Returns the values of a bar, one for each pair of measurements made beside each other."""
        mine = self.values.get((spec.who, spec.metric), {})
        if spec.over is not None:
            divisor = self.median(spec.who, spec.over)
            return [value / divisor for value in mine.values()] if divisor else []
        if spec.against is None:
            return list(mine.values())
        other = self.values.get((spec.against, spec.metric), {})
        both = [(mine[key], other[key]) for key in mine if key in other]
        if spec.how == "difference":
            return [a - b for a, b in both]
        return [a / b for a, b in both if b]

    def judge(self, spec: BarSpec, reason: str = "") -> Bar:
        """Returns the bar as measured; `reason` says why it may not have been."""
        values = self.pairs(spec)
        if not values:
            return Bar(spec.name, None, spec.target, None, 0, None, reason or "not measured")
        value = statistics.median(values)
        return Bar(spec.name, value, spec.target, meets(value, spec.target), len(values), interval_of_median(values))

    def loss_difference(self, who: str, reference: str) -> float | None:
        """Returns the largest difference of a step's loss from the reference's."""
        mine, other = self.losses.get(who, {}), self.losses.get(reference, {})
        return max((abs(mine[step] - other[step]) for step in mine if step in other), default=None)

    def rows(self, case: str) -> list[Row]:
        """Returns a row for each contender and metric, and for each rank of it."""
        medians = {(who, metric): statistics.median(found.values()) for (who, metric), found in self.values.items()}
        return [Row(case, who, metric, value, UNITS[metric]) for (who, metric), value in medians.items()]


@dataclass
class Result:
    """What a benchmark hands back."""

    machine: dict[str, Any]
    rows: list[Row]
    bars: list[Bar]
    missing: list[str] = field(default_factory=list)
    """Peers that are not installed."""
    notes: list[str] = field(default_factory=list)
    intervals: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    """Of each contender's `step_ratio`."""

    def value(self, who: str, metric: str) -> float | None:
        """Returns a figure, or None."""
        return next((row.value for row in self.rows if (row.who, row.metric) == (who, metric)), None)

    def write(self, path: Path) -> None:
        """Writes `machine`, `rows` and `bars` as JSON, a row a line."""
        bars = [{k: v for k, v in asdict(bar).items() if k != "reason"} for bar in self.bars]
        parts = [f'"machine": {json.dumps(self.machine)}']
        for name, entries in (("rows", [asdict(row) for row in self.rows]), ("bars", bars)):
            lines = ",\n  ".join(json.dumps(entry) for entry in entries)
            parts.append(f'"{name}": [\n  {lines}\n]' if entries else f'"{name}": []')
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def read(path: Path) -> Result:
    """Reads what `Result.write` wrote. Raises: ValueError: the file is not one; OSError: it cannot be read."""
    try:
        found = json.loads(path.read_text())
        rows = [Row(**row) for row in found["rows"]]
        bars = [Bar(**bar) for bar in found["bars"]]
        return Result(dict(found["machine"]), rows, bars)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a result of `shardlight bench ... --json FILE` ({error}).") from None


def exit_code(result: Result, named: Sequence[str]) -> int:
    """Returns the exit code of `--strict`: 4 when a peer that was named is not installed, 3 when a bar falls short."""
    if any(name in named for name in result.missing):
        return ABSENT
    return FALLS_SHORT if any(bar.holds is False for bar in result.bars) else 0
