"""The weights of a flat buffer: gathered and released, written back and published."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch
from shardlight.ops.bits import bits, same_bits
from shardlight.ops.crc32 import crc32
from shardlight.ops.sums import CHUNK, cast
from shardlight.strategies.engine.backing import MOVED_FROM_BYTES, Backing, HeapBacking, back
from shardlight.strategies.engine.collectives import Transfer
from shardlight.strategies.engine.copied import CopiedParameter
from shardlight.strategies.engine.deferred.tensors import become, home_of, write_values
from shardlight.strategies.engine.disk_tensor import DiskTensor, in_memory
from shardlight.strategies.engine.dtypes import master_dtype
from shardlight.strategies.engine.groups import Ranks
from shardlight.strategies.engine.layout import FlatLayout, Piece
from shardlight.strategies.engine.part import WHOLE_MODEL, ModelPart
from shardlight.strategies.engine.plan import StatePlan
from shardlight.strategies.engine.released import Owner, ReleasedParameter, mark, marked_class
from shardlight.strategies.engine.tiers import Fetched, Tiers
from torch import Tensor, nn

_version_of = attrgetter("_version")


@dataclass(frozen=True, kw_only=True)
class BufferDtypes:
    """See DtypePolicy; `compute` None: the parameters' own dtype."""

    compute: torch.dtype | None = None
    mixed: bool = False
    reduce: torch.dtype | None = None
    guarded: bool = True
    """Under mixed precision: whether uses that autocast would not cast get the master weights, see [Note: copies]."""


class FlatWeights:
    """The weights of [Note: tensors of a buffer], buffer.py, and the moves between them. Knows no module and no hook.

    Args:
        name: for messages, e.g. "model.blocks.0".
        params: (name, parameter) pairs, all of one dtype and device; their data is moved into the buffer.
        tiers: for state that is not in memory; None: all is.
        part: of the model; of `params` those that another rank accounts for come first.
    """

    def __init__(
        self,
        name: str,
        params: list[tuple[str, nn.Parameter]],
        plan: StatePlan,
        ranks: Ranks,
        owner: Owner,
        dtypes: BufferDtypes,
        tiers: Tiers | None = None,
        part: ModelPart = WHOLE_MODEL,
    ) -> None:
        self.name = name
        self.plan = plan
        self.tiers = tiers
        self._fetched: Fetched | None = None
        """This rank's part, on its way from disk."""
        self._crc32 = 0
        """Where its home is on disk: of this rank's part of what was gathered."""
        self.ranks, self.part = ranks, part
        self.collectives = collectives = ranks.shard
        self.params: list[nn.Parameter] = [p for _, p in params]
        copied = sum(not part.accounts_for(n) for n, _ in params)
        self.layout = FlatLayout.pack([(n, tuple(p.shape)) for n, p in params], collectives.world_size, CHUNK, copied)
        own: torch.dtype = self.params[0].dtype
        self.dtype: torch.dtype = dtypes.compute or own
        self.home_dtype: torch.dtype = master_dtype(own, dtypes.compute)
        self.mastered: bool = self.home_dtype != self.dtype
        """Whether the authoritative weights have another dtype than the parameters."""
        self.shows_home = self.mastered and dtypes.mixed
        self._kind = CopiedParameter if self.shows_home and dtypes.guarded else None
        """What its parameters are while they are gathered, beside what they are anyway."""
        self.device: torch.device = home_of(self.params[0])
        self.pieces: dict[int, Piece] = {p.slot: p for p in self.layout.pieces(collectives.rank)}
        self.gathered = True
        self._backing = self._back()
        self.full: Tensor = self._backing.tensor
        self.renewed: Callable[[], None] = lambda: None
        """Called when `full` has another storage."""
        self.wide: Tensor | None = None
        self.views: list[Tensor] = [self.slice(i, self.full) for i in range(len(params))]
        self._own = slice(*self.layout.shard_range(collectives.rank))
        self._span = self._own if plan.shard_optimizer else slice(0, self.layout.numel)
        self.home: Tensor = self._start_weights(owner)
        self.shard: Tensor = self.home if plan.shard_optimizer else self.home[self._own]
        self._versions: list[int] = []
        self._note_versions()
        self._starts: list[int] = [s.start for s in self.layout.slots]
        self._own_classes, self._classes, self._released_classes = (
            [marked_class(p, kind) for p in self.params] for kind in (None, self._kind, ReleasedParameter)
        )
        """What parameters are anyway, while they are gathered, and while they are not."""
        self.numbers: range = range(0)
        """The numbers of its parameters among all, once the units are numbered."""
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self.nans: list[Tensor] = [nan.expand(s.shape) for s in self.layout.slots]

        self._transfer: Transfer | None = None
        """A gather, or a publication, that is under way."""
        self.asks_later: bool = self.device.type != "cpu"
        """Whether an answer that depends on values has to be waited for."""
        self.doubt: Tensor | None = None
        """0-dim bool: whether weights that were released since the last step had been changed; None: they had not."""
        self.copied = False
        """Whether this rank's part of `full` is a copy of `home` as it is, written with the step."""

    @cached_property
    def copied_until(self) -> int:
        """What is before this element is accounted for by another rank of the tensor group."""
        return max((s.stop for s in self.layout.slots if not self.part.accounts_for(s.name)), default=0)

    def _start_weights(self, owner: Owner) -> Tensor:
        """Moves rank 0's values into the buffer, and the parameters with them; returns `home`. Collective."""
        start = torch.zeros_like(self.full, dtype=self.home_dtype) if self.mastered else self.full
        for slot, (parameter, view) in enumerate(zip(self.params, self.views, strict=True)):
            if self.ranks.world.rank == 0:
                write_values(self.slice(slot, start), parameter, self.layout.slots[slot].name)
            become(parameter, view)
            parameter._shardlight_owner = owner
            if self.mastered:
                # What is shown as `p.grad` is the fp32 gradient.
                parameter.grad_dtype = None
            if self._kind is not None:
                parameter._shardlight_dtype = self.home_dtype
                mark(parameter, self._kind)
        if self.ranks.world.rank == 0 and self.ranks.tensor.world_size > 1:
            self._take_start_weights(start)
        self.ranks.world.broadcast(start, f"start weights of {self.name}")
        if self.mastered:
            self.full.copy_(start)
            mine = start[self._span]
            return self._at_home(mine.clone() if not self._on_disk() else mine) if self.plan.shard_optimizer else start
        if not self.plan.shard_parameters:
            return start[self._span]
        if self._on_disk():
            return self._at_home(start[self._own])
        # Gathered from where it is.
        return self.collectives.pages.fresh(self.layout.shard_numel, self.home_dtype).copy_(start[self._own])

    def _take_start_weights(self, start: Tensor) -> None:
        """Makes what several ranks of the tensor group have equal on them. Collective within it."""
        tensor = self.ranks.tensor
        for name, slot in sorted((s.name, n) for n, s in enumerate(self.layout.slots)):
            if name not in self.part.slices:
                tensor.broadcast(self.slice(slot, start).view(-1), f"start weights of {name}")

    def _on_disk(self) -> bool:
        """Whether `home` is to be on disk."""
        return self.tiers is not None and self.tiers.keeps("parameters" if self.plan.shard_parameters else "optimizer")

    def _at_home(self, mine: Tensor) -> Tensor:
        if self.tiers is None:
            return mine
        return self.tiers.put(mine, "parameters" if self.plan.shard_parameters else "optimizer")

    def _back(self) -> Backing:
        numel = self.layout.numel
        if self.plan.shard_parameters and numel * self.dtype.itemsize >= MOVED_FROM_BYTES:
            return back(numel, self.dtype, self.device, self.collectives.pages.chunks())
        if self.plan.shard_optimizer and not self.plan.shard_parameters:
            # Published from where it is.
            return HeapBacking(self.collectives.pages.fresh(numel, self.dtype).zero_())
        return HeapBacking(torch.zeros(numel, dtype=self.dtype, device=self.device))

    # --- parameters

    @property
    def filled(self) -> bool:
        """Whether `full` has memory."""
        return self._backing.filled

    @property
    def guarded(self) -> bool:
        """Whether its parameters are copies that know it; see [Note: copies]."""
        return self._kind is not None

    def gather(self) -> None:
        """Fills `full` from the shards of all ranks and makes every parameter a view of it. Collective."""
        self.start_gather()
        self.finish_gather()

    def start_gather(self) -> None:
        """Starts to fill `full`, which is not to be used before `finish_gather`."""
        self._backing.fill()
        self._transfer = self._start_spread(f"gather {self.name}")

    def start_fetch(self) -> None:
        """Starts to read this rank's part from disk, for a gather that is to come; nothing where it is in memory."""
        if self.tiers is not None and isinstance(self.home, DiskTensor) and self._fetched is None:
            self._fetched = self.tiers.fetch(self.home, gathered=True)

    def drop_fetched(self) -> None:
        """Gives back what was read for a gather that did not come."""
        if self._fetched is not None:
            fetched, self._fetched = self._fetched, None
            fetched.give()

    def finish_gather(self) -> None:
        """Returns when `full` is filled, with every parameter a view of it."""
        self._end_transfer()
        if not self.gathered:
            self._attach(self.views)
            self.gathered = True

    def _end_transfer(self) -> None:
        if self._transfer is not None:
            transfer, self._transfer = self._transfer, None
            transfer.wait()
        self.drop_fetched()

    def _start_spread(self, caller: str) -> Transfer | None:
        shard = self.shard
        if isinstance(self.home, DiskTensor) and not self.copied:
            self.start_fetch()
            assert self._fetched is not None
            shard = self._fetched.wait()
        if self.mastered and not self.copied:
            cast(self.home if self.home is not self.shard else shard, self.full[self._span])
        self.copied = False
        if not self.plan.shard_optimizer:
            return None
        mine = self.full[self._own] if self.mastered else shard
        return self.collectives.start_all_gather(self.full, mine, caller)

    def _attach(self, views: list[Tensor]) -> None:
        self._become(views, self._classes if views is self.views else self._own_classes)
        self._note_versions()

    def _become(self, views: list[Tensor], classes: list[type]) -> None:
        """Gives every parameter its data and its class; see `released.py` and `copied.py`."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, view, kind in zip(self.params, views, classes, strict=True):
                parameter.data = view
                parameter.__class__ = kind

    def _note_versions(self) -> None:
        self._versions = [*map(_version_of, self.params)]
        if isinstance(self.shard, DiskTensor):
            self._crc32 = self._checksum()

    def _checksum(self) -> int:
        mine = (self.full if self.wide is None else self.wide)[self._own]
        return crc32(mine if mine.device.type == "cpu" else mine.cpu())

    def changed(self, wait: bool = True) -> list[str]:
        """Returns the names of parameters that were written in place, or given other data, since they were gathered.

        Args:
            wait: False: on a GPU what only a look at the weights tells goes into `doubt`.
        """
        if not self.gathered:
            return []
        full = self.full if self.wide is None else self.wide
        base, width = full.data_ptr(), full.element_size()
        with torch._C.DisableTorchFunctionSubclass():
            held = zip(map(_version_of, self.params), map(Tensor.data_ptr, self.params), strict=True)
            there = zip(self._versions, self._starts, strict=True)
            found = [
                slot.name
                for slot, (version, pointer), (noted, start) in zip(self.layout.slots, held, there, strict=True)
                if version != noted or (pointer != base + width * start and pointer)
            ]
        if isinstance(self.shard, DiskTensor) and not found and self._checksum() == self._crc32:
            return []
        mine, kept = full[self._own], in_memory(self.shard).to(full.dtype)
        if not found and self.asks_later and not wait:
            differs = (bits(mine) != bits(kept)).any()
            self.doubt = differs if self.doubt is None else self.doubt | differs
            return []
        if found or same_bits(mine, kept):
            return found
        # Written by `p.data`, which has no version: it shows in this rank's part alone.
        for slot in self.pieces:
            there, here = self.piece_of_shard(slot, mine), self.piece_of_shard(slot, kept)
            if there is not None and here is not None and not same_bits(there, here):
                found.append(self.layout.slots[slot].name)
        return found

    def release(self) -> None:
        """Empties `full`; every parameter becomes a NaN of its full shape. Only where parameters are sharded."""
        if not self.gathered:
            return
        self._become(self.nans, self._released_classes)
        if self._backing.pinned:
            self._renew()
        self._backing.empty()
        self.wide = None
        self.gathered = False

    def _renew(self) -> None:
        """Takes another storage: `.numpy()` on a gathered weight makes this one unfit for being emptied."""
        self._backing = self._back()
        self.full = self._backing.tensor
        self.views = [self.slice(i, self.full) for i in range(len(self.params))]
        self.renewed()

    def show_home(self, gathered: bool) -> None:
        """Makes the parameters views of all authoritative weights. Collective.

        Args:
            gathered: every rank has `full`; equal on all ranks.
        """
        if self.shows_home:
            self.gather_home(True)
        elif not gathered:
            self.gather()

    def gather_home(self, own: bool) -> None:
        """Gathers the authoritative weights in full precision; shows them if they are for this rank. Collective."""
        wide = torch.empty(self.layout.numel, dtype=self.home_dtype, device=self.device)
        self.collectives.all_gather(wide, in_memory(self.shard), f"gather {self.name}")
        if own and self.wide is None:
            self.wide = wide
            self._attach(self._wide_views())
            self.gathered = True

    def _wide_views(self) -> list[Tensor]:
        assert self.wide is not None
        return [self.slice(i, self.wide) for i in range(len(self.params))]

    def start_publish(self) -> None:
        """After a step: every rank's updated shard becomes everyone's parameters, by `finish_publish`. Collective."""
        if not self.plan.shard_parameters:
            self._transfer = self._start_spread(f"publish {self.name}")

    def finish_publish(self) -> None:
        """Returns when the parameters are up to date."""
        self._end_transfer()

    def shards_changed(self) -> None:
        """After `shard` was written on every rank: it becomes everyone's parameters. Collective."""
        if not self.plan.shard_optimizer:
            self.collectives.all_gather(self.home, self.shard, f"publish {self.name}")
        self.start_publish()
        self.finish_publish()

    def write_back(self, narrow: bool = True) -> None:
        """Takes changes made to the gathered parameters into this rank's authoritative weights.

        Args:
            narrow: parameters that show the authoritative weights hold copies again, where these are there.
        """
        if not self.gathered:
            return
        if self.wide is not None:
            self._adopt(self._wide_views())
            self.home.copy_(self.wide[self._span])
            if narrow and self._backing.filled:
                self.full.copy_(self.wide)
                self._attach(self.views)
                self.wide = None
            return
        self._adopt(self.views)
        mine = self.full[self._span]
        if self.mastered:
            # What was not written keeps its full precision.
            written = bits(mine) != bits(in_memory(self.home).to(self.dtype))
            if self.device.type == "cpu":
                self.home[written] = mine[written].to(self.home_dtype)
            else:
                # Without waiting for how many there are.
                torch.where(written, mine.to(self.home_dtype), self.home, out=self.home)
        elif self.plan.shard_parameters:
            self.home.copy_(mine)
        self._note_versions()

    def _adopt(self, views: list[Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, view in zip(self.params, views, strict=True):
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter.data)
                    parameter.data = view

    def references(self) -> int:
        """Returns how many tensors share the storage of `full`; see [Note: outside views]."""
        return torch._C._storage_Use_Count(self.full.untyped_storage()._cdata)

    def slice(self, slot: int, flat: Tensor) -> Tensor:
        """Returns a parameter's part of a (numel,) tensor, in its shape."""
        s = self.layout.slots[slot]
        return flat[s.start : s.stop].view(s.shape)

    def own_copy(self, slot: int) -> Tensor | None:
        """Returns the part of `full` that is a copy of what this rank updates of a parameter."""
        if not self.plan.shard_optimizer:
            return self.slice(slot, self.full)
        return self.piece_of_shard(slot, self.full[self._own])

    def own_range(self, low: int, high: int) -> Tensor:
        """Returns elements [low, high) of this rank's part of `full`."""
        return self.full[self._own][low:high]

    def piece_of_shard(self, slot: int, flat: Tensor) -> Tensor | None:
        """Returns this rank's (n,) part of a parameter in a (shard_numel,) tensor, None if it owns nothing of it."""
        piece = self.pieces.get(slot)
        return None if piece is None else flat[piece.offset : piece.offset + piece.stop - piece.start]
