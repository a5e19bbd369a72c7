"""Opening a checkpoint on all ranks together, past damaged ones where older ones are at hand."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.candidates import find
from shardlight.strategies.checkpoint.lightning_file import LightningFile, open_checkpoint
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.errors import CheckpointError
from shardlight.strategies.notices import notify
from torch import Tensor


class NothingToRestore(dict[str, Any]):
    """What a Trainer gets where it is to start afresh: it restores nothing from a checkpoint that is false."""

    def __bool__(self) -> bool:
        return False


def open_first(engine: Engine | None, paths: Sequence[Any], fitting: bool) -> CheckpointReader | LightningFile | None:
    """Opens the first checkpoint that is whole, once all of it that will be read has been compared. Collective.

    Args:
        paths: of rank 0, which all ranks take. One alone has to be whole.
        fitting: training goes on from it, so that it has to hold more than weights.
    Returns: None: none of several is whole, and training can start afresh.
    Raises: CheckpointError: on every rank: the only one is not whole, or cannot be read by some rank; or, evaluating,
        none is.
    """
    if engine is not None:
        paths = engine.everyone.gather_objects([str(p) for p in paths], "load_checkpoint")[0]
    damaged: list[Path] = []
    for path in paths:
        try:
            return _open_together(engine, path, fitting)
        except CheckpointError as error:
            if len(paths) == 1:
                raise
            said = _passed_over(paths, damaged, fitting)
            damaged.append(Path(path))
            notify(f"{path} is skipped: {str(error).removeprefix(f'{path} ').removeprefix(f'{path}/')}")
            for line in _passed_over(paths, damaged, fitting):
                if line not in said:
                    notify(line)
    if not fitting:
        raise CheckpointError(f"none of these is whole: {', '.join(map(str, paths))}.")
    return None


def _passed_over(paths: Sequence[Any], damaged: Sequence[Path], fitting: bool) -> tuple[str, ...]:
    """Returns a line for each that cannot be used, and would come before the first of `paths` that is not damaged."""
    return find(dict.fromkeys(Path(path).parent.parent for path in paths), training=fitting, damaged=damaged).skipped


def open_to_go_on(path: Any, fitting: bool) -> CheckpointReader | LightningFile:
    """Opens a checkpoint; its checksums are not compared.

    Args:
        fitting: training goes on from it, so that it has to hold more than weights.
    Raises: CheckpointError: it is none, not whole as far as its manifest tells, or holds too little.
    """
    reader = open_checkpoint(path)
    if fitting and reader.content.get("optimizers") is None:
        raise CheckpointError(
            f"{path} holds weights only (it was saved with save_weights_only), so training cannot go on from it: "
            "start anew from its weights with init_from (load_weights)."
        )
    return reader


def _open_together(engine: Engine | None, path: Any, fitting: bool) -> CheckpointReader | LightningFile:
    reader, fault = None, ""
    try:
        reader = open_to_go_on(path, fitting)
    except CheckpointError as error:
        fault = str(error)
    trainer_state.agree(engine, fault, "load_checkpoint")
    assert reader is not None
    trainer_state.verify_together(engine, reader, not fitting)
    return reader


def names_to_skip(
    patterns: Sequence[str], state: Mapping[str, Tensor], stored: Collection[str], where: Any
) -> frozenset[str]:
    """Finds the names of tensors that are to stay as they are; of a tied one all of its names.

    Args:
        patterns: names, or prefixes that end in `.*`.
        state: the model's state dict.
        stored: names that the checkpoint has.
        where: the checkpoint, for messages.
    Raises: CheckpointError: one that fits no name of the model or the checkpoint; names what is near.
    Example: ["head.*"] with head.weight, head.bias and body.weight: head.weight and head.bias.
    """
    every = list(dict.fromkeys([*state, *stored]))
    found: set[str] = set()
    for pattern in patterns:
        below = pattern[:-1] if pattern.endswith(".*") else None
        fits = [n for n in every if (n == pattern if below is None else n.startswith(below))]
        if not fits:
            raise CheckpointError(f"skip: '{pattern}' is no tensor of the model or of {where}. {_near(pattern, every)}")
        found.update(fits)
    tied = {id(state[n]) for n in found if n in state}
    return frozenset(found | {n for n, t in state.items() if id(t) in tied})


def _near(pattern: str, names: Sequence[str]) -> str:
    if any(n.startswith(f"{pattern}.") for n in names):
        return f"Write '{pattern}.*' for all below it."
    prefixes = {".".join([*n.split(".")[:i], "*"]) for n in names for i in range(1, n.count(".") + 1)}
    near = difflib.get_close_matches(pattern, [*names, *sorted(prefixes)], n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else f"Names are such as '{names[0]}'."
