"""A file that Lightning or torch.save has made, read as a checkpoint: `.ckpt` with all state, or a state dict alone.

It is a zip of tensors and a pickle. The pickle is opened by torch.load(weights_only=True) alone, which knows tensors
and plain containers and refuses all else; tensors are mapped into memory, so that each rank reads what it needs.
"""

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from shardlight.strategies.checkpoint.codec import encode
from shardlight.strategies.checkpoint.dtypes import NAMES
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine.slices import Slice
from shardlight.strategies.errors import CheckpointError
from torch import Tensor

_ZIP = b"PK\x03\x04"
_AGAIN = "python -c \"import torch; torch.save(torch.load('{path}', weights_only=True), 'new.ckpt')\""


class LightningFile:
    """A file of torch.save, with what CheckpointReader offers; it has no checksums.

    Raises: CheckpointError: it is not a file of tensors and plain containers, or says what cannot be.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        data = _load(self.path)
        whole = isinstance(data.get("state_dict"), Mapping)
        self._tensors: dict[str, Tensor] = {}
        aliases = self._take_model(data["state_dict"] if whole else data)
        plain = {k: v for k, v in data.items() if k not in ("state_dict", "optimizer_states")} if whole else {}
        found: dict[str, Tensor] = {}
        encoded = encode(plain, "trainer", found)
        self._tensors |= found
        self._optimizers: list[Mapping[str, Any]] | None = data.get("optimizer_states") if whole else None
        self.content: dict[str, Any] = {
            "world_size": None,
            "strategy": None,
            "step": data.get("global_step") if whole else None,
            "epoch": data.get("epoch") if whole else None,
            "versions": {"lightning": data.get("pytorch-lightning_version") if whole else None},
            "aliases": aliases,
            "optimizers": None if self._optimizers is None else [None] * len(self._optimizers),
            "ranks": [],
            "trainer": encoded,
            "window": None,
        }

    def _take_model(self, state: Mapping[str, Any]) -> dict[str, str]:
        first: dict[Any, str] = {}
        aliases: dict[str, str] = {}
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{self.path} is no checkpoint of Lightning and no state dict: {name!r} is a "
                    f"{type(value).__name__}."
                )
            self._check(name, value)
            # Tied weights are two names of one range of one storage.
            place = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride())
            if value.numel() and place in first:
                aliases[name] = first[place]
                continue
            first[place] = name
            self._tensors[f"model/{name}"] = value.detach()
        return aliases

    def _check(self, name: str, value: Tensor) -> None:
        if value.layout is not torch.strided or value.is_quantized or value.dtype not in NAMES:
            raise CheckpointError(f"{self.path}: '{name}' is a {value.layout} tensor of {value.dtype}.")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointError(
                f"{self.path}: '{name}' of shape {tuple(value.shape)} has more elements than are there."
            )

    def name_parameters(self, names: Sequence[Sequence[Sequence[str | None]]]) -> None:
        """Tells which parameters the optimizers have, which the file knows by their numbers alone.

        Args:
            names: by optimizer and group, in their order.
        Raises: CheckpointError: the groups have other numbers of parameters there.
        """
        found = []
        for index, (stored, here) in enumerate(zip(self._optimizers or [], names, strict=False)):
            try:
                there = [list(group["params"]) for group in stored["param_groups"]]
                if [len(group) for group in there] != [len(group) for group in here]:
                    raise CheckpointError(
                        f"{self.path}: the groups of optimizer {index} have {[len(g) for g in there]} parameters there "
                        f"and {[len(g) for g in here]} here; parameters are matched by their order in the groups."
                    )
                pairs = [p for group in zip(there, here, strict=True) for p in zip(*group, strict=True)]
                states = {
                    name: self._take_state(f"optimizer/{index}/{name}/", stored["state"][number])
                    for number, name in pairs
                    if name is not None and number in stored["state"]
                }
                groups = [
                    {"options": _options(group), "params": list(known)}
                    for group, known in zip(stored["param_groups"], here, strict=True)
                ]
            except (KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(
                    f"{self.path}: the state of optimizer {index} is not of PyTorch's form ({error!r})."
                ) from None
            found.append({"class": None, "groups": groups, "states": states})
        self.content["optimizers"] = found

    def _take_state(self, prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
        scalars, tensors = {}, []
        for key, value in state.items():
            if isinstance(value, Tensor):
                self._check(prefix + key, value)
            if isinstance(value, Tensor) and value.dim():
                self._tensors[prefix + key] = value.detach()
                tensors.append(key)
            elif isinstance(value, Tensor):
                scalars[key] = {"tensor": encode(value.item(), key, {}), "dtype": NAMES[value.dtype], "dim": 0}
            else:
                scalars[key] = {"plain": encode(value, f"{self.path}: {prefix}{key}", {})}
        return {"scalars": scalars, "tensors": tensors}

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of the tensors below `prefix`, without it."""
        return [n.removeprefix(prefix) for n in self._tensors if n.startswith(prefix)]

    def has(self, name: str) -> bool:
        """Whether the tensor is there."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the full shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        return self._tensors[name].dtype

    def read(self, name: str, start: int = 0, stop: int | None = None, of: Slice | None = None) -> Tensor:
        """Returns elements [start, stop) of a flattened tensor, or the whole tensor in its shape.

        Args:
            of: the part of the tensor that is meant; None: all of it.
        Raises: CheckpointError: the tensor is not there.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: '{name}' is not in the checkpoint.")
        tensor = self._tensors[name] if of is None else of.of(self._tensors[name])
        part = tensor if start == 0 and stop is None else tensor.reshape(-1)[start:stop]
        return part.clone()  # not the file itself

    def read_into(self, out: Tensor, name: str, start: int = 0, of: Slice | None = None) -> None:
        """Overwrites `out`, (n,), with elements [start, start + n) of a flattened tensor, converted to its dtype."""
        tensor = self._tensors[name] if of is None else of.of(self._tensors[name])
        out.copy_(tensor.reshape(-1)[start : start + out.numel()])

    def verify(self, share: tuple[int, int] = (0, 1), wanted: Callable[[str], bool] | None = None) -> None:
        """Does nothing: there are no checksums."""


Stored = CheckpointReader | LightningFile


def open_checkpoint(path: str | os.PathLike) -> Stored:
    """Opens a checkpoint folder, or a file of torch.save. Raises: CheckpointError: it is neither, or not whole."""
    return LightningFile(path) if is_torch_file(Path(path)) else CheckpointReader(path)


def is_torch_file(path: Path) -> bool:
    """Whether a file is to be opened as one of torch.save: by its first bytes, or its name."""
    if not path.is_file() or path.suffix == ".safetensors":
        return False
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP or path.suffix in (".pt", ".pth", ".bin", ".ckpt")


def _load(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            start = file.read(len(_ZIP))
        if start != _ZIP:
            raise CheckpointError(
                f"{path} is not a zip of tensors, as torch.save makes since PyTorch 1.6, but perhaps a bare pickle, "
                f"which is not read. Make it new: {_AGAIN.format(path=path)}"
            )
        with zipfile.ZipFile(path) as archive:
            packed = [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise CheckpointError(f"{path}: {packed[0]} is compressed, which no file of torch.save is.")
        data = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged or hostile file makes of it
        raise CheckpointError(_why_not(path, error)) from None
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, not a checkpoint or a state dict.")
    return data


def _why_not(path: Path, error: Exception) -> str:
    first = f"{path} cannot be read as a file of tensors: {str(error).splitlines()[0] if str(error) else error!r}"
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as other:  # it is not even a pickle
        return f"{first} ({other})."
    if not unsafe:
        return f"{first}."
    return (
        f"{path} is not opened: beside tensors its pickle holds {', '.join(sorted(unsafe))}, which would have been "
        "imported and called. If you trust whoever made it, load it once with torch.load(PATH, weights_only=False) in "
        "a script of your own, keep tensors, numbers, text, lists and dicts (other things are mostly in "
        "hyper_parameters: OmegaConf.to_container), and torch.save that."
    )


def _options(group: Mapping[str, Any]) -> Any:
    plain = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()}
    return encode({k: v for k, v in plain.items() if k not in ("params", "param_names")}, "options", {})
