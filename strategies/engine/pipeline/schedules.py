"""Pipeline schedules as data: for each rank, in which order it computes its stages on which micro-batches.

GPipe: Huang et al. 2019, section 2.3. 1F1B: Narayanan et al. 2019 (PipeDream), with a flush. Interleaved 1F1B:
Narayanan et al. 2021, section 2.2.2. ZB-H1 and the V schedule ZBV: Qi et al. 2023 (Zero Bubble Pipeline Parallelism),
sections 2.1 and 6. Plain Python: `simulate.py` checks and times what is written here, a runtime executes it.

[Note: implied messages] A schedule has no sends and receives: they follow from the borders of stages. The activations
of a FORWARD go to the next stage and the gradient of a BACKWARD or BACKWARD_INPUT to the stage before, as soon as they
are there; the action that needs them waits for them when it starts. Sends are asynchronous. Where neighbouring stages
lie on one rank, nothing is sent.
"""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from shardlight.strategies.errors import ScheduleError


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Both gradients together, that of the stage's input and those of its weights."""
    BACKWARD_INPUT = "backward_input"
    """The gradient of the stage's input alone, for which the stage before waits."""
    BACKWARD_WEIGHT = "backward_weight"
    """The weights' gradients, for which nobody waits: they fill what would be idle time."""


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank; `stage` is a virtual stage, counted along the model over all ranks."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} on stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one step of the optimizer, or in one batch of evaluation.

    Attributes:
        stages: how many virtual stages there are, over all ranks.
        placement: which rank has each stage, by its number.
        actions: of each rank, in the order in which it takes them.
    """

    name: str
    ranks: int
    stages: int
    micro_batches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that `rank` has, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def forward_only(self) -> "Schedule":
        """Returns the same without backward, as evaluation and prediction run it."""
        kept = (tuple(a for a in actions if a.kind == Kind.FORWARD) for actions in self.actions)
        return replace(self, actions=tuple(kept))


@dataclass(frozen=True)
class Recipe:
    """How a schedule is made.

    Attributes:
        order: (rank, ranks, micro_batches, chunks) -> its actions. It may go on beyond the micro-batches
            that there are: those actions are left out, which leaves the rest an order that can be carried out.
        place: (ranks, chunks) -> placement.
        chunks: how many stages a rank has; None: two or more, as asked.
        splits: whether it takes the backward apart.
    """

    order: Callable[[int, int, int, int], Iterator[Action]]
    place: Callable[[int, int], tuple[int, ...]]
    chunks: int | None = 1
    splits: bool = False


def build(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """Returns the schedule of that name.

    Args:
        name: a key of `SCHEDULES`.
        ranks: ranks of one pipeline, any number from 1.
        micro_batches: any number from 1.
        chunks: stages per rank; None: what the schedule takes (2 for interleaved_1f1b and zbv, 1 for the others).
    Raises: ScheduleError: there is no such schedule, or not with these numbers.
    Example: build("1f1b", 2, 2) has F0 F1 B0 B1 on rank 0 and F0 B0 F1 B1 on rank 1.
    """
    chunks = check_setting(name, ranks, micro_batches, chunks)
    recipe = SCHEDULES[name]
    placement = recipe.place(ranks, chunks)
    actions = (
        tuple(a for a in recipe.order(rank, ranks, micro_batches, chunks) if a.micro_batch < micro_batches)
        for rank in range(ranks)
    )
    return Schedule(name, ranks, len(placement), micro_batches, placement, tuple(actions))


def check_setting(name: str, ranks: int, micro_batches: int, chunks: int | None) -> int:
    """Returns the number of stages per rank.

    Raises: ScheduleError: there is no such schedule, or not with these numbers.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        mend = f"Did you mean '{near[0]}'?" if near else f"Choose from: {', '.join(SCHEDULES)}."
        raise ScheduleError(f"schedule '{name}' is not known. {mend}")
    for what, value in (("stages", ranks), ("micro_batches", micro_batches)):
        if value < 1:
            raise ScheduleError(f"schedule {name}: {what} is {value}. Set {what} to 1 or more.")
    fixed = SCHEDULES[name].chunks
    if fixed is None:
        if chunks is not None and chunks < 2:
            mend = "Set chunks to 2 or more, or take schedule 1f1b."
            raise ScheduleError(f"schedule {name}: chunks is {chunks}, but it needs several stages per rank. {mend}")
        return chunks or 2
    if chunks not in (None, fixed):
        mend = f"Leave chunks out, or take schedule {'1f1b' if chunks == 1 else 'interleaved_1f1b'}."
        raise ScheduleError(f"schedule {name}: chunks is {chunks}, but each rank has {fixed} of its stages. {mend}")
    return fixed


def _loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages go round the ranks: 0 1 2 0 1 2."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def _vee(ranks: int, _chunks: int) -> tuple[int, ...]:
    """Stages go down the ranks and back: 0 1 2 2 1 0. The rank with the first stage has the loss, too."""
    return (*range(ranks), *reversed(range(ranks)))


def _gpipe(rank: int, _ranks: int, micro_batches: int, _chunks: int) -> Iterator[Action]:
    """All forwards, then all backwards."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        yield from (Action(kind, rank, m) for m in range(micro_batches))


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int, _chunks: int) -> Iterator[Action]:
    """As many forwards as it takes until the first gradient can come, then a backward after each."""
    ahead = ranks - rank - 1
    for k in range(micro_batches + ahead):
        if k < micro_batches:
            yield Action(Kind.FORWARD, rank, k)
        if k >= ahead:
            yield Action(Kind.BACKWARD, rank, k - ahead)


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """1F1B over several stages per rank: a group of micro-batches goes through all of them before the next group does.

    The paper's groups are of `ranks` micro-batches, of which there must be a multiple. Here there are as many groups,
    rounded down, of nearly equal size, the larger ones first: with them the bubble is that of the paper's formula for
    every number of micro-batches from `ranks` on. A short group would leave ranks waiting; a larger one behind smaller
    ones can block.
    """
    groups = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, groups)
    ends = [group * size + min(group, larger) for group in range(groups + 1)]
    turns = [
        (chunk, m) for group in range(groups) for chunk in range(chunks) for m in range(ends[group], ends[group + 1])
    ]
    ahead = min(len(turns), 2 * (ranks - rank - 1) + (chunks - 1) * ends[1])
    for k in range(len(turns) + ahead):
        if k < len(turns):
            chunk, m = turns[k]
            yield Action(Kind.FORWARD, chunk * ranks + rank, m)
        if k >= ahead:
            chunk, m = turns[k - ahead]
            yield Action(Kind.BACKWARD, (chunks - 1 - chunk) * ranks + rank, m)


def _zero_bubble_h1(rank: int, ranks: int, micro_batches: int, _chunks: int) -> Iterator[Action]:
    """1F1B whose weights' gradients come `rank` backwards late, so that later ranks have them to do at the end.

    A rank so holds what `ranks - rank` forwards and `rank` input gradients left: as much as rank 0 does under 1F1B.
    """
    ahead = ranks - rank - 1
    for k in range(micro_batches + ahead):
        if k < micro_batches:
            yield Action(Kind.FORWARD, rank, k)
        if k >= ahead:
            yield Action(Kind.BACKWARD_INPUT, rank, k - ahead)
        if k >= ahead + rank:
            yield Action(Kind.BACKWARD_WEIGHT, rank, k - ahead - rank)
    for m in range(max(0, micro_batches - rank), micro_batches):
        yield Action(Kind.BACKWARD_WEIGHT, rank, m)


def _zero_bubble_v(rank: int, ranks: int, micro_batches: int, _chunks: int) -> Iterator[Action]:
    """The V schedule: a rank's second stage gives its first gradients just when they can be computed without waiting.

    With equal costs of forward, input and weights' gradients no rank waits between its first and its last action. The
    phases hold from 2 * ranks - 1 micro-batches on.
    """
    total = max(micro_batches, 2 * ranks - 1)
    done: dict[tuple[Kind, int], int] = {}
    first, second = rank, 2 * ranks - 1 - rank

    def step(kind: Kind, stage: int) -> Action:
        done[kind, stage] = done.get((kind, stage), 0) + 1
        return Action(kind, stage, done[kind, stage] - 1)

    def steps(stage: int, *kinds: Kind) -> Iterator[Action]:
        return (step(kind, stage) for kind in kinds)

    F, B, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    yield from steps(first, *[F] * (2 * (ranks - rank) - 1))
    for _ in range(rank):
        yield from (step(F, second), step(F, first))
    for _ in range(ranks - rank):
        yield from steps(second, F, B, W)
    while done[F, second] < total:
        if done[F, first] < total:
            yield step(F, first)
        yield from steps(first, B, W)
        yield from steps(second, F, B, W)
    for _ in range(rank):
        yield from (step(B, first), step(B, second))
    for _ in range(ranks - rank):
        yield from steps(first, B, W)
    for stage in (second, first):
        yield from steps(stage, *[W] * (total - done[W, stage]))


SCHEDULES: dict[str, Recipe] = {
    "gpipe": Recipe(_gpipe, _loop),
    "1f1b": Recipe(_one_forward_one_backward, _loop),
    "interleaved_1f1b": Recipe(_interleaved, _loop, chunks=None),
    "zb_h1": Recipe(_zero_bubble_h1, _loop, splits=True),
    "zbv": Recipe(_zero_bubble_v, _vee, chunks=2, splits=True),
}
"""By the name that a config gives, the simplest first."""
