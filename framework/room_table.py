"""What a run takes of memory and disk beside what there is: a table on a terminal, plain lines elsewhere."""

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from shardlight.strategies.byte_words import in_words
from shardlight.strategies.engine.estimate import Where
from shardlight.strategies.room import Room

NAMES: dict[Where, str] = {"device": "GPU", "host": "memory", "disk": "disk"}
NOTE = "Not counted: activations, and what the module and its libraries keep themselves."


def show_room(room: Room, console: Console | None = None) -> None:
    """Shows an estimate on rank 0.

    Args:
        console: where to write; standard output by default.
    """
    if room.rank:
        return
    console = console or Console()
    told = room.estimate
    rank = "on rank 0" if room.by_rank else "per rank"
    tiers = [where for where in NAMES if told.nbytes(where)]
    ranks = max((room.mates(where) for where in tiers), default=1)
    if not console.is_terminal:
        for where in tiers:
            parts = ", ".join(f"{x.what} {in_words(x.nbytes)}" for x in told.lines if x.where == where)
            console.print(f"{NAMES[where]} {rank}: {in_words(told.nbytes(where))} ({parts})", soft_wrap=True)
        sums = ", ".join(f"{in_words(room.together(w))} of {NAMES[w]} ({_there(room, w)} there)" for w in tiers)
        console.print(f"needed by {_ranks(ranks)} of this host: {sums}. {NOTE}", soft_wrap=True, highlight=False)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for where in tiers:
        table.add_column(NAMES[where], justify="right")
    for what in dict.fromkeys(line.what for line in told.lines):
        found = {line.where: in_words(line.nbytes) for line in told.lines if line.what == what}
        table.add_row(what, *(found.get(where, "") for where in tiers))
    table.add_row(rank, *(in_words(told.nbytes(where)) for where in tiers))
    if ranks > 1:
        sums = (in_words(room.together(where)) for where in tiers)
        table.add_row(f"{_ranks(ranks)} of this host", *sums)
    table.add_row("there", *(_there(room, where) for where in tiers))
    console.print(table)
    console.print(NOTE)


@rank_zero_only
def show_line(text: str) -> None:
    """Shows one line on rank 0, on standard output."""
    Console().print(text, soft_wrap=True, highlight=False)


def _ranks(ranks: int) -> str:
    return "the only rank" if ranks == 1 else f"{ranks} ranks"


def _there(room: Room, where: Where) -> str:
    free = room.free(where)
    return "unknown" if free is None else in_words(free)
