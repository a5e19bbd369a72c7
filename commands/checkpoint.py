"""`shardlight checkpoint show|verify|diff` and `shardlight export`: a checkpoint without ranks, GPU or model code."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from shardlight.commands.output import USER_FAULT, Debug, fail, short_errors, wide_console

if TYPE_CHECKING:
    from shardlight.strategies.checkpoint.diff import KindDiff
    from shardlight.strategies.checkpoint.exact import Difference
    from shardlight.strategies.checkpoint.verify import Verified

checkpoint = typer.Typer(help="Look into checkpoints: show, verify, diff.", no_args_is_help=True, rich_markup_mode=None)

_SHOWN = 30
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@checkpoint.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint.")],
    *,
    every: Annotated[bool, typer.Option("--all", help="Every tensor, not only the first ones.")] = False,
    limit: Annotated[int, typer.Option("--limit", help="How many tensors to list.", min=0)] = _SHOWN,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, with every tensor.")] = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint is and holds."""
    with short_errors(debug):
        from shardlight.strategies.checkpoint.show import describe, understood

        found = describe(path)
        with understood(path):
            lines = list(_what_it_is(found))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for line in lines:
        typer.echo(line)
    tensors = found["tensors"] if every else found["tensors"][:limit]
    rows = [
        (t["name"], "x".join(map(str, t["shape"])) or "1 value", t["dtype"], size(t["bytes"]), t["pieces"])
        for t in tensors
    ]
    if rows:
        _print_table(("tensor", "shape", "dtype", "bytes", "pieces"), rows)
    left = len(found["tensors"]) - len(tensors)
    if left:
        typer.echo(f"... and {left} more: --all")


def _what_it_is(found: dict[str, Any]) -> Iterable[str]:
    yield printable(found["path"])
    world, mesh = found["world_size"], {axis: n for axis, n in (found["mesh"] or {}).items() if n > 1}
    axes = f" ({' x '.join(f'{axis} {n}' for axis, n in mesh.items())})" if len(mesh) > 1 else ""
    ranks = f"{found['strategy'] or '?'} on {world} rank{'s' * (world != 1)}{axes}"
    yield printable(f"step {found['step']}, epoch {found['epoch']}, {ranks}, saved {found['saved_at']}")
    yield printable(", ".join(f"{name} {version}" for name, version in (found["versions"] or {}).items()))
    for number, o in enumerate(found["optimizers"]):
        kept = f" ({', '.join(o['keeps'])})" if o["keeps"] else ""
        groups = f"{o['groups']} group{'s' * (o['groups'] != 1)}"
        yield printable(
            f"optimizer {number}: {o['class'] or '?'}, {groups}, {o['parameters']} parameters, {o['with_state']} with "
            f"state{kept}"
        )
    if not found["optimizers"]:
        yield "no optimizer state: weights only"
    if found["window"]:
        yield "an accumulation window is open: its gradients are kept too"
    for model in found["models"]:
        adapters = f" with adapters {', '.join(model['adapters'])}" if model["adapters"] else ""
        yield printable(f"{model['class']} at '{model['prefix']}'{adapters}: export --to hf")
    parts = [f"{kind} {size(n)}" for kind, n in found["bytes"].items() if n]
    files = found["files"]
    yield f"{size(sum(f['bytes'] for f in files))} in {len(files)} file{'s' * (len(files) != 1)}: {', '.join(parts)}"
    if found["aliases"]:
        yield f"names of weights that share another's values: {len(found['aliases'])}"


@checkpoint.command()
def verify(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Checkpoints, or run folders.")],
    *,
    debug: Debug = False,
) -> None:
    """Compare every byte with its checksum; exit 1 if something is damaged or missing."""
    from shardlight.strategies.checkpoint.verify import find_checkpoints
    from shardlight.strategies.checkpoint.verify import verify as check

    broken = False
    for path in paths:
        with short_errors(debug):
            found = find_checkpoints(path)
        for folder in found:
            result = check(folder)
            broken = broken or bool(result.faults)
            _say_verified(result)
    if broken:
        raise typer.Exit(1)


def _say_verified(result: "Verified") -> None:
    if not result.faults:
        typer.echo(f"{printable(result.path)}: {size(result.nbytes)}, as it was saved")
    else:
        typer.echo(f"{printable(result.path)}: BROKEN")
    for fault in result.faults:
        typer.echo(f"  {printable(fault)}")
    if result.not_listed:
        typer.echo(f"  not a part of it: {printable(_some(result.not_listed))}")


@checkpoint.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    *,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare all state bit by bit; exit 1 if anything differs.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Name what differs between two checkpoints."""
    with short_errors(debug, USER_FAULT):
        from shardlight.strategies.checkpoint.diff import compare
        from shardlight.strategies.checkpoint.exact import compare_exactly
        from shardlight.strategies.checkpoint.lightning_file import open_checkpoint
        from shardlight.strategies.checkpoint.show import checkpoint_folder

        readers = [open_checkpoint(checkpoint_folder(path)) for path in (first, second)]
        if exact:
            _say_exactly(compare_exactly(*readers))
        else:
            steps = [f"step {r.content.get('step')} ({printable(r.path)})" for r in readers]
            _say_difference(compare(*readers), steps)


def _say_exactly(found: Sequence["Difference"]) -> None:
    if not found:
        typer.echo("the same")
        return
    for difference in found:
        typer.echo(printable(difference))
    raise typer.Exit(1)


def _say_difference(found: Sequence["KindDiff"], steps: Sequence[str]) -> None:
    typer.echo(f"A: {steps[0]}\nB: {steps[1]}")
    headings = ("", "equal", "differ", "largest difference", "only in A", "only in B", "other shape", "other dtype")
    _print_table(
        headings,
        [
            (d.kind, d.same, d.differing, f"{d.largest:.3g}" if d.differing else "", len(d.only_first),
             len(d.only_second), len(d.shapes), len(d.dtypes))
            for d in found
        ],
    )  # fmt: skip
    worst = [(name, f"{largest:.3g}") for d in found for largest, name in d.worst]
    if worst:
        _print_table(("differs most", "largest difference"), worst)
    for d in found:
        _list("only in A", d.only_first)
        _list("only in B", d.only_second)
        _list("other shape", [f"{n} {a} and {b}" for n, (a, b) in d.shapes.items()])
        _list("other dtype", [f"{n} {a} and {b}" for n, (a, b) in d.dtypes.items()])


def _list(what: str, names: Sequence[str]) -> None:
    if names:
        typer.echo(f"{what}: {printable(_some(names))}")


def export(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="OUT", help="The file or folder to write; default: named after PATH."),
    ] = None,
    *,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="safetensors, or hf: what from_pretrained opens.")
    ] = "safetensors",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16; default: as it is stored.")
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Several files of at most e.g. 5GB, with an index."),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The averages that ShardedEMA keeps, not the weights.")] = False,
    only: Annotated[str | None, typer.Option("--only", metavar="WHICH", help="trainable: without frozen ones.")] = None,
    debug: Debug = False,
) -> None:
    """Write the bare module's weights of a checkpoint."""
    if to not in ("safetensors", "hf"):
        fail(f"--to is {to!r}; the formats are safetensors and hf.")
    if dtype not in (None, "fp32", "bf16", "fp16"):
        fail(f"--dtype is {dtype!r}; choose from fp32, bf16, fp16, or leave it out for what is stored.")
    if only not in (None, "trainable"):
        fail(f"--only is {only!r}; the only choice is trainable.")
    limit = None if max_shard_size is None else _bytes(max_shard_size)
    name = path.resolve().name
    plain = to == "safetensors"
    target = out or Path(f"{name}.safetensors" if plain and limit is None else f"{name}-{to}")
    with short_errors(debug):
        from shardlight.strategies.checkpoint.export import export as write

        made = write(
            path, target, to="safetensors" if plain else "hf", dtype=dtype, ema=ema, trainable=only is not None,
            max_file_bytes=limit,
        )  # fmt: skip
    files = f" in {made.files} files" if made.files > 1 else ""
    typer.echo(f"{target}: {made.tensors} tensors, {size(made.nbytes)}{files}")
    if made.left_out:
        typer.echo(f"not in it, since no part of a transformers model: {printable(_some(made.left_out))}", err=True)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]+)", text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        fail(f"--max-shard-size is {text!r}; write a size such as 5GB or 500MB.")
    return int(float(found[1]) * unit)


def size(nbytes: int) -> str:
    """Returns a size in words. Example: 12_300_000 is "12.3 MB"."""
    for unit in ("TB", "GB", "MB", "KB"):
        if nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.1f} {unit}"
    return f"{nbytes} B"


def printable(value: Any) -> str:
    """Returns a text without what would control a terminal: names come from files."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(value))


def _some(names: Sequence[str], most: int = 10) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    wide_console().print(table)
