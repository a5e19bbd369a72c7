"""Sums whose order is fixed, so that results do not depend on how a buffer is partitioned."""

import torch
from torch import Tensor

CHUNK = 1024
"""Elements per partial sum of `square_sums`; every shard of a flat buffer is a multiple of it."""


def square_sums(flat: Tensor, chunk: int = CHUNK) -> Tensor:
    """Sums the squares of each chunk of `flat` in fp64.

    The chunks are fixed by position, so the partial sums of a shard equal those of the same range of the full buffer
    bit for bit, whichever rank computes them.

    Args:
        flat: (n * chunk,), floating or complex (the squared modulus is summed).
    Returns: (n,) fp64.
    """
    rows = real_view(flat).view(-1, chunk * (2 if flat.is_complex() else 1))
    return rows.double().square().sum(dim=1) if rows.numel() else rows.new_zeros(0, dtype=torch.float64)


def abs_max(flat: Tensor) -> Tensor:
    """Returns the largest modulus of `flat` as a 0-dim fp64 tensor; 0 for an empty tensor, NaN if there is one."""
    return flat.abs().max().to(torch.float64) if flat.numel() else torch.zeros((), dtype=torch.float64)


def sum_in_rank_order(parts_RN: Tensor, out_N: Tensor) -> Tensor:
    """Writes ((parts[0] + parts[1]) + parts[2]) + ... into `out_N`; 16-bit types are added in fp32.

    Args:
        parts_RN: (ranks, n), one row per rank.
        out_N: (n,), dtype of `parts_RN`; may be one of the rows only at one rank.
    Returns: `out_N`.
    """
    if parts_RN.dtype in (torch.bfloat16, torch.float16):
        total = parts_RN[0].float()
        for part in parts_RN[1:]:
            total += part
        return out_N.copy_(total)
    out_N.copy_(parts_RN[0])
    for part in parts_RN[1:]:
        out_N += part
    return out_N


def real_view(flat: Tensor) -> Tensor:
    """Returns a complex tensor as a flat real view of twice the length, and any other tensor as it is."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
