"""CRC-32 of memory, the same value as `zlib.crc32`, at the speed at which memory is read; for the files of checkpoints.

Needs no PyTorch; tensors may be given all the same. The reference is zlib's. While it runs, other threads of Python do.
Source: Gopal et al. 2009, Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction (Intel).
"""

import ctypes
import functools
import zlib
from mmap import mmap
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from shardlight.ops.built import library
from shardlight.ops.registry import OPS

if TYPE_CHECKING:
    from torch import Tensor

Bytes: TypeAlias = bytes | bytearray | memoryview | mmap

WAYS = ("table", "pclmul", "vpclmul")
"""As `way_of` in csrc/cpu/crc32.cpp: 16 bytes at a time by tables, or by carry-less multiplication."""


def crc32(data: "Bytes | Tensor", start: int = 0) -> int:
    """Returns the CRC-32 of bytes.

    Args:
        data: contiguous memory, or a contiguous tensor on CPU.
        start: the CRC of what is before it, so that parts may come one after the other.
    Raises: ValueError: the memory is not contiguous, or not the CPU's.
    Example: crc32(b"123456789") == crc32(b"6789", crc32(b"12345")) == 0xCBF43926.
    """
    address, nbytes, held = _memory(data)
    if not nbytes:
        return start & 0xFFFFFFFF
    if not OPS["crc32"].native("cpu"):
        return zlib.crc32(held, start)
    return _run(address, nbytes, nbytes, start & 0xFFFFFFFF, best_way(), 1)[0]


def crc32_chunks(data: "Bytes | Tensor", chunk_bytes: int, threads: int = 1) -> list[int]:
    """Returns the CRC-32 of each chunk of `chunk_bytes`, the last one maybe shorter; none of no bytes.

    Args:
        data: see crc32.
        threads: that share the chunks.
    Raises: ValueError: see crc32; `chunk_bytes` is not positive.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}: a chunk has at least 1 byte.")
    address, nbytes, held = _memory(data)
    if not nbytes:
        return []
    if not OPS["crc32"].native("cpu"):
        return [zlib.crc32(held[at : at + chunk_bytes]) for at in range(0, nbytes, chunk_bytes)]
    return list(_run(address, nbytes, chunk_bytes, 0, best_way(), threads))


@functools.cache
def best_way() -> int:
    """Returns the number of the fastest of WAYS on this processor, which has all before it."""
    return int(_compiled().ops_crc32_ways())


@functools.cache
def _compiled() -> ctypes.CDLL:
    found = ctypes.CDLL(str(library()))
    pointer, number, integer, crc = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint32
    found.ops_crc32.argtypes = [pointer, number, number, crc, pointer, integer, integer]
    return found


def _run(address: int, nbytes: int, chunk_bytes: int, start: int, way: int, threads: int) -> "ctypes.Array[Any]":
    found = (ctypes.c_uint32 * -(-nbytes // chunk_bytes))()
    if _compiled().ops_crc32(address, nbytes, chunk_bytes, start, found, way, threads):
        raise RuntimeError(f"ops.crc32: this processor cannot do '{WAYS[way]}'.")
    return found


def _memory(data: "Bytes | Tensor") -> tuple[int, int, memoryview]:
    """Returns where memory lies, its bytes, and a view that keeps it there."""
    if hasattr(data, "data_ptr"):
        if data.device.type != "cpu" or not data.is_contiguous():
            raise ValueError(f"ops.crc32: {tuple(data.shape)} on {data.device} is not contiguous memory of the CPU.")
        address, nbytes = data.data_ptr(), data.nbytes
        return address, nbytes, memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"ops.crc32: memory of shape {view.shape} and strides {view.strides} is not contiguous.")
    if not view.nbytes:
        return 0, 0, view
    view = view.cast("B")
    # ctypes takes no memory that is read-only.
    return np.frombuffer(view, np.uint8).ctypes.data, view.nbytes, view
