"""Draws a simulated schedule: a row per rank, time to the right, as text or as a picture."""

import os
from pathlib import Path

from shardlight.strategies.engine.pipeline.schedules import Action, Kind, Schedule
from shardlight.strategies.engine.pipeline.simulate import Simulation, Timed

LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "B", Kind.BACKWARD_WEIGHT: "W"}

COLOURS = {"F": "#7aa6d8", "B": "#8fc08a", "W": "#e6b35c"}

MOST_COLUMNS = 24
"""Characters that the longest action may take in a text; in much shorter ones there is then no room for the number."""


def draw_text(run: Simulation, width: int | None = None) -> str:
    """Returns the timeline as plain lines.

    `F3` is the forward of micro-batch 3 and `B3` its backward; where a backward is split, `B3` is the input's gradient
    and `W3` the weights'. With several stages per rank a letter behind the number is the stage's place on its rank.

    Args:
        width: of a line; a longer timeline goes on below. None: lines are as long as they are.
    """
    drawn = [[timed for timed in row if timed.end > timed.start] for row in run.timeline]
    scale = _scale(run, drawn)
    heads = [f"rank {rank} " for rank in range(run.schedule.ranks)]
    lines = [_line(run.schedule, row, scale) for row in drawn]
    length = max(map(len, lines))
    step = max(1, length) if width is None else max(10, width - max(map(len, heads)))
    parts = []
    for start in range(0, length, step):
        rows = zip(heads, lines, strict=True)
        parts.append("\n".join((head + line[start : start + step]).rstrip() for head, line in rows))
    return "\n\n".join(parts)


def _scale(run: Simulation, drawn: list[list[Timed]]) -> float:
    """Returns characters per unit of time: so many that the shortest action has room for its label, within reason."""
    lengths = [timed.end - timed.start for row in drawn for timed in row]
    room = 1 + max((len(label(run.schedule, timed.action)) for row in drawn for timed in row), default=0)
    return min(room / min(lengths), MOST_COLUMNS / max(lengths)) if lengths else 1.0


def _line(schedule: Schedule, row: list[Timed], scale: float) -> str:
    line = ""
    for timed in row:
        start, end = round(timed.start * scale), round(timed.end * scale)
        line = line.ljust(start)
        if end - start > 0:
            # The last column stays empty: it parts an action from the next.
            line += label(schedule, timed.action)[: max(1, end - start - 1)].ljust(end - start - 1, "-")
    return line


def label(schedule: Schedule, action: Action) -> str:
    """Returns how an action is written. Example: "F3", or "F3b" on the second stage of its rank."""
    letter = LETTERS[action.kind]
    place = place_of(schedule, action.stage)
    return f"{letter}{action.micro_batch}{chr(ord('a') + place) if schedule.stages > schedule.ranks else ''}"


def legend(schedule: Schedule) -> str:
    """Returns what the letters of `draw_text` mean, in one line."""
    meaning = ", ".join(f"{letter} {what}" for letter, what in _legend(schedule))
    places = "; a, b ... stages of a rank, the first in the model first" if schedule.stages > schedule.ranks else ""
    return f"{meaning}, each with the number of its micro-batch{places}"


def place_of(schedule: Schedule, stage: int) -> int:
    """Returns which of its rank's stages a stage is, from 0."""
    return schedule.stages_of(schedule.placement[stage]).index(stage)


def draw_picture(run: Simulation, path: Path, title: str) -> None:
    """Draws a .png file, complete or not at all; a rank's later stages are darker."""
    # Here and not at the top: it takes a second that only a picture needs. No pyplot: it keeps global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    schedule = run.schedule
    actions = max(map(len, schedule.actions))
    figure = Figure(
        figsize=(min(40, max(8, actions * 0.32)), 1.4 + 0.5 * schedule.ranks), dpi=120, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    per_rank = schedule.stages // schedule.ranks
    for rank, row in enumerate(run.timeline):
        for timed in row:
            length, letter = timed.end - timed.start, LETTERS.get(timed.action.kind, "R")
            place = place_of(schedule, timed.action.stage)
            axes.barh(
                rank, length, left=timed.start, height=0.9, color=_shade(letter, place, per_rank), edgecolor="white"
            )
            if length:
                middle = timed.start + length / 2
                ink = "white" if 2 * place > per_rank - 1 else "black"
                axes.text(middle, rank, str(timed.action.micro_batch), ha="center", va="center", fontsize=7, color=ink)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, run.makespan)
    axes.set_xlabel("time")
    axes.set_title(title, fontsize="medium")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [
        Patch(
            color=_shade(letter, place, per_rank),
            label=name if per_rank == 1 else f"{name}, stage {place + 1} of {per_rank}",
        )
        for letter, name in _legend(schedule)
        for place in range(per_rank)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3 * per_rank, fontsize="small", frameon=False)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(partial, format="png")
    os.replace(partial, path)


def _legend(schedule: Schedule) -> list[tuple[str, str]]:
    """Returns the letters that are drawn and what they are."""
    kinds = {action.kind for actions in schedule.actions for action in actions}
    found = [("F", "forward")]
    if Kind.BACKWARD in kinds:
        found.append(("B", "backward"))
    if Kind.BACKWARD_INPUT in kinds:
        found += [("B", "input gradient"), ("W", "weight gradients")]
    return found


def _shade(letter: str, place: int, per_rank: int) -> tuple[float, ...]:
    """Returns the colour of a kind of action on a rank's first, second ... stage."""
    colour = COLOURS[letter]
    darker = 1 - 0.45 * place / max(1, per_rank - 1)
    return tuple(int(colour[at : at + 2], 16) / 255 * darker for at in (1, 3, 5))
