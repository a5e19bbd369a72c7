"""Which blocks each stage of a pipeline gets: the contiguous cut whose busiest rank has least to do.

With one stage per rank the cut is the optimum, by dynamic programming over (stage, blocks so far). With several, what
counts is the sum over a rank's stages, which lie apart in the model; then states are followed that differ in what each
rank has so far, all of them while they are few (`WIDTH`), which makes it the optimum for small models, and the most
promising of them beyond that.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from shardlight.strategies.errors import ScheduleError

WIDTH = 300
"""States that are followed from stage to stage where a rank has several: as many as there are for 11 blocks."""

_BITS = 40
"""All costs together are a number of so many bits, and so is each a whole one: equal sums are equal however they are
added up."""


def balance(
    costs: Sequence[float], placement: Sequence[int], before: float = 0.0, after: float = 0.0
) -> tuple[int, ...]:
    """Returns how many blocks each stage gets; the costliest rank costs as little as it can, every stage has a block.

    Of equal cuts the one with the least sum of squares of the ranks' costs is taken, of those the one with the least
    sum of squares of the stages' costs, and of those the one with more blocks on the earlier stages.

    Args:
        costs: of each block.
        placement: the rank of each stage, as a schedule has it.
        before: cost of what is on the first stage besides its blocks; `after`: on the last.
    Raises: ScheduleError: there are fewer blocks than stages.
    Cost: stages * blocks ** 2 steps with one stage per rank, stages * WIDTH * blocks at most with several.
    Example: balance([1] * 5, (0, 1)) == (3, 2); with after=2 it is (4, 1): 4 and 3 rather than 3 and 4.
    """
    stages = len(placement)
    check_blocks(len(costs), placement)
    exponent = _BITS - math.frexp(sum(costs) + before + after)[1]
    first, last, *blocks = (round(math.ldexp(cost, exponent)) for cost in (before, after, *costs))
    sums = list(accumulate(blocks, initial=0))
    # What is outside of the blocks belongs to the ends of the sums: no stage has one but the first and the last.
    sums = [0, *(first + value for value in sums[1:])]
    sums[-1] += last
    return _one_each(sums, stages) if len(set(placement)) == stages else _several_each(sums, placement)


def check_blocks(blocks: int, placement: Sequence[int]) -> None:
    """Raises ScheduleError where there are more stages than blocks."""
    stages = len(placement)
    if blocks >= stages:
        return
    ranks = len(set(placement))
    chunks = stages // ranks
    count = f"{blocks} block{'s' * (blocks != 1)}"
    if chunks == 1:
        raise ScheduleError(f"{count} cannot be {stages} stages: each needs one. Set stages to {blocks} or fewer.")
    mends = [f"Set stages to {blocks // chunks} or fewer."] if blocks >= chunks else []
    mends += ["Take schedule 1f1b, with one stage per rank."] if blocks >= ranks else []
    arithmetic = f"{ranks} stages x {chunks} chunks = {stages} parts of the model, but it has {count}"
    raise ScheduleError(f"{arithmetic}. {' Or: '.join(mends) or f'Set stages to {blocks}, with schedule 1f1b.'}")


def check_balance(counts: Sequence[int], blocks: int, placement: Sequence[int]) -> tuple[int, ...]:
    """Returns a cut that was given instead of computed.

    Raises: ScheduleError: it is not one of so many blocks into so many stages.
    """
    stages, ranks = len(placement), len(set(placement))
    written = f"balance is {list(counts)}"
    if len(counts) != stages:
        arithmetic = f"{stages}" if stages == ranks else f"{ranks} x {stages // ranks} chunks = {stages}"
        raise ScheduleError(f"{written}, {len(counts)} numbers, but there are {arithmetic} stages. Give one for each.")
    if min(counts) < 1:
        at = next(i for i, count in enumerate(counts) if count < 1)
        raise ScheduleError(f"{written}: stage {at} has {counts[at]} blocks. Give each at least 1.")
    if sum(counts) != blocks:
        off = blocks - sum(counts)
        mend = f"Add {off} to it" if off > 0 else f"Take {-off} from it"
        arithmetic = f"{' + '.join(map(str, counts))} = {sum(counts)} blocks"
        raise ScheduleError(f"{written}: {arithmetic}, but the model has {blocks}. {mend}, or leave balance out.")
    return tuple(counts)


def _one_each(sums: Sequence[int], stages: int) -> tuple[int, ...]:
    """The optimum where each stage is a rank of its own: the least maximum, then the best cut that keeps to it."""
    blocks = len(sums) - 1
    least = list(sums)
    for stage in range(1, stages):
        least = [
            min((max(least[i], sums[j] - sums[i]) for i in range(stage, j)), default=sums[-1])
            for j in range(blocks + 1)
        ]
    # Of the blocks from i on, in so many stages: (sum of squares, counts) of the best cut that keeps to the maximum.
    best: dict[int, tuple[int, tuple[int, ...]]] = {blocks: (0, ())}
    for _ in range(stages):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for i in range(blocks):
            # From the longest: of equal cuts the first to be met has more blocks on the earlier stage.
            for j in range(blocks, i, -1):
                cost = sums[j] - sums[i]
                if j not in best or cost > least[blocks]:
                    continue
                squares = best[j][0] + cost**2
                if i not in longer or squares < longer[i][0]:
                    longer[i] = (squares, (j - i, *best[j][1]))
        best = longer
    return best[0][1]


class _State(NamedTuple):
    """The first stages with their blocks: costs of each rank so far, squares of the stages' costs, blocks of each."""

    loads: tuple[int, ...]
    squares: int
    counts: tuple[int, ...]
    end: int

    def among_equal(self) -> tuple[object, ...]:
        """Returns what decides between states whose ranks have the same, the lower the better."""
        return self.squares, tuple(-count for count in self.counts)


def _several_each(sums: Sequence[int], placement: Sequence[int]) -> tuple[int, ...]:
    """The best cut of those that are followed, where ranks have several stages each."""
    blocks, stages = len(sums) - 1, len(placement)
    even = [(stage + 1) * blocks // stages - stage * blocks // stages for stage in range(stages)]
    limit = _busiest(even, sums, placement)
    states = [_State((0,) * (max(placement) + 1), 0, (), 0)]
    for stage, rank in enumerate(placement):
        rest = stages - stage - 1
        longer: dict[tuple[int, tuple[int, ...]], _State] = {}
        for state in states:
            for end in range(state.end + 1, blocks - rest + 1) if rest else (blocks,):
                cost = sums[end] - sums[state.end]
                load = state.loads[rank] + cost
                if load > limit:
                    break
                loads = (*state.loads[:rank], load, *state.loads[rank + 1 :])
                new = _State(loads, state.squares + cost**2, (*state.counts, end - state.end), end)
                known = longer.get((end, loads))
                if known is None or new.among_equal() < known.among_equal():
                    longer[end, loads] = new
        left = Counter(placement[stage + 1 :])
        states = sorted(longer.values(), key=lambda state: _outlook(state, sums, left))[:WIDTH]
    # None is left where the best that were followed all end worse than an even cut.
    return states[0].counts if states else tuple(even)


def _busiest(counts: Sequence[int], sums: Sequence[int], placement: Sequence[int]) -> int:
    """Returns the cost of the costliest rank."""
    loads: Counter[int] = Counter()
    for rank, (start, end) in zip(placement, pairwise(accumulate(counts, initial=0)), strict=True):
        loads[rank] += sums[end] - sums[start]
    return max(loads.values())


def _outlook(state: _State, sums: Sequence[int], left: Counter[int]) -> tuple[object, ...]:
    """Returns what decides between states, the lower the better, as if stages to come shared the rest evenly."""
    rest, shares = sums[-1] - sums[state.end], max(1, left.total())
    ends = [load * shares + rest * left[rank] for rank, load in enumerate(state.loads)]
    return max(ends), sum(end**2 for end in ends), *state.among_equal()
