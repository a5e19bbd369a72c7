"""`shardlight bench pipeline`: sleeps and bubbles add up to a step, and everyone trains the same model."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from command import run_command
from harness import preload, run_ranks
from shardlight import cli
from shardlight.framework.bench import diff, meters, pipeline
from shardlight.framework.bench.contenders.bubble import WIDTH, Clock, SleepingModel, measure, sleeping_split
from shardlight.framework.bench.contenders.gpt import fixed_gpt, rows_of
from shardlight.framework.bench.contenders.pipeline import BUILDERS, MICRO_BATCHES
from shardlight.framework.bench.contenders.stages import Part, PlainGradients, SavedBytes, counts_of
from shardlight.framework.bench.pipeline import ALONE, OURS, PEERS, TRAINED, TRAINING_BARS, Sleeps, add_bubbles
from shardlight.framework.bench.results import UNITS, Samples, meets, read
from shardlight.framework.bench.sizes import SIZES, Size
from shardlight.strategies.engine.pipeline.costs import Costs
from shardlight.strategies.engine.pipeline.schedules import SCHEDULES, build
from shardlight.strategies.engine.pipeline.simulate import simulate
from typer.testing import CliRunner

NANO = Size(name="nano", vocabulary=64, width=16, blocks=3, heads=2, sequence=16, batch=8, rounds=3)
MOST_CALLS = 400
"""Of Python functions and builtins, of an action of the runtime around a stage that computes nothing."""
preload(pipeline.MODULE)


@pytest.mark.long
def test_quick_measures_every_schedule_and_contender(tmp_path):
    outcome = run_command(["bench", "pipeline", "--quick", "--json", "result.json"], tmp_path, timeout_s=240, cold=True)
    assert outcome.left_running == () and outcome.code == 0, outcome.output
    result = read(tmp_path / "result.json")
    rows = {(row.case, row.who, row.metric): row.value for row in result.rows}
    for ranks in pipeline.COUNTS:
        for name in SCHEDULES:
            assert 0 < rows[f"bubble {ranks} ranks", name, "bubble"] < 1
    for name in TRAINED:
        assert rows["training tiny", f"shardlight-{name}", "loss_difference"] < 1e-5
        assert rows["training tiny", f"simulated-{name}", "pipeline_ms"] > 0
    assert all(bar.holds for bar in result.bars if "activations" in bar.name), outcome.output
    assert diff.compare(result, result).changes == []


def sleeping_body(rank, world):
    for ranks, group in ((4, dist.group.WORLD), (2, dist.new_group([0, 1]))):
        if rank < ranks:
            sleep_in_every_schedule(rank, ranks, group)


def sleep_in_every_schedule(rank, ranks, group):
    seconds = (0.004, 0.003, 0.002)
    for name in SCHEDULES:
        schedule = build(name, ranks, MICRO_BATCHES)
        asked = {"schedule": name, "micro_batches": MICRO_BATCHES, "seconds": seconds, "rounds": 1}
        found = measure(asked, group)
        share = ranks / schedule.stages
        theory = simulate(schedule, Costs.uniform(schedule.stages, *(share * s for s in seconds)))
        (slept_s,), (step_s,) = found["slept_s"], found["step_s"]
        # A sleep is never too short: each rank had its whole share, and waited for what it needs.
        assert slept_s >= MICRO_BATCHES * sum(seconds), (name, ranks)
        end_s = max(timed.end for timed in theory.timeline[rank])
        assert step_s >= 0.99 * end_s, (name, ranks, rank)


def test_a_stage_that_sleeps_puts_off_what_a_schedule_may_put_off():
    class Counted(Clock):
        def sleep(self, seconds):
            self.slept_s += seconds

    clock = Counted()
    model = SleepingModel(2, clock, 100.0, 10.0)
    output = model(torch.ones(1, WIDTH)).sum()
    assert clock.slept_s == 200.0
    for at_once, then in ((False, 220.0), (True, 222.0)):
        clock.slept_s = 200.0
        split = sleeping_split(clock, 1.0)(
            model(torch.ones(1, WIDTH)).sum(), None, None, PlainGradients(model), at_once
        )
        clock.slept_s = 200.0
        split.input()
        assert clock.slept_s == then
        split.weight()
        assert clock.slept_s == 222.0
    assert output.item() == WIDTH and model.blocks[0].weight.grad is not None


def training_body(rank, world):
    made = {name: BUILDERS[name](NANO) for name in BUILDERS if name != "single" or rank == 0}
    losses = {name: [] for name in made}
    for step in range(3):
        for name, contender in made.items():
            losses[name].append(contender.step(*rows_of(NANO, step, 0, 1)))
    for name, contender in made.items():
        if not name.startswith("simulated"):
            expected = losses.get("single", losses[name])
            assert losses[name] == pytest.approx(expected, abs=1e-5), name
        if name != "single":
            assert contender.counters()["pipeline_ms"] > 0, name
    assert losses[OURS] == pytest.approx(losses["torch-1f1b"], abs=1e-5)
    assert losses[OURS][0] != losses[OURS][1]
    held = {name: made[name].gauges().get("activation_bytes") for name in made if name != "single"}
    for name in TRAINED:
        assert held[f"shardlight-{name}"] == pytest.approx(held[f"simulated-{name}"], rel=0.1), (rank, name)
    # What a gauge looked at was no step.
    assert made[OURS].step(*rows_of(NANO, 3, 0, 1)) == pytest.approx(
        made["torch-1f1b"].step(*rows_of(NANO, 3, 0, 1)), abs=1e-5
    )
    return held


def calls_body(rank, world):
    asked = {"schedule": "1f1b", "micro_batches": MICRO_BATCHES, "seconds": (0.0, 0.0, 0.0)}
    measure(asked | {"rounds": 1}, dist.group.WORLD)
    counts = []
    for rounds in (1, 2):
        probe = meters.CallProbe()
        probe.start()
        measure(asked | {"rounds": rounds}, dist.group.WORLD)
        counts.append(probe.stop())
    return (counts[1] - counts[0]) / (2 * MICRO_BATCHES)


def test_the_runtime_makes_few_calls():
    assert max(run_ranks(calls_body, 2)) <= MOST_CALLS


def test_stages_that_sleep_have_their_share_and_wait_for_what_they_need():
    run_ranks(sleeping_body, 4)


def test_everyone_trains_the_same_model_and_holds_what_the_simulator_says():
    first, last = run_ranks(training_body, 2)
    # The first stage has two micro-batches in flight, the last one has one.
    assert first[OURS] > last[OURS] > 0


def test_the_bubble_is_what_no_rank_sleeps_of_the_longest_step():
    samples, sleeps = Samples(), Sleeps(forward_s=0.1, input_s=0.1, weight_s=0.1)
    # 8 micro-batches of 0.3 s, and 0.3 s in which the other rank fills or drains; rank 1 is there a little later.
    slept = 8 * 0.3
    answers = [{"step_s": [2.7, 3.0], "slept_s": [slept] * 2}, {"step_s": [2.6, 2.9], "slept_s": [slept] * 2}]
    add_bubbles(samples, "1f1b", sleeps, answers)
    assert samples.median("1f1b", "theory_bubble") == pytest.approx(1 / 9)
    assert samples.median("1f1b", "theory_ms") == pytest.approx(2700)
    assert samples.values["1f1b", "bubble_above"] == pytest.approx(
        {"round 0": 0.0, "round 1": 100 * (0.2 - 1 / 9)}, abs=1e-9
    )
    for quick, above in ((True, None), (False, pytest.approx(50 * (0.2 - 1 / 9)))):
        result = pipeline.report({2: samples}, Samples(), SIZES["tiny"], [], [], quick, [])
        bar = next(bar for bar in result.bars if bar.name == "bubble of 1f1b at 2 ranks - the simulator's, points")
        assert (bar.value, bar.reason) == (above, "not with --quick" if quick else "")
    add_bubbles(samples, "zbv", sleeps, answers)
    # A stage of two on a rank is half of what a rank does.
    assert samples.median("zbv", "theory_ms") == pytest.approx(8 * 300 + 50)


def samples_of(figures):
    samples = Samples()
    for (who, metric), values in figures.items():
        for number, value in enumerate(values):
            samples.add(who, metric, f"round {number}", value)
    return samples


def test_bars_hold_rounds_side_by_side_and_the_simulator_says_only_what_it_knows():
    slow = (1.0, 3.0, 2.0)  # a machine that is slower in some rounds
    figures = {
        (OURS, "step_ms"): [102 * s for s in slow],
        (OURS, "pipeline_ms"): [100 * s for s in slow],
        ("simulated-1f1b", "pipeline_ms"): [98 * s for s in slow],
        ("simulated-1f1b", "step_ms"): [500 * s for s in slow],
        ("torch-1f1b", "step_ms"): [100 * s for s in slow],
        ("shardlight-zb_h1", "step_ms"): [90 * s for s in slow],
        (f"{OURS} rank 0", "activation_bytes"): [105],
        ("simulated-1f1b rank 0", "activation_bytes"): [100],
        (f"{OURS} rank 1", "activation_bytes"): [80],
        ("simulated-1f1b rank 1", "activation_bytes"): [100],
    }
    contenders = [*ALONE, *PEERS["torch"]]
    result = pipeline.report({}, samples_of(figures), SIZES["small"], contenders, ["deepspeed"], False, [])
    judged = {bar.name: (bar.value, bar.holds, bar.reason) for bar in result.bars}
    assert judged.pop("step of 1f1b / DeepSpeed's at small") == (None, None, "not installed")
    assert judged == {
        "forwards and backwards of 1f1b / the simulator's at small": (pytest.approx(100 / 98), True, ""),
        "step of 1f1b / torch's at small": (pytest.approx(1.02), False, ""),
        "step of zb_h1 / of 1f1b at small": (pytest.approx(90 / 102), True, ""),
        "activations of stage 0 under 1f1b: how far from the simulator's": (pytest.approx(0.05), True, ""),
        "activations of stage 1 under 1f1b: how far from the simulator's": (pytest.approx(0.2), False, ""),
        "activations of stage 0 under zb_h1: how far from the simulator's": (None, None, "left out"),
        "activations of stage 1 under zb_h1: how far from the simulator's": (None, None, "left out"),
    }
    assert result.value("simulated-1f1b", "pipeline_ms") == 196 and result.value("simulated-1f1b", "step_ms") is None
    assert result.value("torch-1f1b", "step_ratio") == pytest.approx(100 / 102)
    assert result.notes == ["deepspeed is not installed: left out, and not measured."]


def test_bars_are_of_known_contenders_and_metrics():
    specs = [*TRAINING_BARS, *(spec for ranks in pipeline.COUNTS for spec in pipeline.bubble_bars(ranks))]
    assert len({spec.name for spec in specs}) == len(specs) == 4 + 4 + 2 * len(SCHEDULES)
    known = {c.name for c in [*ALONE, *(c for peers in PEERS.values() for c in peers)]} | {*SCHEDULES}
    assert {c for c in known if c.partition("-")[0] not in ("deepspeed",)} >= {*BUILDERS}
    for spec in specs:
        assert {spec.who.partition(" rank ")[0], spec.against or spec.who.partition(" rank ")[0]} <= known
        assert spec.metric in UNITS
        meets(1.0, spec.target)
    assert pipeline.MICRO_BATCHES == MICRO_BATCHES


@pytest.mark.parametrize("size", [NANO, SIZES["tiny"]], ids=lambda size: size.name)
def test_parts_cut_by_hand_are_the_whole_model(size):
    counts = counts_of(size, (0, 1))
    assert sum(counts) == size.blocks
    tokens, _ = rows_of(size, 0, 0, 8)
    x = tokens
    for stage in range(2):
        x = Part(size, counts, stage)(x)
    torch.testing.assert_close(x, fixed_gpt(size)(tokens))


def test_what_autograd_keeps_is_counted_once_and_off_again():
    weight = torch.ones(4, requires_grad=True)
    x = torch.ones(4, requires_grad=True) * 1.0
    meter, marks = SavedBytes([weight]), [0]
    with meter.counting():
        y = x * weight  # keeps x and the weight, which is nobody's activation
        marks.append(meter.now)
        z = x * x + y.exp()  # x is there already; exp keeps its own result
        marks.append(meter.now)
    z.sum().backward()
    marks.append(meter.now)
    assert marks == [0, 16, 32, 0] and meter.most == 32
    assert all(a != b for a, b in pairwise(marks))


def test_unknown_sizes_and_peers_are_refused():
    for line, words in (
        (["--size", "smal"], "--size smal: no such size. Did you mean 'small'?\n"),
        (["--against", "torhc"], "--against torhc: no such peer. Did you mean 'torch'?\n"),
    ):
        outcome = CliRunner().invoke(cli.app, ["bench", "pipeline", *line])
        assert outcome.exit_code == 2 and outcome.stderr.endswith(words), outcome.stderr
