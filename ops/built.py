"""Which compiled code of `ops` was built, and whether it is used; told without PyTorch."""

import ctypes
import functools
import importlib.machinery
import os
import sys
from pathlib import Path

OPS_VARIABLE = "SHARDLIGHT_OPS"
"""`reference`: compiled code is not used."""


def host_collectives() -> Path | None:
    """Returns the library of the host's collectives; None: it was not built."""
    paths = [Path(__file__).with_name(f"_host_collectives{s}") for s in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if path.exists()), None)


@functools.cache
def why_not() -> str | None:
    """Returns why the library of the host's collectives cannot be used; None: it can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "this system is not Linux"
    if os.environ.get(OPS_VARIABLE) == "reference":
        return f"{OPS_VARIABLE}=reference is set"
    path = host_collectives()
    if path is None:
        return "it was not built: install a C++ compiler, then shardlight again (pip install --force-reinstall)"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"it cannot be loaded ({error})"
    return None
