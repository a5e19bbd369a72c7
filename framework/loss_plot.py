"""The loss curve as a picture: train loss of every step, its running mean, validation points."""

import os
from pathlib import Path


def running_mean(values: list[float]) -> list[float]:
    """Exponential mean over about a 30th of the values, without bias to the first (Kingma and Ba 2015, section 3).

    Example: [1, 1, 1] gives [1, 1, 1]; [0, 1] gives [0, 1 / 1.5].
    """
    past = 1 - 1 / max(2, len(values) / 30)
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total = past * total + (1 - past) * value
        weight = past * weight + (1 - past)
        means.append(total / weight)
    return means


def draw_losses(
    path: Path,
    losses: list[tuple[int, float]],
    validation: list[tuple[int, float]],
    validation_name: str,
    unigram_bpb: float | None = None,
) -> None:
    """Draws a .png file, complete or not at all.

    Args:
        path: of the picture.
        losses: (optimizer step, train loss).
        validation: (optimizer step, value of `validation_name`), on an axis of its own unless that is a loss, too.
        validation_name: the logged name; "" without validation.
        unigram_bpb: bits per byte of a model without context, drawn as a line where validation is in bits per byte.
    """
    # Here and not at the top: it takes a second that only rank 0 needs, at the end. No pyplot: it keeps global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("train loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    steps, values = [step for step, _ in losses], [loss for _, loss in losses]
    lines = axes.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1, label="train loss")
    if len(losses) > 10:
        lines += axes.plot(steps, running_mean(values), color="tab:blue", label="train loss, running mean")
    if validation:
        beside = axes if "loss" in validation_name else axes.twinx()
        beside.set_ylabel(f"train loss, {validation_name}" if beside is axes else validation_name)
        lines += beside.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", label=validation_name)
        if unigram_bpb is not None and "bpb" in validation_name:
            label = "byte frequencies alone (unigram)"
            lines.append(beside.axhline(unigram_bpb, color="tab:gray", linestyle="--", label=label))
    figure.legend(handles=lines, loc="outside upper center", ncols=4, fontsize="small", frameon=False)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(partial, format="png")
    os.replace(partial, path)
