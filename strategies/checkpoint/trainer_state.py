"""Between a running engine with its optimizers and a checkpoint directory."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shardlight.strategies.checkpoint.codec import decode, encode
from shardlight.strategies.checkpoint.directory import CheckpointReader, RankWriter, publish, write_manifest
from shardlight.strategies.checkpoint.parts import SHARDED, add_parts
from shardlight.strategies.checkpoint.weights import SavedModel, compare, write
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
) -> None:
    """Writes a checkpoint folder: each rank the pieces it owns, then rank 0 the manifest. Collective.

    Args:
        checkpoint: the Trainer's dict; `state_dict` holds the engine's parameters themselves and other tensors.
        rank_state: plain data that each rank keeps for itself.
    Raises: CheckpointError: on every rank, when any rank could not write; what was at `path` before is untouched.
    """
    rank = engine.collectives.rank
    folder = path.with_name(f".{path.name}.writing")
    engine.agreement.meet(f"save_checkpoint {path.name}")
    engine.take_in_changes()

    def prepare() -> None:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    _together(engine, path, prepare)
    parts = _together(engine, path, lambda: _write_rank(engine, optimizers, checkpoint, rank_state, folder))

    def finish() -> None:
        if rank == 0:
            write_manifest(folder, _merge(parts))
            publish(folder, path)

    _together(engine, path, finish)


def _together(engine: Engine, path: Path, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on each rank and returns all results; one rank's failure is everyone's error."""
    result, failure = None, ""
    try:
        result = work()
    except (OSError, CheckpointError) as error:
        failure = str(error) or repr(error)
    everyone = engine.collectives.gather_objects((result, failure), f"save_checkpoint {path.name}")
    failures = [f"rank {r}: {f}" for r, (_, f) in enumerate(everyone) if f]
    if failures:
        raise CheckpointError(f"{path}: the checkpoint was not written. {'; '.join(failures)}")
    return [r for r, _ in everyone]


def _write_rank(
    engine: Engine,
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    rank_state: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    writer = RankWriter(engine.collectives.rank)
    tensors: dict[str, Tensor] = {}
    content: dict[str, Any] = {"rank": encode(rank_state, f"rank/{engine.collectives.rank}", tensors)}
    content["aliases"] = _add_model(engine, checkpoint["state_dict"], writer)
    if "optimizer_states" in checkpoint:
        content["optimizers"] = [_add_optimizer(engine, i, o, writer) for i, o in enumerate(optimizers)]
    if engine.writes_pieces:
        add_parts(checkpoint.get(SHARDED, {}), writer, engine.collectives.rank)
    if engine.collectives.rank == 0:
        plain = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states", SHARDED)}
        content["trainer"] = encode(plain, "trainer", tensors)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.write(folder)
    content["pieces"] = [vars(p) for p in writer.pieces]
    return content


def _add_model(engine: Engine, state: Mapping[str, Any], writer: RankWriter) -> dict[str, str]:
    """Writes this rank's pieces; returns the names that share another name's parameter."""
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"state_dict['{name}'] is a {type(value).__name__}, not a tensor.")
        if isinstance(value, nn.Parameter) and id(value) in first_name:
            aliases[name] = first_name[id(value)]
            continue
        first_name[id(value)] = name
        piece = engine.owned_piece(value) if isinstance(value, nn.Parameter) else None
        if piece is not None:
            start, part = piece
            if (part.numel() and engine.writes_pieces) or (value.numel() == 0 and engine.collectives.rank == 0):
                writer.add(f"model/{name}", part, engine.full_shape(value), start)
        elif engine.collectives.rank == 0:
            writer.add(f"model/{name}", value)
    return aliases


def _add_optimizer(engine: Engine, index: int, optimizer: Optimizer, writer: RankWriter) -> dict[str, Any]:
    local = engine.local_parameters
    groups = []
    states: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        full = group["params"]
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        unwritten: dict[str, Tensor] = {}
        groups.append({"options": encode(options, "options", unwritten), "params": [local.name(p) for p in full]})
        if unwritten:
            groups[-1]["options"] = encode(
                {k: v.item() if isinstance(v, Tensor) else v for k, v in options.items()}, "options", {}
            )
        for parameter in full:
            name = local.name(parameter)
            if name is None or parameter not in optimizer.state:
                continue
            start, _ = local.span(parameter, optimizer)
            mine, whole = local.of(parameter, optimizer), local.is_whole(parameter, optimizer)
            writes = engine.writes_pieces if local.plan.shard_optimizer else engine.collectives.rank == 0
            scalars = {}
            for key, value in optimizer.state[parameter].items():
                is_tensor, stored = isinstance(value, Tensor) and value.dim(), f"optimizer/{index}/{name}/{key}"
                if is_tensor and mine is not None and value.shape == mine.shape:
                    if writes:
                        writer.add(stored, value.reshape(-1), engine.full_shape(parameter), start)
                elif is_tensor and whole and value.numel() != 1:
                    if writes:
                        writer.add(stored, value)
                else:
                    scalars[key] = _scalar(value, f"optimizer state '{key}' of '{name}'")
            states[name] = scalars
    return {"groups": groups, "states": states}


def _scalar(value: Any, where: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {
            "tensor": encode(value.item(), where, {}),
            "dtype": str(value.dtype).removeprefix("torch."),
            "dim": value.dim(),
        }
    tensors: dict[str, Tensor] = {}
    data = encode(value, where, tensors)
    if tensors:
        raise CheckpointError(f"{where} is a tensor that is not laid out like its parameter, which cannot be saved.")
    return {"plain": data}


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    optimizers = []
    for index, first in enumerate(parts[0].get("optimizers", [])):
        states: dict[str, Any] = {}
        for part in parts:
            states.update(part["optimizers"][index]["states"])
        optimizers.append({"groups": first["groups"], "states": states})
    return {
        "world_size": len(parts),
        "versions": {"torch": str(torch.__version__)},
        "aliases": parts[0]["aliases"],
        "pieces": [p for part in parts for p in part["pieces"]],
        "optimizers": optimizers if "optimizers" in parts[0] else None,
        "ranks": [part["rank"] for part in parts],
        "trainer": parts[0]["trainer"],
    }


def _tensors_below(reader: CheckpointReader, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{n}": reader.read(f"{prefix}.{n}") for n in reader.names(f"{prefix}.")}


def load_trainer(reader: CheckpointReader) -> dict[str, Any]:
    """Returns the Trainer's part of a checkpoint as the dict that was saved, without weights and optimizer state."""
    return decode(reader.content["trainer"], _tensors_below(reader, "trainer"))


def load_model(
    engine: Engine, reader: CheckpointReader, state: Mapping[str, Any], names: Sequence[str], strict: bool
) -> None:
    """Reads this rank's pieces of the weights, and the rest whole.

    Args:
        state: the module's state dict with the engine's parameters themselves.
        names: which of the checkpoint's tensors to use.
    Raises: CheckpointError: before anything is changed: names missing or too many (with `strict`), shapes that differ.
    """
    weights = SavedModel(reader, names)
    report, sources, faults = compare(weights, state)
    if not strict:
        report = replace(report, missing={}, unexpected={})
    if report.fault(weights.where) or faults:
        raise CheckpointError(" ".join([report.fault(weights.where), *faults]).strip())
    write(engine, weights, state, sources)


def load_optimizer(engine: Engine, reader: CheckpointReader, index: int, optimizer: Optimizer) -> None:
    """Reads this rank's part of an optimizer's state, matched by parameter name, and the options of its groups.

    Raises: CheckpointError: the groups hold other parameters than those that were saved.
    """
    stored = (reader.content.get("optimizers") or [])[index : index + 1]
    if not stored:
        raise CheckpointError(f"{reader.path}: has no state of optimizer {index}: it holds weights only.")
    local = engine.local_parameters
    want = [[local.name(p) for p in group["params"]] for group in optimizer.param_groups]
    have = [group["params"] for group in stored[0]["groups"]]
    if want != have:
        raise CheckpointError(f"{reader.path}: optimizer {index} has groups {have} there and {want} here.")
    for group, data in zip(optimizer.param_groups, stored[0]["groups"], strict=True):
        for key, value in decode(data["options"], {}).items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
        for parameter in group["params"]:
            name, mine = local.name(parameter), local.of(parameter, optimizer)
            scalars = stored[0]["states"].get(name)
            if name is None or mine is None:
                continue
            # A parameter that had no state then has none now: what steps since have left does not stay.
            optimizer.state.pop(parameter, None)
            if scalars is None:
                continue
            span, prefix = local.span(parameter, optimizer), f"optimizer/{index}/{name}/"
            kept = local.moment_dtype(mine)
            state: dict[str, Any] = {k: _restore_scalar(v, parameter, mine, k, kept) for k, v in scalars.items()}
            for key in reader.names(prefix):
                if reader.shape(prefix + key) == engine.full_shape(parameter):
                    stored_part = reader.read(prefix + key, *span).view(mine.shape)
                else:  # such as the factors of a second moment
                    stored_part = reader.read(prefix + key)
                state[key] = _like(stored_part, mine, kept)
            optimizer.state[parameter] = state


def _like(stored: Tensor, mine: nn.Parameter, kept: torch.dtype) -> Tensor:
    """Returns state as an optimizer keeps it: where the parameter is, and in the dtype that moments are kept in."""
    dtype = kept if stored.is_floating_point() and mine.is_floating_point() else stored.dtype
    return stored.to(mine.device, dtype, copy=True)


def _restore_scalar(
    data: Mapping[str, Any], parameter: nn.Parameter, mine: nn.Parameter, key: str, kept: torch.dtype
) -> Any:
    """Returns a state of one element.

    Args:
        mine: what the optimizer gets for `parameter`: of a 0-dim one that is sharded a 1-dim range.
        kept: the dtype of moments.
    """
    if "plain" in data:
        return decode(data["plain"], {})
    dtype = getattr(torch, data["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"'{data['dtype']}' is not a dtype.")
    value = torch.full((1,) * int(data["dim"]), decode(data["tensor"], {}), dtype=dtype)
    if not parameter.dim() and key != "step":
        return _like(value, mine, kept).view(mine.shape)  # a moment
    return value.to(mine.device) if value.dim() else value


def load_rank(reader: CheckpointReader, rank: int) -> dict[str, Any]:
    """Returns what rank `rank` has kept for itself. Raises: CheckpointError: the checkpoint has no such rank."""
    ranks = reader.content.get("ranks", [])
    if rank >= len(ranks):
        raise CheckpointError(f"{reader.path}: has no state of rank {rank}, only of {len(ranks)} ranks.")
    return decode(ranks[rank], _tensors_below(reader, f"rank/{rank}"))
