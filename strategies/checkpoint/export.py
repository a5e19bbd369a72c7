"""Makes one file of a checkpoint's weights, without ranks or the model's code."""

import os
from pathlib import Path

from safetensors.torch import save_file
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.errors import CheckpointError


def export_safetensors(path: str | os.PathLike, out: str | os.PathLike, *, ema: bool = False) -> int:
    """Writes the bare module's weights and buffers (the keys, shapes and dtypes of its `state_dict`) to one file.

    Args:
        path: a checkpoint folder.
        out: the file to write; appears only when it is complete.
        ema: write the averages that `ShardedEMA` keeps, for the weights that have one.
    Returns: the number of tensors written.
    Raises: CheckpointError: `path` is not a complete checkpoint or has no averages, or `out` cannot be written.
    """
    reader = CheckpointReader(path)
    aliases: dict[str, str] = reader.content.get("aliases", {})
    tensors = {name: reader.read(f"model/{name}") for name in reader.names("model/")}
    averages = reader.names("ema/") if ema else []
    if ema and not averages:
        raise CheckpointError(f"{reader.path} has no averaged weights: train with the callback ShardedEMA.")
    for name in averages:
        tensors[name] = reader.read(f"ema/{name}").to(tensors[name].dtype)
    for name, same in aliases.items():
        # The file format has no shared tensors: a tied weight is written under each of its names.
        tensors[name] = tensors[same].clone()
    target = Path(out)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{target} cannot be written: {error}.") from None
    return len(tensors)
