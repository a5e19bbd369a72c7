"""Memory of this process that the other ranks of its host can read, so that what they need is not copied for them.

[Note: arena] A process has one arena: a range of addresses on a memfd, which takes pages as they are written and gives
them back when a tensor goes. It has no name and goes with the process. What a forked child writes to it stays with the
child, as for all other memory.
"""

import bisect
import ctypes
import functools
import mmap
import os
import sys
import threading
import weakref

import torch
from shardlight.ops.built import why_not_shared
from torch import Tensor

ALIGNED_BYTES = 1 << 12
_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10


class Arena:
    """See [Note: arena].

    Args:
        nbytes: of addresses; memory is only taken for what is used of them.
    Raises: OSError: the system does not give them.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes: int = nbytes // ALIGNED_BYTES * ALIGNED_BYTES
        self.file: int = os.memfd_create("shardlight-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.file, self.nbytes)
            self._memory = mmap.mmap(self.file, self.nbytes, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        except (OSError, ValueError) as error:
            os.close(self.file)
            raise OSError(getattr(error, "errno", None), str(error)) from error
        self.address: int = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]
        """(start, bytes) of what nobody has, by start; no two touch."""
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._is_copy = False
        os.register_at_fork(after_in_child=self._keep_apart)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns (numel,) of anything (zeros where memory is fresh), or None where no range of addresses is left.

        Its memory is given back with its storage.
        """
        nbytes = max(1, -(-numel * dtype.itemsize // ALIGNED_BYTES)) * ALIGNED_BYTES
        with self._lock:
            place = next((n for n, (_, free) in enumerate(self._free) if free >= nbytes), None)
            if place is None or os.getpid() != self._owner:
                return None
            start, free = self._free[place]
            self._free[place : place + 1] = [(start + nbytes, free - nbytes)] if free > nbytes else []
        held = (ctypes.c_char * nbytes).from_buffer(self._memory, start)
        weakref.finalize(held, self._give, start, nbytes).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is the arena's."""
        return self.address <= tensor.data_ptr() < self.address + self.nbytes

    def _give(self, start: int, nbytes: int) -> None:
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._memory.madvise(mmap.MADV_REMOVE, start, nbytes)
            place = bisect.bisect(self._free, (start, 0))
            if place < len(self._free) and self._free[place][0] == start + nbytes:
                nbytes += self._free.pop(place)[1]
            if place and sum(self._free[place - 1]) == start:
                start, before = self._free.pop(place - 1)
                nbytes += before
                place -= 1
            self._free.insert(place, (start, nbytes))

    def _keep_apart(self) -> None:
        """In a forked child: what it writes is its own from here on."""
        if self._is_copy:
            return  # a child of a child
        self._is_copy = True
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        made = _mmap()(self.address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, self.file, 0)
        if made != self.address:
            os._exit(1)  # better than a child that writes into its parent's weights


def _mmap() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return function


@functools.cache
def _made(process: int) -> Arena | None:
    if sys.platform != "linux" or why_not_shared() is not None:
        return None
    try:
        return Arena(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except OSError:
        return None


def arena() -> Arena | None:
    """Returns this process's arena; None where there is none, and all memory is private."""
    return _made(os.getpid())
