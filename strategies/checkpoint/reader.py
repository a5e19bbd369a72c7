"""Reads tensors of a checkpoint, whole or a range, from whichever files hold them; nothing that a checksum denies."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from shardlight.ops.crc32 import crc32_chunks
from shardlight.strategies.checkpoint.dtypes import TORCH_DTYPES
from shardlight.strategies.checkpoint.manifest import (
    ITEMSIZE,
    KNOWN_CHUNK_BYTES,
    Manifest,
    StoredPiece,
    StoredTensor,
    n_chunks,
    open_plain,
)
from shardlight.strategies.engine.boxes import Box, strides_of
from shardlight.strategies.engine.disk_tensor import DiskTensor
from shardlight.strategies.engine.slices import Slice
from shardlight.strategies.errors import CheckpointError
from torch import Tensor

_AT_ONCE = 1 << 22
"""Elements that are read at once into a tensor that is there already."""
_RUN_BYTES = max(1 << 20, *KNOWN_CHUNK_BYTES)
"""Of whole chunks that are read by one call: what a cache holds until their checksums are taken."""
_KEPT = 8
"""Chunks that were needed in part, the last ones: a rank reads from several files in turn."""


class CheckpointReader:
    """A complete checkpoint. Opening it reads the manifest; bytes of tensors are checked when they are read.

    Raises: CheckpointError: it is not complete, damaged, or says what cannot be.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        manifest = Manifest.read(self.path)
        self.content: dict[str, Any] = manifest.content
        self.files = manifest.files
        self.tensors: dict[str, StoredTensor] = manifest.tensors
        self._open: dict[int, int] = {}
        self._kept: dict[tuple[int, int], memoryview] = {}
        """Chunks by file and number; the one that was used last is at the end."""

    def __del__(self) -> None:
        for file in getattr(self, "_open", {}).values():
            os.close(file)

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of the tensors below `prefix`, without it."""
        return [n.removeprefix(prefix) for n in self.tensors if n.startswith(prefix)]

    def has(self, name: str) -> bool:
        """Whether the tensor is there."""
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the full shape of a tensor."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        return TORCH_DTYPES[self.tensors[name].dtype]

    def read(self, name: str, start: int = 0, stop: int | None = None, of: Slice | None = None) -> Tensor:
        """Returns elements [start, stop) of a flattened tensor, or the whole tensor in its shape.

        Args:
            of: the part of the tensor that is meant; None: all of it.
        Raises: CheckpointError: the tensor is not there, or what is read is damaged.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: '{name}' is not in the checkpoint.")
        shape = self.shape(name) if of is None else of.local_shape
        end = math.prod(shape) if stop is None else stop
        flat = torch.empty(end - start, dtype=self.dtype(name))
        self.read_into(flat, name, start, of)
        return flat.view(shape) if start == 0 and stop is None else flat

    def read_into(self, out: Tensor, name: str, start: int = 0, of: Slice | None = None) -> None:
        """Overwrites `out` with elements [start, start + n) of a flattened tensor, converted to its dtype.

        Args:
            out: (n,), any device.
            of: see `read`.
        Raises: CheckpointError: see `read`; `out` is in part overwritten then.
        """
        tensor = self.tensors[name]
        part_of = Slice.whole(tensor.shape) if of is None else of
        for low in range(0, out.numel(), _AT_ONCE):
            whole = part = out[low : low + _AT_ONCE]
            if isinstance(part, DiskTensor):
                whole = part = torch.empty(part.numel(), dtype=part.dtype)
            for box, to in part_of.parts(part, start + low):
                for piece in tensor.pieces:
                    common = piece.box.common(box) if piece.box.numel else None
                    if common is not None:
                        inside = tuple(
                            slice(o - b, o - b + n)
                            for o, n, b in zip(common.offsets, common.sizes, box.offsets, strict=True)
                        )
                        self._take(tensor, piece, common, to[inside])
            if isinstance(out, DiskTensor):
                out[low : low + _AT_ONCE].copy_(whole)

    def _take(self, tensor: StoredTensor, piece: StoredPiece, box: Box, out: Tensor) -> None:
        """Overwrites `out` with a box of a tensor that lies in a piece."""
        span = box.span(piece.box)
        memory = _memory_of(out) if out.dtype == TORCH_DTYPES[tensor.dtype] else None
        if memory is None or span[1] - span[0] != box.numel:
            out.copy_(self._part(tensor, piece, span, box.sizes))
        else:
            self._fill(memory, piece.file, piece.at + span[0] * ITEMSIZE[tensor.dtype])
            if not out.is_inference():
                torch.autograd.graph.increment_version(out)  # as every other change of it does

    def _part(self, tensor: StoredTensor, piece: StoredPiece, span: tuple[int, int], sizes: tuple[int, ...]) -> Tensor:
        """Returns the box of `sizes` whose first and last elements are `span` in a piece's row-major memory."""
        size = ITEMSIZE[tensor.dtype]
        data = bytearray((span[1] - span[0]) * size)
        self._fill(memoryview(data), piece.file, piece.at + span[0] * size)
        flat = torch.frombuffer(data, dtype=torch.uint8).view(TORCH_DTYPES[tensor.dtype])
        return flat.as_strided(sizes, strides_of(piece.box.sizes))

    def _fill(self, out: memoryview, file: int, start: int) -> None:
        """Overwrites `out` with bytes of a file from `start` on, of chunks that are as they were written."""
        stored, stop = self.files[file], start + len(out)
        while start < stop:
            number = start // stored.chunk_bytes
            at, end = stored.span(number, number + 1)
            if start > at or stop < end:
                end = min(end, stop)
                out[: end - start] = self._chunk(file, number)[start - at : end - at]
            else:
                last = stored.n_chunks if stop == stored.nbytes else stop // stored.chunk_bytes
                _, end = stored.span(number, min(last, number + _RUN_BYTES // stored.chunk_bytes))
                self._read(out[: end - start], file, number)  # straight to where it is wanted
            out, start = out[end - start :], end

    def _chunk(self, file: int, number: int) -> memoryview:
        """Returns a chunk; several times, it is read once."""
        found = self._kept.pop((file, number), None)
        if found is None:
            start, stop = self.files[file].span(number, number + 1)
            found = memoryview(bytearray(stop - start))
            self._read(found, file, number)
            if len(self._kept) == _KEPT:
                del self._kept[next(iter(self._kept))]
        self._kept[file, number] = found
        return found

    def _read(self, out: memoryview, file: int, first: int) -> None:
        """Reads whole chunks that follow each other. Raises: CheckpointError: one of them is damaged."""
        stored, want = self.files[file], len(out)
        start = first * stored.chunk_bytes
        try:
            if file not in self._open:
                self._open[file] = open_plain(self.path / stored.name)
            got = _read_all(self._open[file], out, start)
        except OSError as error:
            raise CheckpointError(f"{self.path / stored.name} cannot be read: {error}.") from None
        if got < want:
            raise CheckpointError(
                f"{self.path / stored.name} is damaged between byte {start:,} and {start + want:,}: it ends after "
                f"{got} of them."
            )
        for number, crc32 in enumerate(crc32_chunks(out, stored.chunk_bytes), first):
            if crc32 != stored.crc32[number]:
                start, stop = stored.span(number, number + 1)
                raise CheckpointError(
                    f"{self.path / stored.name} is damaged between byte {start:,} and {stop:,}: it does not have the "
                    "CRC-32 it was saved with."
                )

    def verify(self, share: tuple[int, int] = (0, 1), wanted: Callable[[str], bool] | None = None) -> None:
        """Reads chunks and compares them with their checksums.

        Args:
            share: (rank, world size): one of as many equal parts of the work.
            wanted: tells by name which tensors matter; None: every byte of the files, whoever it belongs to.
        Raises: CheckpointError: a chunk is damaged; says file and bytes.
        """
        chunks = list(self._chunks_of(wanted))
        rank, world = share
        room = memoryview(bytearray(_RUN_BYTES))
        for file, first, stop in self._runs(chunks[len(chunks) * rank // world : len(chunks) * (rank + 1) // world]):
            start, end = self.files[file].span(first, stop)
            self._read(room[: end - start], file, first)

    def _runs(self, chunks: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Yields (file, first, stop) of chunks that follow each other, as many as are read by one call."""
        at = 0
        while at < len(chunks):
            file, first = chunks[at]
            most, n = _RUN_BYTES // self.files[file].chunk_bytes, 1
            while n < most and chunks[at + n : at + n + 1] == [(file, first + n)]:
                n += 1
            yield file, first, first + n
            at += n

    def _chunks_of(self, wanted: Callable[[str], bool] | None) -> Iterator[tuple[int, int]]:
        if wanted is None:
            for file, stored in enumerate(self.files):
                yield from ((file, number) for number in range(stored.n_chunks))
            return
        found = set()
        for name, tensor in self.tensors.items():
            if wanted(name):
                for piece in tensor.pieces:
                    size, nbytes = self.files[piece.file].chunk_bytes, piece.box.numel * ITEMSIZE[tensor.dtype]
                    numbers = range(piece.at // size, n_chunks(piece.at + nbytes, size))
                    found.update((piece.file, n) for n in numbers)
        yield from sorted(found)


def _memory_of(tensor: Tensor) -> memoryview | None:
    """Returns the bytes of a tensor where they lie, None if they are not one range of this process's memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def _read_all(file: int, data: memoryview, at: int) -> int:
    """Fills `data` from byte `at` of a file; returns how much there was."""
    got = 0
    while got < len(data):
        n = os.preadv(file, [data[got:]], at + got)
        if not n:
            break
        got += n
    return got
