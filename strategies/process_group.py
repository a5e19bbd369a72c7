"""Starts the process group, and says who is missing when not every rank arrives."""

import atexit
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from shardlight.strategies.engine.collectives import let_go_of_groups
from shardlight.strategies.engine.groups import EngineGroups
from shardlight.strategies.engine.mesh import Mesh
from shardlight.strategies.errors import LaunchError, StrategyError

STORE_VARIABLE = "SHARDLIGHT_STORE"
"""Names a file for the rendezvous of ranks on one host; a launcher that sets it needs no port."""
_POLL_S = 0.05


def start_process_group(
    rank: int, world_size: int, address: str, port: int, backend: str, timeout_s: float, device: torch.device
) -> None:
    """Initialises torch.distributed for this rank, once all ranks have arrived.

    Args:
        address, port: of rank 0; not used when SHARDLIGHT_STORE names a file.
        timeout_s: limit for the arrival of all ranks and for every collective afterwards.
    Raises: LaunchError: not every rank arrived in time (names them), or this rank's number is impossible.
    """
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise LaunchError(
                f"a process group of {dist.get_world_size()} ranks exists already, but {world_size} are configured."
            )
        return
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks are numbered 0 to {world_size - 1}."
        )
    timeout = timedelta(seconds=timeout_s)
    store = _store(rank, world_size, address, port, timeout)
    _wait_for_all(store, rank, world_size, timeout_s)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("shardlight", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )
    if backend == "gloo":
        # gloo's threads abort the process when the interpreter ends before them.
        atexit.register(_end)


def _end() -> None:
    # A group ends its threads when the last reference to it goes; one that is left to the interpreter's own end aborts.
    let_go_of_groups()
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


_groups: dict[tuple[str, float, tuple[tuple[int, ...], ...]], tuple[dist.ProcessGroup | None, Any]] = {}
"""By backend, timeout and the ranks of each: the default group they were made in, and this rank's."""


def engine_groups(
    backend: str,
    timeout_s: float,
    shard_size: int | None = None,
    mesh: Mesh | None = None,
    joint: Collection[tuple[int, ...]] = (),
) -> EngineGroups:
    """Returns groups for the collectives of the engine alone: all ranks, and what `shard_size` and `mesh` make of them.

    Shard groups are `shard_size` ranks that follow each other; ranks at one place of all shard groups are a replicate
    group. Collective. One Trainer after the other uses the same: a gloo group has threads and sockets, which stay until
    the process ends.

    Args:
        mesh: None: all ranks hold the same parameters.
        joint: sets of stages that share parameters.
    Raises: StrategyError: the number of ranks does not divide by `shard_size`.
    """
    mesh = mesh or Mesh(data=dist.get_world_size())
    ranks, place = mesh.data, mesh.place(dist.get_rank())
    size = shard_size or ranks
    if ranks % size:
        fit = [n for n in range(1, ranks + 1) if ranks % n == 0]
        raise StrategyError(
            f"strategy.shard_group: {size}: {ranks} ranks do not divide into groups of {size}. Use one of {fit}."
        )

    def new(lists: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        return _own_group(backend, timeout_s, lists)

    same = mesh.lines("data")
    world, shard, replicate = None if ranks == 1 else new(same), None, None
    if size != ranks:
        shard = new([line[first : first + size] for line in same for first in range(0, ranks, size)])
        replicate = new([line[first::size] for line in same for first in range(size)])
    if mesh.data == mesh.size:
        return EngineGroups(world, shard, replicate)
    pipeline = new(mesh.lines("pipeline")) if mesh.pipeline > 1 else None
    tensor = new(mesh.lines("tensor")) if mesh.tensor > 1 else None
    both = pipeline is not None and tensor is not None
    held = {stages: new(mesh.joined([stages])) for stages in sorted(joint)}
    return EngineGroups(
        world,
        shard,
        replicate,
        everyone=new([range(mesh.size)]),
        pipeline=pipeline,
        tensor=tensor,
        model=new(mesh.lines("pipeline", "tensor")) if both else pipeline or tensor,
        stage=place.pipeline,
        joint={stages: group for stages, group in held.items() if place.pipeline in stages},
    )


def tensor_group(backend: str, timeout_s: float, mesh: Mesh) -> dist.ProcessGroup | None:
    """Returns this rank's tensor group, before the others are known. Collective."""
    return _own_group(backend, timeout_s, mesh.lines("tensor"))


def _own_group(backend: str, timeout_s: float, lists: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Returns this rank's of the groups of these ranks; None: it is in none."""
    key = backend, timeout_s, tuple(map(tuple, lists))
    made_in, group = _groups.get(key, (None, None))
    if made_in is not dist.group.WORLD:
        # Every rank makes every group, in one order.
        made = [dist.new_group(list(r), timeout=timedelta(seconds=timeout_s), backend=backend) for r in lists]
        group = next((g for g, r in zip(made, lists, strict=True) if dist.get_rank() in r), None)
        _groups[key] = dist.group.WORLD, group
    return group


def _store(rank: int, world_size: int, address: str, port: int, timeout: timedelta) -> dist.Store:
    path = os.environ.get(STORE_VARIABLE)
    if path:
        return dist.FileStore(path, world_size)
    hosted_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0 and not hosted_elsewhere,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, dist.DistError) as error:
        raise LaunchError(
            f"rank {rank} of {world_size} found no rank 0 at {address}:{port} within {timeout.total_seconds():g} s "
            f"({str(error).splitlines()[0]}): start all {world_size} ranks, or correct MASTER_ADDR and MASTER_PORT."
        ) from error


def _wait_for_all(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = [f"arrived/{attempt}/{r}" for r in range(world_size)]
    store.set(keys[rank], "1")
    deadline = time.monotonic() + timeout_s
    missing = list(range(world_size))
    while missing:
        try:
            missing = [r for r in missing if not store.check([keys[r]])]
        except dist.DistError:
            # Rank 0 holds the store, and has given up a moment before this rank.
            deadline = 0.0
        if missing and time.monotonic() > deadline:
            raise LaunchError(
                f"{world_size - len(missing)} of {world_size} ranks arrived within {timeout_s:g} s; missing: "
                f"{', '.join(map(str, missing))}. Start all {world_size}, or correct WORLD_SIZE."
            )
        time.sleep(_POLL_S)


def end_with_parent() -> None:
    """Lets the kernel kill this process when the one that started it dies (Linux), so that no rank outlives its job."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
