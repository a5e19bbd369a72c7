"""How a model's blocks are shared out among the stages of a pipeline, and which schedule is taken for it."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardlight.strategies.engine.pipeline.balance import balance, check_balance
from shardlight.strategies.engine.pipeline.choose import choose
from shardlight.strategies.engine.pipeline.costs import ModelCosts, PartCosts
from shardlight.strategies.engine.pipeline.schedules import build
from shardlight.strategies.errors import ScheduleError

PLACEMENTS = [
    *(tuple(range(ranks)) for ranks in (1, 2, 3, 4, 5)),
    (0, 1, 0, 1),
    (0, 1, 1, 0),
    (0, 1, 0, 1, 0, 1),
    (0, 1, 2, 0, 1, 2),
    (0, 1, 2, 2, 1, 0),
    (0, 0),
]


def loads(counts, costs, placement, before, after):
    sums, at = [0] * (max(placement) + 1), 0
    for count, rank in zip(counts, placement, strict=True):
        sums[rank] += sum(costs[at : at + count])
        at += count
    sums[placement[0]] += before
    sums[placement[-1]] += after
    return sums


def brute_force(costs, placement, before, after):
    """Every cut there is; integers, so that equal is equal."""
    cuts = itertools.combinations(range(1, len(costs)), len(placement) - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts]

    def order(counts):
        ranks = loads(counts, costs, placement, before, after)
        stages = loads(counts, costs, range(len(counts)), before, after)
        squares = (sum(load**2 for load in each) for each in (ranks, stages))
        return max(ranks), *squares, [-count for count in counts]

    return min(every, key=order)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), placement=st.sampled_from(PLACEMENTS))
def test_the_cut_is_the_best_of_all(data, placement):
    small = st.integers(0, 9)
    costs = data.draw(st.lists(small, min_size=len(placement), max_size=10))
    before, after = data.draw(small), data.draw(small)
    cut = balance(costs, placement, before, after)
    assert cut == brute_force(costs, placement, before, after)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_equal_blocks_are_shared_out_evenly(placement):
    for blocks in range(len(placement), 11):
        cut = balance([1] * blocks, placement)
        assert cut == brute_force([1] * blocks, placement, 0, 0)
        if len(set(placement)) == len(placement):
            assert max(cut) - min(cut) <= 1 and list(cut) == sorted(cut, reverse=True)


@pytest.mark.parametrize(
    "costs,placement,before,after,expected",
    [
        ([1] * 5, (0, 1), 0, 0, (3, 2)),
        ([1] * 5, (0, 1), 0, 2, (4, 1)),
        ([1] * 12, (0, 1), 0.5, 2.5, (7, 5)),
        ([5, 1, 1, 1, 1, 1], (0, 1), 0, 0, (1, 5)),
        ([1] * 8, (0, 1, 1, 0), 2, 2, (1, 3, 3, 1)),
        ([0.1] * 6, (0, 1, 2), 0, 0, (2, 2, 2)),
    ],
)
def test_embedding_and_head_count(costs, placement, before, after, expected):
    assert balance(costs, placement, before, after) == expected


@pytest.mark.parametrize("ranks,chunks", [(2, 2), (4, 2), (8, 2), (4, 3)])
def test_large_models_with_several_stages_per_rank_come_near_the_mean(ranks, chunks):
    """Beyond the states that can all be followed: no rank has a block more than its share, rounded up."""
    placement = build("interleaved_1f1b", ranks, 1, chunks).placement
    for blocks, before, after in ((48, 0, 0), (61, 0.5, 1.5)):
        ranks_have = loads(balance([1.0] * blocks, placement, before, after), [1.0] * blocks, placement, before, after)
        assert max(ranks_have) <= math.ceil((blocks + before + after) / ranks)


@settings(max_examples=5, deadline=None)
@given(costs=st.lists(st.integers(0, 1000), min_size=16, max_size=30))
def test_no_cut_is_worse_than_an_even_one(costs):
    """Also where the states that are followed are a few of very many."""
    for chunks, ranks in ((2, 4), (4, 4)):
        placement = tuple(range(ranks)) * chunks
        even = [
            (s + 1) * len(costs) // len(placement) - s * len(costs) // len(placement) for s in range(len(placement))
        ]
        found = balance(costs, placement)
        assert sum(found) == len(costs) and min(found) >= 1
        assert max(loads(found, costs, placement, 0, 0)) <= max(loads(even, costs, placement, 0, 0))


def test_a_single_block_per_stage_is_the_only_cut():
    assert balance([3, 1, 2], (0, 1, 2), 9, 9) == (1, 1, 1)
    assert balance([2.5], (0,), 1, 1) == (1,)


@pytest.mark.parametrize(
    "blocks,placement,said",
    [
        (3, (0, 1, 2, 3), "3 blocks cannot be 4 stages: each needs one. Set stages to 3 or fewer."),
        (1, (0, 1), "1 block cannot be 2 stages: each needs one. Set stages to 1 or fewer."),
        (
            6,
            (0, 1, 2, 3, 0, 1, 2, 3),
            "4 stages x 2 chunks = 8 parts of the model, but it has 6 blocks. Set stages to 3 or fewer. Or: "
            "Take schedule 1f1b, with one stage per rank.",
        ),
        (
            1,
            (0, 0),
            "1 stages x 2 chunks = 2 parts of the model, but it has 1 block. Take schedule 1f1b, with one stage per rank.",
        ),
        (
            1,
            (0, 1, 1, 0),
            "2 stages x 2 chunks = 4 parts of the model, but it has 1 block. Set stages to 1, with schedule 1f1b.",
        ),
    ],
)
@pytest.mark.case("C056")
def test_more_stages_than_blocks_are_refused(blocks, placement, said):
    with pytest.raises(ScheduleError) as raised:
        balance([1.0] * blocks, placement)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    "counts,placement,said",
    [
        (
            [5, 5],
            (0, 1),
            "balance is [5, 5]: 5 + 5 = 10 blocks, but the model has 12. Add 2 to it, or leave balance out.",
        ),
        (
            [9, 5],
            (0, 1),
            "balance is [9, 5]: 9 + 5 = 14 blocks, but the model has 12. Take 2 from it, or leave balance out.",
        ),
        ([12, 0], (0, 1), "balance is [12, 0]: stage 1 has 0 blocks. Give each at least 1."),
        ([6, 6], (0, 1, 2), "balance is [6, 6], 2 numbers, but there are 3 stages. Give one for each."),
        (
            [6, 6],
            (0, 1, 0, 1),
            "balance is [6, 6], 2 numbers, but there are 2 x 2 chunks = 4 stages. Give one for each.",
        ),
        ([], (0,), "balance is [], 0 numbers, but there are 1 stages. Give one for each."),
    ],
)
def test_a_given_balance_is_checked_with_its_arithmetic(counts, placement, said):
    with pytest.raises(ScheduleError) as raised:
        check_balance(counts, 12, placement)
    assert str(raised.value) == said
    assert check_balance([5, 7], 12, (0, 1)) == (5, 7)


def test_stages_cost_what_their_parts_cost():
    block = PartCosts(forward=1, backward_input=2, backward_weight=3, activation_bytes=8, held_bytes=2)
    model = ModelCosts(
        blocks=(block,) * 3,
        before=PartCosts(forward=0.5, backward_weight=0.25, activation_bytes=1),
        after=PartCosts(forward=4, backward_input=4, backward_weight=4, backward=6, activation_bytes=16),
        communication=0.125,
    )
    costs = model.of_stages((2, 1))
    assert costs.forward == (2.5, 5) and costs.backward_input == (4, 6) and costs.backward_weight == (6.25, 7)
    assert costs.backward == (10.25, 5 + 6) and costs.communication == 0.125
    assert costs.activation_bytes == (17, 24) and costs.held_bytes == (1 + 4, 2 + 16)
    assert block.time == 6 and model.after.time == 10


def model(blocks, held_bytes=None, **more):
    """A MiB of activations per block."""
    part = PartCosts(
        forward=1, backward_input=1, backward_weight=1, activation_bytes=1 << 20, held_bytes=held_bytes, **more
    )
    return ModelCosts(blocks=(part,) * blocks)


def test_auto_takes_the_fastest_that_fits():
    """4 ranks, 2 blocks each: 1F1B holds 4 micro-batches on rank 0, 8 MiB; interleaving holds more, ZBV as much."""
    free = choose(4, 8, model(8))
    assert (free.taken.name, free.taken.chunks, free.taken.balance, free.fits) == ("zbv", 2, (1,) * 8, True)
    assert free.taken.simulation.makespan == 6 * 8 + 3 and free.taken.peak_bytes == 8 << 20
    assert free.reason == (
        "zbv with 2 stages per rank: 5.9% of the time is bubble, 8 MiB of activations at most; 1f1b would take 1.29 x as long."
    )
    assert [c.name for c in free.candidates] == ["zbv", "zb_h1", "interleaved_1f1b", "1f1b", "gpipe"]
    few = choose(4, 8, model(7))
    assert (few.taken.name, few.taken.balance) == ("zb_h1", (2, 2, 2, 1)), (
        "7 blocks are too few for two stages per rank"
    )
    assert {c.chunks for c in few.candidates} == {1}


def test_auto_stays_within_the_memory_that_there_is():
    """A split backward costs more than the bubble here, and there are too few blocks to interleave."""
    costs = ModelCosts(
        blocks=(
            PartCosts(
                forward=1, backward_input=2, backward_weight=2, backward=2, activation_bytes=1 << 20, held_bytes=0
            ),
        )
        * 4,
    )
    assert choose(4, 4, costs).taken.name == "1f1b", "it is as fast as gpipe, and later ranks hold less"
    tight = choose(2, 6, model(4), memory_limit=4.5 * (1 << 20))
    assert (tight.taken.name, tight.fits) == ("zbv", True)
    none = choose(2, 6, model(4), memory_limit=1 << 20)
    assert not none.fits and none.taken.peak_bytes == min(c.peak_bytes for c in none.candidates) == 4 << 20
    assert none.reason == (
        "1f1b: no schedule fits, and this one holds least: 4 MiB of activations on rank 0, where there is room for 1 MiB."
    )


def test_auto_says_what_would_be_faster_with_more_memory():
    """A backward that cannot be split without cost: interleaving is faster, but holds more."""
    costs = model(8, backward=1.0)
    wide = choose(4, 8, costs)
    assert wide.taken.name == "interleaved_1f1b"
    narrow = choose(4, 8, costs, memory_limit=8 << 20)
    assert narrow.taken.name == "1f1b" and narrow.reason == (
        "1f1b: 27.3% of the time is bubble, 8 MiB of activations at most; interleaved_1f1b with 2 stages per rank would "
        "be faster, but holds 11 MiB of activations, and there is room for 8 MiB."
    )


def test_auto_keeps_to_a_given_balance_and_number_of_chunks():
    given = choose(2, 4, model(9), counts=[3, 2, 2, 2])
    assert {c.chunks for c in given.candidates} == {2} and given.taken.balance == (3, 2, 2, 2)
    assert {c.name for c in choose(2, 4, model(9), chunks=3).candidates} == {"interleaved_1f1b"}
    for asked, said in (
        ({"counts": [3, 2]}, "3 + 2 = 5 blocks, but the model has 9"),
        ({"counts": [3, 3, 3]}, "3 numbers, but there are 2 stages"),
        ({"chunks": 5}, "2 stages x 5 chunks = 10 parts of the model, but it has 9 blocks"),
    ):
        with pytest.raises(ScheduleError) as raised:
            choose(2, 4, model(9), **asked)
        assert said in str(raised.value)
    with pytest.raises(ScheduleError, match="1 block cannot be 2 stages"):
        choose(2, 4, model(1))
