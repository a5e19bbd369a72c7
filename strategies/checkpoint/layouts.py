"""What an export consists of, before a byte is written: files, the place of each tensor, names, JSON beside them.

Files are safetensors: 8 bytes with the length of a JSON header, the header, then the tensors' bytes. As every place is
known first, tensors can be written one after the other or by several ranks at once, and none is held whole.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from shardlight.strategies.checkpoint.dtypes import NAMES
from shardlight.strategies.checkpoint.hf import adapter_names, check_folder_name, model_names
from shardlight.strategies.checkpoint.safetensors_file import Entry, header
from shardlight.strategies.errors import CheckpointError
from torch import Tensor

CHUNK_BYTES = 1 << 24
"""Most of one tensor that is in memory at a time."""


@dataclass(frozen=True)
class OutTensor:
    """A tensor of an export.

    Attributes:
        name: in the file.
        source: the name that its values are read under.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OutFile:
    """A safetensors file: its name and its tensors in the order of the file."""

    name: str
    tensors: tuple[OutTensor, ...]

    @property
    def header(self) -> bytes:
        """Returns the bytes before the tensors' own."""
        return self._laid_out[0]

    @property
    def offsets(self) -> dict[str, int]:
        """Returns by name of a tensor its first byte in the file."""
        return self._laid_out[1]

    @cached_property
    def _laid_out(self) -> tuple[bytes, dict[str, int]]:
        entries = []
        for t in self.tensors:
            if t.dtype not in NAMES or t.dtype == torch.complex128:
                raise CheckpointError(f"'{t.name}' is {t.dtype}, which the safetensors format does not have.")
            entries.append(Entry(t.name, NAMES[t.dtype], t.shape))
        return header(entries, {"format": "pt"}), {e.key: e.at for e in entries}

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the file."""
        return len(self.header) + sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class OutFolder:
    """A folder of an export: `name` below the export's own ("" is that itself), and text files by name."""

    name: str
    files: tuple[OutFile, ...]
    texts: Mapping[str, str]


def out_dtype(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Returns the dtype a tensor is exported in: integers, bools and complex numbers are never cast."""
    return wanted if wanted is not None and stored.is_floating_point else stored


def cast(part: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Casts elements of a tensor. Raises: CheckpointError: finite numbers that the dtype has no room for."""
    if part.dtype == dtype:
        return part
    out = part.to(dtype)
    lost = int((out.isinf() & part.isfinite()).sum()) if dtype.is_floating_point else 0
    if lost:
        raise CheckpointError(
            f"'{name}': {lost} of its numbers are too large for {_plain(dtype)}: export in bf16 or fp32."
        )
    return out


def make_file(name: str, tensors: Iterable[OutTensor]) -> OutFile:
    """Returns a file with its tensors in an order in which each is aligned to its elements."""
    return OutFile(name, tuple(sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))))


def make_folder(
    tensors: Sequence[OutTensor], limit_bytes: int | None, name: str = "", texts: Mapping[str, Any] | None = None
) -> OutFolder:
    """Cuts tensors into files of limited size, named as transformers does it, with an index where they are several.

    Args:
        tensors: in the model's order.
        limit_bytes: of a file's tensors; one that is larger has a file for itself. None: one file.
        texts: plain data of JSON files beside them, by name.
    """
    groups: list[list[OutTensor]] = [[]]
    room = math.inf if limit_bytes is None else limit_bytes
    for t in tensors:
        if groups[-1] and t.nbytes > room:
            groups.append([])
            room = math.inf if limit_bytes is None else limit_bytes
        groups[-1].append(t)
        room -= t.nbytes
    files = dict(texts or {})
    if len(groups) == 1:
        return OutFolder(name, (make_file("model.safetensors", groups[0]),), _json(files))
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    files["model.safetensors.index.json"] = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors)},
        "weight_map": {t.name: file for file, group in zip(names, groups, strict=True) for t in group},
    }
    made = tuple(make_file(file, group) for file, group in zip(names, groups, strict=True))
    return OutFolder(name, made, _json(files))


def hf_folders(
    tensors: Sequence[OutTensor], models: Sequence[Mapping[str, Any]], limit_bytes: int | None
) -> tuple[list[OutFolder], list[str]]:
    """Lays an export out so that `from_pretrained` opens it: each model of `models`, several in folders of their own.

    Args:
        tensors: of the whole module, a tied one under each of its names.
        models: see `describe_models`.
    Returns: the folders, and the names of tensors that belong to none of the models.
    Raises: CheckpointError: adapters that cannot be written this way.
    """
    by_name = {t.name: t for t in tensors}
    folders: list[OutFolder] = []
    used: set[str] = set()
    for model in models:
        prefix = str(model["prefix"])
        home = check_folder_name(prefix.removesuffix(".")) if len(models) > 1 else ""
        mine = [n for n in by_name if n.startswith(prefix)]
        used.update(mine)
        if model.get("adapters"):
            for adapter, config in model["adapters"].items():
                chosen = _renamed(by_name, adapter_names(mine, prefix, adapter, config))
                inner = "" if adapter == "default" else check_folder_name(adapter)
                folder = "/".join(part for part in (home, inner) if part)
                file = make_file("adapter_model.safetensors", chosen)
                folders.append(OutFolder(folder, (file,), _json({"adapter_config.json": config})))
            continue
        first = {n: by_name[n].source for n in mine}
        chosen = _renamed(by_name, model_names(mine, prefix, first, model.get("tied") or ()))
        texts = {"config.json": {**model["config"], **_dtype_entry(model["config"], chosen)}}
        if model.get("generation_config"):
            texts["generation_config.json"] = model["generation_config"]
        folders.append(make_folder(chosen, limit_bytes, home, texts))
    return folders, [n for n in by_name if n not in used]


def _renamed(by_name: Mapping[str, OutTensor], names: Mapping[str, str]) -> list[OutTensor]:
    made = [OutTensor(new, by_name[old].source, by_name[old].shape, by_name[old].dtype) for old, new in names.items()]
    if len({t.name for t in made}) != len(made):
        raise CheckpointError("two tensors have one name in the exported model.")
    return made


def _dtype_entry(config: Mapping[str, Any], tensors: Sequence[OutTensor]) -> dict[str, str]:
    """Returns the entry of config.json that says in which dtype most of the weights are."""
    sizes: dict[torch.dtype, int] = {}
    for t in tensors:
        if t.dtype.is_floating_point:
            sizes[t.dtype] = sizes.get(t.dtype, 0) + t.nbytes
    most = max(sizes, key=sizes.__getitem__, default=None)
    return {} if most is None else {"torch_dtype" if "torch_dtype" in config else "dtype": _plain(most)}


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _json(texts: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(data, indent=2, sort_keys=name != "config.json") + "\n" for name, data in texts.items()}


def chunks(numel: int, itemsize: int) -> Iterable[tuple[int, int]]:
    """Yields the ranges of elements in which a tensor is read and written."""
    step = max(1, CHUNK_BYTES // itemsize)
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


Read = Callable[[str, int, int], Tensor]
"""(name, start, stop) to elements [start, stop) of the flattened tensor."""
