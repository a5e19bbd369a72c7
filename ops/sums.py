"""Sums whose order is fixed, so that results do not depend on how a buffer is partitioned."""

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1024
"""Elements per partial sum of `square_sums`; every shard of a flat buffer is a multiple of it."""
_STEP = 1 << 18
"""Elements at a time."""
_ROWS = 256
"""Chunks at a time."""


def square_sums(flat: Tensor, chunk: int = CHUNK) -> Tensor:
    """Sums the squares of each chunk of `flat` in fp64.

    The chunks are fixed by position, so the partial sums of a shard equal those of the same range of the full buffer
    bit for bit, whichever rank computes them.

    Args:
        flat: (n * chunk,), floating or complex (the squared modulus is summed).
    Returns: (n,) fp64.
    """
    rows = real_view(flat).view(-1, chunk * (2 if flat.is_complex() else 1))
    sums = torch.empty(len(rows), dtype=torch.float64, device=flat.device)
    # In steps that stay in a core's cache, and take no memory of the size of `flat`.
    wide = torch.empty(min(_ROWS, len(rows)), rows.shape[1], dtype=torch.float64, device=flat.device)
    for first in range(0, len(rows), _ROWS):
        part = rows[first : first + _ROWS]
        squares = wide[: len(part)].copy_(part)
        torch.mul(squares, squares, out=squares)
        torch.sum(squares, dim=1, out=sums[first : first + _ROWS])
    return sums


def scale_and_check(flat_N: Tensor, scale: float) -> bool:
    """Multiplies (n,) `flat_N` by `scale` in place; returns whether it holds no inf and no NaN then.

    On CPU in steps that stay in a core's cache, so that memory is read once.
    """
    flat = real_view(flat_N)
    ends: list[Tensor] = []
    for part in flat.split(_STEP if flat.device.type == "cpu" else max(1, flat.numel())):
        if scale != 1.0:
            part.mul_(scale)
        if part.numel():
            ends += part.aminmax()
    return not ends or bool(torch.isfinite(torch.stack(ends)).all())


def abs_max(flat: Tensor) -> Tensor:
    """Returns the largest modulus of `flat` as a 0-dim fp64 tensor; 0 for an empty tensor, NaN if there is one."""
    return flat.abs().max().to(torch.float64) if flat.numel() else torch.zeros((), dtype=torch.float64)


def sum_in_rank_order(parts: Sequence[Tensor], out_N: Tensor, add: bool = False) -> Tensor:
    """Writes ((parts[0] + parts[1]) + parts[2]) + ... into `out_N`; 16-bit types are added in fp32.

    Args:
        parts: (n,) each, of one dtype; one per rank.
        out_N: (n,); may be one of the parts.
        add: the sum is added to what `out_N` holds.
    Returns: `out_N`.
    """
    own = parts[0].dtype
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


def real_view(flat: Tensor) -> Tensor:
    """Returns a complex tensor as a flat real view of twice the length, and any other tensor as it is."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
