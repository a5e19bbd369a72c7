"""`shardlight export`: what can be done with a checkpoint without ranks, GPU or model code."""

from pathlib import Path
from typing import Annotated

import typer
from shardlight.commands.common import Debug, fail, short_errors


def export(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="safetensors.")] = "safetensors",
    ema: Annotated[bool, typer.Option("--ema", help="The averages that ShardedEMA keeps, not the weights.")] = False,
    debug: Debug = False,
) -> None:
    """Write the bare module's weights of a checkpoint into one file."""
    if to != "safetensors":
        fail(f"--to is {to!r}; the only format is safetensors.")
    with short_errors(debug):
        from shardlight.strategies.checkpoint import export_safetensors

        count = export_safetensors(path, out, ema=ema)
    typer.echo(f"{out}: {count} tensors")
