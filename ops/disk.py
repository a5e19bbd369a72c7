"""Tensors in files, read and written while the program computes; by io_uring, by threads, or in plain Python.

[Note: order] A request that shares a block with an unfinished one of the same file, where one of the two writes, begins
after it: what is read is what was written before, in the program's order. Other requests run in any order. A read whose
blocks an unfinished write was to fill fails if that write fails.

[Note: edges] Direct I/O is of whole blocks of file and memory. What lies otherwise is moved through buffers of whole
blocks; before a write, the blocks at its two ends are read. Where offset and address are equal modulo a block only the
ends go that way.
"""

import atexit
import contextlib
import errno
import itertools
import mmap
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Self, TypeAlias

import torch
from shardlight.ops.built import why_no_ring, why_not
from shardlight.ops.disk_files import BLOCK_BYTES, DiskError, mend, open_file, reserve, whole_blocks
from shardlight.ops.disk_native import Fault, NativeQueue
from shardlight.ops.disk_reference import ReferenceQueue
from shardlight.ops.registry import OPS
from torch import Tensor

__all__ = ["BLOCK_BYTES", "DiskEngine", "DiskError", "DiskFile", "Request", "aligned"]

PIECE_BYTES = 4 << 20
"""Requests are cut into pieces of this size, of which `depth` are under way."""
WAYS = ("auto", "io_uring", "threads")
_MOST_PIECE_BYTES = 1 << 30
_HUGE_BYTES = 2 << 20

Queue: TypeAlias = NativeQueue | ReferenceQueue


def aligned(nbytes: int) -> Tensor:
    """Returns uint8 zeros at the start of a page, in memory of their own that goes back to the system with them.

    From 2 MiB on the system is asked for huge pages: direct I/O on them is more than half as fast again, since it takes
    each page by itself. One that is touched takes memory as a whole.

    Args:
        nbytes: rounded up to whole blocks.
    Example: aligned(5000).nbytes == 8192.
    """
    length = whole_blocks(nbytes)
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if length >= _HUGE_BYTES:
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Core:
    """What an engine, its files and its requests share; it ends with the last of them."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.process: int = os.getpid()
        self.closed: bool = False
        self.paths: dict[int, Path] = {}
        self.held: dict[int, Tensor] = {}
        """By request: memory that the system may still read or write."""
        self.orphans: set[int] = set()
        """Requests that nobody will wait for, and whose memory was not free yet."""
        self.waited_s: float = 0.0
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        weakref.finalize(self, _end, queue, self.held, self.process).atexit = False
        _CORES.add(self)

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the engine's: it leaves everything alone."""
        return os.getpid() != self.process

    def check(self) -> None:
        """Raises: DiskError: this process is not the engine's."""
        if self.is_foreign:
            raise DiskError(
                errno.EPERM,
                f"this disk engine belongs to process {self.process}, from which process {os.getpid()} was forked. "
                "Make a DiskEngine of its own there.",
            )

    def start(self, file: int, write: bool, offset: int, tensor: Tensor) -> int:
        self.check()
        self.sweep()
        number = next(self._numbers)
        self.held[number] = tensor
        if not self.queue.start(number, file, write, tensor.data_ptr(), offset, tensor.nbytes):
            del self.held[number]
            raise DiskError(errno.EBADF, f"{self.paths[file]}: the file or its engine is closed. Open it again.")
        return number

    def wait(self, number: int) -> Fault | None:
        self.check()
        began_s = time.perf_counter()
        try:
            fault = self.queue.wait(number)
        finally:
            with self._lock:
                self.waited_s += time.perf_counter() - began_s
        self.queue.release(number)
        self.held.pop(number, None)
        return fault

    def abandon(self, number: int) -> None:
        """Nobody will wait for a request; its memory stays until it is finished. Takes no lock: collections call it."""
        self.orphans.add(number)

    def sweep(self) -> None:
        """Lets go of the memory of requests that nobody waits for and that are finished."""
        for number in list(self.orphans):
            if self.queue.release(number):
                self.held.pop(number, None)
                self.orphans.discard(number)

    def settle(self, file: int = 0) -> None:
        """Waits until nothing of a file (0: of any) is under way.

        Raises: DiskError: a request failed, and nobody was told.
        """
        self.check()
        fault = self.queue.settle(file)
        self.sweep()
        if fault is not None:
            raise self.error(fault)

    def stop(self) -> None:
        if not self.is_foreign and not self.closed:
            self.queue.stop()
            self.sweep()
            self.closed = True

    def error(self, fault: Fault) -> DiskError:
        path, whole = self.paths[fault.file], f"{fault.nbytes} bytes at offset {fault.offset}"
        if fault.what == "short":
            return DiskError(
                fault.error,
                f"{path}: the file is {fault.size} bytes, needs {fault.offset + fault.nbytes} for {whole}. "
                "Something has cut it short: start again with a new one.",
            )
        why = f"{os.strerror(fault.error)} ({errno.errorcode.get(fault.error, fault.error)})"
        if fault.what == "after":
            return DiskError(fault.error, f"{path}: cannot read {whole}: an earlier write of them failed: {why}.")
        return DiskError(fault.error, f"{path}: cannot {fault.what} {whole}: {why}. {mend(fault.error, path)}")


class Request:
    """A read or write that was started; `wait` says what became of it. It holds its tensor until then."""

    def __init__(self, core: _Core, number: int) -> None:
        self._core = core
        self._number = number
        """0: there was nothing to do."""
        self._waited: bool = not number
        self._error: tuple[int, str] | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        if self._waited:
            return True
        self._core.check()
        return self._core.queue.finished(self._number)

    def wait(self) -> None:
        """Returns when the tensor has been read or written.

        Raises: DiskError: it has not; the same again for each call.
        """
        with self._lock:
            if not self._waited:
                fault = self._core.wait(self._number)
                if fault is not None:
                    error = self._core.error(fault)
                    self._error = (error.errno or errno.EIO, str(error))
                self._waited = True
        if self._error is not None:
            raise DiskError(*self._error)

    def __del__(self) -> None:
        if not self._waited:
            self._core.abandon(self._number)


class DiskFile:
    """A file that an engine has open. Requests may be started by any thread; see [Note: order].

    Attributes:
        path: where it was when it was opened.
        nbytes: that may be asked for: the ones it was opened with, rounded up to whole blocks where it has these.
    """

    def __init__(self, core: _Core, number: int, path: Path, nbytes: int, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.nbytes = nbytes
        self._core = core
        self._number = number
        self._finalizer = weakref.finalize(self, _close_file, core, number)
        self._finalizer.atexit = False

    def start_read(self, offset: int, out: Tensor) -> Request:
        """Starts to fill a tensor: until `Request.wait` has returned it is not to be touched, nor its storage resized.

        Args:
            offset: in bytes. Where it, the address and the size of `out` are multiples of BLOCK_BYTES nothing is copied
                ([Note: edges]).
            out: any shape and dtype, contiguous, on CPU.
        Raises:
            DiskError: the file is closed, or ends before; or the engine is another process's.
            ValueError: the tensor is no contiguous memory of the CPU.
        """
        return self._start(offset, out, False)

    def start_write(self, offset: int, data: Tensor) -> Request:
        """Starts to write a tensor, which is not to be changed before `Request.wait` has returned; see `start_read`."""
        return self._start(offset, data, True)

    def grow(self, nbytes: int) -> None:
        """Makes the file longer and takes the space. Raises: DiskError: there is none; the file is as it was."""
        if not self._finalizer.alive or self._core.closed:
            raise DiskError(errno.EBADF, f"{self.path}: the file or its engine is closed. Open it again.")
        self._core.check()
        reserve(self._descriptor, self.path, whole_blocks(nbytes))
        self.nbytes = max(self.nbytes, whole_blocks(nbytes))

    def read(self, offset: int, out: Tensor) -> None:
        """Fills a tensor; see `start_read`."""
        self.start_read(offset, out).wait()

    def write(self, offset: int, data: Tensor) -> None:
        """Writes a tensor; see `start_write`."""
        self.start_write(offset, data).wait()

    def _start(self, offset: int, tensor: Tensor, write: bool) -> Request:
        what = "write" if write else "read"
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"{self.path}: cannot {what} a tensor of {tuple(tensor.shape)} on {tensor.device}: it is not "
                "contiguous memory of the CPU."
            )
        if offset < 0 or offset + tensor.nbytes > self.nbytes:
            raise DiskError(
                errno.EINVAL,
                f"{self.path}: cannot {what} {tensor.nbytes} bytes at offset {offset}: the file is {self.nbytes} "
                f"bytes, needs {offset + tensor.nbytes}.",
            )
        number = self._core.start(self._number, write, offset, tensor) if tensor.nbytes else 0
        return Request(self._core, number)

    def close(self) -> None:
        """Waits for what is under way and closes the file, which stays where it is.

        Raises: DiskError: a request failed that nobody has waited for.
        """
        if not self._finalizer.alive or self._core.is_foreign:
            return
        try:
            self._core.settle(self._number)
        finally:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DiskEngine:
    """Reads and writes files beside the program; see the notes at the top of this file.

    Args:
        way: "io_uring", "threads", or "auto": the first of them that runs here. SHARDLIGHT_OPS=reference, or a library
            that is not built, makes it "reference", whatever is asked for.
        depth: pieces under way in the system at a time; requests beyond them wait in a queue.
        piece_bytes: the largest piece, rounded up to whole blocks.
        direct: past the page cache (O_DIRECT), where a file takes it.
    Raises:
        DiskError: `way` cannot run here.
        ValueError: there is no such way, depth or size of a piece.
        OpError: SHARDLIGHT_OPS=native, and the library is not there.
    Source: Rajbhandari et al. 2021, ZeRO-Infinity, section 6.3, "DeepNVMe" (arXiv 2104.07857).
    """

    def __init__(
        self, *, way: str = "auto", depth: int = 8, piece_bytes: int = PIECE_BYTES, direct: bool = True
    ) -> None:
        if way not in WAYS or not 1 <= depth <= 1024 or not 1 <= piece_bytes <= _MOST_PIECE_BYTES:
            raise ValueError(
                f"DiskEngine(way={way!r}, depth={depth}, piece_bytes={piece_bytes}): way is one of {', '.join(WAYS)}, "
                f"depth 1 to 1024, piece_bytes 1 to {_MOST_PIECE_BYTES}."
            )
        self.way, self.why = _chosen(way)
        self.depth = depth
        self.piece_bytes: int = whole_blocks(piece_bytes)
        self._wants_direct = direct
        self.direct: bool = direct
        """False once a file had to do without."""
        self.why_not_direct: str | None = None if direct else "direct=False is set"
        try:
            self._core = _Core(
                ReferenceQueue(depth, self.piece_bytes)
                if self.way == "reference"
                else NativeQueue(self.way == "io_uring", depth, self.piece_bytes)
            )
        except OSError as error:
            raise DiskError(error.errno, f"DiskEngine: {self.way} with depth {depth}: {error.strerror}.") from None

    @property
    def bytes_read(self) -> int:
        """Bytes that came from files since the start, in whole blocks for direct files."""
        return self._counters()[0]

    @property
    def bytes_written(self) -> int:
        """Bytes that went to files since the start, in whole blocks for direct files."""
        return self._counters()[1]

    def _counters(self) -> tuple[int, int]:
        self._core.check()
        return self._core.queue.counters()

    @property
    def waited_s(self) -> float:
        """The time that callers have spent in `Request.wait`."""
        return self._core.waited_s

    def open(self, path: Path | str, nbytes: int, *, create: bool) -> DiskFile:
        """Opens a file.

        Args:
            nbytes: that it is to have. A new file is made of whole blocks.
            create: a new file, for its owner only, whose space is reserved; else one that is there.
        Raises: DiskError: it is there already, or not; it is too short; there is no space for it.
        """
        self._core.check()
        path = Path(path)
        if self._core.closed:
            raise DiskError(errno.EBADF, f"{path}: cannot be opened: its engine is closed.")
        descriptor, size, why_not_direct = open_file(path, nbytes, create, self._wants_direct)
        if why_not_direct is not None and self.direct:
            self.direct, self.why_not_direct = False, f"{path}: {why_not_direct}"
        number = self._core.queue.add_file(descriptor, why_not_direct is None)
        self._core.paths[number] = path
        return DiskFile(self._core, number, path, min(size, whole_blocks(nbytes)), descriptor)

    def drain(self) -> None:
        """Waits until nothing is under way. Raises: DiskError: a request failed that nobody has waited for."""
        self._core.settle()

    def close(self) -> None:
        """Waits for what is under way, closes all files and ends the threads. Requests can still be waited for.

        Raises: DiskError: a request failed that nobody has waited for.
        """
        if self._core.closed or self._core.is_foreign:
            return
        try:
            self._core.settle()
        finally:
            self._core.stop()


def _chosen(way: str) -> tuple[str, str]:
    """Returns which way runs, and why."""
    if not OPS["disk"].native("cpu"):
        return "reference", str(why_not())
    refused = None if way == "threads" else why_no_ring()
    if way == "io_uring" and refused is not None:
        raise DiskError(errno.ENOSYS, f"DiskEngine: {refused}. Set way to 'auto' or 'threads'.")
    return ("io_uring", "it runs here") if way != "threads" and refused is None else ("threads", refused or "asked for")


def _close_file(core: _Core, number: int) -> None:
    if not core.is_foreign and not core.closed:
        core.queue.close_file(number)


def _end(queue: Queue, held: dict[int, Tensor], process: int) -> None:
    """The last that used a queue is gone: `held` stays until the system is done with its memory."""
    if os.getpid() == process:
        if queue.serves_with_this_thread():  # a collection may happen anywhere, and this cannot wait for itself
            threading.Thread(target=_end, args=(queue, held, process)).start()
            return
        queue.stop()
        queue.free()
    held.clear()


_CORES: "weakref.WeakSet[_Core]" = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    """While the system reads or writes memory, older kernels must not make it a child's as well (open(2), O_DIRECT)."""
    _forking.cores = [core for core in list(_CORES) if not core.is_foreign and not core.closed]
    for core in _forking.cores:
        core.queue.freeze()


def _after_fork() -> None:
    for core in getattr(_forking, "cores", ()):
        core.queue.thaw()
    _forking.cores = []


@atexit.register
def _stop_all() -> None:
    for core in list(_CORES):
        core.stop()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
