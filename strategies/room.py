"""Whether a run fits into the memory and the disk that there are: asked before anything is allocated, of all ranks.

[Note: room] All ranks tell each other what they would take for certain and what there is around them; each adds up what
the ranks of one host take together. So all come to the same answer, and a run that cannot fit ends on all of them with
the line that kills it and the smallest change that would fit.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shardlight.ops.memory import available_bytes
from shardlight.strategies.byte_words import in_words
from shardlight.strategies.engine.deferred.tensors import is_deferred
from shardlight.strategies.engine.dtypes import DtypePolicy
from shardlight.strategies.engine.estimate import KINDS, Estimate, Setting, UnitShape, Where, estimate
from shardlight.strategies.engine.offload import Offload
from shardlight.strategies.engine.part import WHOLE_MODEL, ModelPart
from shardlight.strategies.engine.plan import PLANS, StatePlan
from shardlight.strategies.engine.shapes import shapes_of
from shardlight.strategies.engine.tiers import leftovers
from shardlight.strategies.engine.whole import needs_whole
from shardlight.strategies.errors import NoRoomError
from shardlight.strategies.options import ROWS, EngineOptions, offload_of
from torch import nn
from torch.optim import Optimizer

SWAP = "swap"
"""The folder that a suggestion takes where the config names none."""


@dataclass(frozen=True, kw_only=True)
class There:
    """What one rank finds around it, before it allocates anything.

    Attributes:
        places: by tier, what is one memory or one disk to all ranks that name it alike.
        free: by tier, bytes that can still be had there; a tier of which nothing is known is not in it.
        held: bytes of weights that this rank has already, and that the estimate counts as well.
    """

    places: dict[Where, str]
    free: dict[Where, int]
    held: int = 0


def look_around(device: torch.device, disk: str, model: nn.Module) -> There:
    """Returns what there is of memory on and beside a device, and on the disk of a folder that need not be there."""
    places: dict[Where, str] = {"host": socket.gethostname()}
    free: dict[Where, int] = {}
    memory = available_bytes(swap=True)
    if memory is not None:
        free["host"] = memory
    if device.type == "cuda":
        places["device"] = f"{socket.gethostname()} {device.index}"
        left, _ = torch.cuda.mem_get_info(device)
        free["device"] = left + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    folder = Path(disk).absolute()
    with suppress(OSError):
        there = next(p for p in (folder, *folder.parents) if p.is_dir())
        found, left_over = os.statvfs(there), 0
        for path in leftovers(folder):
            with suppress(OSError):
                left_over += path.stat().st_blocks * 512
        places["disk"] = f"{socket.gethostname()} {os.stat(there).st_dev}"
        free["disk"] = found.f_bavail * found.f_frsize + left_over
    storages = {
        p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters() if not is_deferred(p)
    }
    return There(places=places, free=free, held=sum(storages.values()))


@dataclass(frozen=True, kw_only=True)
class Room:
    """An estimate beside what there is.

    Attributes:
        everyone: what each rank found, by rank.
        whole: an optimizer needs whole parameters, so that its state cannot be on disk.
        by_rank: where ranks have parts of the model, the units of each; empty: every rank has `units`.
    """

    units: Sequence[UnitShape]
    setting: Setting
    rank: int
    everyone: Sequence[There]
    whole: bool = False
    by_rank: Sequence[Sequence[UnitShape]] = ()

    @property
    def estimate(self) -> Estimate:
        """What this rank takes; without a pipeline, what each takes."""
        return self._told(self.rank, self.setting)

    def _told(self, rank: int, setting: Setting) -> Estimate:
        return estimate(self.by_rank[rank] if self.by_rank else self.units, setting)

    def together(self, where: Where, setting: Setting | None = None, *, certain: bool = False) -> int:
        """Returns the bytes of all ranks that share this one's memory or disk.

        Args:
            setting: other than that of the run.
            certain: only those that are taken for certain.
        """
        own = self.everyone[self.rank].places.get(where)
        mates = [rank for rank, there in enumerate(self.everyone) if there.places.get(where) == own]
        # Without a pipeline all take the same.
        counted = mates if self.by_rank else mates[:1]
        told = [self._told(rank, setting or self.setting) for rank in counted]
        once = sum(each.certain(where) if certain else each.nbytes(where) for each in told)
        return once * len(mates) // len(counted)

    def mates(self, where: Where) -> int:
        """Returns how many ranks share this one's memory or disk."""
        own = self.everyone[self.rank].places.get(where)
        return sum(there.places.get(where) == own for there in self.everyone)

    def free(self, where: Where) -> int | None:
        """Returns what they have together, and what they hold of it already; None: not known."""
        own = self.everyone[self.rank].places.get(where)
        mates = [there for there in self.everyone if there.places.get(where) == own and where in there.free]
        if own is None or not mates:
            return None
        held = sum(there.held for there in mates) if where == self.setting.memory else 0
        # What one saw a moment ago may have been another's for that moment.
        return max(there.free[where] for there in mates) + held

    def missing(self, setting: Setting, ranks_per_place: Callable[[int], int] = lambda n: n) -> dict[Where, int]:
        """Returns by tier how many bytes would be missing on the place that lacks most; nothing where it fits.

        Args:
            ranks_per_place: how many ranks there would be, of how many there are.
        """
        found: dict[Where, int] = {}
        for rank in range(len(self.everyone)):
            seen = replace(self, rank=rank)
            for where in ("device", "host", "disk"):
                free = seen.free(where)  # type: ignore[arg-type]
                taken = seen.together(where, setting, certain=True)  # type: ignore[arg-type]
                if not self.by_rank:
                    mates = seen.mates(where)  # type: ignore[arg-type]
                    taken = taken // mates * ranks_per_place(mates)
                if free is not None and taken > free:
                    found[where] = max(found.get(where, 0), taken - free)  # type: ignore[index,arg-type]
        return found


def room_for(
    model: nn.Module,
    plan: StatePlan,
    options: EngineOptions,
    optimizers: Sequence[Optimizer],
    dtypes: DtypePolicy,
    device: torch.device,
    part: ModelPart = WHOLE_MODEL,
    data_ranks: int | None = None,
) -> Room:
    """Returns what a fit takes and what there is, before an engine is made. Collective.

    Args:
        model: with full parameters, or built without memory.
        part: which part of the whole model this rank has.
        data_ranks: how many ranks have the same part; None: all.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    offload = offload_of(options)
    moments = None if options.moments_dtype is None else getattr(torch, options.moments_dtype)
    units = shapes_of(
        model,
        plan,
        optimizers,
        unit_classes=options.units,
        dtypes=dtypes,
        keep_small=options.keep_small,
        moments=moments,
        part=part,
    )
    mine = look_around(device, SWAP if offload is None else offload.disk or SWAP, model)
    everyone: list[Any] = [(mine, units)] * world_size
    in_parts = data_ranks not in (None, world_size)
    if world_size > 1:
        dist.all_gather_object(everyone, (mine, units if in_parts else None))
    setting = Setting(
        plan=plan,
        ranks=options.shard_group or data_ranks or world_size,
        world_size=world_size,
        reduce=options.reduce or plan.reduce,
        offload=offload,
        memory="device" if device.type == "cuda" else "host",
        keep_gathered=options.keep_gathered,
    )
    whole = any(needs_whole(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups)
    return Room(
        units=units,
        setting=setting,
        rank=rank,
        everyone=[there for there, _ in everyone],
        whole=whole,
        by_rank=[found for _, found in everyone] if in_parts else (),
    )


def refuse_without_room(room: Room) -> None:
    """Raises: NoRoomError: the run takes more than there is for certain; equal on all ranks."""
    missing = room.missing(room.setting)
    if not missing:
        return
    where = next(iter(missing))
    # The place that lacks most is what is told of, wherever this rank is.
    rank = max(range(len(room.everyone)), key=lambda r: _lack(replace(room, rank=r), where))
    seen = replace(room, rank=rank)
    needed, ranks, free = seen.estimate, seen.mates(where), seen.free(where)
    taken = in_words(seen.together(where, certain=True))
    assert free is not None
    line = max((item for item in needed.lines if item.where == where), key=lambda item: item.certain)
    names = {"host": "memory", "device": "memory of the GPU", "disk": f"space for {_disk(room.setting)}"}
    together = f" x {ranks} ranks" if ranks > 1 else ""
    if room.by_rank:
        together = f" on rank {rank}, with the other ranks of its host" if ranks > 1 else f" on rank {rank}"
    others = " + ".join(
        f"{item.what} {in_words(item.certain)}"
        for item in needed.lines
        if item.where == where and item.certain and item is not line
    )
    change = _smallest_change(room, where)
    raise NoRoomError(
        f"{room.setting.plan.name} does not fit: {line.what} {in_words(line.certain)}"
        + (f" + {others}" if others else "")
        + f"{together} = {taken}, and {in_words(free)} of {names[where]} are there "
        f"(activations not counted). {change} To start all the same: --force, or strategy.force: true."
    )


def _lack(room: Room, where: Where) -> int:
    free = room.free(where)
    return 0 if free is None else room.together(where, certain=True) - free


def _disk(setting: Setting) -> str:
    return "swap files" if setting.offload is None else f"swap files in {setting.offload.disk}"


def _smallest_change(room: Room, where: Where) -> str:
    changes = _changes_of_parts(room.setting) if room.by_rank else _changes(room)
    for words, setting in changes:
        if not room.missing(setting):
            return f"This would fit: {words}."
    for ranks in range(room.mates(where) - 1, 0, -1):
        setting = room.setting
        several = len({there.places["host"] for there in room.everyone}) > 1
        if several or room.by_rank or setting.ranks != setting.world_size:
            break
        fewer = replace(setting, ranks=ranks, world_size=ranks)
        if not room.missing(fewer, lambda _, n=ranks: n):  # type: ignore[misc]
            return f"This would fit: trainer.devices: {ranks}."
    lacking = room.missing(room.setting)[where]
    what = "disk space" if where == "disk" else "memory"
    if room.by_rank:
        return f"It takes {in_words(lacking)} more {what}, more ranks to cut it over, or a smaller model."
    return f"No strategy here would make it fit: it takes {in_words(lacking)} more {what}, or a smaller model."


def _changes(room: Room) -> Iterator[tuple[str, Setting]]:
    """Yields other settings, the one that changes least first."""
    now = room.setting
    names = list(PLANS)
    if now.offload is not None and now.offload.uses_disk:
        # From disk to memory, one kind after the other; and the other way round.
        own = "" if now.plan.name == "infinity" else "offload."
        for target in ("device", "disk"):
            for kinds in _some(("gradients", "optimizer", "parameters")):
                if all(getattr(now.offload, kind) != target for kind in kinds):
                    offload: Any = replace(now.offload, **dict.fromkeys(kinds, target))
                    if offload.uses_disk and _can(now, offload):
                        words = ", ".join(f"strategy.{own}{kind}: {target}" for kind in kinds)
                        yield words, replace(now, offload=offload)
        if now.plan.name == "infinity":
            return
    for name in ("zero1", "zero2", "zero3"):
        if now.offload is None and names.index(name) > names.index(now.plan.name) and now.world_size > 1:
            yield f"strategy: {name}", replace(now, plan=PLANS[name], reduce=PLANS[name].reduce)
    if room.whole or now.memory != "host":
        return
    disk = SWAP if now.offload is None else now.offload.disk or SWAP
    if now.plan.name in ("zero1", "zero2", "zero3") and now.offload is None:
        for kinds in (("optimizer",), ("optimizer", "gradients")):
            offload = Offload(disk=disk, **dict.fromkeys(kinds, "disk"))  # type: ignore[arg-type]
            if _can(now, offload):
                words = ", ".join(f"{kind}: disk" for kind in kinds)
                yield f"strategy.offload: {{{words}, disk: {disk}}}", replace(now, offload=offload)
    everything = Offload(disk=disk, **dict.fromkeys(KINDS, "disk"))  # type: ignore[arg-type]
    plan = PLANS["infinity"]
    yield "strategy: infinity", replace(now, plan=plan, reduce=plan.reduce, offload=everything)


def _changes_of_parts(now: Setting) -> Iterator[tuple[str, Setting]]:
    """Yields those of a model that ranks have parts of."""
    for zero, row in enumerate(ROWS):
        plan = replace(PLANS[row], name=now.plan.name, reduce=now.reduce)
        if now.ranks > 1 and _sharded_kinds(plan) > _sharded_kinds(now.plan):
            yield f"strategy.zero: {zero}", replace(now, plan=plan)


def _sharded_kinds(plan: StatePlan) -> int:
    return plan.shard_optimizer + plan.shard_gradients + plan.shard_parameters


def _some(kinds: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for kind in kinds:
        yield (kind,)
    for kind in kinds:
        yield tuple(other for other in kinds if other != kind)
    yield tuple(kinds)


def _can(setting: Setting, offload: Offload) -> bool:
    """Whether a strategy takes this `offload`, as options.py has it."""
    plan = setting.plan
    return (
        (offload.parameters == "device" or plan.shard_parameters)
        and (offload.gradients == "device" or (plan.shard_gradients and setting.reduce != "window"))
        and (offload.optimizer == "device" or plan.shard_optimizer)
    )
