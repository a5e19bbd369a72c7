"""How much memory a machine has left. Linux's /proc and control groups; elsewhere nothing is known."""

from pathlib import Path


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
