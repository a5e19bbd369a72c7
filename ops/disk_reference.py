"""The queue of a disk engine in plain Python: os.preadv and os.pwritev in a pool of threads."""

import ctypes
import errno
import mmap
import os
import stat
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from shardlight.ops.disk_files import BLOCK_BYTES
from shardlight.ops.disk_native import Fault

_THREADS = "shardlight-disk"
_TRIES = 100
"""Of a call that moves nothing."""


@dataclass(eq=False)
class _File:
    number: int
    descriptor: int
    direct: bool
    closed: bool = False
    open: dict[int, "_Request"] = field(default_factory=dict)
    """Requests that are not finished, in order."""


@dataclass(eq=False)
class _Request:
    number: int
    file: _File
    write: bool
    memory: memoryview
    offset: int
    before: "list[_Request]"
    future: "Future[None] | None" = None
    fault: Fault | None = None
    finished: bool = False
    released: bool = False
    told: bool = False

    @property
    def end(self) -> int:
        return self.offset + len(self.memory)

    def shares_blocks(self, other: "_Request") -> bool:
        apart = _below(self.offset) >= _above(other.end) or _below(other.offset) >= _above(self.end)
        return (self.write or other.write) and not apart

    def failed(self, error: int, what: str, size: int = 0) -> Fault:
        return Fault(error, what, self.file.number, self.offset, len(self.memory), size)


class ReferenceQueue:
    """Requests that a pool of Python's threads serves, with the interface of NativeQueue (disk_native.py).

    The pool takes requests in order, so one that waits for an earlier one never waits for one that has no thread.
    """

    def __init__(self, depth: int, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix=_THREADS)
        self._lock = threading.RLock()  # a collection under it may close a file
        self._files: dict[int, _File] = {}
        self._requests: dict[int, _Request] = {}
        self._lost: list[Fault] = []
        self._bytes = [0, 0]
        self._calls = threading.Condition()
        self._in_flight = 0
        self._frozen = 0
        self._stopped = False

    def add_file(self, descriptor: int, direct: bool) -> int:
        """Returns the number of a file whose descriptor the queue closes; `direct`: whole blocks only."""
        with self._lock:
            number = len(self._files) + 1
            self._files[number] = _File(number, descriptor, direct)
        return number

    def close_file(self, file: int) -> None:
        """No request of a file comes any more; it is closed after the last."""
        with self._lock:
            self._files[file].closed = True
            self._close_if_over(self._files[file])

    def _close_if_over(self, file: _File) -> None:
        if file.closed and not file.open and file.descriptor >= 0:
            os.close(file.descriptor)
            file.descriptor = -1

    def start(self, number: int, file: int, write: bool, address: int, offset: int, nbytes: int) -> bool:
        """Starts a request on memory that stays until it is finished; False: the file is closed."""
        memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        with self._lock:
            of = self._files[file]
            if of.closed or self._stopped:
                return False
            made = _Request(number, of, write, memory, offset, [])
            made.before = [earlier for earlier in of.open.values() if made.shares_blocks(earlier)]
            self._requests[number] = of.open[number] = made
            made.future = self._pool.submit(self._serve, made)
        return True

    def _serve(self, request: _Request) -> None:
        wait([earlier.future for earlier in request.before if earlier.future is not None])
        lost = next((e.fault for e in request.before if e.fault is not None and e.write), None)
        try:
            after = lost is not None and not request.write
            request.fault = request.failed(lost.error, "after") if after else self._done(request)
        except OSError as error:  # no memory for a buffer
            request.fault = request.failed(error.errno or errno.ENOMEM, "write" if request.write else "read")
        finally:
            with self._lock:
                request.before = []
                request.finished = True
                del request.file.open[request.number]
                self._close_if_over(request.file)
                if request.released:
                    self._forget(request)

    def _done(self, request: _Request) -> Fault | None:
        size = _size(request.file.descriptor)
        if size is not None and size < request.end:
            return request.failed(errno.EIO, "short", size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(request.memory))
        aligned = not (address % BLOCK_BYTES or request.offset % BLOCK_BYTES or len(request.memory) % BLOCK_BYTES)
        if aligned or not request.file.direct:
            return self._all(request, request.write, request.offset, request.memory)
        at = request.offset
        while at < request.end:
            to = min(request.end, (at // self._piece_bytes + 1) * self._piece_bytes)
            fault = self._through_a_buffer(request, at, to)
            if fault is not None:
                return fault
            at = to
        return None

    def _through_a_buffer(self, request: _Request, start: int, end: int) -> Fault | None:
        first, last = _below(start), _above(end)
        part = request.memory[start - request.offset : end - request.offset]
        with mmap.mmap(-1, last - first) as buffer, memoryview(buffer) as blocks:
            place = slice(start - first, end - first)
            reads = [(first, blocks)]
            if request.write:
                ends = {first} if start != first else set()
                ends |= {last - BLOCK_BYTES} if end != last else set()
                reads = [(at, blocks[at - first : at - first + BLOCK_BYTES]) for at in sorted(ends)]
            fault = None
            for at, memory in reads:
                with memory:
                    fault = fault or self._all(request, False, at, memory)
                    if not request.write and fault is None:
                        part[:] = memory[place]
            if request.write and fault is None:
                blocks[place] = part
                fault = self._all(request, True, first, blocks)
        return fault

    def _all(self, request: _Request, write: bool, offset: int, memory: memoryview) -> Fault | None:
        """Moves all of some memory, call by call."""
        done, tries, file = 0, 0, request.file
        while done < len(memory):
            with memory[done : done + self._piece_bytes] as piece:
                try:
                    moved = self._call(file.descriptor, write, piece, offset + done)
                except (BlockingIOError, InterruptedError):
                    time.sleep(0.001)
                    moved = 0
                except OSError as error:
                    return request.failed(error.errno or errno.EIO, "write" if write else "read")
            if file.direct and moved < len(memory) - done:
                moved = _below(moved)
            if not moved:
                size = _size(file.descriptor)
                if not write and size is not None and size < offset + len(memory):
                    return request.failed(errno.EIO, "short", size)
                tries += 1
                if tries > _TRIES:
                    return request.failed(errno.EIO, "write" if write else "read")
            with self._lock:
                self._bytes[write] += moved
            done += moved
        return None

    def _call(self, descriptor: int, write: bool, piece: memoryview, offset: int) -> int:
        with self._calls:
            self._calls.wait_for(lambda: not self._frozen)
            self._in_flight += 1
        try:
            return os.pwritev(descriptor, [piece], offset) if write else os.preadv(descriptor, [piece], offset)
        finally:
            with self._calls:
                self._in_flight -= 1
                self._calls.notify_all()

    def wait(self, number: int) -> Fault | None:
        """Returns when a request is finished, with what failed."""
        with self._lock:
            request = self._requests.get(number)
        if request is None or request.future is None:
            return None
        request.future.result()
        request.told = True
        return request.fault

    def finished(self, number: int) -> bool:
        """Whether a request is finished."""
        with self._lock:
            request = self._requests.get(number)
            return request is None or request.finished

    def release(self, number: int) -> bool:
        """Nobody waits for a request any more; returns whether its memory is free."""
        with self._lock:
            request = self._requests.get(number)
            if request is None:
                return True
            request.released = True
            if request.finished:
                self._forget(request)
            return request.finished

    def _forget(self, request: _Request) -> None:
        if request.fault is not None and not request.told:
            self._lost.append(request.fault)
        del self._requests[request.number]

    def settle(self, file: int = 0) -> Fault | None:
        """Returns when nothing of a file (0: of any) is under way, with a fault that nobody was told of."""
        with self._lock:
            files = [f for f in self._files.values() if file in (0, f.number)]
            wait_for = [r.future for f in files for r in f.open.values() if r.future is not None]
        wait(wait_for)
        with self._lock:
            for fault in self._lost:
                if file in (0, fault.file):
                    self._lost.remove(fault)
                    return fault
            for request in self._requests.values():
                if request.fault is not None and not request.told and file in (0, request.fault.file):
                    request.told = True
                    return request.fault
        return None

    def counters(self) -> tuple[int, int]:
        """Returns the bytes that were read and written."""
        with self._lock:
            return self._bytes[0], self._bytes[1]

    def freeze(self) -> None:
        """Nothing is under way in the system from here to `thaw`."""
        with self._calls:
            self._frozen += 1
            self._calls.wait_for(lambda: not self._in_flight)

    def thaw(self) -> None:
        """Undoes `freeze`."""
        with self._calls:
            self._frozen -= 1
            self._calls.notify_all()

    def stop(self) -> None:
        """Waits for all, closes all files and ends the threads; what became of requests can be asked still."""
        self._stopped = True
        self._pool.shutdown()
        for number in list(self._files):
            self.close_file(number)

    def serves_with_this_thread(self) -> bool:
        """Whether the caller is one of the queue's own threads."""
        return threading.current_thread().name.startswith(_THREADS)

    def free(self) -> None:
        """Nothing is to be given back."""


def _below(at: int) -> int:
    return at // BLOCK_BYTES * BLOCK_BYTES


def _above(at: int) -> int:
    return -(-at // BLOCK_BYTES) * BLOCK_BYTES


def _size(descriptor: int) -> int | None:
    found = os.fstat(descriptor)
    return found.st_size if stat.S_ISREG(found.st_mode) else None
