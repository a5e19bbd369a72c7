"""The compiled disk engine (`csrc/cpu/disk.cpp`) behind ctypes: io_uring, or threads that call pread and pwrite."""

import ctypes
import functools
import os
from typing import NamedTuple

from shardlight.ops.built import library

_SLICE_S = 0.1
"""A wait returns to Python this often, so that signals are seen."""


class Fault(NamedTuple):
    """What went wrong with a request, as `Fault` in csrc/cpu/disk_queue.h.

    Attributes:
        error: errno.
        what: "read" or "write", the call that failed; "short": the file ends before the request does; "after": a write
            of the same blocks failed before this read.
        file: its number.
        offset, nbytes: of the request.
        size: the file's, where it is too short.
    """

    error: int
    what: str
    file: int
    offset: int
    nbytes: int
    size: int


WHATS = ("read", "write", "short", "after")


class _Fault(ctypes.Structure):
    _fields_ = [
        ("error", ctypes.c_int32),
        ("what", ctypes.c_int32),
        ("file", ctypes.c_int64),
        ("offset", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    ]

    def told(self) -> Fault | None:
        if not self.error:
            return None
        return Fault(self.error, WHATS[self.what], self.file, self.offset, self.nbytes, self.size)


@functools.cache
def _compiled() -> ctypes.CDLL:
    found = ctypes.CDLL(str(library()))
    pointer, number, size, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int
    fault = ctypes.POINTER(_Fault)
    for name, result, arguments in (
        ("new", pointer, (integer, integer, size, ctypes.POINTER(integer))),
        ("stop", None, (pointer,)),
        ("free", None, (pointer,)),
        ("add_file", number, (pointer, integer, integer)),
        ("close_file", None, (pointer, number)),
        ("start", integer, (pointer, size, number, integer, pointer, size, size)),
        ("wait", integer, (pointer, size, number, fault)),
        ("finished", integer, (pointer, size)),
        ("release", integer, (pointer, size)),
        ("settle", integer, (pointer, number, number, fault)),
        ("counters", None, (pointer, ctypes.POINTER(size))),
        ("freeze", None, (pointer,)),
        ("thaw", None, (pointer,)),
        ("spoil", None, (pointer, number, number, integer)),
    ):
        function = getattr(found, f"ops_disk_{name}")
        function.restype, function.argtypes = result, arguments
    return found


class NativeQueue:
    """Requests that compiled code serves. All functions may be called by any thread.

    Args:
        ring: io_uring, else threads.
        depth: pieces under way in the system at a time.
        piece_bytes: the largest, in whole blocks.
    Raises: OSError: the system refuses a ring, or a thread.
    """

    def __init__(self, ring: bool, depth: int, piece_bytes: int) -> None:
        self._library = _compiled()
        error = ctypes.c_int(0)
        self._engine = self._library.ops_disk_new(ring, depth, piece_bytes, error)
        if not self._engine:
            raise OSError(error.value, os.strerror(error.value))

    def add_file(self, descriptor: int, direct: bool) -> int:
        """Returns the number of a file whose descriptor the queue closes; `direct`: whole blocks only."""
        return int(self._library.ops_disk_add_file(self._engine, descriptor, direct))

    def close_file(self, file: int) -> None:
        """No request of a file comes any more; it is closed after the last."""
        self._library.ops_disk_close_file(self._engine, file)

    def start(self, number: int, file: int, write: bool, address: int, offset: int, nbytes: int) -> bool:
        """Starts a request on memory that stays until it is finished; False: the file is closed."""
        return not self._library.ops_disk_start(self._engine, number, file, write, address, offset, nbytes)

    def wait(self, number: int) -> Fault | None:
        """Returns when a request is finished, with what failed."""
        fault = _Fault()
        while self._library.ops_disk_wait(self._engine, number, int(1e6 * _SLICE_S), fault):
            pass
        return fault.told()

    def finished(self, number: int) -> bool:
        """Whether a request is finished."""
        return bool(self._library.ops_disk_finished(self._engine, number))

    def release(self, number: int) -> bool:
        """Nobody waits for a request any more; returns whether its memory is free."""
        return bool(self._library.ops_disk_release(self._engine, number))

    def settle(self, file: int = 0) -> Fault | None:
        """Returns when nothing of a file (0: of any) is under way, with a fault that nobody was told of."""
        fault = _Fault()
        while self._library.ops_disk_settle(self._engine, file, int(1e6 * _SLICE_S), fault):
            pass
        return fault.told()

    def counters(self) -> tuple[int, int]:
        """Returns the bytes that were read and written."""
        found = (ctypes.c_uint64 * 2)()
        self._library.ops_disk_counters(self._engine, found)
        return found[0], found[1]

    def freeze(self) -> None:
        """Nothing is under way in the system from here to `thaw`."""
        self._library.ops_disk_freeze(self._engine)

    def thaw(self) -> None:
        """Undoes `freeze`."""
        self._library.ops_disk_thaw(self._engine)

    def stop(self) -> None:
        """Waits for all, closes all files and ends the threads; what became of requests can be asked still."""
        self._library.ops_disk_stop(self._engine)

    def serves_with_this_thread(self) -> bool:
        """Whether the caller is one of the queue's own threads, which never run Python."""
        return False

    def free(self) -> None:
        """Gives the memory back; after `stop`."""
        self._library.ops_disk_free(self._engine)
        self._engine = None

    def spoil(self, most: int = 2**63 - 1, after: int = -1, error: int = 0) -> None:
        """For tests: one call of the system is taken to have moved `most` bytes, the one after `after` others fails."""
        self._library.ops_disk_spoil(self._engine, most, after, error)
