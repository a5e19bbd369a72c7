"""`shardlight migrate`: a DeepSpeed or accelerate config as ours, and what became of each of its keys."""

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from shardlight.commands.output import Debug, fail, make_folder_of, short_errors

if TYPE_CHECKING:
    from shardlight.framework.migrate.convert import Migration


def migrate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A ds_config.json, or the YAML of accelerate.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The config to write.")] = Path("config.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    report: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the report there, as JSON.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Turn a config of DeepSpeed or accelerate into ours, and say what became of each key."""
    if os.path.realpath(source) in map(os.path.realpath, filter(None, (out, report))):
        fail(f"{source} is the source: name another file to write.")
    if os.path.lexists(out) and not force:
        fail(f"{out} is there already. Name another file with --out, or write over it with --force.")
    with short_errors(debug):
        from shardlight.framework.migrate.convert import MigrationError
        from shardlight.framework.migrate.convert import migrate as convert
        from shardlight.framework.migrate.report import to_json

        try:
            made = convert(source)
        except MigrationError as error:
            _show(error.made)
            typer.echo(f"Nothing is written: {source} has faults, which are below.")
            raise
    _write(out, made.text, force=force)
    if report is not None:
        make_folder_of(report)
        text = json.dumps(to_json(made, source, str(out)), indent=1, ensure_ascii=False)
        _write(report, f"{text}\n", force=True)
    _show(made)
    typer.echo(f"{out}: written. To fill in: {', '.join(made.fill_in)}.")


def _write(path: Path, text: str, *, force: bool) -> None:
    """Writes a file so that it is whole or not there; without `force` never over another one."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        if force:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    except OSError as error:
        fail(f"{path}: cannot be written ({error.strerror}).")
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _show(made: "Migration") -> None:
    """Prints the report: tables on a terminal, one plain line for each key elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from shardlight.framework.migrate.report import groups

    console = Console()
    for heading, rows in groups(made):
        if not console.is_terminal:
            typer.echo(heading)
            for row in rows:
                typer.echo(f"  {row[0]}  {row[1]}  {row[2]}".rstrip())
            typer.echo()
            continue
        table = Table(box=None, pad_edge=False, show_header=False, title=heading, title_justify="left")
        table.add_column(overflow="fold", style="dim", ratio=2)
        table.add_column(overflow="fold", ratio=4)
        table.add_column(overflow="fold", ratio=6)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        console.print()
