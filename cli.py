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
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from shardlight.framework.bench.results import Result
    from shardlight.framework.bench.rotation import Say
    from shardlight.framework.config import Loaded
    from shardlight.framework.world import World

USER_FAULT = 2
"""Exit code for a fault in the config or in how the command was called."""

app = typer.Typer(
    help="Distributed training on PyTorch and Lightning: pick a sharding strategy in one YAML line.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

bench = typer.Typer(
    help="Measure against the peers, and hold to the bars.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench, name="bench")

ops = typer.Typer(help="Show which compiled ops are used, and why; build those for CUDA.", rich_markup_mode=None)
app.add_typer(ops, name="ops")

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Values that win over the file.")
]
Print = Annotated[bool, typer.Option("--print", help="Print the resolved config with each value's origin, and stop.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Start everything, stop before the first step.")]
Trust = Annotated[
    list[str] | None, typer.Option("--trust", metavar="PKG", help="Also take classes from this package; repeatable.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with 3 if a bar falls short, 4 if a named peer is absent.")
]
Checkpoint = Annotated[str | None, typer.Option("--ckpt", metavar="PATH", help="Checkpoint to start from.")]


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
    trust: Trust = None,
    debug: Debug = False,
    ckpt: Checkpoint = None,
) -> None:
    """Train a module."""
    _run("fit", config, overrides, show=show, dry_run=dry_run, trust=trust, debug=debug, ckpt=ckpt)


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


@app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="safetensors.")] = "safetensors",
    ema: Annotated[bool, typer.Option("--ema", help="The averages that ShardedEMA keeps, not the weights.")] = False,
    debug: Debug = False,
) -> None:
    """Write the bare module's weights of a checkpoint into one file."""
    if to != "safetensors":
        _fail(f"--to is {to!r}; the only format is safetensors.")
    with _short_errors(debug):
        from shardlight.strategies.checkpoint import export_safetensors

        count = export_safetensors(path, out, ema=ema)
    typer.echo(f"{out}: {count} tensors")


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

    with _short_errors(debug):
        rows = registry.table()
    table = Table(box=None, pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    _wide_console().print(table)
    _make_folder_of(out)
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
    with _short_errors(debug):
        path = build_cuda(wanted)
    typer.echo(f"{path}: built for {', '.join(wanted)}")


@bench.command("zero")
def bench_zero(
    size: Annotated[str | None, typer.Option("--size", help="tiny, small (default) or medium.")] = None,
    against: Annotated[str | None, typer.Option("--against", metavar="A,B", help="Peers; default: all.")] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A look within a minute: tiny, against DDP.")] = False,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="DIR", help="Also write traces of a few steps of ours there.")
    ] = None,
    strict: Strict = False,
) -> None:
    """The ZeRO strategies beside DDP, FSDP2 and DeepSpeed."""
    from shardlight.framework.bench import zero
    from shardlight.framework.faults import suggest

    name = size or ("tiny" if quick else "small")
    if name not in zero.SIZES:
        _fail(f"--size {name}: no such size.{suggest(name, zero.SIZES)}")
    peers = _names(against)
    if profile is not None:
        try:
            profile.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _fail(f"--profile {profile}: cannot make this folder ({error.strerror}).")

    def run(say: "Say") -> "Result":
        missing = zero.choose(peers, quick)[1] if strict and peers else []
        if missing:
            _fail(f"--strict: {', '.join(missing)} is not installed: install it, or leave it out of --against.", 4)
        return zero.run(zero.SIZES[name], peers, quick, say, traces=profile)

    seen = "(open them in ui.perfetto.dev or chrome://tracing)"
    after = "" if profile is None else f"Traces, one per contender and rank: {profile} {seen}"
    _measure(run, "tables", out, strict, peers or [], after)


@bench.command("collectives")
def bench_collectives(
    ranks: Annotated[int, typer.Option("--ranks", help="Processes, all on this host.")] = 2,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds, and no large buffer.")] = False,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if a bar falls short.")] = False,
) -> None:
    """The engine's collectives beside gloo's and beside plain copies."""
    from shardlight.framework.bench import collectives

    _measure(lambda say: collectives.run(ranks, quick, say), "tables_of_collectives", out, strict, [])


@bench.command("gpu")
def bench_gpu(
    device: Annotated[str, typer.Option("--device", help="cuda, or cpu: try the checks themselves.")] = "cuda",
    *,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 if a bar falls short, 4 if there is no GPU.")
    ] = False,
) -> None:
    """Every check that needs a GPU: ops, strategies, memory and speed on one of them."""
    from shardlight.framework.bench import gpu

    _measure(lambda say: gpu.run(device, say), "tables_of_gpu", out, strict, None)


@bench.command("ops")
def bench_ops(
    against: Annotated[str | None, typer.Option("--against", metavar="A,B", help="Peers; default: all.")] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few rounds, within a minute.")] = False,
    install: Annotated[bool, typer.Option("--install", help="Also build the package from its checkout.")] = False,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")] = None,
    strict: Strict = False,
) -> None:
    """Compiled optimizer steps beside PyTorch's, DeepSpeed's and plain traffic of memory."""
    from shardlight.framework.bench import ops

    peers = _names(against)
    _measure(lambda say: ops.run(peers, quick, install, say), "tables_of_ops", out, strict, peers or [])


def _names(against: str | None) -> list[str] | None:
    return None if against is None else [peer.strip() for peer in against.split(",") if peer.strip()]


def _measure(
    run: "Callable[[Say], Result]", shown: str, out: Path | None, strict: bool, named: list[str] | None, after: str = ""
) -> None:
    """Runs a benchmark and shows it; with `strict` the command's exit code says whether the bars hold.

    Args:
        shown: the function of tables.py that makes its tables.
        named: peers that have to be there; None: whatever is missing counts.
        after: a line below the tables.
    """
    from rich.console import Console
    from shardlight.framework.bench import results, tables
    from shardlight.framework.bench.crew import BenchError, BenchRequestError

    progress = Console(stderr=True)
    _make_folder_of(out)
    try:
        result = run(lambda text: progress.print(text, style="dim", highlight=False, soft_wrap=True))
    except BenchError as error:
        _fail(str(error), USER_FAULT if isinstance(error, BenchRequestError) else 1)
    console = _wide_console()
    for table in getattr(tables, shown)(result):
        console.print(table)
    if out is not None:
        result.write(out)
    if after:
        console.print(after)
    if strict:
        raise typer.Exit(results.exit_code(result, result.missing if named is None else named))


def _make_folder_of(out: Path | None) -> None:
    if out is None:
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"--json {out}: cannot make its folder ({error.strerror}).")


def _wide_console() -> "Console":
    """A console for tables: on a terminal as wide as that, in a file as wide as they are."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=200)


@bench.command("diff")
def bench_diff(
    old: Annotated[Path, typer.Argument(metavar="OLD.json", help="What `--json` wrote.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json", help="What it wrote later.")],
) -> None:
    """Name what got worse between two results."""
    from shardlight.framework.bench import diff, results, tables

    try:
        found = diff.compare(results.read(old), results.read(new))
    except (OSError, ValueError) as error:
        _fail(str(error))
    console = _wide_console()
    for table in tables.comparison(found):
        console.print(table)


def _fail(text: str, code: int = USER_FAULT) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def _short_errors(debug: bool) -> Iterator[None]:
    """Shows our own errors without a traceback: they say what to mend."""
    from shardlight.framework.faults import ConfigError
    from shardlight.ops.built import OpError
    from shardlight.strategies.errors import LaunchError, ShardlightError

    try:
        yield
    except (ConfigError, ShardlightError, OpError) as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, ConfigError):
            _fail(str(error))
        _fail(f"{type(error).__name__}: {error}", USER_FAULT if isinstance(error, LaunchError) else 1)


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
) -> None:
    started = time.time()
    given = [*(overrides or []), *([] if ckpt is None else [f"resume={json.dumps(ckpt)}"])]
    if "SHARDLIGHT_REPORTS" in os.environ:
        _as_worker(verb, config, given, trust or [], dry_run)
        return
    with _short_errors(debug):
        from shardlight.framework.config import load, to_dict
        from shardlight.framework.show import dump
        from shardlight.framework.world import check_world, find_world
        from shardlight.ops.registry import check

        check()
        loaded = load(config, given, trust or [], verb=verb)
        if show:
            typer.echo(dump(to_dict(loaded.config), loaded.origin), nl=False)
            return
        world = find_world(os.environ)
        if world is not None:
            check_world(world, loaded.config.trainer)
        elif loaded.config.trainer.num_nodes > 1:
            nodes = loaded.config.trainer.num_nodes
            _fail(f"LaunchError: trainer.num_nodes is {nodes}: start the processes on each node with torchrun or srun.")
        if world is None and loaded.config.trainer.devices > 1:
            code = _supervise(loaded, verb, started, dry_run=dry_run, debug=debug)
        else:
            code = _here(loaded, verb, world, started, dry_run=dry_run)
    if code:
        raise typer.Exit(code)


@contextlib.contextmanager
def _run_dir(loaded: "Loaded", dry_run: bool) -> Iterator[Path]:
    """The folder of this run; a dry run has one in the temporary folder, removed at its end."""
    from shardlight.framework.assemble import make_run_dir

    if not dry_run:
        yield make_run_dir(loaded.config)
        return
    made = Path(tempfile.mkdtemp(prefix="shardlight-dry-run-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _last_line(run_dir: Path, dry_run: bool) -> None:
    typer.echo("Dry run: everything is ready for the first step." if dry_run else f"Run folder: {run_dir}")


def _supervise(loaded: "Loaded", verb: str, started: float, *, dry_run: bool, debug: bool) -> int:
    """Starts this command again as each of the local workers."""
    from shardlight.framework.launch import run_workers
    from shardlight.strategies import errors

    known = vars(errors).values()
    ours = [item.__name__ for item in known if isinstance(item, type) and issubclass(item, errors.ShardlightError)]
    terse = () if debug else ("ConfigError", "PredictionError", *ours)
    # -P: the working directory is not on sys.path, as under the console script.
    flags = subprocess._args_from_interpreter_flags()
    command = [sys.executable, *flags, "-P", "-m", "shardlight.cli", *sys.argv[1:]]
    with _run_dir(loaded, dry_run) as run_dir:
        env = {**os.environ, "SHARDLIGHT_RUN_DIR": str(run_dir), "SHARDLIGHT_STARTED": repr(started)}
        devices = loaded.config.trainer.devices
        logs = None if dry_run else run_dir / "logs"
        code = run_workers(command, devices, env=env, log_dir=logs, expect_done=True, terse=terse)
        sys.stdout.flush()
        if code == 0 or not dry_run:
            _last_line(run_dir, dry_run)
    return code


def _here(loaded: "Loaded", verb: str, world: "World | None", started: float, *, dry_run: bool) -> int:
    """Runs in this process: the only one, or one of those that torchrun or SLURM started."""
    from shardlight.framework.assemble import quiet, run_rank
    from shardlight.framework.world import adopt_slurm

    quiet()
    if world is not None and world.launcher == "SLURM":
        adopt_slurm(os.environ, loaded.config.trainer.devices)
    first = world is None or world.rank == 0
    config = loaded.config
    with contextlib.ExitStack() as stack:
        if first:
            run_dir = stack.enter_context(_run_dir(loaded, dry_run))
        else:
            # Only rank 0 writes into the run folder by itself; where all do, they are told its name by rank 0.
            run_dir = Path(config.run.dir) / str(config.run.name)
        run_rank(config, verb, run_dir, launched=world is not None, dry_run=dry_run, started=started)
        if first:
            _last_line(run_dir, dry_run)
    return 0


def _as_worker(verb: str, config: str, overrides: list[str], trust: list[str], dry_run: bool) -> None:
    """One rank under our supervisor: a failure is left as a report, which the supervisor shows."""
    from shardlight.framework.report import leave_well, mark_done, write_report

    try:
        from shardlight.framework.assemble import quiet, run_rank
        from shardlight.framework.config import load

        quiet()
        loaded = load(config, overrides, trust, verb=verb)
        run_dir, started = Path(os.environ["SHARDLIGHT_RUN_DIR"]), float(os.environ["SHARDLIGHT_STARTED"])
        run_rank(loaded.config, verb, run_dir, launched=True, dry_run=dry_run, started=started)
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
