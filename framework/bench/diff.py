"""Compares two results of a benchmark, and names what got worse.

Times of two runs are not comparable: a machine is 1.5 times slower one minute than another. Times divided by those of
a contender in the same run are, and counts are exact.
"""

from dataclasses import dataclass

from shardlight.framework.bench.results import Result

NOISE = {
    "step_ms": 1.5,
    "tokens_per_s": 1.5,
    "cpu_ms": 1.5,
    "startup_s": 1.5,
    "step_ratio": 1.1,
    "page_faults": 1.25,
    "peak_memory_bytes": 1.05,
    "steady_memory_bytes": 1.05,
    "loopback_bytes": 1.05,
    "python_calls": 1.05,
    "call_us": 1.5,
    "buffer_bytes_per_s": 1.5,
    "speed_to_gloo": 1.3,
    "speed_to_memcpy": 1.3,
    "error_ratio": 1.1,
    "weights_apart": 2.0,
    "peak_allocated_bytes": 1.05,
    "steady_allocated_bytes": 1.05,
    "speed_to_traffic": 1.1,
    "extra_ms": 1.5,
    "first_call_ms": 1.5,
    "install_s": 1.5,
    "save_ms": 2.0,
    "load_ms": 1.5,
    "verify_ms": 1.5,
    "time_to_raw": 1.2,
    "time_to_same": 1.2,
    "written_bytes": 1.01,
    "checksum_cpu_share": 1.5,
}
"""By which factor a metric has to change to mean something; 1 for what is counted and not in this table."""
FLOOR = {"page_faults": 500.0, "loopback_bytes": 1e6, "first_call_ms": 1.0}
"""Below which a metric says nothing: other programs' share."""
HIGHER_IS_BETTER = {"tokens_per_s", "buffer_bytes_per_s", "speed_to_gloo", "speed_to_memcpy", "speed_to_traffic"}
UNJUDGED = {"table_state_bytes", "table_sent_bytes", "loss_difference", "loss_apart"}
"""Neither better nor worse when they change; a loss has a bar of its own where it matters."""
SAME_MACHINE = ("processor", "cores", "python", "torch", "lightning")


@dataclass(frozen=True)
class Change:
    """A figure that differs by more than noise."""

    case: str
    who: str
    metric: str
    old: float
    new: float
    worse: bool

    @property
    def factor(self) -> float:
        """New over old."""
        return self.new / self.old if self.old else float("inf")


@dataclass(frozen=True)
class Comparison:
    """Two results side by side."""

    changes: list[Change]
    compared: int
    """Figures that both have."""
    only_old: list[str]
    only_new: list[str]
    """Contender and metric of figures that one of them lacks."""
    bars: list[str]
    """Bars that held and do not any more, or the other way round."""
    machines: list[str]
    """What differs between the machines."""


def compare(old: Result, new: Result) -> Comparison:
    """Returns what changed from `old` to `new`; the figures of single ranks are left out."""
    before, after = ({(r.case, r.who, r.metric): r.value for r in x.rows if " rank " not in r.who} for x in (old, new))
    changes = []
    for key, was in before.items():
        metric = key[2]
        if key not in after or metric in UNJUDGED:
            continue
        now, noise = after[key], NOISE.get(metric, 1.0)
        low, high = min(was, now), max(was, now)
        if high > max(low * noise, FLOOR.get(metric, 0.0)):
            changes.append(Change(*key, was, now, worse=(now > was) != (metric in HIGHER_IS_BETTER)))
    changes.sort(key=lambda change: (not change.worse, change.case, change.who, change.metric))
    held = {bar.name: bar.holds for bar in old.bars}
    bars = [
        f"{bar.name}: {'holds now' if bar.holds else 'held, and falls short now'}"
        for bar in new.bars
        if bar.holds is not None and held.get(bar.name) is not None and held[bar.name] != bar.holds
    ]
    differ = [key for key in SAME_MACHINE if old.machine.get(key) != new.machine.get(key)]
    return Comparison(
        changes,
        len(before.keys() & after.keys()),
        sorted(f"{who}: {metric} ({case})" for case, who, metric in before.keys() - after.keys()),
        sorted(f"{who}: {metric} ({case})" for case, who, metric in after.keys() - before.keys()),
        bars,
        [f"{key}: {old.machine.get(key)} before, {new.machine.get(key)} now" for key in differ],
    )
