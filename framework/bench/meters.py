"""What a process and a machine can tell about themselves: memory, CPU time, bytes over loopback, Python calls.

Linux's /proc; where it is missing a figure is None, and is left out.
"""

import cProfile
import os
import platform
import resource
from importlib import metadata
from pathlib import Path
from typing import Any

from shardlight.ops.memory import fields_of

_PACKAGES = ("torch", "lightning", "numpy", "deepspeed")


def memory() -> dict[str, int] | None:
    """Returns this process's memory in bytes: `pss`, `rss` and `peak_rss`, the highest since `reset_peak`.

    `pss` is the proportional set size without pages of files: how much of the libraries' text counts as ours depends
    on how many other contenders wait. Shared memory counts by its share.
    """
    shares, status = fields_of("/proc/self/smaps_rollup"), fields_of("/proc/self/status")
    if shares is None or status is None or "Pss_Anon" not in shares:
        return None
    return {"pss": shares["Pss_Anon"] + shares["Pss_Shmem"], "rss": status["VmRSS"], "peak_rss": status["VmHWM"]}


def reset_peak() -> None:
    """Lets `peak_rss` start anew from what is resident now."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def above(base: dict[str, int] | None, now: dict[str, int] | None) -> dict[str, int]:
    """Returns `steady_memory_bytes` and `peak_memory_bytes` above `base`; nothing where the system does not tell.

    What was resident at the peak and is not any more was memory of this process alone: buffers that were freed.
    """
    if base is None or now is None:
        return {}
    steady = now["pss"] - base["pss"]
    return {"steady_memory_bytes": steady, "peak_memory_bytes": steady + now["peak_rss"] - now["rss"]}


def cpu_s() -> float:
    """User and system time of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def page_faults() -> int:
    """Page faults of this process so far that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class CallProbe:
    """Counts the calls of Python functions and of builtins from Python, in this thread, as cProfile counts them."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def start(self) -> None:
        """Counts from here on."""
        self._profile.enable()

    def stop(self) -> int:
        """Returns the number of calls since `start`."""
        self._profile.disable()
        return sum(entry.callcount for entry in self._profile.getstats())


# --- the machine


def loopback_bytes() -> int | None:
    """Bytes sent over the loopback device so far, by all programs, with headers."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    rows = [line.split() for line in lines]
    return next((int(row[9]) for row in rows if row and row[0] == "lo:"), None)


def busy_s() -> float | None:
    """CPU time that all programs together have used so far."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Returns what a reader of the figures has to know about where they come from."""
    total = fields_of("/proc/meminfo")
    found: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count()}
    if hasattr(os, "sched_getaffinity"):
        found["cores"] = len(os.sched_getaffinity(0))
    found["memory_bytes"] = None if total is None else total["MemTotal"]
    found |= {"system": f"{platform.system()} {platform.release()}", "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
