"""`shardlight check`: what can be known of a run before it starts, and `shardlight schema`: the same for an editor."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from shardlight.commands.output import Debug, count, fail, short_errors

if TYPE_CHECKING:
    from shardlight.framework.schema import Config

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Values that win over the file.")
]
Trust = Annotated[
    list[str] | None, typer.Option("--trust", metavar="PKG", help="Also take classes from this package; repeatable.")
]


def check(config: ConfigPath, overrides: Overrides = None, *, trust: Trust = None, debug: Debug = False) -> None:
    """Check a config without starting anything."""
    with short_errors(debug):
        from shardlight.framework.config import load

        tell_changes(config)
        loaded = load(config, overrides or [], trust or [], imports=False)
    typer.echo(f"{config}: {outline(loaded.config)}. No faults.")


def tell_changes(config: str) -> None:
    """Says what has changed in the template that the config's project was made from."""
    from shardlight.templates.catalogue import what_changed

    for line in what_changed(Path(config)):
        typer.echo(line)


def schema(out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it there.")] = None) -> None:
    """Print the JSON Schema of configs, by which an editor completes and checks them."""
    from shardlight.framework.json_schema import config_schema

    text = json.dumps(config_schema(), indent=1) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text)
    except OSError as error:
        fail(f"--out {out}: cannot be written ({error.strerror}).")
    typer.echo(f"{out}: put '# yaml-language-server: $schema={out}' at the head of a config.")


def outline(config: "Config") -> str:
    """The run in one line: strategy, ranks, samples per step, length."""
    trainer, options = config.trainer, config.strategy.options
    ranks, accumulate = trainer.world_size, trainer.accumulate_grad_batches or 1
    parts = [f"{config.strategy.name} on {count(ranks, 'rank')}"]
    batch = config.data.argument("batch_size")
    taken, takers = count(accumulate, "micro-batch", "es"), count(ranks, "rank")
    axes, words = options.axes, {"pipeline": "stage", "tensor": "slice"}
    staged = config.strategy.name == "pipeline" or axes.get("pipeline", 1) > 1
    if axes:
        ranks //= math.prod(axes.values())
        takers = count(ranks, "data rank")
        cut = [count(size, words[axis]) for axis, size in axes.items() if size > 1 or len(axes) == 1]
        parts[0] += f" ({' x '.join([*cut, takers])})"
    if staged:
        taken = count(accumulate, "batch", "es")  # micro-batches are parts of one
    if isinstance(batch, int):
        parts.append(f"{batch * accumulate * ranks} samples per step (batch_size {batch} x {taken} x {takers})")
    if staged:
        parts.append(f"each batch in {count(split_of(config), 'micro-batch', 'es')} by {options.schedule}")
    if isinstance(trainer.limit_train_batches, int):
        parts.append(f"{count(-(-trainer.limit_train_batches // accumulate), 'step')} per epoch at most")
    lengths = [count(n, word) for n, word in ((trainer.max_steps, "step"), (trainer.max_epochs, "epoch")) if n]
    parts.append(" or ".join(lengths) + (", whichever ends first" if len(lengths) > 1 else ""))
    return ", ".join(parts)


def split_of(config: "Config") -> int:
    """The parts that a batch of a pipeline is cut into; fewer than the strategy's, where it has fewer samples."""
    batch, parts = config.data.argument("batch_size"), config.strategy.options.per_batch
    return min(parts, batch) if isinstance(batch, int) else parts
