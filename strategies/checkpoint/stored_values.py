"""The weights of a checkpoint as a state dict that a module's `on_load_checkpoint` may edit before they are read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from shardlight.strategies.checkpoint.lightning_file import LightningFile
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.weights import WeightSource, compare, write
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.slices import Slice
from shardlight.strategies.errors import CheckpointError
from torch import Tensor
from torch.utils._pytree import tree_map_only

Reader = CheckpointReader | LightningFile


class StoredValue(Tensor):
    """A tensor of a checkpoint that is read, whole, when it is used; renamed or dropped, it is never read whole.

    It has the shape and dtype of the tensor. What is computed from it is an ordinary tensor; what is written into it
    stays in it.

    Args:
        reader: the checkpoint.
        name: of the tensor there.
    """

    stored_name: str
    """Of the tensor in the checkpoint."""
    changed: Tensor | None
    """All of it, once it was used."""

    @staticmethod
    def __new__(cls, reader: Reader, name: str) -> "StoredValue":
        """Makes it without memory."""
        return torch.Tensor._make_wrapper_subclass(cls, reader.shape(name), dtype=reader.dtype(name))

    def __init__(self, reader: Reader, name: str) -> None:
        self._reader = reader
        self.stored_name = name
        self.changed = None

    def whole(self) -> Tensor:
        """Returns all of it, read now if it has not been. Raises: CheckpointError: it cannot be read."""
        if self.changed is None:
            self.changed = self._reader.read(self.stored_name)
        return self.changed

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes with what was read."""
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"StoredValue({self.stored_name!r}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.whole().clone()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns what was read as an array."""
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        """Returns what was read as lists."""
        return self.whole().tolist()


def stored_state(reader: Reader) -> dict[str, Tensor]:
    """Returns the state dict of a checkpoint; the names of a tied weight have one value."""
    found: dict[str, Tensor] = {n: StoredValue(reader, f"model/{n}") for n in reader.names("model/")}
    for name, same in reader.content.get("aliases", {}).items():
        if same in found:
            found[name] = found[same]
    return found


class EditedState(WeightSource):
    """A state dict of stored and ordinary tensors as a source of weights; see WeightSource.

    Args:
        reader: the checkpoint.
        state: names and values as they are after all edits.
    Raises: CheckpointError: a value is no tensor.
    """

    def __init__(self, reader: Reader, state: Mapping[str, Any]) -> None:
        self.where = str(reader.path)
        self._reader = reader
        self._state = state
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(f"state_dict['{name}'] is a {type(value).__name__}, not a tensor.")

    def names(self) -> Sequence[str]:
        """See WeightSource."""
        return list(self._state)

    def key(self, name: str) -> str:
        """See WeightSource."""
        value = self._state[name]
        return value.stored_name if isinstance(value, StoredValue) and value.changed is None else str(id(value))

    def shape(self, name: str) -> tuple[int, ...]:
        """See WeightSource."""
        return tuple(self._state[name].shape)

    def is_floating(self, name: str) -> bool | None:
        """See WeightSource."""
        return self._state[name].is_floating_point() or self._state[name].is_complex()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See WeightSource."""
        value = self._state[name]
        if isinstance(value, StoredValue):
            if value.changed is None:
                return self._reader.read(value.stored_name, start, stop)
            value = value.changed
        return value.detach().reshape(-1)[start:stop]

    def read_into(self, out: Tensor, name: str, start: int, of: Slice | None = None) -> None:
        """See WeightSource."""
        value = self._state[name]
        if isinstance(value, StoredValue) and value.changed is None:
            self._reader.read_into(out, value.stored_name, start, of)
        else:
            super().read_into(out, name, start, of)


def load_state(engine: Engine, weights: EditedState, state: Mapping[str, Any], strict: bool) -> None:
    """Reads this rank's pieces of the weights, and the rest whole.

    Args:
        weights: of the checkpoint.
        state: the module's state dict with the engine's parameters themselves.
    Raises: CheckpointError: before anything is changed: names missing or too many (with `strict`), shapes that differ.
    """
    report, sources, faults = compare(weights, state, engine=engine)
    if not strict:
        report = replace(report, missing={}, unexpected={})
    if report.fault(weights.where) or faults:
        raise CheckpointError(" ".join([report.fault(weights.where), *faults]).strip())
    write(engine, weights, state, sources)
