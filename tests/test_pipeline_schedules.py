"""Pipeline schedules and their simulation: every one can be carried out, with the bubble and memory of its paper."""

import itertools
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardlight.strategies.engine.pipeline.schedules import SCHEDULES, Action, Kind, build
from shardlight.strategies.engine.pipeline.simulate import Channel, Costs, simulate
from shardlight.strategies.errors import ScheduleError, StrategyError

F, B, I, W = Kind  # noqa: E741
RANKS, MICRO_BATCHES = range(1, 9), (1, 2, 3, 4, 5, 7, 8, 9, 16)
EVERY = [(name, ranks, None) for name in SCHEDULES for ranks in RANKS]
EVERY += [("interleaved_1f1b", ranks, chunks) for ranks in (1, 2, 3, 4, 8) for chunks in (3, 4)]


@cache
def run_of(name, ranks, micro_batches, chunks=None):
    """A schedule at unit costs; several tests look at each."""
    return simulate(build(name, ranks, micro_batches, chunks))


def written(schedule, rank):
    """A rank's actions in short: F0 for gpipe and its like, F2.0 (stage 2) where there are more stages than ranks."""
    letters = dict(zip(Kind, "FBIW", strict=True))
    name = "{0}{2}" if schedule.stages == schedule.ranks else "{0}{1}.{2}"
    return " ".join(name.format(letters[a.kind], a.stage, a.micro_batch) for a in schedule.actions[rank])


@pytest.mark.parametrize(
    "name,rank,expected",
    [
        ("gpipe", 0, "F0 F1 F2 F3 B0 B1 B2 B3"),
        ("1f1b", 0, "F0 F1 F2 B0 F3 B1 B2 B3"),
        ("1f1b", 1, "F0 F1 B0 F2 B1 F3 B2 B3"),
        ("1f1b", 2, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("zb_h1", 0, "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"),
        ("zb_h1", 2, "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"),
    ],
)
def test_the_orders_of_the_papers(name, rank, expected):
    assert written(build(name, 3, 4), rank) == expected


def test_interleaved_goes_through_all_stages_of_a_rank_before_the_next_group():
    schedule = build("interleaved_1f1b", 2, 4)
    assert schedule.placement == (0, 1, 0, 1) and schedule.stages_of(1) == (1, 3)
    assert written(schedule, 0) == ("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3")


def test_the_v_schedule_comes_back_to_the_first_rank():
    schedule = build("zbv", 2, 3)
    assert schedule.placement == (0, 1, 1, 0) and schedule.stages_of(0) == (0, 3)
    assert (
        written(schedule, 1)
        == "F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2"
    )


@pytest.mark.parametrize("name,ranks,chunks", EVERY)
def test_every_schedule_can_be_carried_out(name, ranks, chunks):
    """The simulation raises for what is missing, double, out of place or blocked; messages keep their order."""
    for micro_batches in MICRO_BATCHES:
        run = run_of(name, ranks, micro_batches, chunks)
        schedule = run.schedule
        assert run.reordered == (), f"{micro_batches} micro-batches: {run.reordered}"
        assert sum(run.busy) == schedule.stages * micro_batches * 3
        split = {a.kind for actions in schedule.actions for a in actions} & {I, W}
        assert split == ({I, W} if SCHEDULES[name].splits else set())
        for row in run.timeline:
            assert all(first.end <= then.start for first, then in itertools.pairwise(row))


times = st.floats(0, 10, allow_nan=False)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(list(SCHEDULES)), ranks=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_no_costs_block_a_schedule_or_break_an_order(data, name, ranks, micro_batches):
    """Checked here once more, and not by what the simulator itself relies on."""
    chunks = data.draw(st.integers(2, 4)) if name == "interleaved_1f1b" else None
    schedule = build(name, ranks, micro_batches, chunks)
    per_stage = st.tuples(*[times] * schedule.stages)
    costs = Costs(
        forward=data.draw(per_stage),
        backward_input=data.draw(per_stage),
        backward_weight=data.draw(per_stage),
        communication=data.draw(times),
        activation_bytes=(1.0,) * schedule.stages,
    )
    run = simulate(schedule, costs)
    starts = {t.action: t.start for row in run.timeline for t in row}
    ends = {t.action: t.end for row in run.timeline for t in row}
    backward = I if SCHEDULES[name].splits else B
    for stage, m in itertools.product(range(schedule.stages), range(micro_batches)):
        assert starts[Action(backward, stage, m)] >= ends[Action(F, stage, m)]
        if stage:
            away = costs.communication * (schedule.placement[stage] != schedule.placement[stage - 1])
            assert starts[Action(F, stage, m)] >= ends[Action(F, stage - 1, m)] + away
            assert starts[Action(backward, stage - 1, m)] >= ends[Action(backward, stage, m)] + away
        if backward == I:
            assert starts[Action(W, stage, m)] >= ends[Action(I, stage, m)]
    bound = max(run.busy)
    assert run.makespan >= bound - 1e-9 * (1 + bound)


def exact_bubble(run):
    return 1 - Fraction(int(sum(run.busy)), int(run.makespan) * run.schedule.ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_bubbles_are_those_of_the_formulas(ranks):
    waits = ranks - 1
    for m in MICRO_BATCHES:
        for name in ("gpipe", "1f1b"):
            assert exact_bubble(run_of(name, ranks, m)) == Fraction(waits, m + waits)
        if m >= ranks:
            for v in (2, 3):
                run = run_of("interleaved_1f1b", ranks, m, v)
                assert exact_bubble(run) == Fraction(waits, v * m + waits), f"{m} micro-batches, {v} chunks"
            # A third of 1F1B's: of the three units that a rank waits per rank before it, weights' gradients fill two.
            assert exact_bubble(run_of("zb_h1", ranks, m)) == Fraction(waits, 3 * m + waits)
        if m >= 2 * ranks - 1:
            # A sixth: a rank waits for half a forward per rank before it, and for nothing after that.
            run = run_of("zbv", ranks, m)
            assert exact_bubble(run) == Fraction(waits, 6 * m + waits)
            for row in run.timeline:
                assert row[-1].end - row[0].start == 6 * m, "a rank waits between its first action and its last"


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("gpipe", "1f1b")])
def test_no_later_schedule_has_more_bubble_than_1f1b(name):
    for ranks, m in itertools.product(RANKS, MICRO_BATCHES):
        ours, plain = run_of(name, ranks, m), run_of("1f1b", ranks, m)
        assert exact_bubble(ours) <= exact_bubble(plain), f"{ranks} ranks, {m} micro-batches"
        if ranks > 1 and (m > 1 or SCHEDULES[name].splits):
            assert exact_bubble(ours) < exact_bubble(plain), f"{ranks} ranks, {m} micro-batches"


@pytest.mark.parametrize("ranks", RANKS)
def test_activations_are_those_of_the_papers(ranks):
    for m in MICRO_BATCHES:
        peaks = {name: run_of(name, ranks, m).peak_micro_batches for name in SCHEDULES}
        assert peaks["gpipe"] == (m,) * ranks
        assert peaks["1f1b"] == tuple(min(m, ranks - rank) for rank in range(ranks))
        assert max(peaks["zb_h1"]) == max(peaks["1f1b"])
        # Stages are half as large, so that twice as many are as much as rank 0 holds under 1F1B.
        assert max(peaks["zbv"]) == min(2 * m, 2 * ranks)


def test_what_a_split_backward_keeps_counts_until_the_weights_have_their_gradients():
    """Rank 2 of three: one micro-batch between forward and backward, two of which a quarter is kept."""
    schedule = build("zb_h1", 3, 6)
    run = simulate(schedule, Costs.uniform(3, activation_bytes=100.0, held_bytes=25.0))
    assert run.peak_bytes == (300.0, 100 + 100 + 25.0, 100 + 2 * 25.0)
    assert simulate(schedule, Costs.uniform(3, activation_bytes=100.0)).peak_bytes == (300.0, 300.0, 300.0)


def test_communication_delays_only_what_waits_for_it():
    """P - 1 borders down and P - 1 back up, where nothing else is there to do."""
    schedule = build("gpipe", 4, 1)
    assert simulate(schedule, Costs.uniform(4, communication=0.5)).makespan == 4 * 3 + 6 * 0.5
    assert simulate(build("zbv", 1, 3), Costs.uniform(2, communication=9.0)).makespan == 18, (
        "nothing is sent on one rank"
    )


def test_a_joint_backward_may_cost_less_than_its_two_parts():
    costs = replace(Costs.uniform(2), backward=(1.5, 1.5))
    assert simulate(build("1f1b", 2, 4), costs).makespan == 5 * 2.5


def test_messages_that_lie_ready_are_counted():
    """Stage 1 waits for nothing but the first activations if forward is short there: they come one by one."""
    assert simulate(build("gpipe", 2, 4)).peak_messages == (0, 0)
    slow = Costs(forward=(1.0, 3.0), backward_input=(1.0, 1.0), backward_weight=(0.0, 0.0), activation_bytes=(1.0, 1.0))
    assert simulate(build("gpipe", 2, 4), slow).peak_messages == (0, 2)


def test_evaluation_runs_the_forwards_of_training():
    for name, ranks, m in itertools.product(SCHEDULES, (1, 2, 3, 4), (1, 2, 5, 8)):
        schedule = build(name, ranks, m).forward_only()
        run = simulate(schedule)
        assert {a.kind for actions in schedule.actions for a in actions} == {F} and not run.reordered
        if schedule.stages == ranks:
            assert run.makespan == m + ranks - 1


def changed(schedule, rank, change):
    actions = list(schedule.actions)
    actions[rank] = tuple(change(list(actions[rank])))
    return replace(schedule, actions=tuple(actions))


def swapped(first, second):
    def change(actions):
        actions[first], actions[second] = actions[second], actions[first]
        return actions

    return change


@pytest.mark.parametrize(
    "change,said",
    [
        (lambda a: a[1:], "forward of micro-batch 0 on stage 1 is there 0 times, not once"),
        (lambda a: [*a, a[0]], "forward of micro-batch 0 on stage 1 is there 2 times, not once"),
        (
            lambda a: [x for x in a if x != Action(B, 1, 2)],
            "backward or backward_input of micro-batch 2 on stage 1 is there 0",
        ),
        (lambda a: [*a, Action(I, 1, 2)], "backward or backward_input of micro-batch 2 on stage 1 is there 2"),
        (lambda a: [*a, Action(W, 1, 2)], "backward or backward_weight of micro-batch 2 on stage 1 is there 2"),
        (lambda a: [Action(F, 0, 0), *a], "rank 1 has the forward of micro-batch 0 on stage 0, which lies on rank 0"),
        (lambda a: [*a, Action(F, 2, 0)], "on stage 2, which there is not"),
        (lambda a: [*a, Action(F, 1, 9)], "micro-batch 9 on stage 1, which there is not"),
        (
            swapped(0, 1),
            "rank 1 waits before the backward of micro-batch 0 on stage 1 for the forward of micro-batch 0 on stage 1, which it would do itself later",
        ),
        (
            swapped(-1, -2),
            "rank 1 waits before the backward of micro-batch 2 on stage 1 for the forward of micro-batch 2",
        ),
    ],
)
def test_a_schedule_that_is_wrong_is_refused(change, said):
    with pytest.raises(ScheduleError, match="1f1b: ") as raised:
        simulate(changed(build("1f1b", 2, 3), 1, change))
    assert said in str(raised.value)


def test_a_deadlock_names_who_waits_for_what():
    """Rank 0 wants the gradient of 0 before it sends 1; rank 1 wants the activations of 1 before it sends that gradient."""
    one = changed(build("1f1b", 2, 3), 0, swapped(1, 2))
    assert simulate(one).makespan > 0, "alone, this order only waits"
    with pytest.raises(ScheduleError) as raised:
        simulate(changed(one, 1, swapped(1, 2)))
    assert str(raised.value) == (
        "1f1b: deadlock: rank 0 waits before the backward of micro-batch 0 on stage 0 for the backward of micro-batch 0 "
        "on stage 1, which rank 1 would do later; rank 1 waits before the forward of micro-batch 1 on stage 1 for the "
        "forward of micro-batch 1 on stage 0, which rank 0 would do later. Put what is waited for first."
    )


def test_messages_taken_in_another_order_are_reported():
    schedule = changed(build("gpipe", 2, 3), 1, swapped(0, 1))
    assert simulate(schedule).reordered == (Channel(0, 1, F),)
    assert str(Channel(0, 1, F)) == "activations from rank 0 to rank 1"


@pytest.mark.parametrize(
    "setting,said",
    [
        (("1f1", 2, 4), "schedule '1f1' is not known. Did you mean '1f1b'?"),
        (("dual", 2, 4), "schedule 'dual' is not known. Choose from: gpipe, 1f1b, interleaved_1f1b, zb_h1, zbv."),
        (("1f1b", 0, 4), "schedule 1f1b: stages is 0. Set stages to 1 or more."),
        (("1f1b", 2, 0), "schedule 1f1b: micro_batches is 0. Set micro_batches to 1 or more."),
        (
            ("1f1b", 2, 4, 2),
            "schedule 1f1b: chunks is 2, but each rank has 1 of its stages. Leave chunks out, or take schedule interleaved_1f1b.",
        ),
        (
            ("zbv", 2, 4, 1),
            "schedule zbv: chunks is 1, but each rank has 2 of its stages. Leave chunks out, or take schedule 1f1b.",
        ),
        (
            ("interleaved_1f1b", 2, 4, 1),
            "schedule interleaved_1f1b: chunks is 1, but it needs several stages per rank. Set chunks to 2 or more, or take schedule 1f1b.",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(setting, said):
    with pytest.raises(ScheduleError) as raised:
        build(*setting)
    assert str(raised.value) == said and isinstance(raised.value, ValueError | StrategyError)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ScheduleError, match="forward has 2 costs, but schedule zbv has 4 stages"):
        simulate(build("zbv", 2, 4), Costs.uniform(2))


def test_idle_time_and_activations_are_those_the_readme_tells_of():
    """Of equal stages whose backward takes twice as long as forward, in shares of the work of a rank."""
    for ranks, m in ((4, 16), (8, 32)):
        runs = {name: simulate(build(name, ranks, m)) for name in SCHEDULES}
        chunks = {name: run.schedule.stages // ranks for name, run in runs.items()}
        idle = {name: (run.makespan - max(run.busy)) / chunks[name] for name, run in runs.items()}
        shares = {name: round(idle[name] / idle["1f1b"], 3) for name in SCHEDULES}
        assert shares == {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 0.5, "zb_h1": 0.333, "zbv": 0.167}
        held = {name: [bytes_ / chunks[name] for bytes_ in run.peak_bytes] for name, run in runs.items()}
        assert held["gpipe"] == [m] * ranks and held["1f1b"] == [*range(ranks, 0, -1)]
        assert held["zb_h1"] == held["zbv"] == [ranks] * ranks
        assert ranks < max(held["interleaved_1f1b"]) <= 1.5 * ranks
