"""Writing a safetensors file as a stream: the header first, then one tensor after the other, with checksums."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from shardlight.ops.crc32 import crc32, crc32_chunks
from shardlight.strategies.checkpoint.disk import start_writing, write_all
from shardlight.strategies.checkpoint.dtypes import NAMES
from shardlight.strategies.checkpoint.manifest import CHUNK_BYTES, ITEMSIZE, StoredFile
from shardlight.strategies.engine.disk_tensor import DiskTensor, in_memory
from shardlight.strategies.errors import CheckpointError
from torch import Tensor

_SMALL_BYTES = 1 << 16
"""Below it parts are copied together, since a call costs more than a copy."""
_AT_ONCE_BYTES = max(1 << 20, CHUNK_BYTES)
"""That are written by one call, while a cache still has what their checksums were taken of."""
_STARTED_BYTES = 8 << 20
"""That the system begins to bring to disk at once."""
_PAGE_BYTES = 1 << 12
_STAGED_BYTES = 16 << 20
"""Of a tensor on a GPU, copied at once."""
_ALIGNED_BYTES = 64


class Entry:
    """A tensor that a file will hold.

    Args:
        key: its name in the file.
        dtype: as in manifest.ITEMSIZE.
        shape: of the tensor.
    """

    def __init__(self, key: str, dtype: str, shape: tuple[int, ...]) -> None:
        self.key = key
        self.dtype = dtype
        self.shape = shape
        self.nbytes: int = math.prod(shape) * ITEMSIZE[dtype]
        self.at = 0
        """Where it begins in the file, in bytes; set by `header`."""

    def described(self) -> dict[str, object]:
        """Returns what the header says of it; the format has no complex128, which is stored as pairs of fp64."""
        pairs = self.dtype == "C128"
        return {"dtype": "F64" if pairs else self.dtype, "shape": [*self.shape, 2] if pairs else list(self.shape)}


def dtype_name(tensor: Tensor, where: str) -> str:
    """Returns the name of a tensor's dtype. Raises: CheckpointError: it cannot be stored; says `where`."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in NAMES:
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise CheckpointError(f"{where} is a tensor of {kind}, which cannot be stored.")
    return NAMES[tensor.dtype]


def header(entries: Iterable[Entry], metadata: dict[str, str] | None = None) -> bytes:
    """Returns the beginning of a file that holds the entries' bytes one after the other, and sets their `at`."""
    content: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at, entries = 0, list(entries)
    for entry in entries:
        content[entry.key] = {**entry.described(), "data_offsets": [at, at + entry.nbytes]}
        entry.at = at
        at += entry.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNED_BYTES)
    for entry in entries:
        entry.at += len(text) + 8
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the row-major bytes of a tensor, on the CPU where they are, else in copies of bounded size."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    here = flat.device.type == "cpu" and not isinstance(flat, DiskTensor)
    step = max(1, flat.numel() if here else _STAGED_BYTES // flat.element_size())
    for start in range(0, flat.numel(), step):
        part = in_memory(flat[start : start + step]).cpu().contiguous().view(torch.uint8)
        yield memoryview(part.numpy())


class ChecksummedFile:
    """A file that is written from its start to its end, with the CRC-32 of each chunk.

    Raises: OSError: also by every method: such as a full disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._rest = bytearray()
        """Small parts, to be written together."""
        self._crc32: list[int] = []
        """Of each chunk; of the last one so far."""
        self._nbytes = 0
        self._written = self._started = 0
        """Bytes that the system has, and of them those that it was told to begin with."""

    def write(self, data: memoryview | bytes) -> None:
        """Writes bytes."""
        left = memoryview(data)
        while left.nbytes:
            missing = -self._nbytes % CHUNK_BYTES
            part = left[: missing or _AT_ONCE_BYTES]
            if missing:
                self._crc32[-1] = crc32(part, self._crc32[-1])
            else:
                self._crc32 += crc32_chunks(part, CHUNK_BYTES)
            self._nbytes += part.nbytes
            left = left[part.nbytes :]
            if part.nbytes < _SMALL_BYTES:
                self._rest += part
            else:
                self._write_rest()
                self._write(part)
        if len(self._rest) >= _AT_ONCE_BYTES:
            self._write_rest()

    def _write_rest(self) -> None:
        if self._rest:
            self._write(self._rest)
            self._rest = bytearray()

    def _write(self, data: memoryview | bytearray) -> None:
        write_all(self._file, data)
        self._written += len(data)
        if self._written - self._started >= _STARTED_BYTES:
            # A page that is not full yet would be written twice.
            end = self._written // _PAGE_BYTES * _PAGE_BYTES
            start_writing(self._file, self._started, end - self._started)
            self._started = end

    def finish(self) -> StoredFile:
        """Writes what is left and waits until all is on disk."""
        self._write_rest()
        os.fsync(self._file)
        self.close()
        return StoredFile(self._path.name, self._nbytes, tuple(self._crc32))

    def close(self) -> None:
        """Closes the file, complete or not."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)
