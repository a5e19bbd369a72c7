"""What all commands share: how errors and tables are shown."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

USER_FAULT = 2
"""Exit code for a fault in the config or in how the command was called."""

MISTAKES = ("MisconfigurationException", "DiskError")
"""Names of errors that say what is wrong and what to do; they are known by name, not to be imported."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")]


def fail(text: str, code: int = USER_FAULT) -> NoReturn:
    """Prints an error and ends the command."""
    typer.echo(text, err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def short_errors(debug: bool, code: int = 1) -> Iterator[None]:
    """Shows our own errors, and MISTAKES, without a traceback: they say what to mend.

    Args:
        code: exit code of those that are no fault in the config or the call.
    """
    from shardlight.framework.faults import ConfigError
    from shardlight.ops.built import OpError
    from shardlight.strategies.errors import LaunchError, ShardlightError

    try:
        yield
    except Exception as error:
        if not isinstance(error, ConfigError | ShardlightError | OpError) and type(error).__name__ not in MISTAKES:
            raise
        if debug:
            traceback.print_exc()
        if isinstance(error, ConfigError):
            fail(str(error))
        fail(f"{type(error).__name__}: {error}", USER_FAULT if isinstance(error, LaunchError) else code)


def make_folder_of(out: Path | None, option: str = "--json") -> None:
    """Makes the folder of the file that an option names."""
    if out is None:
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{option} {out}: cannot make its folder ({error.strerror}).")


def wide_console() -> "Console":
    """A console for tables: on a terminal as wide as that, in a file as wide as they are."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=200)


def count(number: int, word: str, plural: str = "s") -> str:
    """Returns a number of things. Example: count(2, "micro-batch", "es") == "2 micro-batches"."""
    return f"{number} {word}{'' if number == 1 else plural}"
