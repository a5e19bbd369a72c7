"""Tensors whose values are in a file: what code outside of the fast ways sees of state that is on disk.

[Note: tensors on disk] State on disk is still a tensor to everyone: a checkpoint reads it, a load writes it, a hook
looks at it. Such a tensor has no memory. Ranges of it are tensors on disk as well; whatever is computed from it reads
it, whatever is written into it goes to the file at once. The fast ways, which read ahead and write behind, work on its
`region`: gathers, reductions and the optimizer's step.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shardlight.ops.disk import BLOCK_BYTES, DiskFile, Request, aligned
from shardlight.strategies.errors import StrategyError
from torch import Tensor
from torch.utils._pytree import tree_map_only

AT_ONCE = 1 << 20
"""Elements that are read, changed and written at a time where nobody needs all of them."""


@dataclass
class Traffic:
    """What went between memory and disk for one kind of state, in bytes."""

    read_bytes: int = 0
    written_bytes: int = 0


class Region:
    """A range of a file that holds `numel` elements.

    Args:
        at_byte: where it begins; a multiple of BLOCK_BYTES. What follows it up to the next multiple is its own.
        traffic: counts what is read and written.
    """

    def __init__(self, file: DiskFile, at_byte: int, numel: int, dtype: torch.dtype, traffic: Traffic) -> None:
        self.file = file
        self.at_byte = at_byte
        self.numel = numel
        self.dtype = dtype
        self.traffic = traffic

    def on_end(self, work: Callable[[], None]) -> None:
        """Calls `work` when nobody refers to it any more."""
        weakref.finalize(self, work).atexit = False

    def tensor(self) -> "DiskTensor":
        """Returns all of it as a tensor."""
        return DiskTensor(self, 0, (self.numel,))

    def start_read(self, start: int, out_N: Tensor, traffic: Traffic | None = None) -> Request:
        """Starts to read the elements from `start` on into memory.

        Args:
            traffic: counts it instead of the region's own.
        """
        (traffic or self.traffic).read_bytes += out_N.nbytes
        return self.file.start_read(self.at_byte + start * self.dtype.itemsize, out_N)

    def start_write(self, start: int, data_N: Tensor) -> Request:
        """Starts to write elements; `data_N` is not to be changed before it is done."""
        self.traffic.written_bytes += data_N.nbytes
        return self.file.start_write(self.at_byte + start * self.dtype.itemsize, data_N)

    def read(self, start: int, numel: int) -> Tensor:
        """Returns (numel,) elements from `start` on, in memory of their own."""
        first = start * self.dtype.itemsize
        low = first // BLOCK_BYTES * BLOCK_BYTES
        held = aligned(first + numel * self.dtype.itemsize - low)
        self.traffic.read_bytes += held.numel()
        self.file.read(self.at_byte + low, held)
        return held[first - low :].view(self.dtype)[:numel] if numel else torch.empty(0, dtype=self.dtype)

    def write(self, start: int, data_N: Tensor) -> None:
        """Writes (n,) elements, and returns when they are in the file."""
        self.start_write(start, data_N).wait()


class DiskTensor(Tensor):
    """See [Note: tensors on disk]. Its elements follow each other in the file.

    Args:
        start: its first element in the region.
    """

    region: Region
    start: int

    @staticmethod
    def __new__(cls, region: Region, start: int, shape: Sequence[int]) -> "DiskTensor":
        """Makes it without memory."""
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=region.dtype)

    def __init__(self, region: Region, start: int, shape: Sequence[int]) -> None:
        self.region = region
        self.start = start

    def load(self) -> Tensor:
        """Returns its values in memory of their own."""
        return self.region.read(self.start, self.numel()).view(self.shape)

    def store(self, values: Tensor) -> None:
        """Overwrites them.

        Args:
            values: in its shape, or of one element; any dtype and device.
        """
        whole = values.expand(self.shape) if values.shape != self.shape else values
        flat = whole.detach().reshape(-1)
        for low in range(0, self.numel(), AT_ONCE):
            part = flat[low : low + AT_ONCE].to("cpu", self.dtype).contiguous()
            self.region.write(self.start + low, part)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reads what is used, and writes what is changed."""
        kwargs = kwargs or {}
        lazily = _LAZY.get(func)
        if lazily is not None and isinstance(args[0], DiskTensor):
            found = lazily(*args, **kwargs)
            if found is not None:
                return found
        if func is torch.ops.aten.copy_.default and isinstance(args[0], DiskTensor):
            args[0].store(in_memory(args[1]))
            return args[0]
        written = [
            args[n] if n < len(args) else kwargs.get(a.name)
            for n, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        is_view = not written and any(r.alias_info is not None for r in func._schema.returns)
        if is_view:
            raise StrategyError(
                f"'{func}' of a tensor that is on disk would be a view of it, which it cannot be: read it first with "
                "`.clone()`."
            )
        loaded: dict[int, Tensor] = {}

        def load(tensor: DiskTensor) -> Tensor:
            if id(tensor) not in loaded:
                loaded[id(tensor)] = tensor.load()
            return loaded[id(tensor)]

        held_args, held_kwargs = tree_map_only(DiskTensor, load, (args, kwargs))
        result = func(*held_args, **held_kwargs)
        changed = {id(t): t for w in written for t in (w if isinstance(w, list | tuple) else [w])}
        for number, tensor in changed.items():
            if isinstance(tensor, DiskTensor):
                tensor.store(loaded[number])
        back = {id(value): changed[number] for number, value in loaded.items() if number in changed}
        return tree_map_only(Tensor, lambda t: back.get(id(t), t), result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DiskTensor({tuple(self.shape)}, {self.dtype}, {self.region.file.path})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.load()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.load().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a copy as an array, which cannot be written to."""
        values = self.load().numpy(force=force)
        values.flags.writeable = False
        return values

    def tolist(self) -> Any:
        """Returns its values as lists."""
        return self.load().tolist()

    def data_ptr(self) -> int:
        """Raises: StrategyError: it has no memory."""
        raise StrategyError("a tensor that is on disk has no address: read it first with `.clone()`.")


def _same(tensor: DiskTensor, *rest: Any, **options: Any) -> DiskTensor:
    return DiskTensor(tensor.region, tensor.start, tensor.shape)


def _view(tensor: DiskTensor, size: Sequence[int]) -> DiskTensor:
    return DiskTensor(tensor.region, tensor.start, torch.empty(tensor.shape, device="meta").view(list(size)).shape)


def _slice(
    tensor: DiskTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> DiskTensor | None:
    if dim != 0 or step != 1 or not tensor.dim():
        return None
    low, high, _ = slice(start, end).indices(tensor.shape[0])
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return DiskTensor(tensor.region, tensor.start + low * row, (max(0, high - low), *tensor.shape[1:]))


def _contiguous(tensor: DiskTensor, **options: Any) -> DiskTensor:
    return tensor


_aten = torch.ops.aten
_LAZY = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.slice.Tensor: _slice,
}
"""Operations whose result is a range of the same file."""


def in_memory(tensor: Tensor) -> Tensor:
    """Returns the tensor, or the values of one that is on disk, in memory of their own."""
    return tensor.load() if isinstance(tensor, DiskTensor) else tensor
