"""Which compiled libraries of `ops` were built, and whether they are used; told without PyTorch."""

import ctypes
import errno
import functools
import importlib.machinery
import os
import struct
import sys
from pathlib import Path
from typing import Literal

OPS_VARIABLE = "SHARDLIGHT_OPS"
"""`auto` or unset: compiled code where it is there. `reference`: never. `native`: an error where it is missing."""
CHOICES = ("auto", "native", "reference")
ABI = 3
"""As `kAbi` in csrc/numbers.h: what the functions take."""
Device = Literal["cpu", "cuda"]

_MEND = {
    "cpu": "install a C++ compiler, then shardlight again (pip install --force-reinstall)",
    "cuda": "run 'shardlight ops build' where nvcc is",
}


class OpError(RuntimeError):
    """An op cannot run as it is asked to; says why, and the mend."""


def choice() -> str:
    """Returns what the environment asks for. Raises: OpError: something that there is not."""
    found = os.environ.get(OPS_VARIABLE) or "auto"
    if found not in CHOICES:
        raise OpError(f"{OPS_VARIABLE}={found} is not a choice. Set it to {', '.join(CHOICES[:-1])} or {CHOICES[-1]}.")
    return found


def cuda_library() -> Path:
    """Where `shardlight ops build` puts the CUDA library."""
    return Path(__file__).with_name("_cuda.so")


def library(device: Device = "cpu") -> Path | None:
    """Returns the library for a device; None: it was not built."""
    if device == "cuda":
        return cuda_library() if cuda_library().exists() else None
    paths = [Path(__file__).with_name(f"_native{s}") for s in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if path.exists()), None)


@functools.cache
def why_not(device: Device = "cpu") -> str | None:
    """Returns why the library for a device cannot be used; None: it can."""
    if choice() == "reference":
        return f"{OPS_VARIABLE}=reference is set"
    path = library(device)
    if path is None:
        return f"it was not built: {_MEND[device]}"
    if _is_cut_short(path):
        return f"it is not whole: {_MEND[device]}"
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        return f"it cannot be loaded ({error})"
    if not hasattr(found, "ops_abi") or found.ops_abi() != ABI:
        return f"it is of another version: {_MEND[device]}"
    return None


def _is_cut_short(path: Path) -> bool:
    """Whether a library's file ends before what its header says: loading it would end the process."""
    with path.open("rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if header[:6] != b"\x7fELF\x02\x01" or len(header) < 64:
        return False  # another system's, or nothing that can be loaded
    (sections,) = struct.unpack_from("<Q", header, 0x28)
    width, count = struct.unpack_from("<HH", header, 0x3A)
    return sections + width * count > size


def why_not_shared() -> str | None:
    """Returns why the ranks of a host cannot exchange through shared memory; None: they can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "this system is not Linux"
    return why_not()


@functools.cache
def why_no_ring() -> str | None:
    """Returns why the disk engine's requests go through threads and not through io_uring; None: io_uring serves them.

    Asks the library, which is there.
    """
    refused = ctypes.CDLL(str(library())).ops_disk_ring_refused()
    if not refused:
        return None
    mends = {
        errno.ENOSYS: "this kernel has none, or one older than Linux 5.6",
        errno.EPERM: "a container's seccomp profile or kernel.io_uring_disabled forbids it",
        errno.ENOMEM: "raise the limit of locked memory, ulimit -l",
    }
    told = mends.get(refused, os.strerror(refused))
    return f"io_uring is refused with {errno.errorcode.get(refused, refused)}: {told}"
