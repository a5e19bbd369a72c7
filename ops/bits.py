"""Comparison of tensors bit by bit: NaN equals itself, and 0.0 is not -0.0."""

import ctypes
import os

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _memcmp() -> "ctypes._NamedFuncPointer | None":
    if os.name != "posix":
        return None
    function = ctypes.CDLL(None).memcmp
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return function


_compare = _memcmp()


def bits(flat_N: Tensor) -> Tensor:
    """Returns (n,) `flat_N` as integers of the same size (complex128: two per element)."""
    return flat_N.view(_INTEGERS[flat_N.element_size()])


def same_bits(a_N: Tensor, b_N: Tensor) -> bool:
    """Whether two contiguous tensors of one dtype, size and device hold the same bits.

    On CPU this is memcmp, which reads at the speed of memory; `torch.equal` is slower.
    """
    if _compare is not None and a_N.device.type == "cpu" and a_N.is_contiguous() and b_N.is_contiguous():
        return a_N.numel() == b_N.numel() and _compare(a_N.data_ptr(), b_N.data_ptr(), a_N.nbytes) == 0
    return torch.equal(bits(a_N), bits(b_N))
