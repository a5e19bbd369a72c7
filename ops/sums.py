"""Passes over flat buffers of gradients: sums over ranks, squares, scaling, casts.

The order of every sum is fixed, so that results do not depend on how a buffer is partitioned.
"""

from collections.abc import Sequence
from typing import Any

import torch
from shardlight.ops.native import FLOATING, NUMBER_OF, check, current, loaded, pointers, stream_of
from shardlight.ops.registry import OPS
from torch import Tensor, library

CHUNK = 1024
"""Elements per partial sum of `square_sums`; every shard of a flat buffer is a multiple of it."""
_STEP = 1 << 18
"""Elements at a time."""
_ROWS = 256
"""Chunks at a time."""
_MOST_PARTS = 480
"""As `kParts` in csrc/cuda/sums.cu."""


def square_sums(
    flat: Tensor, chunk: int = CHUNK, scale: float = 1.0, clip: float = 1.0, *, wait: bool = True
) -> tuple[Tensor, int | Tensor]:
    """Sums the squares of each chunk of `flat` in fp64, and counts what is not finite, in one pass.

    The chunks are fixed by position, so the partial sums of a shard equal those of the same range of the full buffer
    bit for bit, whichever rank computes them.

    Args:
        flat: (n * chunk,), floating or complex (the squared modulus is summed).
        scale, clip: every value counts as multiplied by one and then by the other, as a step does it (16-bit numbers
            in fp32).
        wait: False: the count may be a 0-dim tensor of a GPU, which computes it when it gets there.
    Returns: (n,) fp64, and how many of the values are inf or NaN (a complex one counts as two).
    """
    real = real_view(flat)
    length = chunk * (2 if flat.is_complex() else 1)
    n = real.numel() // length
    sums = torch.empty(n, dtype=torch.float64, device=flat.device)
    if n and _native(real):
        given = real.data_ptr(), NUMBER_OF[real.dtype], real.numel(), length, scale, clip, sums.data_ptr()
        if flat.device.type == "cpu":
            return sums, loaded().ops_square_sums(*given, torch.get_num_threads())
        bad = torch.zeros((), dtype=torch.int64, device=flat.device)
        _on_cuda("square_sums", flat.device, *given, bad.data_ptr())
        return sums, int(bad) if wait else bad
    rows = real.view(-1, length)
    wide_dtype = real.dtype if real.dtype == torch.float64 else torch.float32
    # In steps that stay in a core's cache, and take no memory of the size of `flat`.
    wide = torch.empty(min(_ROWS, n), length, dtype=torch.float64, device=flat.device)
    for first in range(0, n, _ROWS):
        part = rows[first : first + _ROWS]
        if scale != 1.0 or clip != 1.0:
            part = (part.to(wide_dtype) * scale).mul_(clip)
        squares = wide[: len(part)].copy_(part)
        torch.mul(squares, squares, out=squares)
        torch.sum(squares, dim=1, out=sums[first : first + _ROWS])
    if torch.isfinite(sums).all():
        return sums, 0
    # Rare: also where squares alone are too large.
    scaled = real if scale == 1.0 and clip == 1.0 else (real.to(wide_dtype) * scale).mul_(clip)
    return sums, int(scaled.numel() - torch.isfinite(scaled).sum())


def scale_and_check(flat_N: Tensor, scale: float, *, wait: bool = True) -> bool | Tensor:
    """Multiplies (n,) `flat_N` by `scale` in place; returns whether it holds no inf and no NaN then.

    On CPU in steps that stay in a core's cache, so that memory is read once.

    Args:
        wait: False: the answer may be a 0-dim tensor of a GPU, which computes it when it gets there.
    """
    flat = real_view(flat_N)
    if _native(flat):
        given = flat.data_ptr(), NUMBER_OF[flat.dtype], flat.numel(), scale
        if flat.device.type == "cpu":
            return not loaded().ops_scale(*given, torch.get_num_threads())
        bad = torch.zeros((), dtype=torch.int64, device=flat.device)
        _on_cuda("scale", flat.device, *given, bad.data_ptr())
        return not int(bad) if wait else bad == 0
    ends: list[Tensor] = []
    for part in flat.split(_STEP if flat.device.type == "cpu" else max(1, flat.numel())):
        if scale != 1.0:
            part.mul_(scale)
        if part.numel():
            ends += part.aminmax()
    if not ends:
        return True
    finite = torch.isfinite(torch.stack(ends)).all()
    return bool(finite) if wait or flat.device.type == "cpu" else finite


def all_true(answers: Sequence[bool | Tensor]) -> bool:
    """Whether all are; 0-dim bool tensors, of one GPU, are read together."""
    there = [answer for answer in answers if isinstance(answer, Tensor)]
    here = all(answer for answer in answers if not isinstance(answer, Tensor))
    return here and (not there or bool(torch.stack(there).all()))


def cast(source_N: Tensor, out_N: Tensor) -> Tensor:
    """Writes (n,) `source_N` into (n,) `out_N` of another floating dtype, rounded to the nearest; returns it."""
    if source_N.numel() == out_N.numel() and source_N.device == out_N.device and _native(source_N, out_N):
        given = source_N.data_ptr(), NUMBER_OF[source_N.dtype], out_N.data_ptr(), NUMBER_OF[out_N.dtype], out_N.numel()
        if out_N.device.type == "cpu":
            loaded().ops_cast(*given, torch.get_num_threads())
        else:
            _on_cuda("cast", out_N.device, *given)
        return out_N
    return out_N.copy_(source_N)


def _native(*flats: Tensor) -> bool:
    fit = all(f.dtype in FLOATING and f.is_contiguous() for f in flats)
    return fit and OPS["sums"].native(flats[0].device.type)


def _on_cuda(name: str, device: torch.device, *given: Any) -> None:
    with current(device):
        error = getattr(loaded("cuda"), f"cuda_{name}")(*given, stream_of(device))
    check(error, f"ops.sums: {name}", device)


def abs_max(flat: Tensor) -> Tensor:
    """Returns the largest modulus of `flat` as a 0-dim fp64 tensor; 0 for an empty tensor, NaN if there is one."""
    return flat.abs().max().to(torch.float64) if flat.numel() else flat.new_zeros((), dtype=torch.float64)


def sum_in_rank_order(parts: Sequence[Tensor], out_N: Tensor, add: bool = False) -> Tensor:
    """Writes ((parts[0] + parts[1]) + parts[2]) + ... into `out_N`; 16-bit types are added in fp32.

    Args:
        parts: (n,) each, of one dtype; one per rank.
        out_N: (n,); may be one of the parts.
        add: the sum is added to what `out_N` holds.
    Returns: `out_N`.
    """
    own = parts[0].dtype
    fits = len(parts) <= _MOST_PARTS or out_N.device.type == "cpu"
    if fits and all(p.is_contiguous() for p in parts) and _sums_natively(own, out_N):
        given = (
            pointers(parts),
            len(parts),
            NUMBER_OF[own],
            out_N.data_ptr(),
            NUMBER_OF[out_N.dtype],
            out_N.numel(),
            add,
        )
        if out_N.device.type == "cpu":
            loaded().ops_sum(*given, torch.get_num_threads())
        else:
            _on_cuda("sum", out_N.device, *given)
        return out_N
    if not add and own == out_N.dtype and own not in (torch.bfloat16, torch.float16) and len(parts) > 1:
        # `out_N` is written last, since it may be one of the parts.
        total = parts[0]
        for number, part in enumerate(parts[1:-1]):
            total = total.add_(part) if number else total + part
        return torch.add(total, parts[-1], out=out_N)
    total = parts[0].to(torch.float32 if own in (torch.bfloat16, torch.float16) else out_N.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return out_N.add_(total) if add else out_N.copy_(total)


def _sums_natively(own: torch.dtype, out_N: Tensor) -> bool:
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
    fits = own in NUMBER_OF and out_N.dtype in (own, wide.get(own)) and out_N.is_contiguous()
    return fits and OPS["sums"].native(out_N.device.type)


def real_view(flat: Tensor) -> Tensor:
    """Returns a complex tensor as a flat real view of twice the length, and any other tensor as it is."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


@library.custom_op("shardlight::square_sums", mutates_args=())
def square_sums_op(flat: Tensor, chunk: int, scale: float = 1.0, clip: float = 1.0) -> tuple[Tensor, Tensor]:
    """`square_sums` as an operator of PyTorch; the count is a 0-dim int64 tensor."""
    sums, bad = square_sums(flat, chunk, scale, clip)
    return sums, torch.tensor(bad, device=flat.device)


@square_sums_op.register_fake
def _(flat: Tensor, chunk: int, scale: float = 1.0, clip: float = 1.0) -> tuple[Tensor, Tensor]:
    sums = flat.new_empty(flat.numel() // chunk, dtype=torch.float64)
    return sums, flat.new_empty((), dtype=torch.int64)


@library.custom_op("shardlight::scale_", mutates_args=("flat",))
def scale_op(flat: Tensor, scale: float) -> Tensor:
    """`scale_and_check` as an operator of PyTorch; whether all is finite is a 0-dim bool tensor."""
    return torch.tensor(scale_and_check(flat, scale), device=flat.device)


@scale_op.register_fake
def _(flat: Tensor, scale: float) -> Tensor:
    return flat.new_empty((), dtype=torch.bool)


@library.custom_op("shardlight::cast", mutates_args=())
def cast_op(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """`cast` into new memory, as an operator of PyTorch."""
    return cast(flat, torch.empty_like(flat, dtype=dtype, memory_format=torch.contiguous_format))


@cast_op.register_fake
def _(flat: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(flat, dtype=dtype, memory_format=torch.contiguous_format)


@library.custom_op("shardlight::sum_in_rank_order", mutates_args=("out",))
def sum_op(parts: list[Tensor], out: Tensor, add: bool = False) -> None:
    """`sum_in_rank_order` as an operator of PyTorch; `out` is none of the parts."""
    sum_in_rank_order(parts, out, add)


@sum_op.register_fake
def _(parts: list[Tensor], out: Tensor, add: bool = False) -> None:
    return None
