"""`shardlight bench zero`: its counts are those of the baseline, and its contenders train the same model."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from command import run_command
from harness import preload, run_ranks
from shardlight.framework.bench import zero
from shardlight.framework.bench.contenders import together, trainer
from shardlight.framework.bench.contenders.loop import train
from shardlight.framework.bench.contenders.trace import ROWS, TRAINING_STEP
from shardlight.framework.bench.results import read
from shardlight.framework.bench.rotation import TRACED_STEPS
from shardlight.framework.bench.sizes import SIZES, Size
from shardlight.framework.bench.turns import Turns
from shardlight.ops.built import why_not_shared

BASELINE = Path(__file__).parent / "baselines" / "zero.json"
"""Written by `shardlight bench zero --quick --json tests/baselines/zero.json`."""
EXACT = ("state_bytes", "sent_bytes", "collectives", "engine_collectives", "table_state_bytes", "table_sent_bytes")
NANO = Size(name="nano", vocabulary=64, width=16, blocks=2, heads=2, sequence=16, batch=4, rounds=3)
OURS = [contender.name for contender in zero.OURS]

preload("shardlight.framework.bench.contenders.together")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The command's outcome, its result and its traces; its ranks are forked, not started."""
    folder = tmp_path_factory.mktemp("bench")
    line = ["bench", "zero", "--quick", "--strict", "--json", "result.json", "--profile", "traces"]
    outcome = run_command(line, folder, timeout_s=400)
    assert (folder / "result.json").exists(), outcome.output
    traces = {path.stem: json.loads(path.read_text())["traceEvents"] for path in (folder / "traces").iterdir()}
    return outcome, read(folder / "result.json"), traces


def figures(result, metrics):
    return {(row.who, row.metric): row.value for row in result.rows if row.who in OURS and row.metric in metrics}


def test_quick_measures_ours_beside_ddp_and_one_process(quick):
    outcome, result, _ = quick
    assert {"single", "ddp", *OURS} == {row.who for row in result.rows if " rank " not in row.who}
    assert {row.case for row in result.rows} == {"zero tiny"}
    for who in ("single", "ddp", *OURS):
        assert result.value(who, "step_ms") > 0 and result.value(who, "tokens_per_s") > 0
        assert f"{result.value(who, 'step_ms'):.1f}" in outcome.output, "what is printed is what is written"
    assert outcome.left_running == ()


def test_its_exit_code_tells_whether_all_bars_hold(quick):
    outcome, result, _ = quick
    short = [bar.name for bar in result.bars if bar.holds is False]
    assert outcome.code == (3 if short else 0), outcome.output
    assert len([line for line in outcome.output.splitlines() if "FALLS SHORT" in line]) == len(short)


def test_every_contender_has_the_losses_of_one_process(quick):
    result = quick[1]
    for who in ("ddp", *OURS):
        assert 0 <= result.value(who, "loss_difference") < 1e-5, who


@pytest.mark.skipif(why_not_shared() is not None, reason="the baseline is of shared memory")
def test_bytes_and_collectives_are_those_of_the_baseline(quick):
    now, before = figures(quick[1], EXACT), figures(read(BASELINE), EXACT)
    assert len(before) == len(OURS) * len(EXACT)
    assert now == before, f"where that is meant, write {BASELINE.name} anew: see BASELINE in this file"
    for who in OURS:
        # The step whose collectives are counted comes after those that are still asked for one by one.
        assert 0 < now[who, "collectives"] <= now[who, "engine_collectives"], who


@pytest.mark.skipif(why_not_shared() is not None, reason="the baseline is of shared memory")
def test_python_calls_are_within_5_percent_of_the_baseline(quick):
    before = read(BASELINE)
    for name in ("python", "torch", "lightning"):
        mine, theirs = ".".join(quick[1].machine[name].split(".")[:2]), ".".join(before.machine[name].split(".")[:2])
        if mine != theirs:
            pytest.skip(f"{name} {mine} is not that of the baseline, {theirs}: other libraries make other calls")
    now, then = (figures(result, ("python_calls",)) for result in (quick[1], before))
    assert len(then) == len(OURS)
    for key, calls in then.items():
        assert calls / 1.05 <= now[key] <= calls * 1.05, f"{key[0]}: {now[key]:.0f} Python calls per step, were {calls}"


def test_traces_of_our_contenders_show_each_unit_in_every_step(quick):
    outcome, _, traces = quick
    assert set(traces) == {f"{who}-rank{rank}" for who in OURS for rank in (0, 1)}
    assert "Traces, one per contender and rank: traces" in outcome.output
    for file, events in traces.items():
        names = {e["name"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
        assert names["process_name"] == file.replace("-rank", ", rank ")
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["tid"] <= len(ROWS)}
        assert list(rows.values()) == list(ROWS)
        ranges = sorted((e for e in events if e["ph"] == "X" and e["tid"] in rows), key=lambda e: e["ts"])
        check_nested(ranges)
        steps = [e for e in ranges if e["name"] == TRAINING_STEP]
        assert len(steps) == TRACED_STEPS
        for step in steps:
            check_traced_step(file, [e["name"] for e in ranges if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]])
        under_way = [e for e in events if e.get("cat") == "under way"]
        assert sum(e["ph"] == "b" for e in under_way) == sum(e["ph"] == "e" for e in under_way) > 0


def check_nested(ranges):
    """In a row a range lies in another one or beside it: viewers drop what overlaps."""
    open_until: dict[int, list[float]] = {}
    for event in ranges:
        ends, end = open_until.setdefault(event["tid"], []), event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert not ends or end <= ends[-1], event
        ends.append(end)


def check_traced_step(file, names):
    blocks = [f"blocks.{n}" for n in range(SIZES["tiny"].blocks)]
    forward = [name for name in names if name.startswith("compute blocks")]
    assert forward == [f"compute {block}" for block in blocks], file
    backward = [name for name in names if name.startswith("compute backward blocks")]
    assert backward == [f"compute backward {block}" for block in reversed(blocks)], file
    assert names.count("step") == 1
    wanted = [f"reduce {block}" for block in blocks]
    wanted += [f"gather {block}" for block in blocks if "zero3" in file]
    for name in wanted:
        assert f"{name} (start)" in names and f"{name} (wait)" in names, (file, name)


def scripted(hosts: dict[str, int], rank: int, steps: int) -> tuple[Turns, list]:
    """Turns that tell each contender to take some steps, and the answers."""
    answers: list = []
    commands = [
        {"do": "turn", "who": who, "first": first, "steps": count, "count": probe}
        for who, processes in hosts.items()
        for first, count, probe in ((0, steps, None), (steps, 1, "python_calls"), (steps + 1, 1, "collectives"))
        if rank < processes
    ]
    return Turns(iter([*commands, {"do": "end"}]).__next__, answers.append), answers


def bare_losses(rank, world_size):
    hosts = {"single": 1, **dict.fromkeys(together.BUILDERS.keys() - {"single"}, 2)}
    turns, answers = scripted(hosts, rank, 3)
    train(NANO, hosts, turns, together.BUILDERS, rank)
    mine = [who for who, processes in hosts.items() if rank < processes]
    return {who: answers[1 + 3 * n : 4 + 3 * n] for n, who in enumerate(mine)}


@pytest.fixture(scope="module")
def bare():
    return run_ranks(bare_losses, 2, timeout_s=180)


def test_peers_in_the_bare_loop_train_the_same_model(bare):
    want = [loss for answer in bare[0]["single"] for loss in answer["losses"]]
    assert len(want) == 5 and len(set(want)) == 5
    for who in bare[1]:
        got = [
            sum(losses) / 2
            for answers in zip(bare[0][who], bare[1][who], strict=True)
            for losses in zip(*(a["losses"] for a in answers), strict=True)
        ]
        torch.testing.assert_close(
            torch.tensor(got), torch.tensor(want), rtol=0, atol=2e-6, msg=lambda m: f"{who}: {m}"
        )


def test_collectives_of_peers_are_counted_too(bare):
    """DDP's are started by C++ code: one bucket at this size. FSDP2: a gather per unit and pass, a reduction each."""
    counted = {who: answers[2]["per_step"]["collectives"] for who, answers in bare[0].items() if who != "single"}
    assert counted["ddp"] == 1
    assert 6 <= counted["fsdp2"] <= 12
    assert bare[0]["ddp"][1]["per_step"].keys() == {"python_calls"}


def trainer_losses(rank, world_size):
    import torch.distributed as dist

    found = {}
    for who in ("trainer-ddp", "trainer-shardlight-zero3"):
        turns, answers = scripted({who: 2}, rank, 3)
        trainer.run({"hosts": {who: 2}, "size": vars(NANO)}, turns)
        found[who] = answers[1:]
    assert dist.is_initialized()
    return found


def test_under_the_trainer_the_same_steps_are_taken(bare):
    ranks = run_ranks(trainer_losses, 2, init=False, timeout_s=180)
    want = [loss for answer in bare[0]["single"] for loss in answer["losses"]]
    for who in ranks[0]:
        got = [
            sum(losses) / 2
            for answers in zip(ranks[0][who], ranks[1][who], strict=True)
            for losses in zip(*(a["losses"] for a in answers), strict=True)
        ]
        torch.testing.assert_close(
            torch.tensor(got), torch.tensor(want), rtol=0, atol=2e-6, msg=lambda m: f"{who}: {m}"
        )
        assert all(seconds > 0 for answer in ranks[0][who] for seconds in answer["seconds"])
    counted = {who: answers[2]["per_step"]["collectives"] for who, answers in ranks[0].items()}
    assert counted["trainer-ddp"] <= 2, "Lightning's own ddp: PyTorch's one bucket, and Lightning's own word"
    assert counted["trainer-shardlight-zero3"] > 6


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["zero", "--size", "smal"], "--size smal: no such size. Did you mean 'small'?"),
        (["zero", "--against", "ddpp"], "--against ddpp: no such peer. Did you mean 'ddp'?"),
        (["zero", "--profile", BASELINE], "cannot make this folder"),
        (["zero", "--json", BASELINE / "x.json"], "cannot make its folder"),
        (["diff", "nothing.json", "nothing.json"], "nothing.json"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(line, words, tmp_path):
    outcome = run_command(["bench", *line], tmp_path)
    assert outcome.code == 2, outcome.output
    assert words in outcome.output and "Traceback" not in outcome.output


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_strict_refuses_at_once_when_a_named_peer_is_absent(tmp_path):
    outcome = run_command(["bench", "zero", "--strict", "--against", "ddp,deepspeed"], tmp_path)
    assert outcome.code == 4 and "--strict: deepspeed is not installed" in outcome.output


def test_diff_shows_what_changed(tmp_path):
    worse = json.loads(BASELINE.read_text())
    for row in worse["rows"]:
        if (row["who"], row["metric"]) == ("shardlight-zero3", "collectives"):
            row["value"] += 1
    (tmp_path / "new.json").write_text(json.dumps(worse))
    outcome = run_command(["bench", "diff", BASELINE, "new.json"], tmp_path)
    assert outcome.code == 0, outcome.output
    (line,) = [line for line in outcome.output.splitlines() if "shardlight-zero3" in line]
    assert line.split()[:4] == ["zero", "tiny", "shardlight-zero3", "collectives"]


@pytest.mark.long
def test_all_of_it_at_a_size_without_bars(tmp_path):
    """Every contender in processes of its own, under the Trainer as well."""
    result = zero.run(NANO, ["ddp", "fsdp2"], traces=tmp_path)
    names = {"single", "ddp", "fsdp2", *OURS, *(c.name for c in zero.TRAINED)}
    assert names == {row.who for row in result.rows if " rank " not in row.who}
    for who in names:
        for metric in ("step_ms", "startup_s", "python_calls", "cpu_ms"):
            assert result.value(who, metric) > 0, (who, metric)
        if os.path.exists("/proc/self/smaps_rollup"):
            assert result.value(who, "peak_memory_bytes") >= result.value(who, "steady_memory_bytes")
    traced = [*OURS, *(c.name for c in zero.TRAINED if c.ours)]
    assert {path.name for path in tmp_path.iterdir()} == {f"{who}-rank{rank}.json" for who in traced for rank in (0, 1)}
    for who in names - {"single"}:
        assert result.value(who, "loss_difference") < 1e-5, who
    assert all(result.value(c.name, "step_ratio") > 0 for c in zero.TRAINED)
