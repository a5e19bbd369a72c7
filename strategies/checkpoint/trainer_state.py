"""Between a running engine with its optimizers and the folder of a checkpoint."""

import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardlight.strategies.checkpoint.codec import decode, encode
from shardlight.strategies.checkpoint.disk import publish, remove_folder, sync_folder, write_file
from shardlight.strategies.checkpoint.hf import describe_models
from shardlight.strategies.checkpoint.manifest import MANIFEST, Manifest, StoredTensor
from shardlight.strategies.checkpoint.optimizer_state import (
    SavedOptimizer,
    add_optimizer,
    merge_optimizers,
    refuse_fewer,
)
from shardlight.strategies.checkpoint.parts import SHARDED, add_parts, replica_share
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.stored_values import EditedState, load_state, stored_state
from shardlight.strategies.checkpoint.window import add_window
from shardlight.strategies.checkpoint.writer import RankWriter
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.errors import CheckpointError
from torch import Tensor, nn
from torch.optim import Optimizer


def save(
    engine: Engine,
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    path: Path,
    config: Mapping[str, Any] | None = None,
    window: bool = True,
) -> None:
    """Writes a checkpoint folder: each rank the pieces it owns, then rank 0 the manifest. Collective.

    Args:
        checkpoint: the Trainer's dict; `state_dict` holds the engine's parameters themselves and other tensors.
        rank_state: plain data that each rank keeps for itself.
        config: the resolved config of the run, if it has one.
        window: gradients that a later step is to use are in it.
    Raises: CheckpointError: on every rank, when any rank could not write; what was at `path` before is untouched.
    """
    rank = engine.everyone.rank
    folder = path.with_name(f".{path.name}.writing")
    engine.agreement.meet(f"save_checkpoint {path.name}")
    engine.take_in_changes()

    def prepare() -> None:
        if rank == 0:
            remove_folder(folder)
            folder.mkdir(parents=True)

    def finish() -> None:
        if rank == 0:
            content = {**_merge(parts), **_about(engine, checkpoint, config)}
            files = [part["file"] for part in parts]
            tensors = _join([t for part in parts for t in part["tensors"]])
            # Weights first, in the module's order, whichever rank wrote them.
            names = [name for key in checkpoint["state_dict"] if (name := f"model/{key}") in tensors]
            stored = Manifest(content, files, {name: tensors[name] for name in [*names, *tensors]})
            write_file(folder / MANIFEST, stored.to_bytes())
            sync_folder(folder)
            publish(folder, path)

    try:
        together(engine, path, prepare)
        parts = together(engine, path, lambda: _write_rank(engine, optimizers, checkpoint, rank_state, folder, window))
        together(engine, path, finish)
    except CheckpointError:
        if rank == 0:
            # What is left of a full disk is needed for the next one.
            _try_to(lambda: remove_folder(folder))
        raise


def together(
    engine: Engine, path: Path, work: Callable[[], Any], fault: str = "the checkpoint was not written"
) -> list[Any]:
    """Runs `work` on each rank and returns all results; one rank's failure is everyone's error. Collective."""
    result, failure = None, ""
    try:
        result = work()
    except (OSError, CheckpointError) as error:
        failure = str(error) or repr(error)
    everyone = engine.everyone.gather_objects((result, failure), f"writing {path.name}")
    failures = [f"rank {r}: {f}" for r, (_, f) in enumerate(everyone) if f]
    if failures:
        raise CheckpointError(f"{path}: {fault}. {'; '.join(failures)}")
    return [r for r, _ in everyone]


def _try_to(work: Callable[[], Any]) -> None:
    try:
        work()
    except OSError:
        return


def _write_rank(
    engine: Engine,
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    folder: Path,
    window: bool,
) -> dict[str, Any]:
    rank = engine.everyone.rank
    writer = RankWriter(rank)
    tensors: dict[str, Tensor] = {}
    content: dict[str, Any] = {"rank": encode(rank_state, f"rank/{rank}", tensors)}
    content["aliases"] = _add_model(engine, checkpoint["state_dict"], writer)
    content["trainable"] = _trainable(checkpoint["state_dict"])
    if "optimizer_states" in checkpoint:
        content["optimizers"] = [add_optimizer(engine, i, o, writer) for i, o in enumerate(optimizers)]
        content["window"] = add_window(engine, writer) if window else None
    add_parts(checkpoint.get(SHARDED, {}), writer, rank)
    if rank == 0:
        plain = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states", SHARDED)}
        content["trainer"] = encode(plain, "trainer", tensors)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    content["file"], content["tensors"] = writer.write(folder)
    return content


def _add_model(engine: Engine, state: Mapping[str, Any], writer: RankWriter) -> dict[str, str]:
    """Adds this rank's pieces; returns the names that share another name's parameter."""
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    ranks, first_of_slices = engine.collectives, engine.ranks.tensor.rank == 0
    replicated = 0
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"state_dict['{name}'] is a {type(value).__name__}, not a tensor.")
        if isinstance(value, nn.Parameter) and id(value) in first_name:
            aliases[name] = first_name[id(value)]
            continue
        first_name[id(value)] = name
        piece = engine.owned_piece(value) if isinstance(value, nn.Parameter) else None
        if piece is not None and value.numel():
            start, part = replica_share(engine, value, *piece)
            if part.numel():
                writer.add(f"model/{name}", part, engine.slice_of(value), start)
        else:
            # Parameters are the same on all ranks, which take turns. Buffers may have moved since: rank 0's count.
            turn = replicated % ranks.world_size if isinstance(value, nn.Parameter) else 0
            if not first_of_slices or not (isinstance(value, nn.Parameter) or engine.part.writes(name)):
                continue
            if turn == ranks.rank and piece is not None:
                writer.add(f"model/{name}", piece[1], engine.slice_of(value))
            elif turn == ranks.rank:
                writer.add(f"model/{name}", value)
            replicated += isinstance(value, nn.Parameter)
    return aliases


def _trainable(state: Mapping[str, Any]) -> list[str]:
    """Returns the names of trainable parameters, of tied ones the first."""
    names: dict[int, str] = {}
    for name, value in state.items():
        if isinstance(value, nn.Parameter) and value.requires_grad:
            names.setdefault(id(value), name)
    return list(names.values())


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    optimizers = [part["optimizers"] for part in parts] if "optimizers" in parts[0] else None
    return {
        "world_size": len(parts),
        "aliases": {new: old for part in parts for new, old in part["aliases"].items()},
        "optimizers": None if optimizers is None else merge_optimizers(optimizers),
        "window": [part["window"] for part in parts] if parts[0].get("window") else None,
        "ranks": [part["rank"] for part in parts],
        "trainer": parts[0]["trainer"],
        "trainable": list(dict.fromkeys(name for part in parts for name in part["trainable"])),
    }


def _join(pieces: list[StoredTensor]) -> dict[str, StoredTensor]:
    """Joins what ranks have of the same tensors. Raises: CheckpointError: they disagree about one."""
    joined: dict[str, StoredTensor] = {}
    for part in pieces:
        there = joined.setdefault(part.name, replace(part, pieces=()))
        if (there.dtype, there.shape) != (part.dtype, part.shape):
            raise CheckpointError(
                f"'{part.name}' is {part.dtype} {part.shape} on one rank and {there.dtype} {there.shape} on another."
            )
        joined[part.name] = replace(there, pieces=there.pieces + part.pieces)
    return joined


def _about(engine: Engine, checkpoint: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what is good to know of a checkpoint."""
    return {
        "strategy": engine.plan.name,
        "step": checkpoint.get("global_step"),
        "epoch": checkpoint.get("epoch"),
        "saved_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "versions": _versions(),
        "mesh": mesh_of(engine),
        "hf": encode(describe_models(engine.model), "hf", {}),
        "config": None if config is None else encode(config, "config", {}),
    }


def mesh_of(engine: Engine) -> dict[str, int]:
    """Returns how many ranks there are along each axis of the mesh, of those that cut a model where there are some."""
    ranks = engine.ranks
    sizes = {axis: getattr(ranks, axis).world_size for axis in ("shard", "replicate", "pipeline", "tensor")}
    return {axis: n for axis, n in sizes.items() if n > 1 or axis in ("shard", "replicate")}


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("shardlight", "torch", "lightning"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _tensors_below(reader: CheckpointReader, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{n}": reader.read(f"{prefix}.{n}") for n in reader.names(f"{prefix}.")}


def verify_together(engine: Engine | None, reader: CheckpointReader, evaluating: bool) -> None:
    """Compares all that will be read with its checksums, each rank its share of it. Collective.

    Args:
        evaluating: optimizer state and accumulated gradients will not be read.
    Raises: CheckpointError: on every rank: something is damaged, or some rank cannot read it.
    """
    ranks = None if engine is None else engine.everyone
    fault = ""
    try:
        wanted = None if not evaluating else lambda name: not name.startswith(("optimizer/", "gradient/"))
        reader.verify((0, 1) if ranks is None else (ranks.rank, ranks.world_size), wanted)
    except CheckpointError as error:
        fault = str(error)
    agree(engine, fault, f"load_checkpoint {reader.path.name}")


def agree(engine: Engine | None, fault: str, caller: str) -> None:
    """Raises CheckpointError on every rank where any has a fault. Collective."""
    faults = [fault] if engine is None else engine.everyone.gather_objects(fault, caller)
    found = list(dict.fromkeys(f for f in faults if f))
    if found:
        raise CheckpointError(" ".join(found))


def load_trainer(reader: CheckpointReader) -> dict[str, Any]:
    """Returns the Trainer's part of a checkpoint as the dict that was saved, without weights and optimizer state."""
    return decode(reader.content["trainer"], _tensors_below(reader, "trainer"))


def load_model(
    engine: Engine, reader: CheckpointReader, state: Mapping[str, Any], names: Collection[str], strict: bool = True
) -> None:
    """Reads this rank's pieces of the weights, and the rest whole; for who uses an engine without a Trainer.

    Args:
        state: the module's state dict with the engine's parameters themselves.
        names: which of the checkpoint's tensors to use.
    Raises: CheckpointError: see load_state.
    """
    stored = {n: t for n, t in stored_state(reader).items() if n in names}
    load_state(engine, EditedState(reader, stored), state, strict)


def load_optimizers(
    engine: Engine, reader: CheckpointReader, optimizers: Sequence[Optimizer], skip: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Reads this rank's part of the optimizers' state, matched by parameter name, and the options of their groups.

    Args:
        skip: names of parameters whose state is to stay as it is.
    Returns: names of parameters that start without state, because the saved run did not train them; and of those that
        it did, and this one does not.
    Raises: CheckpointError: before anything is changed: see SavedOptimizer.
    """
    saved, fault = [], ""
    try:
        refuse_fewer(reader, optimizers)
        saved = [SavedOptimizer(engine, reader, i, o, skip) for i, o in enumerate(optimizers)]
    except CheckpointError as error:
        fault = str(error)
    agree(engine, fault, "load_optimizer_state_dict")
    for one in saved:
        one.load()
    return [n for one in saved for n in one.fresh], [n for one in saved for n in one.unused]


def load_rank(reader: CheckpointReader, rank: int) -> dict[str, Any]:
    """Returns what rank `rank` has kept for itself. Raises: CheckpointError: the checkpoint has no such rank."""
    ranks = reader.content.get("ranks", [])
    if rank >= len(ranks):
        raise CheckpointError(f"{reader.path}: has no state of rank {rank}, only of {len(ranks)} ranks.")
    return decode(ranks[rank], _tensors_below(reader, f"rank/{rank}"))
