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


def available_bytes(swap: bool = False) -> int | None:
    """Memory that programs can still get, within the limits of this process's control groups; None: not known.

    Args:
        swap: with what the system could swap out, which is slow.
    """
    fields = fields_of("/proc/meminfo")
    if fields is None:
        return None
    found = [fields["MemAvailable"] + (fields.get("SwapFree", 0) if swap else 0)]
    return min(found + [left for folder in _groups() if (left := _left_in_group(folder, swap)) is not None])


def _groups() -> list[Path]:
    """Returns the folders of this process's control group (version 2) and of those around it."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [root]
    own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    here = root / own
    return [folder for folder in (here, *here.parents) if folder.is_relative_to(root)]


def _left_in_group(folder: Path, swap: bool) -> int | None:
    """Returns what a control group may still take; None: it has no limit."""

    def number(name: str) -> int | None:
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            return None
        return int(text) if text.isdecimal() else None

    limit, used = number("memory.max"), number("memory.current")
    if limit is None or used is None:
        return None
    try:
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        rows = {}
    # Pages of files, which the system drops when memory is wanted.
    left = limit - used + sum(int(rows.get(name, 0)) for name in ("active_file", "inactive_file"))
    if swap:
        left += max(0, (number("memory.swap.max") or 0) - (number("memory.swap.current") or 0))
    return left


@functools.cache
def keep_freed_memory() -> bool:
    """Lets the allocator use freed memory again instead of giving it back; returns whether it does (glibc).

    Gradients come and go with every step, and each page that was given back is cleared when it is wanted again, which
    costs as much as filling it. Where the user has set the allocator's own variables, these count.
    """
    return _set(_LARGEST_FROM_HEAP, KEPT_BYTES)


def return_freed_memory(from_bytes: int) -> bool:
    """Lets the allocator give freed memory back at once; returns whether it does (glibc). It undoes the other.

    For a process that is to take little memory: what is freed between blocks that stay is not used for larger ones, and
    such holes add up to more than what is in use. Every page that comes back is cleared, which costs time.

    Args:
        from_bytes: of the smallest block that is given back by itself.
    """
    return keep_freed_memory() and _set(from_bytes, 2 * from_bytes)


def _set(mapped_from_bytes: int, kept_bytes: int) -> bool:
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    options = ((_M_MMAP_THRESHOLD, mapped_from_bytes), (_M_TRIM_THRESHOLD, kept_bytes))
    return mallopt is not None and all(mallopt(*option) for option in options)
