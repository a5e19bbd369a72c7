"""Where state lives that is not on the device: its home tier, and the staging buffers that it comes through.

State on disk is in one swap file per rank. The file has no name: it is removed from its folder when it was just made,
so that it ends with its process however that ends, and no other job can take it for its own.

Source: Rajbhandari et al. 2021, ZeRO-Infinity, sections 5 and 6 (arXiv 2104.07857).
"""

import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch
from shardlight.ops.disk import BLOCK_BYTES, DiskEngine, DiskFile, Request, aligned
from shardlight.ops.memory import return_freed_memory
from shardlight.strategies.engine.disk_tensor import DiskTensor, Region, Traffic
from shardlight.strategies.engine.offload import Offload
from shardlight.strategies.engine.pages import Pages
from shardlight.strategies.errors import StrategyError
from torch import Tensor

Kind = Literal["parameters", "gradients", "optimizer"]
TENSORS = 4
"""Of a range that is stepped: weights, gradients and two moments."""
LEAST_MAPPED_BYTES, MOST_IN_HEAP_BYTES = 1 << 18, 2 << 20
"""Between which the size of a block is from which on the heap does not keep it, half that of a staging buffer."""
_NAME = "shardlight-swap-"


def _mine() -> str:
    return f"{_NAME}{socket.gethostname()}-"


def leftovers(folder: Path) -> list[Path]:
    """Returns swap files of processes that ended before they could remove the name; what others have open they keep."""
    return list(folder.glob(f"{_mine()}*"))


class Staging:
    """Buffers that state on disk comes through, used again.

    Args:
        make: returns so many bytes whose address disks take directly.
        kept_bytes: what stays for later at most.
    """

    def __init__(self, make: Callable[[int], Tensor], kept_bytes: int) -> None:
        self._make = make
        self._kept_bytes = kept_bytes
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns (numel,) of anything, at an address and on a length of memory that disks take directly."""
        nbytes = -(-max(1, numel * dtype.itemsize) // BLOCK_BYTES) * BLOCK_BYTES
        fit = [(b.numel(), n) for n, b in enumerate(self._free) if nbytes <= b.numel() <= 2 * nbytes]
        held = self._free.pop(min(fit)[1]) if fit else self._make(nbytes)
        return held[:nbytes].view(dtype)[:numel]

    def give(self, tensor: Tensor) -> None:
        """Takes back what `take` returned."""
        self._free.append(_whole(tensor))
        while len(self._free) > 1 and sum(map(Tensor.numel, self._free)) > self._kept_bytes:
            self._free.pop(0)


def _whole(staged: Tensor) -> Tensor:
    """Returns all bytes of a staging buffer."""
    return torch.empty(0, dtype=torch.uint8).set_(staged.untyped_storage())


class Fetched:
    """Elements of a tensor on disk that are on their way into memory, or there.

    Args:
        staging: that `tensor` is from.
    """

    def __init__(self, request: Request, tensor: Tensor, staging: Staging) -> None:
        self._request: Request | None = request
        self._tensor: Tensor | None = tensor
        self._staging = staging

    def wait(self) -> Tensor:
        """Returns (n,) once they are there."""
        assert self._tensor is not None
        if self._request is not None:
            self._request.wait()
            self._request = None
        return self._tensor

    def give(self) -> None:
        """Gives the memory back."""
        if self._tensor is not None:
            self.wait()
            self._staging.give(self._tensor)
            self._tensor = None


class Tiers:
    """The disk tier of one rank.

    Args:
        pages: where staging buffers come from.
    Raises: StrategyError: the folder of swap files cannot be used, or the device is none that this can serve.
    """

    def __init__(self, offload: Offload, pages: Pages) -> None:
        # Who has small staging buffers has little memory: smaller blocks leave no holes then.
        return_freed_memory(min(MOST_IN_HEAP_BYTES, max(LEAST_MAPPED_BYTES, offload.staging_bytes // 2)))
        self.offload = offload
        self._written_bytes = 2 * offload.staging_count * offload.staging_bytes
        """What is being written, at most."""
        read_bytes = offload.staging_count * TENSORS * offload.staging_bytes
        self.staging = Staging(aligned, read_bytes + self._written_bytes)
        self.shared = Staging(pages.aligned, self._written_bytes)
        """What other ranks of the host read where it lies."""
        self.traffic: dict[Kind, Traffic] = {"parameters": Traffic(), "gradients": Traffic(), "optimizer": Traffic()}
        """What was written, and what was read for the optimizer's step, or by whoever looks at state."""
        self.gathers = Traffic()
        """What was read of parameters for gathers."""
        self._engine = DiskEngine()
        self._file = self._make_file(Path(offload.disk))
        self._used_bytes = 0
        self._free: dict[int, list[int]] = {}
        """By size: ranges of the file that nobody has any more."""
        self._writes: deque[tuple[Request, Tensor]] = deque()

    @property
    def waited_s(self) -> float:
        """How long this rank has waited for its disk."""
        return self._engine.waited_s

    @property
    def disk_bytes(self) -> int:
        """How large the swap file is."""
        return self._used_bytes

    def _make_file(self, folder: Path) -> DiskFile:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StrategyError(
                f"disk: {folder} is no folder and cannot be one: {error.strerror}. Name another."
            ) from None
        for left in leftovers(folder):
            with suppress(OSError):
                left.unlink()
        path = folder / f"{_mine()}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            file = self._engine.open(path, BLOCK_BYTES, create=True)
        except OSError as error:
            raise StrategyError(f"disk: {folder}: no file can be made there: {error}. Name another folder.") from None
        with suppress(FileNotFoundError):
            path.unlink()
        return file

    def keeps(self, kind: Kind) -> bool:
        """Whether this kind of state is on disk."""
        return getattr(self.offload, kind) == "disk"

    def empty(self, numel: int, dtype: torch.dtype, kind: Kind) -> DiskTensor:
        """Returns (numel,) of anything on disk. Raises: OSError: the disk is full; says how much is needed."""
        nbytes = -(-max(1, numel * dtype.itemsize) // BLOCK_BYTES) * BLOCK_BYTES
        if self._free.get(nbytes):
            at = self._free[nbytes].pop()
        else:
            at = self._used_bytes
            self._file.grow(at + nbytes)
            self._used_bytes += nbytes
        region = Region(self._file, at, numel, dtype, self.traffic[kind])
        region.on_end(lambda: self._free.setdefault(nbytes, []).append(at))
        return region.tensor()

    def put(self, values: Tensor, kind: Kind) -> Tensor:
        """Returns (n,) `values` in their home: a tensor on disk, or themselves."""
        if not self.keeps(kind):
            return values
        kept = self.empty(values.numel(), values.dtype, kind)
        kept.store(values)
        return kept

    # --- moving it

    def fetch(self, tensor: Tensor, gathered: bool = False) -> Fetched:
        """Starts to bring (n,) elements on disk into memory.

        Args:
            gathered: other ranks of the host read them there; it counts as `gathers`.
        """
        assert isinstance(tensor, DiskTensor)
        staging = self.shared if gathered else self.staging
        staged = staging.take(tensor.numel(), tensor.dtype)
        traffic = self.gathers if gathered else None
        return Fetched(tensor.region.start_read(tensor.start, _padded(staged), traffic), staged, staging)

    def staged(self, tensor: Tensor) -> Tensor:
        """Returns (n,) of anything, in memory, for what is to be written to a tensor on disk."""
        return self.staging.take(tensor.numel(), tensor.dtype)

    def write_behind(self, tensor: Tensor, staged: Tensor) -> None:
        """Starts to write (n,) `staged`, a staging buffer, which it takes; a later read sees what was written."""
        assert isinstance(tensor, DiskTensor)
        self.reap(max(0, self._written_bytes - staged.nbytes))
        self._writes.append((tensor.region.start_write(tensor.start, _padded(staged)), staged))

    def reap(self, most_bytes: int = 0) -> None:
        """Returns when at most so many bytes are being written. Raises: OSError: a write failed."""
        writing = sum(staged.nbytes for _, staged in self._writes)
        while self._writes and (writing > most_bytes or self._writes[0][0].done):
            request, staged = self._writes.popleft()
            request.wait()
            writing -= staged.nbytes
            self.staging.give(staged)

    def blocks(self, flat: Tensor, change: bool = False) -> Iterator[Tensor]:
        """Yields (n,) `flat` as ranges in memory that follow each other; the next one is read meanwhile.

        Args:
            change: what was done to a range is kept.
        """
        if not isinstance(flat, DiskTensor):
            yield flat
            return
        step = self.range_numel
        if not flat.numel():
            yield torch.empty(0, dtype=flat.dtype)
        parts = [flat[low : low + step] for low in range(0, flat.numel(), step)]
        coming = [self.fetch(part) for part in parts[:1]]
        for number, part in enumerate(parts):
            coming += [self.fetch(later) for later in parts[number + 1 : number + 2]]
            fetched = coming.pop(0)
            yield fetched.wait()
            if change:
                self.write_behind(part, fetched.wait())
            else:
                fetched.give()

    @property
    def range_numel(self) -> int:
        """Elements of a range: any dtype's begin and end at whole blocks of the disk."""
        return max(1, self.offload.staging_bytes // 4 // BLOCK_BYTES) * BLOCK_BYTES


def _padded(staged: Tensor) -> Tensor:
    """Returns a staging buffer up to the next whole block, as a disk takes it directly."""
    nbytes = -(-staged.nbytes // BLOCK_BYTES) * BLOCK_BYTES
    return _whole(staged)[:nbytes]


def open_tiers(offload: Offload | None, pages: Pages, device: torch.device) -> Tiers | None:
    """Returns what moves state that is not on the device; None: all of it is there.

    Raises: StrategyError: see Tiers.
    """
    if offload is None or not offload.elsewhere:
        return None
    if device.type != "cpu":
        raise StrategyError(
            "offload to host memory or disk runs on CPU ranks alone in this version: leave it out on a GPU, or set "
            "trainer.accelerator to cpu."
        )
    return Tiers(offload, pages) if offload.uses_disk else None
