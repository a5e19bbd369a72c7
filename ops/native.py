"""The compiled libraries behind ctypes: their functions, and tensors as what these take."""

import ctypes
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from shardlight.ops.built import Device, library
from torch import Tensor

NUMBER_OF = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
}
"""As `Dtype` in csrc/numbers.h."""
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_POINTER, _NUMBER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double


class Step(ctypes.Structure):
    """As `Step` in csrc/step.h."""

    _fields_ = [
        ("count", _NUMBER),
        ("numel", _POINTER),
        ("parameter", _POINTER),
        ("gradient", _POINTER),
        ("state", _POINTER * 3),
        ("copy", _POINTER),
        ("number", _POINTER),
        ("options", _POINTER),
        ("scale", _REAL),
        ("clip", _REAL),
        ("parameter_dtype", ctypes.c_int32),
        ("gradient_dtype", ctypes.c_int32),
        ("state_dtype", ctypes.c_int32),
        ("copy_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("stream", _POINTER),
    ]


_STEPS = ("adam", "sgd", "adagrad", "rmsprop", "lion")
_SUMS = {
    "square_sums": (_NUMBER, (_POINTER, _INTEGER, _NUMBER, _NUMBER, _REAL, _REAL, _POINTER, _INTEGER)),
    "scale": (_NUMBER, (_POINTER, _INTEGER, _NUMBER, _REAL, _INTEGER)),
    "cast": (_INTEGER, (_POINTER, _INTEGER, _POINTER, _INTEGER, _NUMBER, _INTEGER)),
    "sum": (_INTEGER, (_POINTER, _INTEGER, _INTEGER, _POINTER, _INTEGER, _NUMBER, _INTEGER, _INTEGER)),
}
_CUDA_SUMS = {
    "square_sums": (_INTEGER, (_POINTER, _INTEGER, _NUMBER, _NUMBER, _REAL, _REAL, _POINTER, _POINTER, _POINTER)),
    "scale": (_INTEGER, (_POINTER, _INTEGER, _NUMBER, _REAL, _POINTER, _POINTER)),
    "cast": (_INTEGER, (_POINTER, _INTEGER, _POINTER, _INTEGER, _NUMBER, _POINTER)),
    "sum": (_INTEGER, (_POINTER, _INTEGER, _INTEGER, _POINTER, _INTEGER, _NUMBER, _INTEGER, _POINTER)),
}


@functools.cache
def loaded(device: Device = "cpu") -> ctypes.CDLL:
    """Returns the library for a device, which is there."""
    found = ctypes.CDLL(str(library(device)))
    prefix = "ops" if device == "cpu" else "cuda"
    for name in _STEPS:
        function = getattr(found, f"{prefix}_{name}")
        function.restype, function.argtypes = _INTEGER, (ctypes.POINTER(Step), _INTEGER)
    for name, (result, arguments) in (_SUMS if device == "cpu" else _CUDA_SUMS).items():
        function = getattr(found, f"{prefix}_{name}")
        function.restype, function.argtypes = result, arguments
    if device == "cuda":
        for function in (found.cuda_error_name, found.cuda_error_text):
            function.restype, function.argtypes = ctypes.c_char_p, (_INTEGER,)
    return found


def pointers(tensors: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    """Returns where tensors lie."""
    return (_POINTER * len(tensors))(*map(Tensor.data_ptr, tensors))


def current(device: torch.device) -> AbstractContextManager[object]:
    """Context in which kernels are for a tensor's device: its streams are known to CUDA only there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check(error: int, what: str, device: torch.device) -> None:
    """Raises: RuntimeError: a compiled function returned -1, or an error of CUDA, maybe of earlier work."""
    if error < 0:
        raise RuntimeError(f"{what} has no compiled version for these dtypes and states.")
    if error:
        names = loaded("cuda")
        name, text = names.cuda_error_name(error).decode(), names.cuda_error_text(error).decode()
        raise RuntimeError(f"{what} failed on {device}: {name} ({text}), here or in what ran before it.")


def stream_of(device: torch.device) -> int | None:
    """Returns the handle of CUDA's current stream; None on CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
