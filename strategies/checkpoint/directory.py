"""The files of a checkpoint: one safetensors file per rank and a manifest that says which piece of what lies where.

    manifest.json          written last: a directory without it is not a checkpoint
    rank-00000.safetensors the pieces rank 0 owns: 1-dim ranges of flattened tensors, or whole tensors

A tensor is named by its role: `model/NAME`, `optimizer/I/NAME/STATE`, `trainer/PATH`, `rank/R/PATH`.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from shardlight.strategies.errors import CheckpointError
from torch import Tensor

FORMAT = "shardlight-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class StoredPiece:
    """Elements [start, stop) of the flattened tensor `name` lie in `file` under the key `key`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    file: str
    key: str

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "StoredPiece":
        """Checks the fields' types and ranges. Raises: CheckpointError."""
        try:
            piece = cls(
                str(data["name"]), tuple(int(n) for n in data["shape"]), int(data["start"]), int(data["stop"]),
                str(data["file"]), str(data["key"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"a piece of the manifest cannot be read ({error!r}).") from None
        if Path(piece.file).name != piece.file or min(piece.shape, default=0) < 0:
            raise CheckpointError(f"'{piece.name}': a file must be in the checkpoint's folder, and sizes >= 0.")
        if not 0 <= piece.start <= piece.stop <= math.prod(piece.shape):
            raise CheckpointError(
                f"'{piece.name}': range [{piece.start}, {piece.stop}) is outside shape {piece.shape}."
            )
        return piece


class RankWriter:
    """Collects what one rank writes."""

    def __init__(self, rank: int) -> None:
        self.file = f"rank-{rank:05d}.safetensors"
        self.pieces: list[StoredPiece] = []
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor, shape: Iterable[int] | None = None, start: int = 0) -> None:
        """Adds a whole tensor, or (with `shape`) the 1-dim range of a tensor of that shape that starts at `start`."""
        full = tuple(tensor.shape if shape is None else shape)
        key = name if shape is None else f"{name}[{start}:{start + tensor.numel()}]"
        # A copy: views into shared storages cannot be written.
        self._tensors[key] = tensor.detach().clone(memory_format=torch.contiguous_format).cpu()
        self.pieces.append(StoredPiece(name, full, start, start + tensor.numel(), self.file, key))

    def write(self, folder: Path) -> None:
        """Writes the file and waits until it is on disk."""
        path = folder / self.file
        save_file(self._tensors, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes the manifest; the checkpoint is complete once it is there."""
    path = folder / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "version": VERSION, **content}, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def publish(written: Path, target: Path) -> None:
    """Gives a complete folder its final name; what had that name before is removed afterwards."""
    old = target.with_name(f".{target.name}.replaced")
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    written.rename(target)
    parent = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
    shutil.rmtree(old, ignore_errors=True)


class CheckpointReader:
    """Reads tensors of a complete checkpoint, whole or a range, from whichever files hold them.

    Raises: CheckpointError: no manifest, or one that cannot be read.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        if self.path.is_file():
            inside = (self.path.parent / MANIFEST).is_file()
            raise CheckpointError(
                f"{self.path} is a file, and checkpoints here are folders: "
                + (
                    f"pass {self.path.parent}."
                    if inside
                    else "for one of Lightning's own (.ckpt), load its state_dict "
                    "with torch.load(PATH, weights_only=True), and pass that to shardlight.strategies.load_weights."
                )
            )
        try:
            content = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is not a complete checkpoint: it has no {MANIFEST}.") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / MANIFEST} cannot be read: {error}.") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
            raise CheckpointError(f"{self.path / MANIFEST} is not a manifest of {FORMAT} version {VERSION}.")
        self.content: dict[str, Any] = content
        self._pieces: dict[str, list[StoredPiece]] = {}
        for data in content.get("pieces", []):
            piece = StoredPiece.from_json(data)
            self._pieces.setdefault(piece.name, []).append(piece)
        self._open: dict[str, Any] = {}

    def names(self, prefix: str) -> list[str]:
        """Returns the names of the tensors below `prefix`, without it."""
        return [n.removeprefix(prefix) for n in self._pieces if n.startswith(prefix)]

    def has(self, name: str) -> bool:
        """Whether the tensor is there."""
        return name in self._pieces

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the full shape of a tensor."""
        return self._pieces[name][0].shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Returns elements [start, stop) of a flattened tensor, or the whole tensor in its shape.

        Raises: CheckpointError: elements are missing, or a file is not what the manifest says.
        """
        if name not in self._pieces:
            raise CheckpointError(f"{self.path}: '{name}' is not in the checkpoint.")
        shape = self.shape(name)
        end = math.prod(shape) if stop is None else stop
        parts, at = [], start
        for piece in sorted(self._pieces[name], key=lambda p: (p.start, p.stop)):
            low, high = max(at, piece.start), min(end, piece.stop)
            if low == at and low < high:
                parts.append(self._tensor(piece)[low - piece.start : high - piece.start])
                at = high
        if at != end:
            raise CheckpointError(f"{self.path}: elements [{at}, {end}) of '{name}' are missing.")
        flat = torch.cat(parts) if parts else self._tensor(self._pieces[name][0])[:0]
        return flat.view(shape) if start == 0 and stop is None else flat

    def _tensor(self, piece: StoredPiece) -> Tensor:
        try:
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(self.path / piece.file, framework="pt")
            flat = self._open[piece.file].get_tensor(piece.key).reshape(-1)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / piece.file}: '{piece.key}' cannot be read: {error}.") from None
        if flat.numel() != piece.stop - piece.start:
            raise CheckpointError(
                f"{self.path / piece.file}: '{piece.key}' has {flat.numel()} elements, not {piece.stop - piece.start}."
            )
        return flat
