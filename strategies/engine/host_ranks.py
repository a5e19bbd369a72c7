"""Which ranks of a group are on one host, and the memory they share for collectives.

[Note: hosts] Ranks of one host exchange through shared memory (`ops/host_collectives.py`), which moves data at the
speed of memory. Where a group spans hosts with equally many ranks each, that follow each other, a collective has two
levels: within each host through memory, and between ranks at the same place of each host over the network, so that
what goes over the network is a host's share and not a rank's. Everything else is gloo's, and `why_not_shared` says for
what reason. All ranks of a group decide alike.

What lies in a rank's arena (`ops/host_memory.py`) the others of its host read where it lies: weights that are published
and gradients that are reduced are not copied into rings.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shardlight.ops.built import why_not_shared
from shardlight.ops.host_collectives import HostGroup, create_segment
from shardlight.ops.host_memory import Arena, arena
from shardlight.strategies.engine.choices import Transport

HOST_VARIABLE = "SHARDLIGHT_HOST"
"""Names the host instead of what the system says; ranks with different names do not look for shared memory."""


@dataclass(frozen=True)
class HostRanks:
    """The ranks of this rank's host, and how many hosts there are."""

    local: HostGroup
    hosts: int
    host: int
    """This rank's host among them."""

    @property
    def place(self) -> int:
        """This rank's number on its host."""
        return self.local.rank

    @property
    def others_at_place(self) -> list[int]:
        """The ranks, in the whole group, at this rank's place of the other hosts."""
        return [h * self.local.world_size + self.place for h in range(self.hosts) if h != self.host]


def connect(group: dist.ProcessGroup, transport: Transport) -> HostRanks | str:
    """Returns the ranks that this one shares memory with, or why the group does not use any. Collective.

    Args:
        transport: equal on all ranks.
    """
    if transport == "gloo":
        return "collectives: gloo is set"
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    mine = arena()
    own = _host(), why_not_shared(), os.getpid(), None if mine is None else (mine.file, mine.nbytes)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, own, group=group)
    without = [f"rank {r}: {reason}" for r, (_, reason, *_) in enumerate(everyone) if reason]
    if without:
        return f"the compiled library is not used ({without[0]})"
    names = [host for host, *_ in everyone]
    first_of = [names.index(name) for name in names]
    hosts = sorted(set(first_of))
    size = world_size // len(hosts)
    if len(hosts) == world_size:
        return "every rank is on a host of its own"
    if first_of != [r // size * size for r in range(world_size)]:
        return "hosts have unequal numbers of ranks, or their ranks do not follow each other"
    mates = range(first_of[rank], first_of[rank] + size)
    arenas = {r: everyone[r][2:] for r in mates}
    made = _share(group, list(mates), [everyone[r][2] for r in mates])
    in_place = isinstance(made, HostGroup) and _share_arenas(made, list(arenas.values()), mine)
    dist.all_gather_object(everyone, (isinstance(made, HostGroup) or made, in_place), group=group)
    failures = [f"rank {r}: {fault}" for r, (fault, _) in enumerate(everyone) if fault is not True]
    if failures or isinstance(made, str):
        return f"memory could not be shared ({failures[0]})"
    if not all(shared for _, shared in everyone):
        made.keep_private()
    return HostRanks(made, len(hosts), hosts.index(first_of[rank]))


def _share(group: dist.ProcessGroup, mates: Sequence[int], processes: Sequence[int]) -> HostGroup | str:
    """Attaches the ranks of one host to memory that the first of them made; Returns: why that failed, else."""
    rank, everyone = dist.get_rank(group), [None] * dist.get_world_size(group)
    made: int | str = ""
    if rank == mates[0]:
        try:
            made = create_segment(len(mates))
        except OSError as error:
            made = str(error)
    dist.all_gather_object(everyone, made, group=group)
    found: Any = everyone[mates[0]]
    attached: HostGroup | str = str(found)
    if isinstance(found, int):
        try:
            # The memory has no name: whoever may look into the other process finds it there.
            path = f"/proc/{processes[0]}/fd/{found}"
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                place = mates.index(rank)
                attached = HostGroup(file, place, processes, _limit_s(group), mates)
            finally:
                os.close(file)
        except OSError as error:
            attached = f"{error.strerror or error}"
    # The file is closed when all have opened it.
    dist.all_gather_object(everyone, None, group=group)
    if isinstance(made, int):
        os.close(made)
    return attached


def _share_arenas(local: HostGroup, arenas: Sequence[tuple[int, tuple[int, int] | None]], own: Arena | None) -> bool:
    """Returns whether this rank can read every other's arena now. Args: arenas: (process, (file, bytes)) by rank."""
    if own is None or any(there is None for _, there in arenas):
        return False
    files: list[int] = []
    try:
        for process, there in arenas:
            assert there is not None
            files.append(os.open(f"/proc/{process}/fd/{there[0]}", os.O_RDONLY | os.O_CLOEXEC))
        local.share_arenas(files, [there[1] for _, there in arenas if there is not None], own)
    except OSError:
        return False
    finally:
        for file in files:
            os.close(file)
    return True


def _host() -> str:
    """Returns what is equal for processes that can share memory: the running system, and its numbering of processes."""
    parts = [os.environ.get(HOST_VARIABLE) or socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
    return "/".join(parts)


def _limit_s(group: dist.ProcessGroup) -> float:
    """Returns after how long a collective of the group fails."""
    try:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout.total_seconds()
