"""Memory that is used again: the system clears the pages of a fresh buffer, and that costs as much as filling it."""

import torch
from shardlight.ops.disk import aligned
from shardlight.ops.host_memory import arena
from shardlight.ops.memory import keep_freed_memory
from shardlight.strategies.engine.backing import Chunks, open_chunks
from torch import Tensor

KEPT_BYTES = 64 << 20
"""What is kept for later at most."""


class Pages:
    """Blocks of memory that come and go with units. On CUDA the allocator does this, and nothing is kept here.

    Args:
        shared: other ranks of this host read what they get from it where it lies.
    """

    def __init__(self, device: torch.device | str = "cpu", shared: bool = False) -> None:
        self.device = torch.device(device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._shared = shared
        self._free: list[Tensor] = []
        self._chunks: Chunks | None = None
        self._asked = False

    def chunks(self) -> Chunks | None:
        """Returns the pages of large gathered buffers; None where that is not possible."""
        if not self._asked:
            self._asked, self._chunks = True, open_chunks(self.device)
        return self._chunks

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns (numel,) of anything, on memory that was used before where there is some of about that size."""
        nbytes = numel * dtype.itemsize
        fit = [b for b in self._free if nbytes <= b.numel() <= 2 * nbytes]
        if not fit:
            return self.fresh(numel, dtype)
        found = min(fit, key=Tensor.numel)
        self._free = [b for b in self._free if b is not found]
        return found[:nbytes].view(dtype)

    def fresh(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns (numel,) of anything, on memory that stays its own."""
        own = arena() if self._shared else None
        found = None if own is None else own.take(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device) if found is None else found

    def aligned(self, nbytes: int) -> Tensor:
        """Returns (nbytes,) uint8 of anything whose address disks take directly."""
        own = arena() if self._shared else None
        found = None if own is None else own.take(nbytes, torch.uint8)
        return aligned(nbytes) if found is None else found

    def give(self, tensor: Tensor) -> None:
        """Takes back what `take` returned; the caller has no further use for it."""
        if self.device.type != "cpu":
            return
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self._free.append(whole)
        while sum(b.numel() for b in self._free) > KEPT_BYTES:
            self._free.pop(0)
