"""The manifest of a checkpoint: which box of which tensor lies where, with checksums. Needs no torch.

    step-20/manifest.json            written last: a folder without it is not a checkpoint
    step-20/rank-00000.safetensors   the pieces that rank 0 wrote

[Note: checksums] The manifest has one line with a SHA-256 of all that follows, and of every file its length and a
CRC-32 of each chunk of `chunk_bytes`: no byte of a checkpoint is outside of a checksum. Nothing in a file is
interpreted but by what the manifest says of it; that a file is in the safetensors format is for other programs.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardlight.strategies.engine.boxes import Box
from shardlight.strategies.errors import CheckpointError

FORMAT = "shardlight-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 18
"""Of a file's chunks. A range is read in whole chunks: with smaller ones less is read that nobody asked for."""
KNOWN_CHUNK_BYTES = (CHUNK_BYTES, 1 << 20)
"""Of files that are opened."""
_MAX_BYTES = 1 << 29
"""Of a manifest: some millions of pieces, or the checksums of 16 TB."""
_MAX_DIMS = 64
ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1, "U16": 2, "I16": 2,
    "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8, "C128": 16,
}  # fmt: skip
"""Bytes of an element, by the safetensors format's name of a dtype (C128 is ours)."""
_FILE_NAME = re.compile(r"rank-[0-9]{5,}\.safetensors")
_HEAD = re.compile(rb'\{"format": "([^"]*)", "version": ([0-9]{1,9}), "sha256": "([0-9a-f]{64})",\n"content": ')
_TAIL = b"}\n"


@dataclass(frozen=True)
class StoredFile:
    """A file: its length, and the CRC-32 of each of its chunks."""

    name: str
    nbytes: int
    crc32: tuple[int, ...]
    chunk_bytes: int = CHUNK_BYTES

    @property
    def n_chunks(self) -> int:
        """Returns how many chunks it has."""
        return n_chunks(self.nbytes, self.chunk_bytes)

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Returns the bytes of chunks [first, stop)."""
        return first * self.chunk_bytes, min(stop * self.chunk_bytes, self.nbytes)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data; see `from_json`."""
        return {"name": self.name, "bytes": self.nbytes, "crc32": "".join(f"{c:08x}" for c in self.crc32)}

    @classmethod
    def from_json(cls, data: Any, chunk_bytes: int) -> "StoredFile":
        """Raises: CheckpointError: the name is not that of a rank's file, or checksums do not fit the length."""
        name, nbytes, text = data["name"], _natural(data["bytes"]), data["crc32"]
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{name!r} is no name of a file of a checkpoint")
        fits = isinstance(text, str) and len(text) == 8 * n_chunks(nbytes, chunk_bytes)
        if not fits or not re.fullmatch(r"[0-9a-f]*", text):
            raise CheckpointError(f"{name}: the checksums do not fit its {nbytes} bytes")
        return cls(name, nbytes, tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8)), chunk_bytes)


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor, row-major from byte `at` of file number `file` on."""

    file: int
    at: int
    box: Box


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, in pieces that hold each element once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all elements."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Returns plain data; see `from_json`."""
        pieces = [[p.file, p.at, list(p.box.offsets), list(p.box.sizes)] for p in self.pieces]
        return {"dtype": self.dtype, "shape": list(self.shape), "pieces": pieces}

    @classmethod
    def from_json(cls, name: str, data: Any, files: list[StoredFile]) -> "StoredTensor":
        """Raises: CheckpointError: a piece is outside of its file or the tensor, or elements are missing or twice."""
        dtype, shape = data["dtype"], _sizes(data["shape"])
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            raise CheckpointError(f"'{name}': {dtype!r} is not a dtype")
        pieces = []
        for file, at, offsets, sizes in data["pieces"]:
            piece = StoredPiece(_natural(file), _natural(at), Box(_sizes(offsets), _sizes(sizes)))
            if not piece.box.fits(shape):
                raise CheckpointError(f"'{name}': a piece {piece.box} is outside of shape {shape}")
            if piece.file >= len(files) or piece.at + piece.box.numel * ITEMSIZE[dtype] > files[piece.file].nbytes:
                raise CheckpointError(f"'{name}': a piece is outside of the checkpoint's files")
            pieces.append(piece)
        found = cls(name, dtype, shape, tuple(pieces))
        found._check_covered()
        return found

    def _check_covered(self) -> None:
        there, wanted = sum(p.box.numel for p in self.pieces), math.prod(self.shape)
        if there < wanted:
            raise CheckpointError(f"'{self.name}': {wanted - there} of {wanted} elements are missing")
        held = [p.box for p in self.pieces if p.box.numel]
        spans = sorted(b.span(Box((0,) * len(self.shape), self.shape)) for b in held if b.is_run(self.shape))
        twice = there > wanted or any(a[1] > b[0] for a, b in pairwise(spans))
        blocks = [b for b in held if not b.is_run(self.shape)]
        if twice or any(b.common(other) for b in blocks for other in held if other is not b):
            raise CheckpointError(f"'{self.name}': its pieces overlap")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is and holds; `content` is all of it as plain data, without files and tensors."""

    content: dict[str, Any]
    files: list[StoredFile]
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads and checks a manifest, and that its files are there in full length; their bytes are not read.

        Raises: CheckpointError: there is none, it is damaged, or it says what cannot be.
        """
        if folder.is_file():
            raise CheckpointError(what_to_pass(folder))
        content = _read_content(folder / MANIFEST)
        try:
            chunk_bytes = _natural(content["chunk_bytes"])
            if chunk_bytes not in KNOWN_CHUNK_BYTES:
                known = " or ".join(map(str, KNOWN_CHUNK_BYTES))
                raise CheckpointError(f"chunk_bytes is {chunk_bytes}, not {known}")
            files = [StoredFile.from_json(f, chunk_bytes) for f in _a(list, content["files"])]
            if len({f.name for f in files}) != len(files):
                raise CheckpointError("two files have one name")
            stored = _a(dict, content["tensors"])
            tensors = {n: StoredTensor.from_json(n, t, files) for n, t in stored.items()}
            _check_regions(files, tensors)
            for name, same in _a(dict, content.get("aliases", {})).items():
                if not isinstance(same, str) or f"model/{same}" not in tensors:
                    raise CheckpointError(f"'{name}' is said to be tied to {same!r}, which is no tensor of it")
        except CheckpointError as error:
            raise CheckpointError(f"{folder / MANIFEST}: {error}.") from None
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder / MANIFEST}: a part of it cannot be read ({error!r}).") from None
        for file in files:
            _check_file(folder / file.name, file.nbytes)
        rest = {k: v for k, v in content.items() if k not in ("files", "tensors", "chunk_bytes")}
        return cls(rest, files, tensors)

    def to_bytes(self) -> bytes:
        """Returns the file's content; see [Note: checksums].

        Raises: CheckpointError: text or a number that JSON cannot express; more than what would be read again.
        """
        (chunk_bytes,) = {f.chunk_bytes for f in self.files} or {CHUNK_BYTES}
        stored = {
            **self.content,
            "chunk_bytes": chunk_bytes,
            "files": [f.to_json() for f in self.files],
            "tensors": {n: t.to_json() for n, t in self.tensors.items()},
        }
        try:
            text = json.dumps(stored, allow_nan=False, separators=(",", ":")).encode("ascii")
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the manifest cannot be written as JSON: {error}.") from None
        digest = hashlib.sha256(text + _TAIL).hexdigest()
        head = f'{{"format": "{FORMAT}", "version": {VERSION}, "sha256": "{digest}",\n"content": '
        if len(text) > _MAX_BYTES - len(head) - len(_TAIL):
            raise CheckpointError(f"the manifest would have {len(text):,} bytes, more than {_MAX_BYTES:,}.")
        return head.encode() + text + _TAIL


def n_chunks(nbytes: int, chunk_bytes: int) -> int:
    """Returns how many chunks so many bytes have."""
    return -(-nbytes // chunk_bytes)


def open_plain(path: Path) -> int:
    """Opens a file of a checkpoint for reading: no link, no pipe. Raises: OSError."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError("not a regular file")
    return file


def what_to_pass(file: Path) -> str:
    """Returns what is wrong with a file where a checkpoint is wanted."""
    mend = "this is none, and no .ckpt file of Lightning."
    if (file.parent / MANIFEST).is_file():
        mend = f"pass {file.parent}."
    elif file.suffix == ".ckpt":
        mend = "what a .ckpt file of Lightning holds has no manifest and no checksums."
    return f"{file} is a file, and checkpoints here are folders: {mend}"


def _read_content(path: Path) -> dict[str, Any]:
    try:
        with open(open_plain(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > _MAX_BYTES:
                raise CheckpointError(f"{path} has more than {_MAX_BYTES >> 20} MiB, which no manifest has.")
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a complete checkpoint: it has no {MANIFEST}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    head = _HEAD.match(data)
    if head is None:
        raise CheckpointError(f"{path} is damaged, or not a manifest of {FORMAT}.{_other_version(data)}")
    name, version, digest = head[1].decode(errors="replace"), int(head[2]), head[3].decode()
    if name != FORMAT or version != VERSION:
        raise CheckpointError(f"{path} is of {name} version {version}; this is {FORMAT} version {VERSION}.")
    if hashlib.sha256(data[head.end() :]).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: it does not have the SHA-256 it says.")
    try:
        return _a(dict, json.loads(data[head.end() : -len(_TAIL)], object_pairs_hook=_once, parse_constant=_no))
    except (CheckpointError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error or type(error).__name__}.") from None


def _other_version(data: bytes) -> str:
    return " It was written by an earlier version." if b'"version": 1,' in data[:80] else ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CheckpointError("a key is there twice")
    return found


def _no(text: str) -> Any:
    raise CheckpointError(f"{text} is not JSON")


def _check_regions(files: list[StoredFile], tensors: Mapping[str, StoredTensor]) -> None:
    """Raises unless every byte of a file belongs to one tensor at most: memory is bounded by what lies on disk."""
    regions: list[list[tuple[int, int]]] = [[] for _ in files]
    for tensor in tensors.values():
        for piece in tensor.pieces:
            nbytes = piece.box.numel * ITEMSIZE[tensor.dtype]
            if nbytes:
                regions[piece.file].append((piece.at, piece.at + nbytes))
    for file, found in zip(files, regions, strict=True):
        if any(a[1] > b[0] for a, b in pairwise(sorted(found))):
            raise CheckpointError(f"{file.name}: tensors overlap")


def _check_file(path: Path, nbytes: int) -> None:
    try:
        found = path.lstat()
    except OSError:
        raise CheckpointError(f"{path} is missing.") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not a regular file.")
    if found.st_size != nbytes:
        raise CheckpointError(f"{path} has {found.st_size:,} bytes, not {nbytes:,}.")


def _a(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"{value!r:.40} is not a {kind.__name__}")
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CheckpointError(f"{value!r:.40} is not a size or a position")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if len(_a(list, value)) > _MAX_DIMS:
        raise CheckpointError(f"{len(value)} dims are too many")
    return tuple(_natural(n) for n in value)
