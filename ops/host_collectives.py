"""Collectives between the processes of one host over memory that they share.

It puts tensors before `csrc/cpu/host_collectives.cpp`.

The library is built when the package is installed, where there is a compiler; without it `library()` is None. Nothing
is left behind by processes that end or are killed: the shared memory has no name, and goes with the last of them.
"""

import ctypes
import functools
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shardlight.ops.built import library as library_path
from shardlight.ops.built import why_not_shared
from shardlight.ops.host_memory import Arena
from shardlight.ops.native import NUMBER_OF
from shardlight.ops.sums import sum_in_rank_order
from torch import Tensor

RING_BYTES = 8 << 20
"""What each rank can send to all before they have received it, and as much again to single ones."""
READ_FROM_BYTES = 1 << 20
"""From which size on others read what a rank sends where it lies. It waits until they have, which takes longer than to
copy a little."""
_SPINS = 100
"""How often a rank looks before it sleeps, where each has a core of its own; about 50 microseconds."""
_LOOK_S = 0.1
"""How often a rank that waits looks whether the others live."""
_KINDS = {name: number << 8 for number, name in enumerate(("all_gather", "broadcast", "all_to_all", "sum", "barrier"))}


@functools.cache
def library() -> "ctypes.CDLL | None":
    """Returns the compiled library; None where `why_not_shared` says why."""
    if why_not_shared() is not None:
        return None
    loaded = ctypes.CDLL(str(library_path()))
    pointer, number, size, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint32
    integer, many = ctypes.c_int, ctypes.POINTER
    for name, result, arguments in (
        ("host_prepare", integer, (integer, integer, size)),
        ("host_attach", pointer, (integer, integer, integer, size, integer)),
        ("host_detach", None, (pointer,)),
        ("host_arena", integer, (pointer, integer, integer, pointer, size, size)),
        ("host_no_arenas", None, (pointer,)),
        ("host_all_gather", number, (pointer, code, pointer, size, pointer)),
        ("host_broadcast", number, (pointer, code, pointer, size, integer)),
        ("host_all_to_all", number, (pointer, code, many(pointer), many(size), many(pointer), many(size))),
        ("host_sum", number, (pointer, code, pointer, size, integer, pointer, integer, integer)),
        ("host_wait", integer, (pointer, number, number)),
        ("host_abandon", None, (pointer,)),
        ("host_missing", None, (pointer, ctypes.c_char_p)),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


class HostError(RuntimeError):
    """A collective between the ranks of one host cannot end; says which rank is missing, has ended or differs."""


def create_segment(world_size: int, ring_bytes: int = RING_BYTES) -> int:
    """Returns the file descriptor of memory for `world_size` ranks to attach to.

    Raises: OSError: the system does not give it.
    """
    built = library()
    assert built is not None
    file = os.memfd_create("shardlight", os.MFD_CLOEXEC)
    failed = built.host_prepare(file, world_size, ring_bytes)
    if failed:
        os.close(file)
        raise OSError(failed, os.strerror(failed))
    return file


class HostGroup:
    """One rank's end of the collectives over a segment. Every rank starts the same ones in the same order.

    Each `start_...` returns what takes part in `wait`, in the order of starting. Until then the tensors are not to be
    touched (inputs may be read). Tensors are contiguous and on CPU.

    Args:
        file: of `create_segment`; not needed any more when this returns.
        processes: the ranks' process ids, so that the end of one is noticed.
        limit_s: how long a rank may be late.
        names: what the ranks are called in messages; their numbers if unset.
    Raises: OSError: the segment cannot be attached.
    """

    def __init__(
        self,
        file: int,
        rank: int,
        processes: Sequence[int],
        limit_s: float,
        names: Sequence[int] | None = None,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        built = library()
        assert built is not None
        self._library = built
        self.rank = rank
        self.world_size = len(processes)
        self.limit_s = limit_s
        self._names = list(names or range(self.world_size))
        self._processes = list(processes)
        self._watched: dict[int, int] = {}
        spins = _SPINS if self.world_size <= len(os.sched_getaffinity(0)) else 0
        ctypes.set_errno(0)
        self._handle: Any = built.host_attach(file, rank, self.world_size, ring_bytes, spins)
        if not self._handle:
            raise OSError(f"memory shared by {self.world_size} ranks of this host cannot be attached")
        self._made_in = os.getpid()
        self.waited_s: float = 0.0
        """The time that this rank has spent in `wait`: for others, and copying and adding meanwhile."""
        self._held: dict[int, tuple[Tensor, ...]] = {}
        """By number: tensors of collectives under way, whose memory must stay."""

    def share_arenas(
        self, files: Sequence[int], sizes: Sequence[int], own: Arena, read_from_bytes: int | None = None
    ) -> None:
        """Lets ranks read what lies in another's arena where it lies; see [Note: arena], host_memory.py.

        Before the first collective; on every rank of the group, or `keep_private` on every rank.

        Args:
            files, sizes: of the ranks' arenas; this rank's own is `own`.
            read_from_bytes: what has fewer is copied all the same; READ_FROM_BYTES if unset.
        Raises: OSError: one cannot be mapped.
        """
        least = READ_FROM_BYTES if read_from_bytes is None else read_from_bytes
        for rank, (file, nbytes) in enumerate(zip(files, sizes, strict=True)):
            address = own.address if rank == self.rank else None
            failed = self._library.host_arena(self._open(), rank, file, address, nbytes, least)
            if failed:
                raise OSError(failed, os.strerror(failed))

    def keep_private(self) -> None:
        """Undoes `share_arenas`: everything goes through rings."""
        self._library.host_no_arenas(self._open())

    def start_all_gather(self, full: Tensor, shard: Tensor) -> int:
        """Starts to fill (world_size * n,) `full` with the (n,) shards of all ranks, in rank order."""
        kind = _KINDS["all_gather"] | shard.dtype.itemsize
        pointers = shard.data_ptr(), shard.nbytes, full.data_ptr()
        return self._hold(self._library.host_all_gather(self._open(), kind, *pointers), full, shard)

    def start_reduce_scatter(self, full: Tensor, out: Tensor, add: bool = False) -> int | None:
        """Starts to write this rank's (n,) row of the sum of (world_size * n,) `full` over all ranks into `out`.

        As `sum_in_rank_order` computes it, to the bit: in rank order, 16-bit types in fp32.

        Args:
            add: the sum is added to what `out` holds.
        Returns: None where these dtypes cannot be added here; then nothing was started.
        """
        pair = NUMBER_OF.get(full.dtype), NUMBER_OF.get(out.dtype)
        if None in pair:
            return None
        kind = _KINDS["sum"] | pair[0]
        rest = full.data_ptr(), out.numel(), pair[0], out.data_ptr(), pair[1], int(add)
        number = self._library.host_sum(self._open(), kind, *rest)
        return None if number < 0 else self._hold(number, full, out)

    def start_all_to_all(self, into: Sequence[Tensor], parts: Sequence[Tensor]) -> int:
        """Starts to send parts[r] to, and to receive into[r] from, each rank r. Their sizes may differ by rank."""
        kind = _KINDS["all_to_all"] | parts[0].dtype.itemsize
        pointers, sizes = ctypes.c_void_p * self.world_size, ctypes.c_uint64 * self.world_size
        arguments = [make(*(read(t) for t in ts)) for ts in (parts, into) for make, read in _both(pointers, sizes)]
        return self._hold(self._library.host_all_to_all(self._open(), kind, *arguments), *into, *parts)

    def start_broadcast(self, tensor: Tensor, source: int = 0) -> int:
        """Starts to overwrite `tensor` with rank `source`'s."""
        kind = _KINDS["broadcast"] | tensor.dtype.itemsize
        pointers = tensor.data_ptr(), tensor.nbytes, source
        return self._hold(self._library.host_broadcast(self._open(), kind, *pointers), tensor)

    def all_reduce(self, tensor: Tensor) -> None:
        """Overwrites (n,) `tensor` with its sum over all ranks, in rank order.

        Raises: HostError: see `wait`.
        """
        n, part = tensor.numel(), -(-tensor.numel() // self.world_size)
        rows = tensor if part * self.world_size == n else tensor.new_zeros(part * self.world_size)
        if rows is not tensor:
            rows[:n] = tensor
        own = rows[part * self.rank : part * (self.rank + 1)]
        self.reduce_scatter(rows, own)
        self.wait(self.start_all_gather(rows, own))
        if rows is not tensor:
            tensor.copy_(rows[:n])

    def reduce_scatter(self, full: Tensor, out: Tensor, add: bool = False) -> None:
        """See start_reduce_scatter; for any dtypes that PyTorch adds. Raises: HostError: see `wait`."""
        number = self.start_reduce_scatter(full, out, add)
        if number is not None:
            self.wait(number)
            return
        received = torch.empty_like(full)
        self.wait(self.start_all_to_all(self._rows(received), self._rows(full)))
        sum_in_rank_order(self._rows(received), out, add)

    def barrier(self) -> None:
        """Returns when every rank is here. Raises: HostError: see `wait`."""
        self.wait(self._library.host_all_gather(self._open(), _KINDS["barrier"], None, 0, None))

    def wait(self, number: int) -> None:
        """Returns when a collective, and every one that was started before it, is done on this rank.

        Raises: HostError: a rank has ended, did not arrive within the limit, or takes part in another collective. The
        group is of no use then.
        """
        began_s = time.perf_counter()
        found = self._library.host_wait(self._open(), number, int(1e6 * _LOOK_S))
        if found:
            self._wait_long(number, found)
        self.waited_s += time.perf_counter() - began_s
        for done in [n for n in self._held if n <= number]:
            del self._held[done]

    def _wait_long(self, number: int, found: int) -> None:
        deadline = time.monotonic() + self.limit_s
        while found > 0:
            missing = self._missing()
            ended = [r for r in missing if self._has_ended(r)]
            late = time.monotonic() > deadline
            # Whoever has ended may have sent everything before.
            found = self._library.host_wait(self._handle, number, 0 if ended else int(1e6 * _LOOK_S))
            if found > 0 and ended:
                self._fail(f"{self._called(ended)} has ended")
            if found > 0 and late:
                self._fail(f"{self._called(missing)} did not arrive within {self.limit_s:g} s")
        if found < 0:
            self._fail(f"{self._called([-found - 1])} takes part in another collective, or with another size")

    def _fail(self, why: str) -> None:
        self._library.host_abandon(self._handle)
        raise HostError(why)

    def _called(self, ranks: Sequence[int]) -> str:
        names = ", ".join(f"{self._names[r]} (process {self._processes[r]})" for r in ranks)
        return f"rank {names}" if len(ranks) == 1 else f"ranks {names}" if ranks else "some rank"

    def _missing(self) -> list[int]:
        found = ctypes.create_string_buffer(self.world_size)
        self._library.host_missing(self._handle, found)
        return [r for r in range(self.world_size) if found.raw[r]]

    def _has_ended(self, rank: int) -> bool:
        if rank not in self._watched:
            try:
                self._watched[rank] = os.pidfd_open(self._processes[rank])
            except ProcessLookupError:
                return True
            except OSError:  # a system that does not let us look
                return False
        poll = select.poll()
        poll.register(self._watched[rank], select.POLLIN)
        return bool(poll.poll(0))

    def _rows(self, flat: Tensor) -> list[Tensor]:
        return list(flat.view(self.world_size, -1))

    def _open(self) -> Any:
        if self._handle is None or os.getpid() != self._made_in:
            raise HostError("these collectives are closed, or belong to the process that this one was forked from")
        return self._handle

    def _hold(self, number: int, *tensors: Tensor) -> int:
        self._held[number] = tensors
        return number

    def close(self) -> None:
        """Lets go of the memory; nothing may be under way."""
        if self._handle is not None and os.getpid() == self._made_in:
            self._library.host_detach(self._handle)
        self._handle = None
        while self._watched:
            os.close(self._watched.popitem()[1])

    def __del__(self) -> None:
        self.close()


def _both(pointers: Any, sizes: Any) -> list[tuple[Any, Callable[[Tensor], int]]]:
    return [(pointers, Tensor.data_ptr), (sizes, lambda tensor: tensor.nbytes)]
