"""Requests of a disk engine that are under way: the memory they hold, what failed, forks and the process's end."""

import atexit
import errno
import itertools
import os
import threading
import time
import weakref
from pathlib import Path
from typing import TypeAlias

from shardlight.ops.disk_files import DiskError, mend
from shardlight.ops.disk_native import Fault, NativeQueue
from shardlight.ops.disk_reference import ReferenceQueue
from torch import Tensor

Queue: TypeAlias = NativeQueue | ReferenceQueue


class Core:
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
        """Starts a request on a tensor, which is held until it is finished; returns its number."""
        self.check()
        self.sweep()
        number = next(self._numbers)
        self.held[number] = tensor
        if not self.queue.start(number, file, write, tensor.data_ptr(), offset, tensor.nbytes):
            del self.held[number]
            raise DiskError(errno.EBADF, f"{self.paths[file]}: the file or its engine is closed. Open it again.")
        return number

    def wait(self, number: int) -> Fault | None:
        """Waits for a request, which is known no more then; returns what failed."""
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
        """Waits for all and closes all files. Requests can still be waited for."""
        if not self.is_foreign and not self.closed:
            self.queue.stop()
            self.sweep()
            self.closed = True

    def error(self, fault: Fault) -> DiskError:
        """Returns what a fault is to a reader."""
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

    def __init__(self, core: Core, number: int) -> None:
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


def _end(queue: Queue, held: dict[int, Tensor], process: int) -> None:
    """The last that used a queue is gone: `held` stays until the system is done with its memory."""
    if os.getpid() == process:
        if queue.serves_with_this_thread():  # a collection may happen anywhere, and this cannot wait for itself
            threading.Thread(target=_end, args=(queue, held, process)).start()
            return
        queue.stop()
        queue.free()
    held.clear()


_CORES: "weakref.WeakSet[Core]" = weakref.WeakSet()
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
