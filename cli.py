"""The `shardlight` command: parses, prints, and calls the framework. PyTorch is imported only by what needs it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from shardlight.commands.bench import bench
from shardlight.commands.check import ConfigPath, Overrides, Trust, check, schema, tell_changes
from shardlight.commands.checkpoint import checkpoint, export
from shardlight.commands.init import init
from shardlight.commands.migrate import migrate
from shardlight.commands.output import MISTAKES, Debug, fail, make_folder_of, short_errors, wide_console
from shardlight.commands.schedule import schedule

if TYPE_CHECKING:
    from shardlight.framework.config import Loaded
    from shardlight.framework.world import World

app = typer.Typer(
    help="Distributed training on PyTorch and Lightning: pick a sharding strategy in one YAML line.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


app.add_typer(checkpoint, name="checkpoint")
app.add_typer(bench, name="bench")

ops = typer.Typer(help="Show which compiled ops are used, and why; build those for CUDA.", rich_markup_mode=None)
app.add_typer(ops, name="ops")

Print = Annotated[bool, typer.Option("--print", help="Print the resolved config with each value's origin, and stop.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Start everything, stop before the first step.")]
Force = Annotated[
    bool, typer.Option("--force", help="Start even where state cannot fit into the memory or the disk that are there.")
]
Checkpoint = Annotated[
    str | None, typer.Option("--ckpt", metavar="PATH", help="Checkpoint to go on from; auto: the newest whole one.")
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="NAME", help="Leave this tensor of it out ('head.*': all below); repeatable."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardlight {version('shardlight')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


@app.command()
def fit(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    show: Print = False,
    dry_run: DryRun = False,
    force: Force = False,
    trust: Trust = None,
    debug: Debug = False,
    ckpt: Checkpoint = None,
    skip: Skip = None,
) -> None:
    """Train a module."""
    overrides = [*(overrides or []), *([f"resume.skip={json.dumps(skip)}"] if skip else [])]
    _run("fit", config, overrides, show=show, dry_run=dry_run, force=force, trust=trust, debug=debug, ckpt=ckpt)


@app.command()
def validate(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    show: Print = False,
    trust: Trust = None,
    debug: Debug = False,
    ckpt: Checkpoint = None,
) -> None:
    """Run the validation data through a checkpoint."""
    _run("validate", config, overrides, show=show, dry_run=False, trust=trust, debug=debug, ckpt=ckpt)


@app.command()
def test(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    show: Print = False,
    trust: Trust = None,
    debug: Debug = False,
    ckpt: Checkpoint = None,
) -> None:
    """Run the test data through a checkpoint."""
    _run("test", config, overrides, show=show, dry_run=False, trust=trust, debug=debug, ckpt=ckpt)


@app.command()
def predict(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    show: Print = False,
    trust: Trust = None,
    debug: Debug = False,
    ckpt: Checkpoint = None,
) -> None:
    """Write the predictions of a checkpoint to predictions.safetensors in the run folder."""
    _run("predict", config, overrides, show=show, dry_run=False, trust=trust, debug=debug, ckpt=ckpt)


app.command()(init)
app.command()(check)
app.command()(schema)
app.command()(export)
app.command()(migrate)
app.command()(schedule)


@ops.callback(invoke_without_command=True)
def show_ops(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the table there.")] = None,
    debug: Debug = False,
) -> None:
    """Show which compiled ops are used, and why."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table
    from shardlight.ops import registry

    with short_errors(debug):
        rows = registry.table()
    table = Table(box=None, pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    wide_console().print(table)
    make_folder_of(out)
    if out is not None:
        out.write_text(json.dumps({"ops": rows}, indent=1) + "\n")


@ops.command("build")
def build_ops(
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", metavar="SM", help="sm_80,sm_90 (the default), ..."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Build the CUDA library with nvcc, ahead of time."""
    from shardlight.ops.build import ARCHITECTURES, build_cuda

    wanted = [name.strip() for given in arch or ARCHITECTURES for name in given.split(",")]
    with short_errors(debug):
        path = build_cuda(wanted)
    typer.echo(f"{path}: built for {', '.join(wanted)}")


def _run(
    verb: str,
    config: str,
    overrides: list[str] | None,
    *,
    show: bool,
    dry_run: bool,
    trust: list[str] | None,
    debug: bool,
    ckpt: str | None,
    force: bool = False,
) -> None:
    started = time.time()
    given = [*(overrides or []), *([] if ckpt is None else [f"resume={json.dumps(ckpt)}"])]
    if "SHARDLIGHT_REPORTS" in os.environ:
        _as_worker(verb, config, given, trust or [], dry_run, force)
        return
    with short_errors(debug):
        from shardlight.framework.config import load, to_dict
        from shardlight.framework.show import dump
        from shardlight.ops import registry

        registry.check()
        if not show and all(os.environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID")):
            tell_changes(config)
        loaded = load(config, given, trust or [], verb=verb)
        if show:
            typer.echo(dump(to_dict(loaded.config), loaded.origin), nl=False)
            return
        # Not before: importing torch takes seconds, and a fault of the config is there at once.
        from shardlight.framework.world import check_devices, check_world, find_world

        check_devices(loaded)
        world = find_world(os.environ)
        if world is not None:
            check_world(world, loaded.config.trainer)
        elif loaded.config.trainer.num_nodes > 1:
            nodes = loaded.config.trainer.num_nodes
            fail(f"LaunchError: trainer.num_nodes is {nodes}: start the processes on each node with torchrun or srun.")
        if world is None and loaded.config.trainer.devices > 1:
            code = _supervise(loaded, verb, started, dry_run=dry_run, debug=debug)
        else:
            code = _here(loaded, verb, world, started, dry_run=dry_run, force=force)
    if code:
        raise typer.Exit(code)


@contextlib.contextmanager
def _run_dir(loaded: "Loaded", dry_run: bool) -> Iterator[Path]:
    """The folder of this run; a dry run has one in the temporary folder, removed at its end."""
    from shardlight.framework.assemble import make_run_dir
    from shardlight.framework.resume import hold

    if not dry_run:
        made = make_run_dir(loaded.config)
        with hold(made):
            yield made
        return
    made = Path(tempfile.mkdtemp(prefix="shardlight-dry-run-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _echo(lines: Sequence[str]) -> None:
    for line in lines:
        typer.echo(line)


def _last_line(run_dir: Path, dry_run: bool) -> None:
    typer.echo("Dry run: everything is ready for the first step." if dry_run else f"Run folder: {run_dir}")


def _supervise(loaded: "Loaded", verb: str, started: float, *, dry_run: bool, debug: bool) -> int:
    """Starts this command again as each of the local workers."""
    from shardlight.framework import resume
    from shardlight.framework.launch import run_workers
    from shardlight.strategies import errors

    known = vars(errors).values()
    ours = [item.__name__ for item in known if isinstance(item, type) and issubclass(item, errors.ShardlightError)]
    terse = () if debug else ("ConfigError", "PredictionError", *MISTAKES, *ours)
    # -P: the working directory is not on sys.path, as under the console script.
    flags = subprocess._args_from_interpreter_flags()
    command = [sys.executable, *flags, "-P", "-m", "shardlight.cli", *sys.argv[1:]]
    choice = resume.choose(loaded.config, verb)
    _echo(choice.notes)
    with _run_dir(loaded, dry_run) as run_dir:
        env = {**os.environ, "SHARDLIGHT_RUN_DIR": str(run_dir), "SHARDLIGHT_STARTED": repr(started)}
        env[resume.VARIABLE] = json.dumps(choice.paths)
        devices = loaded.config.trainer.devices
        logs = None if dry_run else run_dir / "logs"
        code = run_workers(command, devices, env=env, log_dir=logs, expect_done=True, terse=terse)
        sys.stdout.flush()
        if code == 0 or not dry_run:
            _last_line(run_dir, dry_run)
    return code


def _here(loaded: "Loaded", verb: str, world: "World | None", started: float, *, dry_run: bool, force: bool) -> int:
    """Runs in this process: the only one, or one of those that torchrun or SLURM started."""
    from shardlight.framework.assemble import quiet, run_rank
    from shardlight.framework.resume import choose
    from shardlight.framework.world import adopt_slurm

    quiet()
    choice = choose(loaded.config, verb)
    if world is not None and world.launcher == "SLURM":
        adopt_slurm(os.environ, loaded.config.trainer.devices)
    first = world is None or world.rank == 0
    config = loaded.config
    with contextlib.ExitStack() as stack:
        if first:
            _echo(choice.notes)
            run_dir = stack.enter_context(_run_dir(loaded, dry_run))
        else:
            # Only rank 0 writes into the run folder by itself; where all do, they are told its name by rank 0.
            run_dir = Path(config.run.dir) / str(config.run.name)
        how = {"launched": world is not None, "dry_run": dry_run, "force": force}
        run_rank(config, verb, run_dir, **how, started=started, resume=choice)
        if first:
            _last_line(run_dir, dry_run)
    return 0


def _as_worker(verb: str, config: str, overrides: list[str], trust: list[str], dry_run: bool, force: bool) -> None:
    """One rank under our supervisor: a failure is left as a report, which the supervisor shows."""
    from shardlight.framework.report import leave_well, mark_done, write_report

    try:
        from shardlight.framework.assemble import quiet, run_rank
        from shardlight.framework.config import load
        from shardlight.framework.resume import choose

        quiet()
        loaded = load(config, overrides, trust, verb=verb)
        choice = choose(loaded.config, verb, os.environ)
        run_dir, started = Path(os.environ["SHARDLIGHT_RUN_DIR"]), float(os.environ["SHARDLIGHT_STARTED"])
        how = {"launched": True, "dry_run": dry_run, "force": force}
        run_rank(loaded.config, verb, run_dir, **how, started=started, resume=choice)
    except BaseException as error:
        write_report(error)
        if os.environ["RANK"] != "0":
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: threads and process groups of a failed run may never come to an end.
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1)
    mark_done()
    leave_well()


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
