"""The memory of buffers that are filled and emptied again and again, each with one storage for its whole life.

[Note: mapped memory] A released unit gives its memory back, and a gather takes some. From the heap that is slow for
large units, whose pages the system hands out anew and clears each time, and it leaves holes between what else is
allocated meanwhile (`shardlight bench zero --size medium` shows both, as page faults and as peak memory). So a large
buffer on CPU has a range of addresses of its own, and chunks of one file in memory are mapped into it while it is
filled: the same pages serve one unit after the other.
"""

import ctypes
import mmap
import os
import sys
import weakref
from typing import Protocol

import torch
from torch import Tensor

MAPPED_FROM_BYTES = 4 << 20
"""Smaller buffers are on the heap."""
CHUNK_BYTES = 2 << 20
_MAP_FIXED, _MAP_POPULATE, _MAP_NORESERVE = 0x10, 0x8000, 0x4000


class Backing(Protocol):
    """A flat tensor whose memory comes and goes."""

    tensor: Tensor
    """(numel,); not to be touched while it is empty."""
    filled: bool

    def fill(self) -> None:
        """Gives it memory, which holds anything."""

    def empty(self) -> None:
        """Takes the memory away."""


class HeapBacking:
    """Memory of PyTorch's allocator; on every device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor: Tensor = torch.zeros(numel, dtype=dtype, device=device)
        self.filled = True
        self._nbytes = self.tensor.nbytes

    def fill(self) -> None:
        """See Backing.fill."""
        self.tensor.untyped_storage().resize_(self._nbytes)
        self.filled = True

    def empty(self) -> None:
        """See Backing.empty."""
        self.tensor.untyped_storage().resize_(0)
        self.filled = False


class Chunks:
    """A file in memory whose chunks serve one buffer after the other; it grows to what is filled at one time.

    Raises: OSError: the system gives no such file.
    """

    def __init__(self) -> None:
        self.file: int = os.memfd_create("shardlight", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        self._free: list[int] = []
        self._made = 0

    def take(self, count: int) -> list[int]:
        """Returns the numbers of `count` chunks, in ascending order."""
        missing = count - len(self._free)
        if missing > 0:
            os.ftruncate(self.file, (self._made + missing) * CHUNK_BYTES)
            self._free += range(self._made, self._made + missing)
            self._made += missing
        taken, self._free = self._free[:count], self._free[count:]
        return sorted(taken)

    def give(self, taken: list[int]) -> None:
        """Takes chunks back."""
        self._free = sorted(self._free + taken)


class MappedBacking:
    """See [Note: mapped memory]. Linux, CPU."""

    def __init__(self, numel: int, dtype: torch.dtype, chunks: Chunks) -> None:
        count = -(-numel * dtype.itemsize // CHUNK_BYTES)
        # The storage holds on to the range, which is given back with it.
        addresses = mmap.mmap(-1, count * CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self.tensor: Tensor = torch.frombuffer(addresses, dtype=dtype, count=numel)
        self.filled = False
        self._chunks = chunks
        self._count = count
        self._taken: list[int] = []
        self._unmap()

    def fill(self) -> None:
        """See Backing.fill."""
        if self.filled:
            return
        self._taken = self._chunks.take(self._count)
        rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        at = self.tensor.data_ptr()
        for first, length in _runs(self._taken):
            _map(at, length * CHUNK_BYTES, rights, flags, self._chunks.file, first * CHUNK_BYTES)
            at += length * CHUNK_BYTES
        self.filled = True

    def empty(self) -> None:
        """See Backing.empty."""
        if self.filled:
            self._unmap()
            self._chunks.give(self._taken)
            self.filled = False

    def _unmap(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        # Without rights: whoever reads it now crashes instead of computing with zeros.
        _map(self.tensor.data_ptr(), self._count * CHUNK_BYTES, 0, flags, -1, 0)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Returns (first, length) of the runs of consecutive numbers. Example: [1, 2, 5]: (1, 2), (5, 1)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((number, 1))
    return found


def _map(address: int, length: int, rights: int, flags: int, file: int, offset: int) -> None:
    if _mmap(address, length, rights, flags, file, offset) != address:
        error = ctypes.get_errno()
        raise MemoryError(f"{length} bytes for gathered weights could not be mapped: {os.strerror(error)}.")


def _load_mmap() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return function


if sys.platform == "linux":
    _mmap = _load_mmap()


def open_chunks(device: torch.device) -> Chunks | None:
    """Returns chunks for buffers on that device; None where memory cannot be mapped."""
    if device.type != "cpu" or sys.platform != "linux":
        return None
    try:
        return Chunks()
    except OSError:
        return None


def back(numel: int, dtype: torch.dtype, device: torch.device, chunks: Chunks | None) -> Backing:
    """Returns a filled backing of zeros."""
    if chunks is None or numel * dtype.itemsize < MAPPED_FROM_BYTES:
        return HeapBacking(numel, dtype, device)
    backing = MappedBacking(numel, dtype, chunks)
    backing.fill()
    backing.tensor.zero_()
    return backing
