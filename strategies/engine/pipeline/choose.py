"""Which schedule `schedule: auto` takes: the fastest, on paper, of those whose activations fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardlight.strategies.byte_words import in_words
from shardlight.strategies.engine.pipeline.balance import balance, check_balance, check_blocks
from shardlight.strategies.engine.pipeline.costs import ModelCosts
from shardlight.strategies.engine.pipeline.schedules import SCHEDULES, build
from shardlight.strategies.engine.pipeline.simulate import Simulation, simulate

MOST_CHUNKS = 4
"""More stages per rank are not tried: each makes all messages once more, and the bubble is a quarter by then."""

MARGIN = 0.01
"""Schedules this much slower than the fastest are as good: what decides among them is memory."""


@dataclass(frozen=True)
class Candidate:
    """A schedule that was considered.

    Attributes:
        balance: how many blocks each of its stages gets.
    """

    name: str
    chunks: int
    balance: tuple[int, ...]
    simulation: Simulation

    @property
    def peak_bytes(self) -> float:
        """The activations of the rank that holds most."""
        return max(self.simulation.peak_bytes)

    @property
    def memory(self) -> tuple[float, float]:
        """Orders schedules by their activations: those of the rank that holds most, then of all ranks."""
        return self.peak_bytes, sum(self.simulation.peak_bytes)

    def __str__(self) -> str:
        return self.name if self.chunks == 1 else f"{self.name} with {self.chunks} stages per rank"


@dataclass(frozen=True)
class Choice:
    """What was taken, why, and everything that was considered, the fastest first.

    Attributes:
        fits: whether its activations are within the limit; where those of none are, the smallest was taken.
        reason: one sentence.
    """

    taken: Candidate
    fits: bool
    reason: str
    candidates: tuple[Candidate, ...]


def choose(
    ranks: int,
    micro_batches: int,
    costs: ModelCosts,
    memory_limit: float | None = None,
    *,
    chunks: int | None = None,
    counts: Sequence[int] | None = None,
) -> Choice:
    """Returns the schedule to take for a model.

    Args:
        memory_limit: bytes of activations that a rank has room for; None: any number.
        chunks: only schedules with so many stages per rank; None: any number.
        counts: blocks of each stage, as a config's `balance` gives them; their number fixes that of stages.
    Raises: ScheduleError: the model has too few blocks for any, or `counts` does not fit it.
    """
    found = _candidates(ranks, micro_batches, costs, chunks, counts)
    if not found:
        # Says by how much, for the schedule that needs the fewest.
        placement = build("1f1b" if chunks in (None, 1) else "interleaved_1f1b", ranks, 1, chunks).placement
        check_blocks(len(costs.blocks), placement)
        check_balance(counts or (), len(costs.blocks), placement)
    found.sort(key=lambda candidate: (candidate.simulation.makespan, *candidate.memory))
    fitting = [c for c in found if memory_limit is None or c.peak_bytes <= memory_limit]
    if fitting:
        near = [c for c in fitting if c.simulation.makespan <= fitting[0].simulation.makespan * (1 + MARGIN)]
        taken = min(near, key=lambda c: (*c.memory, c.simulation.makespan))
    else:
        taken = min(found, key=lambda c: (*c.memory, c.simulation.makespan))
    return Choice(taken, bool(fitting), _reason(taken, found, memory_limit, bool(fitting)), tuple(found))


def _candidates(
    ranks: int, micro_batches: int, costs: ModelCosts, chunks: int | None, counts: Sequence[int] | None
) -> list[Candidate]:
    """Returns every schedule that the model has blocks for."""
    found = []
    if chunks is None and counts and len(counts) % ranks == 0:
        chunks = len(counts) // ranks
    several = range(2, MOST_CHUNKS + 1) if chunks is None else [chunks] * (chunks > 1)
    for name, recipe in SCHEDULES.items():
        for each in several if recipe.chunks is None else (recipe.chunks,):
            stages = ranks * each
            if chunks not in (None, each) or stages > len(costs.blocks) or (counts and len(counts) != stages):
                continue
            schedule = build(name, ranks, micro_batches, each)
            if counts:
                cut = check_balance(counts, len(costs.blocks), schedule.placement)
            else:
                times = [part.time for part in costs.blocks]
                cut = balance(times, schedule.placement, costs.before.time, costs.after.time)
            found.append(Candidate(name, each, cut, simulate(schedule, costs.of_stages(cut))))
    return found


def _reason(taken: Candidate, found: Sequence[Candidate], limit: float | None, fits: bool) -> str:
    """Says what was gained, and what was passed over and why."""
    if not fits:
        most = max(range(len(taken.simulation.peak_bytes)), key=taken.simulation.peak_bytes.__getitem__)
        return (
            f"{taken}: no schedule fits, and this one holds least: {in_words(taken.peak_bytes)} of activations on rank "
            f"{most}, where there is room for {in_words(limit or 0)}."
        )
    bubble, held = f"{taken.simulation.bubble:.1%} of the time is bubble", in_words(taken.peak_bytes)
    parts = [f"{taken}: {bubble}, {held} of activations at most"]
    plain = next((c for c in found if c.name == "1f1b"), None)
    if plain not in (None, taken):
        longer = plain.simulation.makespan / taken.simulation.makespan
        if longer > 1 + MARGIN:
            parts.append(f"1f1b would take {longer:.2f} x as long")
        elif longer > 1 / (1 + MARGIN):
            parts.append(f"1f1b is as fast and holds {in_words(plain.peak_bytes)} of activations")
    faster = [c for c in found if c.simulation.makespan < taken.simulation.makespan / (1 + MARGIN)]
    if faster:
        more = f"holds {in_words(faster[0].peak_bytes)} of activations, and there is room for {in_words(limit or 0)}"
        parts.append(f"{faster[0]} would be faster, but {more}")
    return "; ".join(parts) + "."
