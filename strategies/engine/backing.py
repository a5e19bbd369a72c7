"""The memory of buffers that are filled and emptied again and again, each with one storage for its whole life.

[Note: moved pages] A released unit gives its memory back, and a gather takes some. From the heap that is slow for
large units, whose pages the system hands out anew and clears each time, and it leaves holes between what else is
allocated meanwhile (`shardlight bench zero --size medium` shows both, as page faults and as peak memory). So a large
buffer on CPU has a range of addresses of its own, and pages are moved into it while it is filled (Linux's
mremap, which copies nothing): the same pages serve one unit after the other.
"""

import ctypes
import mmap
import os
import sys
from typing import Any, Protocol

import torch
from torch import Tensor

MOVED_FROM_BYTES = 4 << 20
"""Smaller buffers are on the heap."""
CHUNK_BYTES = 2 << 20
"""What a table of pages covers, and a large page: moved by changing one entry."""
_MAP_NORESERVE, _MADV_HUGEPAGE = 0x4000, 14
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4


class Backing(Protocol):
    """A flat tensor whose memory comes and goes."""

    tensor: Tensor
    """(numel,); not to be touched while it is empty."""
    filled: bool
    pinned: bool
    """Whether its memory cannot be taken away any more: an array of NumPy was made of it, though it may be gone."""

    def fill(self) -> None:
        """Gives it memory, which holds anything."""

    def empty(self) -> None:
        """Takes the memory away."""


class HeapBacking:
    """Memory of PyTorch's allocator, on every device; or any other, for a buffer that is never emptied.

    Args:
        flat: (numel,), with a storage of its own.
    """

    def __init__(self, flat: Tensor) -> None:
        self.tensor: Tensor = flat
        self.filled = True
        self._nbytes = self.tensor.nbytes

    @property
    def pinned(self) -> bool:
        """See Backing.pinned."""
        return not self.tensor.untyped_storage().resizable()

    def fill(self) -> None:
        """See Backing.fill."""
        self.tensor.untyped_storage().resize_(self._nbytes)
        self.filled = True

    def empty(self) -> None:
        """See Backing.empty."""
        self.tensor.untyped_storage().resize_(0)
        self.filled = False


class Chunks:
    """Pages that serve one buffer after the other; as many as are filled at one time.

    Each chunk has a place of its own, where its pages are while no buffer has them.
    """

    def __init__(self) -> None:
        self.made = 0
        """How many chunks there are, in use or not."""
        self._free: list[int] = []
        self._slabs: list[_Range] = []

    def take(self, count: int) -> list[int]:
        """Returns the places of `count` chunks, in ascending order."""
        missing = count - len(self._free)
        if missing > 0:
            slab = _Range(missing)
            # Where the system has large pages, they move as one.
            _madvise(slab.start, missing * CHUNK_BYTES, _MADV_HUGEPAGE)
            self._slabs.append(slab)
            self._free += [slab.start + i * CHUNK_BYTES for i in range(missing)]
            self.made += missing
        taken, self._free = self._free[:count], self._free[count:]
        return sorted(taken)

    def give(self, taken: list[int]) -> None:
        """Takes chunks back, whose pages are at their places again."""
        self._free = sorted(self._free + taken)


class _Range:
    """A range of addresses that begins at a multiple of a chunk; given back when nobody refers to it."""

    def __init__(self, count: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.memory = mmap.mmap(-1, (count + 1) * CHUNK_BYTES, flags=flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.offset: int = -address % CHUNK_BYTES
        self.start: int = address + self.offset


class MovedBacking:
    """See [Note: moved pages]. Linux, CPU."""

    pinned = False

    def __init__(self, numel: int, dtype: torch.dtype, chunks: Chunks) -> None:
        self._count = -(-numel * dtype.itemsize // CHUNK_BYTES)
        addresses = _Range(self._count)
        self._start = addresses.start
        # The storage holds on to the range, which goes with it.
        self.tensor: Tensor = torch.frombuffer(addresses.memory, dtype=dtype, count=numel, offset=addresses.offset)
        self.filled = False
        self._chunks = chunks
        self._taken: list[int] = []
        self._forbid()

    def fill(self) -> None:
        """See Backing.fill."""
        if self.filled:
            return
        self._taken = self._chunks.take(self._count)
        at = self._start
        for place, length in _runs(self._taken):
            _move(place, length, at)
            at += length
        self.filled = True

    def empty(self) -> None:
        """See Backing.empty."""
        if not self.filled:
            return
        at = self._start
        for place, length in _runs(self._taken):
            _move(at, length, place)
            at += length
        self._forbid()
        self._chunks.give(self._taken)
        self.filled = False

    def _forbid(self) -> None:
        # Whoever reads it now crashes instead of computing with zeros.
        if _mprotect(self._start, self._count * CHUNK_BYTES, 0):
            raise MemoryError(f"addresses of gathered weights: {os.strerror(ctypes.get_errno())}.")


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """Returns (place, bytes) of chunks that follow each other. Example: for chunks of 1 byte [1, 2, 5]: (1, 2), (5, 1).

    Each is moved by one call.
    """
    found: list[tuple[int, int]] = []
    for place in places:
        if found and place == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + CHUNK_BYTES
        else:
            found.append((place, CHUNK_BYTES))
    return found


def _move(place: int, length: int, to: int) -> None:
    """Moves pages; what was at `to` is dropped, and `place` stays reserved, without pages."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if _mremap(place, length, length, flags, to) != to:
        raise MemoryError(f"{length} bytes for gathered weights could not be moved: {os.strerror(ctypes.get_errno())}.")


def _load(name: str, result: Any, *arguments: Any) -> Any:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = result, arguments
    return function


_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_mremap = _load("mremap", _address, _address, _size, _size, _int, _address)
_mprotect = _load("mprotect", _int, _address, _size, _int)
_madvise = _load("madvise", _int, _address, _size, _int)


def open_chunks(device: torch.device) -> Chunks | None:
    """Returns chunks for buffers on that device; None where pages cannot be moved (Linux before 5.7, other systems)."""
    if device.type != "cpu" or _mremap is None:
        return None
    chunks = Chunks()
    try:
        trial = MovedBacking(1, torch.uint8, chunks)
        trial.fill()
        trial.empty()
    except (OSError, MemoryError):
        return None
    return chunks


def back(numel: int, dtype: torch.dtype, device: torch.device, chunks: Chunks | None) -> Backing:
    """Returns a filled backing of zeros."""
    if chunks is None or numel * dtype.itemsize < MOVED_FROM_BYTES:
        return HeapBacking(torch.zeros(numel, dtype=dtype, device=device))
    backing = MovedBacking(numel, dtype, chunks)
    backing.fill()
    backing.tensor.zero_()
    return backing
