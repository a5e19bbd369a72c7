"""Memory of the machine and of this process. Linux's /proc, control groups and glibc; elsewhere nothing is known."""

import ctypes
import functools
import os
from pathlib import Path

KEPT_BYTES = 256 << 20
"""Of freed memory, that the process keeps at most."""
_LARGEST_FROM_HEAP = 32 << 20
"""Bytes of the largest block that glibc can take from what it keeps."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def fields_of(path: str) -> dict[str, int] | None:
    """Returns the lines "Name:  123 kB" of a file of /proc, in bytes; None where there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    rows = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def available_bytes() -> int | None:
    """Memory that programs can still get, within the limit of this process's control group; None: not known."""
    fields = fields_of("/proc/meminfo")
    if fields is None:
        return None
    found = [fields["MemAvailable"]]
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
    except OSError:
        limit, used = "max", 0
    if limit != "max":
        found.append(int(limit) - used)
    return min(found)


@functools.cache
def keep_freed_memory() -> bool:
    """Lets the allocator use freed memory again instead of giving it back; returns whether it does (glibc).

    Gradients come and go with every step, and each page that was given back is cleared when it is wanted again, which
    costs as much as filling it. Where the user has set the allocator's own variables, these count.
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    options = ((_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    return mallopt is not None and all(mallopt(*option) for option in options)
