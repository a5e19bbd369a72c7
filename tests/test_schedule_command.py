"""`shardlight schedule`: what is drawn is the schedule, and what cannot be is said."""

import struct
import subprocess
import sys

import pytest
from shardlight import cli
from shardlight.strategies.engine.pipeline.costs import Costs
from shardlight.strategies.engine.pipeline.draw import LETTERS, draw_text
from shardlight.strategies.engine.pipeline.schedules import SCHEDULES, build
from shardlight.strategies.engine.pipeline.simulate import simulate
from typer.testing import CliRunner


def command(*arguments):
    result = CliRunner().invoke(cli.app, ["schedule", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def asked(name, stages, micro_batches, *more):
    return command("--schedule", name, "--stages", stages, "--micro-batches", micro_batches, *more)


def test_the_drawing_has_a_row_per_rank_and_time_to_the_right():
    assert draw_text(simulate(build("1f1b", 2, 3))).splitlines() == [
        "rank 0 F0 F1       B0--- F2 B1---    B2---",
        "rank 1    F0 B0--- F1 B1--- F2 B2---",
    ]
    assert draw_text(simulate(build("zb_h1", 2, 2))).splitlines() == [
        "rank 0 F0 F1    B0 W0 B1 W1",
        "rank 1    F0 B0 F1 B1 W0 W1",
    ]
    assert draw_text(simulate(build("zbv", 2, 2))).splitlines() == [
        "rank 0 F0a F1a     F0b B0b W0b F1b B1b W1b B0a W0a     B1a W1a",
        "rank 1     F0a F0b F1a F1b B0b W0b B0a W0a B1b W1b B1a W1a",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("costs", [(1, 1, 1, 0), (1, 1.37, 0.61, 0.25), (1, 40, 0, 3)])
def test_every_action_begins_where_its_time_is_and_none_covers_another(name, costs):
    """Columns are read back: the order and the place of each label are those of the simulation."""
    schedule = build(name, 3, 12)
    run = simulate(schedule, Costs.uniform(schedule.stages, *costs))
    lines = [line.removeprefix(f"rank {rank} ") for rank, line in enumerate(draw_text(run).splitlines())]
    scale = max(map(len, lines)) / run.makespan
    for line, row in zip(lines, run.timeline, strict=True):
        row = [timed for timed in row if timed.end > timed.start]
        assert len(line) <= round(row[-1].end * scale) + 1
        if costs[1] == 40:
            continue  # too long beside the others: those are drawn without their numbers
        starts = [at for at, mark in enumerate(line) if mark in "FBW"]
        assert [line[at] for at in starts] == [LETTERS[timed.action.kind] for timed in row]
        numbers = [int("".join(c for c in line[at + 1 :].split()[0].rstrip("-") if c.isdigit())) for at in starts]
        assert numbers == [timed.action.micro_batch for timed in row]
        for at, timed in zip(starts, row, strict=True):
            assert abs(at - timed.start * scale) <= 0.02 * len(line) + 1


def test_a_long_drawing_goes_on_below():
    run = simulate(build("1f1b", 3, 30))
    whole, wrapped = draw_text(run).splitlines(), draw_text(run, 60).splitlines()
    assert max(map(len, wrapped)) <= 60 and len(wrapped) % 4 == 3
    for rank in range(3):
        parts = [line[len("rank 0 ") :].ljust(53) for line in wrapped[rank::4]]
        assert "".join(parts).rstrip() == whole[rank].removeprefix(f"rank {rank} ").rstrip()


def test_bubble_and_activations_are_printed():
    code, out, _ = asked("1f1b", 4, 8)
    lines = out.splitlines()
    assert code == 0 and lines[0] == "1f1b: 4 ranks, 8 micro-batches"
    assert lines[2].startswith("rank 0 F0 F1 F2 F3") and lines[5].split()[:5] == ["rank", "3", "F0", "B0---", "F1"]
    assert "time 33, of which 27.3% is bubble" in lines
    assert [line.split()[:5] for line in lines[-4:]] == [[str(r), str(r), "24", "27.3%", str(4 - r)] for r in range(4)]
    code, out, _ = asked("interleaved_1f1b", 2, 4, "--chunks", 3)
    assert out.splitlines()[0] == "interleaved_1f1b: 2 ranks, 3 stages per rank, 4 micro-batches"
    assert out.splitlines()[-1].split()[:4] == ["1", "1,", "3,", "5"], "stages of rank 1"


def test_costs_are_those_of_a_rank_whatever_its_stages():
    for name, bubble in (("1f1b", 3 * 3), ("interleaved_1f1b", 3 * 3 / 2)):
        _, out, _ = asked(name, 4, 8)
        assert f"time {24 + bubble:.4g}, " in out
    _, out, _ = asked("gpipe", 3, 1, "--costs", "1,2,3,0.5")
    assert "time 20, of which" in out, "three times 6, and four messages"


def test_auto_compares_all_and_draws_the_fastest():
    code, out, _ = command("--stages", 4, "--micro-batches", 8)
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["schedule", "time", "bubble", "activations"]
    assert lines[1].split() == ["zbv", "with", "2", "stages", "per", "rank", "25.5", "5.9%", "4"]
    assert {line.split()[0] for line in lines[1:8]} == set(SCHEDULES)
    assert lines[9] == "zbv: 4 ranks, 2 stages per rank, 8 micro-batches"
    _, out, _ = command("--stages", 2, "--micro-batches", 4, "--chunks", 3)
    assert "interleaved_1f1b: 2 ranks, 3 stages per rank, 4 micro-batches" in out.splitlines()


def test_the_picture_is_a_png_in_a_folder_that_is_made(tmp_path):
    out = tmp_path / "made" / "1f1b.png"
    code, printed, _ = asked("zb_h1", 2, 4, "--png", out)
    assert code == 0 and printed.splitlines()[-1] == f"{out}: drawn"
    data = out.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) > (800, 200)
    assert [path.name for path in out.parent.iterdir()] == ["1f1b.png"], "nothing is left beside it"
    code, _, said = asked("zb_h1", 2, 4, "--png", tmp_path / "made")
    assert code == 2 and said == f"--png {tmp_path / 'made'}: cannot be written (Is a directory).\n"


@pytest.mark.parametrize(
    "arguments,said",
    [
        ([], "Name a CONFIG, or --stages and --micro-batches."),
        (["--stages", 2], "Name a CONFIG, or --stages and --micro-batches."),
        (["--stages", 2, "--micro-batches", 0], "ScheduleError: schedule gpipe: micro_batches is 0. Set micro_batches to 1 or more."),
        (["--schedule", "1fb1", "--stages", 2, "--micro-batches", 2], "ScheduleError: schedule '1fb1' is not known. Did you mean '1f1b'?"),
        (["--stages", 2, "--micro-batches", 2, "--costs", "1,2"], "--costs 1,2: not three or four times, such as 1,1.2,0.8 or 1,1,1,0.1."),
        (["--stages", 2, "--micro-batches", 2, "--costs", "1,x,2"], "--costs 1,x,2: not three or four times, such as 1,1.2,0.8 or 1,1,1,0.1."),
        (["--stages", 2, "--micro-batches", 2, "--costs", "0,0,0"], "--costs 0,0,0: not three or four times, such as 1,1.2,0.8 or 1,1,1,0.1."),
        (["c.yaml", "--stages", 2], "--schedule, --stages, --micro-batches, --chunks: not beside CONFIG, which says them."),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_said(arguments, said):
    assert command(*arguments) == (2, "", f"{said}\n")


def test_it_answers_without_torch():
    script = "import sys; from shardlight.cli import main\ntry: main()\nfinally: print([m for m in ('torch', 'lightning', 'omegaconf', 'matplotlib') if m in sys.modules])"
    arguments = ["schedule", "--schedule", "zbv", "--stages", "2", "--micro-batches", "4"]
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.splitlines()[-1] == "[]", run.stdout


MODULE = """
import lightning as L

class Model(L.LightningModule):
    def training_step(self, batch, batch_idx): ...
    def configure_optimizers(self): ...

class Data(L.LightningDataModule):
    def __init__(self, batch_size: int) -> None: ...
    def train_dataloader(self): ...
"""


def config_with(folder, strategy, batch_size=8):
    (folder / "mine.py").write_text(MODULE)
    config = folder / "config.yaml"
    config.write_text(
        f"module: {{class: mine.Model}}\ndata: {{class: mine.Data, batch_size: {batch_size}}}\n"
        f"trainer: {{max_steps: 1, devices: 4}}\nstrategy: {strategy}\n"
    )
    return config


def test_a_config_without_a_pipeline_has_no_schedule(tmp_path):
    config = config_with(tmp_path, "zero2")
    said = f"{config}: strategy is zero2, which has no pipeline schedule. It is for strategy pipeline, and for mesh with stages.\n"
    assert command(config) == (2, "", said)


@pytest.mark.parametrize(
    ("options", "more", "head"),
    [
        ("", [], "1f1b: 2 ranks, 4 micro-batches"),
        ("", ["data.batch_size=3"], "1f1b: 2 ranks, 3 micro-batches"),
        (", stages: 4, micro_batches: 6, schedule: zb_h1", [], "zb_h1: 4 ranks, 6 micro-batches"),
        (", schedule: interleaved_1f1b", ["strategy.chunks=3"],
         "interleaved_1f1b: 2 ranks, 3 stages per rank, 4 micro-batches"),
        (", schedule: auto, stages: 4, micro_batches: 8", [], "zbv: 4 ranks, 2 stages per rank, 8 micro-batches"),
    ],
)  # fmt: skip
def test_a_config_says_what_is_drawn(tmp_path, options, more, head):
    code, out, err = command(config_with(tmp_path, f"{{name: pipeline{options}}}"), *more)
    assert (code, err) == (0, "") and head in out.splitlines()
    assert out.startswith("strategy.balance is not set: drawn with equal stages.")


def test_a_balance_of_the_config_is_drawn(tmp_path):
    code, out, _ = command(config_with(tmp_path, "{name: pipeline, balance: [3, 1]}"))
    assert code == 0 and out.startswith("1f1b: 2 ranks, 4 micro-batches")
    busy = [line.split()[2] for line in out.splitlines() if line.split()[:2] in (["0", "0"], ["1", "1"])]
    assert busy == ["18", "6"], "a rank with three blocks of four works three times as long"
