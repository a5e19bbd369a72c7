"""State of optimizers in a checkpoint: by parameter name and range, so that it opens wherever the parameter is.

A parameter's state has tensors laid out like the parameter (moments), tensors of other shapes where an optimizer gets
parameters whole (factors of a second moment), and single numbers (the count of steps), which are JSON.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from shardlight.strategies.checkpoint.codec import decode, encode
from shardlight.strategies.checkpoint.dtypes import NAMES, TORCH_DTYPES
from shardlight.strategies.checkpoint.parts import replica_share
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.writer import RankWriter
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.errors import CheckpointError
from torch import Tensor, nn
from torch.optim import Optimizer


def add_optimizer(engine: Engine, index: int, optimizer: Optimizer, writer: RankWriter) -> dict[str, Any]:
    """Adds this rank's part of an optimizer's state to what it writes; returns the rest as plain data.

    Raises: CheckpointError: a part of it cannot be stored; names it.
    """
    local = engine.local_parameters
    groups = []
    states: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        options = {
            k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v
            for k, v in group.items()
            if k not in ("params", "param_names")
        }
        names = [local.name(p) for p in group["params"]]
        groups.append({"options": _plain(options, f"optimizer {index}, group {number}"), "params": names})
        for parameter, name in zip(group["params"], names, strict=True):
            if name is not None and parameter in optimizer.state:
                states[name] = _add_state(engine, optimizer, parameter, f"optimizer/{index}/{name}/", writer)
    return {"class": type(optimizer).__name__, "groups": groups, "states": states}


def _add_state(
    engine: Engine, optimizer: Optimizer, parameter: nn.Parameter, prefix: str, writer: RankWriter
) -> dict[str, Any]:
    local = engine.local_parameters
    mine, whole = local.of(parameter, optimizer), local.is_whole(parameter, optimizer)
    owner = engine.writes_pieces if local.plan.shard_optimizer else engine.writes_whole
    scalars, tensors = {}, []
    for key, held in optimizer.state[parameter].items():
        # Of a parameter that is one number the moments are numbers as well, sharded or not.
        single = isinstance(held, Tensor) and not parameter.dim() and held.numel() == 1
        value = held.reshape(()) if single else held
        is_tensor = isinstance(value, Tensor) and value.dim() > 0
        if is_tensor and mine is not None and value.shape == mine.shape:
            start, part = _part_to_write(engine, optimizer, parameter, value.reshape(-1))
            tensors.append(key)
            if part.numel() or (not value.numel() and owner):
                writer.add(prefix + key, part, engine.slice_of(parameter), start)
        elif is_tensor and whole and value.numel() != 1:
            tensors.append(key)
            if owner:
                writer.add(prefix + key, value)
        else:
            scalars[key] = _scalar(value, f"optimizer state '{prefix}{key}'")
    return {"scalars": scalars, "tensors": tensors}


def _part_to_write(engine: Engine, optimizer: Optimizer, parameter: nn.Parameter, flat: Tensor) -> tuple[int, Tensor]:
    """Returns (start, range) of what this rank writes of state that is laid out like what the optimizer got."""
    start, stop = engine.local_parameters.span(parameter, optimizer)
    if engine.local_parameters.plan.shard_optimizer:
        return replica_share(engine, parameter, start, flat)
    piece = engine.owned_piece(parameter)
    if piece is None:
        return 0, flat[: flat.numel() if engine.writes_whole else 0]
    first, part = replica_share(engine, parameter, *piece)
    assert (start, stop) == (0, flat.numel())
    return first, flat[first : first + part.numel()]


def _plain(value: Any, where: str) -> Any:
    tensors: dict[str, Tensor] = {}
    data = encode(value, where, tensors)
    if tensors:
        raise CheckpointError(f"{where}: {', '.join(tensors)} is a tensor that is not laid out like its parameter.")
    return data


def _scalar(value: Any, where: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype in NAMES:
        return {"tensor": encode(value.item(), where, {}), "dtype": NAMES[value.dtype], "dim": value.dim()}
    return {"plain": _plain(value, where)}


def merge_optimizers(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Joins what `add_optimizer` returned for each optimizer on each rank."""
    merged = []
    for everyone in zip(*parts, strict=True):
        states: dict[str, Any] = {}
        for part in everyone:
            states.update(part["states"])
        groups = [{**group, "params": _joined_names(everyone, n)} for n, group in enumerate(everyone[0]["groups"])]
        merged.append({**everyone[0], "groups": groups, "states": states})
    return merged


def _joined_names(everyone: Sequence[Mapping[str, Any]], group: int) -> list[str | None]:
    """Returns the names of a group's parameters on all ranks: those of one pipeline stage follow those before."""
    lists = [one["groups"][group]["params"] for one in everyone]
    if all(names == lists[0] for names in lists):
        return lists[0]
    return list(dict.fromkeys(name for names in lists for name in names))


def refuse_fewer(reader: CheckpointReader, optimizers: Sequence[Optimizer]) -> None:
    """Raises CheckpointError where a checkpoint has more optimizers than there are: the state of some would be lost."""
    saved = reader.content.get("optimizers") or []
    if len(saved) > len(optimizers):
        there = ", ".join(str((one or {}).get("class")) for one in saved)
        raise CheckpointError(
            f"{reader.path}: {len(saved)} optimizers were saved ({there}), and there are {len(optimizers)} here: the "
            "state of the others would be lost. Make as many in configure_optimizers, or start from the weights alone "
            "with init_from (load_weights)."
        )


class SavedOptimizer:
    """What a checkpoint has of one optimizer, compared with the one that is to take it.

    Args:
        skip: names of parameters whose state is to stay as it is.
    Raises: CheckpointError: before anything is changed: another class, or state that is not complete.
    """

    def __init__(
        self,
        engine: Engine,
        reader: CheckpointReader,
        index: int,
        optimizer: Optimizer,
        skip: Collection[str] = (),
    ) -> None:
        stored = (reader.content.get("optimizers") or [])[index : index + 1]
        if not stored:
            raise CheckpointError(
                f"{reader.path} has no state of optimizer {index}"
                + (
                    ": it was saved by a run with fewer."
                    if reader.content.get("optimizers")
                    else ": it holds weights only."
                )
                + " Start from its weights alone with init_from (load_weights)."
            )
        self._engine = engine
        self._reader = reader
        self._optimizer = optimizer
        self._prefix = f"optimizer/{index}/"
        self._groups: list[Any] = stored[0]["groups"]
        self._states: Mapping[str, Any] = stored[0]["states"]
        self._skip = skip
        kind, there = type(optimizer).__name__, stored[0].get("class")
        if there not in (kind, None):
            raise CheckpointError(
                f"{reader.path}: optimizer {index} is {there} there and {kind} here. Use {there}, or start from the "
                "weights alone with init_from (load_weights)."
            )
        self.fresh: list[str] = []
        """Names of parameters that the saved optimizer did not have: they start without state."""
        self.unused: list[str] = []
        """Names of parameters that it had, and that this one does not have."""
        self._check(index)

    def _check(self, index: int) -> None:
        local = self._engine.local_parameters
        self._home = {n: i for i, group in enumerate(self._groups) for n in group["params"] if n is not None}
        here = [local.name(p) for group in self._optimizer.param_groups for p in group["params"]]
        self.fresh = [n for n in here if n is not None and n not in self._home and n not in self._skip]
        self.unused = [n for n in self._home if n not in {*here, *self._engine.part.elsewhere}]
        for name in here:
            state = self._states.get(name or "")
            if state is None or name in self._skip:
                continue
            lost = [k for k in state["tensors"] if not self._reader.has(f"{self._prefix}{name}/{k}")]
            if lost:
                raise CheckpointError(
                    f"{self._reader.path}: of '{name}' the optimizer's {', '.join(lost)} is missing. Pass "
                    f"--skip {name} to leave its weights and state as they are."
                )
        for number, group in enumerate(self._optimizer.param_groups):
            homes = self._homes(group)
            if len(homes) > 1:
                raise CheckpointError(
                    f"{self._reader.path}: group {number} of optimizer {index} holds parameters of groups "
                    f"{sorted(homes)} there, which have options of their own: make the groups as they were."
                )

    def _homes(self, group: Mapping[str, Any]) -> set[int]:
        """Returns the saved groups that a group's parameters come from; with none: the one that had none either."""
        names = map(self._engine.local_parameters.name, group["params"])
        found = {self._home[n] for n in names if n in self._home}
        return found

    def load(self) -> None:
        """Reads this rank's part of the state, and the options of the groups.

        Raises: CheckpointError: a file is damaged.
        """
        same = len(self._groups) == len(self._optimizer.param_groups)
        for number, group in enumerate(self._optimizer.param_groups):
            homes = self._homes(group) or ({number} if same and not self._groups[number]["params"] else set())
            for home in homes:
                _take_options(group, decode(self._groups[home]["options"], {}))
            for parameter in group["params"]:
                self._load_state(parameter)

    def _load_state(self, parameter: nn.Parameter) -> None:
        local, reader = self._engine.local_parameters, self._reader
        name, mine = local.name(parameter), local.of(parameter, self._optimizer)
        if name is None or mine is None or name in self._skip:
            return
        # A parameter that had no state then has none now: what steps since have left does not stay.
        self._optimizer.state.pop(parameter, None)
        if name not in self._states:
            return
        stored = self._states[name]
        of = self._engine.slice_of(parameter)
        span, kept = local.span(parameter, self._optimizer), local.moment_dtype(mine)
        state: dict[str, Any] = {k: _restore_scalar(v, parameter, mine, k, kept) for k, v in stored["scalars"].items()}
        for key in stored["tensors"]:
            tensor = f"{self._prefix}{name}/{key}"
            if reader.shape(tensor) == of.shape:
                value = reader.read(tensor, *span, of).view(mine.shape)
            else:  # such as the factors of a second moment
                value = reader.read(tensor)
            state[key] = _like(value, mine, kept)
        self._optimizer.state[parameter] = state
        local.keep_state(self._optimizer, parameter)


def _take_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _like(stored: Tensor, mine: nn.Parameter, kept: torch.dtype) -> Tensor:
    """Returns state as an optimizer keeps it: where the parameter is, and in the dtype that moments are kept in."""
    dtype = kept if stored.is_floating_point() and mine.is_floating_point() else stored.dtype
    return stored.to(mine.device, dtype)


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
    dtype = TORCH_DTYPES.get(data["dtype"])
    if dtype is None:
        raise CheckpointError(f"'{data['dtype']}' is not a dtype.")
    value = torch.full((1,) * int(data["dim"]), decode(data["tensor"], {}), dtype=dtype)
    if not parameter.dim() and key != "step":
        return _like(value, mine, kept).view(mine.shape)  # a moment
    return value.to(mine.device) if value.dim() else value
