"""Tensors in files, read and written while the program computes; by io_uring, by threads, or in plain Python.

[Note: order] A request that shares a block with an unfinished one of the same file, where one of the two writes, begins
after it: what is read is what was written before, in the program's order. Other requests run in any order. A read whose
blocks an unfinished write was to fill fails if that write fails.

[Note: edges] Direct I/O is of whole blocks of file and memory. What lies otherwise is moved through buffers of whole
blocks; before a write, the blocks at its two ends are read. Where offset and address are equal modulo a block only the
ends go that way.
"""

import contextlib
import errno
import mmap
import weakref
from pathlib import Path
from typing import Self

import torch
from shardlight.ops.built import why_no_ring, why_not
from shardlight.ops.disk_files import BLOCK_BYTES, DiskError, open_file, reserve, whole_blocks
from shardlight.ops.disk_native import NativeQueue
from shardlight.ops.disk_reference import ReferenceQueue
from shardlight.ops.disk_requests import Core, Request
from shardlight.ops.registry import OPS
from torch import Tensor

__all__ = ["BLOCK_BYTES", "DiskEngine", "DiskError", "DiskFile", "Request", "aligned"]

PIECE_BYTES = 4 << 20
"""Requests are cut into pieces of this size, of which `depth` are under way."""
DEPTH = 16
"""Pieces under way. With 8, writes were about 5 % slower on a machine whose processors were busy with other work."""
WAYS = ("auto", "io_uring", "threads")
_MOST_PIECE_BYTES = 1 << 30
_HUGE_BYTES = 2 << 20


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
        with contextlib.suppress(OSError, AttributeError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class DiskFile:
    """A file that an engine has open. Requests may be started by any thread; see [Note: order].

    Attributes:
        path: where it was when it was opened.
        nbytes: that may be asked for: the ones it was opened with, rounded up to whole blocks where it has these.
    """

    def __init__(self, core: Core, number: int, path: Path, nbytes: int, descriptor: int) -> None:
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
        self._core.check()
        if not self._finalizer.alive or self._core.closed:
            raise DiskError(errno.EBADF, f"{self.path}: the file or its engine is closed. Open it again.")
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
        lazy = tensor.is_conj() or tensor.is_neg()
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or lazy:
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
        self, *, way: str = "auto", depth: int = DEPTH, piece_bytes: int = PIECE_BYTES, direct: bool = True
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
            self._core = Core(
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


def _close_file(core: Core, number: int) -> None:
    if not core.is_foreign and not core.closed:
        core.queue.close_file(number)
