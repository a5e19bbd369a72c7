"""`shardlight schedule`: a pipeline's schedule as a drawing, with its bubble and its memory, before anything runs."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from shardlight.commands.check import Overrides, Trust, split_of
from shardlight.commands.output import USER_FAULT, Debug, count, fail, make_folder_of, short_errors, wide_console

if TYPE_CHECKING:
    from shardlight.strategies.engine.pipeline.choose import Choice
    from shardlight.strategies.engine.pipeline.costs import Costs, ModelCosts
    from shardlight.strategies.engine.pipeline.simulate import Simulation

_BLOCKS = 12
"""Equal blocks per rank where none are given: as many as any number of stages per rank divides that `auto` tries."""


class _Asked(NamedTuple):
    """What to draw; as in a config."""

    schedule: str
    stages: int
    micro_batches: int
    chunks: int | None
    balance: tuple[int, ...]


def schedule(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="The YAML file of the run.")] = None,
    overrides: Overrides = None,
    *,
    name: Annotated[
        str, typer.Option("--schedule", metavar="NAME", help="Without CONFIG: its name, or auto.")
    ] = "auto",
    stages: Annotated[int | None, typer.Option("--stages", help="Without CONFIG: ranks of the pipeline.")] = None,
    micro_batches: Annotated[int | None, typer.Option("--micro-batches", help="Without CONFIG: per batch.")] = None,
    chunks: Annotated[int | None, typer.Option("--chunks", help="Without CONFIG: stages per rank.")] = None,
    costs: Annotated[
        str,
        typer.Option("--costs", metavar="F,B,W[,M]", help="Time of forward, gradient of inputs, of weights; message."),
    ] = "1,1,1",
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Also draw a picture there.")] = None,
    trust: Trust = None,
    debug: Debug = False,
) -> None:
    """Draw a pipeline schedule, its bubble and its memory."""
    with short_errors(debug, USER_FAULT):
        times = _times(costs)
        if config is not None:
            if any(given is not None for given in (stages, micro_batches, chunks)) or name != "auto":
                fail("--schedule, --stages, --micro-batches, --chunks: not beside CONFIG, which says them.")
            asked = _of_config(config, overrides or [], trust or [])
        elif stages is None or micro_batches is None:
            fail("Name a CONFIG, or --stages and --micro-batches.")
        else:
            asked = _Asked(name, stages, micro_batches, chunks, ())
        _draw(asked, times, png)


def _times(text: str) -> tuple[float, float, float, float]:
    """Returns the times of forward, of both parts of a backward, and of a message."""
    try:
        given = [float(part) for part in text.split(",")]
    except ValueError:
        given = []
    if len(given) not in (3, 4) or not all(0 <= value < float("inf") for value in given) or not sum(given[:3]):
        fail(f"--costs {text}: not three or four times, such as 1,1.2,0.8 or 1,1,1,0.1.")
    forward, inputs, weights, message = (*given, 0.0)[:4]
    return forward, inputs, weights, message


def _of_config(config: str, overrides: list[str], trust: list[str]) -> _Asked:
    """Returns what the strategy of a config says of its pipeline."""
    from shardlight.framework.config import load
    from shardlight.strategies.options import StagedOptions

    loaded = load(config, overrides, trust, imports=False).config
    name, options = loaded.strategy.name, loaded.strategy.options
    if not isinstance(options, StagedOptions) or (name == "mesh" and options.pipeline == 1):
        what = f"strategy is {name}, which has no pipeline schedule"
        fail(f"{config}: {what}. It is for strategy pipeline, and for mesh with stages.")
    if not options.balance:
        typer.echo("strategy.balance is not set: drawn with equal stages. A run prints which blocks each stage gets.\n")
    return _Asked(options.schedule, options.axes["pipeline"], split_of(loaded), options.chunks, options.balance)


def _draw(asked: _Asked, times: tuple[float, float, float, float], png: Path | None) -> None:
    """Prints the drawing and what comes of it."""
    from shardlight.strategies.engine.pipeline.draw import draw_picture, draw_text, legend
    from shardlight.strategies.engine.pipeline.schedules import build
    from shardlight.strategies.engine.pipeline.simulate import simulate

    if asked.schedule == "auto":
        run = _chosen(asked, times)
    else:
        built = build(asked.schedule, asked.stages, asked.micro_batches, asked.chunks)
        run = simulate(built, _stage_costs(asked, built.placement, times))
    plan = run.schedule
    per_rank = plan.stages // plan.ranks
    several = f", {per_rank} stages per rank" if per_rank > 1 else ""
    title = f"{plan.name}: {count(plan.ranks, 'rank')}{several}, {count(plan.micro_batches, 'micro-batch', 'es')}"
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    typer.echo(f"{title}\n\n{draw_text(run, width)}\n\n{legend(plan)}\n")
    typer.echo(f"time {run.makespan:.4g}, of which {run.bubble:.1%} is bubble")
    _print_ranks(run)
    if png is not None:
        make_folder_of(png, "--png")
        try:
            draw_picture(run, png, f"{title}; {run.bubble:.1%} bubble")
        except OSError as error:
            fail(f"--png {png}: cannot be written ({error.strerror}).")
        typer.echo(f"{png}: drawn")


def _model(asked: _Asked, times: tuple[float, float, float, float]) -> "ModelCosts":
    """Returns a model of equal blocks that costs `times` on each rank, where these have equally many."""
    from shardlight.strategies.engine.pipeline.costs import ModelCosts, PartCosts

    blocks = sum(asked.balance) or _BLOCKS * asked.stages * (asked.chunks or 1)
    share = asked.stages / blocks
    forward, inputs, weights, message = times
    part = PartCosts(
        forward=forward * share, backward_input=inputs * share, backward_weight=weights * share, activation_bytes=share
    )
    return ModelCosts(blocks=(part,) * blocks, communication=message)


def _stage_costs(asked: _Asked, placement: tuple[int, ...], times: tuple[float, float, float, float]) -> "Costs":
    from shardlight.strategies.engine.pipeline.balance import check_balance
    from shardlight.strategies.engine.pipeline.costs import Costs

    if asked.balance:
        counts = check_balance(asked.balance, sum(asked.balance), placement)
        return _model(asked, times).of_stages(counts)
    per_rank = len(placement) // asked.stages
    forward, inputs, weights, message = times
    parts = (time / per_rank for time in (forward, inputs, weights))
    return Costs.uniform(len(placement), *parts, communication=message, activation_bytes=1 / per_rank)


def _chosen(asked: _Asked, times: tuple[float, float, float, float]) -> "Simulation":
    """Compares all schedules, and returns the one that `auto` takes by these costs."""
    from shardlight.strategies.engine.pipeline.choose import choose
    from shardlight.strategies.engine.pipeline.schedules import build

    build("gpipe", asked.stages, asked.micro_batches)  # says what is wrong with these two before costs are made of them
    choice = choose(
        asked.stages, asked.micro_batches, _model(asked, times), chunks=asked.chunks, counts=asked.balance or None
    )
    _print_candidates(choice)
    return choice.taken.simulation


def _print_candidates(choice: "Choice") -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("schedule", "time", "bubble", "activations"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for each in choice.candidates:
        run = each.simulation
        table.add_row(str(each), f"{run.makespan:.4g}", f"{run.bubble:.1%}", f"{each.peak_bytes:.4g}")
    wide_console().print(table)
    typer.echo("auto, by these costs and without a limit of memory (a run goes by its own):")


def _print_ranks(run: "Simulation") -> None:
    """Prints what each rank does and holds; activations count as micro-batches on all of a rank's stages."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "stages", "busy", "bubble", "activations at most", "messages waiting at most"):
        table.add_column(heading, justify="left" if heading == "stages" else "right")
    for rank in range(run.schedule.ranks):
        table.add_row(
            str(rank),
            ", ".join(map(str, run.schedule.stages_of(rank))),
            f"{run.busy[rank]:.4g}",
            f"{run.bubbles[rank]:.1%}",
            f"{run.peak_bytes[rank]:.4g} micro-batches",
            str(run.peak_messages[rank]),
        )
    wide_console().print(table)
