"""`shardlight bench`: the benchmarks, and the comparison of two results."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from shardlight.commands.output import USER_FAULT, fail, make_folder_of, wide_console

if TYPE_CHECKING:
    from shardlight.framework.bench.results import Result
    from shardlight.framework.bench.rotation import Say

bench = typer.Typer(
    help="Measure against the peers, and hold to the bars.", no_args_is_help=True, rich_markup_mode=None
)

Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with 3 if a bar falls short, 4 if a named peer is absent.")
]


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
        fail(f"--size {name}: no such size.{suggest(name, zero.SIZES)}")
    peers = _names(against)
    if profile is not None:
        try:
            profile.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--profile {profile}: cannot make this folder ({error.strerror}).")

    def run(say: "Say") -> "Result":
        missing = zero.choose(peers, quick)[1] if strict and peers else []
        if missing:
            fail(f"--strict: {', '.join(missing)} is not installed: install it, or leave it out of --against.", 4)
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


@bench.command("checkpoint")
def bench_checkpoint(
    size: Annotated[str | None, typer.Option("--size", help="tiny, small (default) or medium.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="A,B", help="torch.save, dcp; default: both.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="On the disk to measure; default: the working directory."),
    ] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A look within a minute: tiny, few rounds.")] = False,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")] = None,
    strict: Strict = False,
) -> None:
    """Saving and loading beside torch.save, torch's DCP and plain writes to the same disk."""
    from shardlight.framework.bench import checkpoint
    from shardlight.framework.faults import suggest

    name = size or ("tiny" if quick else "small")
    if name not in checkpoint.SIZES:
        fail(f"--size {name}: no such size.{suggest(name, checkpoint.SIZES)}")
    if folder is not None and not folder.is_dir():
        fail(f"--folder {folder}: there is no such folder.")
    peers, chosen = _names(against), checkpoint.SIZES[name]
    _measure(
        lambda say: checkpoint.run(chosen, peers, quick, folder, say), "tables_of_checkpoint", out, strict, peers or []
    )


@bench.command("infinity")
def bench_infinity(
    size: Annotated[str | None, typer.Option("--size", help="tiny, small (default) or medium.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="A,B", help="ddp, deepspeed; default: both.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="On the disk to measure; default: the working directory."),
    ] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A look within a minute: tiny, few rounds.")] = False,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")] = None,
    strict: Strict = False,
) -> None:
    """Training what does not fit into memory, and the speed of state on disk beside DeepSpeed's."""
    from shardlight.framework.bench import infinity
    from shardlight.framework.faults import suggest

    name = size or ("tiny" if quick else "small")
    if name not in infinity.SIZES:
        fail(f"--size {name}: no such size.{suggest(name, infinity.SIZES)}")
    if folder is not None and not folder.is_dir():
        fail(f"--folder {folder}: there is no such folder.")
    peers, chosen = _names(against), infinity.SIZES[name]

    def run(say: "Say") -> "Result":
        missing = infinity.choose(peers)[1] if strict and peers else []
        if missing:
            fail(f"--strict: {', '.join(missing)} is not installed: install it, or leave it out of --against.", 4)
        return infinity.run(chosen, peers, quick, folder, say)

    _measure(run, "tables_of_infinity", out, strict, peers or [])


@bench.command("pipeline")
def bench_pipeline(
    size: Annotated[str | None, typer.Option("--size", help="tiny, small (default) or medium.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="A,B", help="torch, deepspeed; default: both.")
    ] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A look within a minute: tiny, against torch.")] = False,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures there.")] = None,
    strict: Strict = False,
) -> None:
    """What schedules leave idle, and training in two stages beside torch's and DeepSpeed's."""
    from shardlight.framework.bench import pipeline
    from shardlight.framework.faults import suggest

    name = size or ("tiny" if quick else "small")
    if name not in pipeline.SIZES:
        fail(f"--size {name}: no such size.{suggest(name, pipeline.SIZES)}")
    peers = _names(against)

    def run(say: "Say") -> "Result":
        missing = pipeline.choose(peers, quick)[1] if strict and peers else []
        if missing:
            fail(f"--strict: {', '.join(missing)} is not installed: install it, or leave it out of --against.", 4)
        return pipeline.run(pipeline.SIZES[name], peers, quick, say)

    _measure(run, "tables_of_pipeline", out, strict, peers or [])


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
    make_folder_of(out)
    try:
        result = run(lambda text: progress.print(text, style="dim", highlight=False, soft_wrap=True))
    except BenchError as error:
        fail(str(error), USER_FAULT if isinstance(error, BenchRequestError) else 1)
    console = wide_console()
    for table in getattr(tables, shown)(result):
        console.print(table)
    if out is not None:
        result.write(out)
    if after:
        console.print(after)
    if strict:
        raise typer.Exit(results.exit_code(result, result.missing if named is None else named))


@bench.command("diff")
def bench_diff(
    old: Annotated[Path, typer.Argument(metavar="OLD.json", help="What `--json` wrote.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json", help="What it wrote later.")],
) -> None:
    """Name what got worse between two results."""
    from shardlight.framework.bench import diff, results, tables

    try:
        found = diff.compare(results.read(old), results.read(new))
    except OSError as error:
        fail(f"{error.filename}: cannot be read ({error.strerror}).")
    except ValueError as error:
        fail(str(error))
    console = wide_console()
    for table in tables.comparison(found):
        console.print(table)
