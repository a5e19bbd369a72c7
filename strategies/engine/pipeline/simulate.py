"""Runs a pipeline schedule on paper: proves that it can be carried out; gives its time, its bubble and its memory."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardlight.strategies.engine.pipeline.costs import Costs
from shardlight.strategies.engine.pipeline.schedules import Action, Kind, Schedule
from shardlight.strategies.errors import ScheduleError

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""After these the gradient of the stage's input is there."""
WEIGHTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""After these the gradients of the stage's weights are there."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An action and when it is computed."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Channel:
    """The messages of one kind from one rank to another."""

    source: int
    target: int
    kind: Kind
    """FORWARD for activations, BACKWARD for gradients."""

    def __str__(self) -> str:
        what = "activations" if self.kind == Kind.FORWARD else "gradients"
        return f"{what} from rank {self.source} to rank {self.target}"


@dataclass(frozen=True)
class Simulation:
    """What comes of a schedule under given costs; lists go by rank.

    Attributes:
        makespan: from the first action to the end of the last, of all ranks.
        busy: time that a rank computes.
        bubbles: share of the makespan that a rank does not compute.
        bubble: the same of all ranks together.
        peak_micro_batches: most pairs of stage and micro-batch whose activations, or what is left of them for the
            weights' gradients, a rank holds at a time.
        peak_bytes: most bytes of these.
        peak_messages: most messages that lie ready at a rank that has not come to them yet.
        reordered: channels whose receiver does not take the messages in the order in which they are sent.
    """

    schedule: Schedule
    timeline: tuple[tuple[Timed, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    bubbles: tuple[float, ...]
    bubble: float
    peak_micro_batches: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    peak_messages: tuple[int, ...]
    reordered: tuple[Channel, ...]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Checks a schedule and runs it.

    Args:
        costs: per stage of the schedule; None: 1 for each of forward, input and weights' gradients.
    Raises: ScheduleError: an action is missing, twice, on a rank without its stage, or waits for ever.
    Example: simulate(build("1f1b", 2, 2)).bubble == 1 / 3: each rank waits for one forward and one backward of three.
    """
    costs = Costs.uniform(schedule.stages) if costs is None else costs
    check_costs(schedule, costs)
    check_actions(schedule)
    timeline = _run(schedule, costs)
    starts = [timed.start for row in timeline for timed in row]
    makespan = max(timed.end for row in timeline for timed in row) - min(starts)
    busy = tuple(sum(timed.end - timed.start for timed in row) for row in timeline)
    bubbles = tuple(0.0 if makespan == 0 else 1 - time / makespan for time in busy)
    held = [_held(row, costs) for row in timeline]
    sent, taken = _messages(schedule)
    return Simulation(
        schedule=schedule,
        timeline=timeline,
        makespan=makespan,
        busy=busy,
        bubbles=bubbles,
        bubble=sum(bubbles) / schedule.ranks,
        peak_micro_batches=tuple(count for count, _ in held),
        peak_bytes=tuple(size for _, size in held),
        peak_messages=_waiting(schedule, timeline, costs.communication),
        reordered=tuple(channel for channel in sent if sent[channel] != taken[channel]),
    )


def check_costs(schedule: Schedule, costs: Costs) -> None:
    """Raises ScheduleError where costs are not those of the schedule's stages."""
    for name in (
        "forward",
        "backward_input",
        "backward_weight",
        "backward",
        "activation_bytes",
        "held_bytes",
    ):
        values = getattr(costs, name)
        if values is not None and len(values) != schedule.stages:
            had = f"{name} has {len(values)} costs, but schedule {schedule.name} has {schedule.stages} stages"
            raise ScheduleError(f"{had}. Give one cost per stage.")


def check_actions(schedule: Schedule) -> None:
    """Raises ScheduleError unless every stage computes every micro-batch once, where it lies.

    A schedule without any backward is one of evaluation and needs none.
    """
    done: Counter[Action] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            owner = schedule.placement[action.stage] if 0 <= action.stage < schedule.stages else None
            if owner != rank:
                where = "which there is not" if owner is None else f"which lies on rank {owner}"
                raise ScheduleError(f"{schedule.name}: rank {rank} has the {action}, {where}.")
            if not 0 <= action.micro_batch < schedule.micro_batches:
                raise ScheduleError(f"{schedule.name}: rank {rank} has the {action}, which there is not.")
            done[action] += 1
    trains = any(action.kind != Kind.FORWARD for action in done)
    for stage in range(schedule.stages):
        for m in range(schedule.micro_batches):
            _once(schedule, done, stage, m, (Kind.FORWARD,))
            if trains:
                _once(schedule, done, stage, m, BACKWARDS)
                _once(schedule, done, stage, m, WEIGHTS)


def _once(schedule: Schedule, done: Counter[Action], stage: int, m: int, kinds: Sequence[Kind]) -> None:
    times = sum(done[Action(kind, stage, m)] for kind in kinds)
    if times != 1:
        what = " or ".join(kinds)
        raise ScheduleError(
            f"{schedule.name}: {what} of micro-batch {m} on stage {stage} is there {times} times, not once."
        )


def needs(schedule: Schedule, action: Action) -> Iterable[tuple[Action, ...]]:
    """Yields what must be done before `action`: of each group, one action."""
    stage, m = action.stage, action.micro_batch
    if action.kind == Kind.FORWARD:
        if stage > 0:
            yield (Action(Kind.FORWARD, stage - 1, m),)
    elif action.kind in BACKWARDS:
        yield (Action(Kind.FORWARD, stage, m),)
        if stage < schedule.stages - 1:
            yield tuple(Action(kind, stage + 1, m) for kind in BACKWARDS)
    else:
        yield (Action(Kind.BACKWARD_INPUT, stage, m),)


def _run(schedule: Schedule, costs: Costs) -> tuple[tuple[Timed, ...], ...]:
    """Every rank takes its actions in order and waits at each for what it needs; as long as one of them gets on."""
    ends: dict[Action, float] = {}
    rows: list[list[Timed]] = [[] for _ in range(schedule.ranks)]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            row = rows[rank]
            while len(row) < len(actions):
                action = actions[len(row)]
                ready = _ready(schedule, action, ends, costs.communication)
                if ready is None:
                    break
                start = max(ready, row[-1].end if row else 0.0)
                ends[action] = start + costs.of(action)
                row.append(Timed(action, start, ends[action]))
                moved = True
    stuck = {
        rank: actions[len(rows[rank])]
        for rank, actions in enumerate(schedule.actions)
        if len(rows[rank]) < len(actions)
    }
    if stuck:
        raise ScheduleError(_deadlock(schedule, stuck, ends))
    return tuple(map(tuple, rows))


def _ready(schedule: Schedule, action: Action, ends: dict[Action, float], communication: float) -> float | None:
    """Returns when all that `action` needs is at its rank; None: it is not done yet."""
    latest = 0.0
    for group in needs(schedule, action):
        done = next((other for other in group if other in ends), None)
        if done is None:
            return None
        away = schedule.placement[done.stage] != schedule.placement[action.stage]
        latest = max(latest, ends[done] + (communication if away else 0.0))
    return latest


def _deadlock(schedule: Schedule, stuck: dict[int, Action], ends: dict[Action, float]) -> str:
    """Says of each rank that cannot go on what it waits for, and where that stands."""
    waits = []
    for rank, action in stuck.items():
        group = next(group for group in needs(schedule, action) if not any(other in ends for other in group))
        owner = schedule.placement[group[0].stage]
        listed = next(other for other in group if other in schedule.actions[owner])
        where = "which it would do itself later" if owner == rank else f"which rank {owner} would do later"
        waits.append(f"rank {rank} waits before the {action} for the {listed}, {where}")
    return f"{schedule.name}: deadlock: {'; '.join(waits)}. Put what is waited for first."


def _held(row: Sequence[Timed], costs: Costs) -> tuple[int, float]:
    """Returns the most micro-batches and the most bytes of activations that a rank holds at a time."""
    count, size, most, largest = 0, 0.0, 0, 0.0
    for timed in row:
        action, whole = timed.action, costs.activation_bytes[timed.action.stage]
        left = whole if costs.held_bytes is None else costs.held_bytes[action.stage]
        if action.kind == Kind.FORWARD:
            count, size = count + 1, size + whole
        elif action.kind == Kind.BACKWARD:
            count, size = count - 1, size - whole
        elif action.kind == Kind.BACKWARD_INPUT:
            size += left - whole
        elif action.kind == Kind.BACKWARD_WEIGHT:
            count, size = count - 1, size - left
        most, largest = max(most, count), max(largest, size)
    return most, largest


def _source(schedule: Schedule, action: Action) -> int | None:
    """Returns the stage on another rank whose message `action` waits for; None: for no message."""
    if action.kind == Kind.FORWARD:
        stage = action.stage - 1
    elif action.kind in BACKWARDS:
        stage = action.stage + 1
    else:
        return None
    inside = 0 <= stage < schedule.stages
    return stage if inside and schedule.placement[stage] != schedule.placement[action.stage] else None


def _messages(schedule: Schedule) -> tuple[dict[Channel, list[tuple[int, int]]], dict[Channel, list[tuple[int, int]]]]:
    """Returns what goes through each channel, as (receiving stage, micro-batch): as it is sent, as it is taken."""
    sent: dict[Channel, list[tuple[int, int]]] = {}
    taken: dict[Channel, list[tuple[int, int]]] = {}
    trains = any(a.kind in BACKWARDS for actions in schedule.actions for a in actions)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            source = _source(schedule, action)
            kind = Kind.FORWARD if action.kind == Kind.FORWARD else Kind.BACKWARD
            if source is not None:
                channel = Channel(schedule.placement[source], rank, kind)
                taken.setdefault(channel, []).append((action.stage, action.micro_batch))
            if action.kind != Kind.FORWARD and (not trains or action.kind not in BACKWARDS):
                continue
            to = action.stage + (1 if kind == Kind.FORWARD else -1)
            if 0 <= to < schedule.stages and schedule.placement[to] != rank:
                sent.setdefault(Channel(rank, schedule.placement[to], kind), []).append((to, action.micro_batch))
    return sent, taken


def _waiting(schedule: Schedule, timeline: Sequence[Sequence[Timed]], communication: float) -> tuple[int, ...]:
    """Returns for each rank the most messages that have come before it took them."""
    ends = {timed.action: timed.end for row in timeline for timed in row}
    peaks = []
    for row in timeline:
        changes = []
        for timed in row:
            source = _source(schedule, timed.action)
            if source is None:
                continue
            kinds = (Kind.FORWARD,) if timed.action.kind == Kind.FORWARD else BACKWARDS
            sender = next(a for kind in kinds if (a := Action(kind, source, timed.action.micro_batch)) in ends)
            changes += [(ends[sender] + communication, 1), (timed.start, -1)]
        now = most = 0
        # What is taken the moment it comes does not lie there: -1 before +1 would count less than nothing only then.
        for _, change in sorted(changes):
            now += change
            most = max(most, now)
        peaks.append(most)
    return tuple(peaks)
