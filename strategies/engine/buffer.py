"""One flat buffer: the parameters of one kind of a unit, this rank's part of them, and their gradients.

[Note: tensors of a buffer]
full    (numel,)        the parameters laid end to end, in the dtype they are computed with; they are views of it.
                        Sharded parameters: its storage is emptied between uses (`resize_(0)`) and refilled in place,
                        never replaced, because autograd saves views.
home    (numel,) or (shard_numel,)  the authoritative weights that this rank updates: all of them, or its shard where
                        optimizer state is sharded. A view of `full` where that is always there in the same dtype,
                        a tensor of its own else; fp32 where `full` is a 16-bit copy, see [Note: master weights].
shard   (shard_numel,)  this rank's part of the authoritative weights: `home`, or a slice of it.
wide    (numel,)        all authoritative weights, while `gathered` shows them instead of 16-bit copies; else None.
local   (numel,)        this rank's gradients since they were last reduced; a sum over micro-batches.
grad    (shard_numel,)  the reduced gradients of this rank's part; a sum over ranks until `finish` scales it.
full_grad (numel,)      where gradients are replicated, or kept over the window, `grad` is its slice; else None.
kept  (shard_numel,)    final gradients of an earlier window that this one adds to; else None.
"""

from dataclasses import dataclass

import torch
from shardlight.ops.bits import bits, same_bits
from shardlight.ops.sums import CHUNK
from shardlight.strategies.engine.collectives import Ranks, Transfer
from shardlight.strategies.engine.copied import CopiedParameter
from shardlight.strategies.engine.deferred.tensors import become, home_of, write_values
from shardlight.strategies.engine.dtypes import master_dtype
from shardlight.strategies.engine.layout import FlatLayout, Piece
from shardlight.strategies.engine.plan import Reduce, StatePlan
from shardlight.strategies.engine.released import Owner, mark, mark_released
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class BufferDtypes:
    """See DtypePolicy; `compute` None: the parameters' own dtype."""

    compute: torch.dtype | None = None
    mixed: bool = False
    reduce: torch.dtype | None = None
    guarded: bool = True
    """Under mixed precision: whether uses that autocast would not cast get the master weights, see [Note: copies]."""


class FlatBuffer:
    """The tensors of [Note: tensors of a buffer] and the moves between them. Knows no module and no hook.

    Args:
        name: for messages, e.g. "model.blocks.0".
        params: (name, parameter) pairs, all of one dtype and device; their data is moved into the buffer.
    """

    def __init__(
        self,
        name: str,
        params: list[tuple[str, nn.Parameter]],
        plan: StatePlan,
        reduce: Reduce,
        ranks: Ranks,
        owner: Owner,
        dtypes: BufferDtypes = BufferDtypes(),
    ) -> None:
        self.name = name
        self.plan = plan
        self.ranks = ranks
        self.collectives = collectives = ranks.shard
        self.params: list[nn.Parameter] = [p for _, p in params]
        self.layout = FlatLayout.pack([(n, tuple(p.shape)) for n, p in params], collectives.world_size, CHUNK)
        own: torch.dtype = self.params[0].dtype
        self.dtype: torch.dtype = dtypes.compute or own
        self.home_dtype: torch.dtype = master_dtype(own, dtypes.compute)
        self.mastered: bool = self.home_dtype != self.dtype
        """Whether the authoritative weights have another dtype than the parameters."""
        self.reduce_dtype = dtypes.reduce
        self.shows_home = self.mastered and dtypes.mixed
        self._kind = CopiedParameter if self.shows_home and dtypes.guarded else None
        """What its parameters are while they are gathered, beside what they are anyway."""
        self.device: torch.device = home_of(self.params[0])
        self.pieces: dict[int, Piece] = {p.slot: p for p in self.layout.pieces(collectives.rank)}
        self.gathered = True
        self.full: Tensor = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        self.wide: Tensor | None = None
        self.views: list[Tensor] = [self.slice(i, self.full) for i in range(len(params))]
        self._own = slice(*self.layout.shard_range(collectives.rank))
        self._span = self._own if plan.shard_optimizer else slice(0, self.layout.numel)
        self.home: Tensor = self._start_weights(owner)
        self.shard: Tensor = self.home if plan.shard_optimizer else self.home[self._own]
        self._versions: list[int] = [p._version for p in self.params]
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self.nans: list[Tensor] = [nan.expand(s.shape) for s in self.layout.slots]

        self._transfer: Transfer | None = None
        """A gather, or a publication, that is under way."""
        self._reduction: Transfer | None = None
        self._keeps_full_grad = (not plan.shard_gradients or reduce == "window") and not (
            self.mastered and plan.shard_optimizer
        )
        self._in_place = reduce == "window" and self._keeps_full_grad
        """Reduced at the end of the window where it was written: one buffer serves as `local` and `full_grad`."""
        self.full_grad: Tensor | None = None
        self.grad: Tensor | None = None
        self.local: Tensor | None = None
        self.pages = collectives.pages
        self._taken: Tensor | None = None
        """The memory that `local` is in, if it is to be given back."""
        self._sent: Tensor | None = None
        """The same of a reduction that is under way."""
        self._gaps: list[tuple[int, int]] = self.layout.gaps()
        self.touched: set[int] = set()
        """Slots with a contribution in `local`."""
        self.reduced = False
        """Whether `grad` holds sums of this window."""
        self.carried: set[int] = set()
        """Slots whose gradient of an earlier window stays; see [Note: gradients that stay], window.py."""
        self._kept: Tensor | None = None

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
        self.ranks.world.broadcast(start, f"start weights of {self.name}")
        if self.mastered:
            self.full.copy_(start)
            return start[self._span].clone() if self.plan.shard_optimizer else start
        return start[self._own].clone() if self.plan.shard_parameters else start[self._span]

    # --- parameters

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
        self.full.untyped_storage().resize_(self.layout.numel * self.full.element_size())
        self._transfer = self._start_spread(f"gather {self.name}")

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

    def _start_spread(self, caller: str) -> Transfer | None:
        if self.mastered:
            self.full[self._span].copy_(self.home)
        if not self.plan.shard_optimizer:
            return None
        mine = self.full[self._own] if self.mastered else self.shard
        return self.collectives.start_all_gather(self.full, mine, caller)

    def _attach(self, views: list[Tensor]) -> None:
        kind = self._kind if views is self.views else None
        for parameter, view in zip(self.params, views, strict=True):
            if not self.gathered or self._kind is not None:
                mark(parameter, None)
            parameter.data = view
            if kind is not None:
                mark(parameter, kind)
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [p._version for p in self.params]

    def changed(self) -> list[str]:
        """Returns the names of parameters that were written in place, or given other data, since they were gathered."""
        if not self.gathered:
            return []
        full, views = (self.full, self.views) if self.wide is None else (self.wide, self._wide_views())
        held = zip(self.layout.slots, self.params, views, self._versions, strict=True)
        with torch._C.DisableTorchFunctionSubclass():
            found = [s.name for s, p, view, v in held if p._version != v or p.data_ptr() != view.data_ptr()]
        mine, kept = full[self._own], self.shard.to(full.dtype)
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
        for parameter, nan in zip(self.params, self.nans, strict=True):
            if self._kind is not None:
                mark(parameter, None)
            parameter.data = nan
            mark_released(parameter)
        self.full.untyped_storage().resize_(0)
        self.wide = None
        self.gathered = False

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
        self.collectives.all_gather(wide, self.shard, f"gather {self.name}")
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
            if narrow and self.full.untyped_storage().nbytes():
                self.full.copy_(self.wide)
                self._attach(self.views)
                self.wide = None
            return
        self._adopt(self.views)
        mine = self.full[self._span]
        if self.mastered:
            # What was not written keeps its full precision.
            written = bits(mine) != bits(self.home.to(self.dtype))
            self.home[written] = mine[written].to(self.home_dtype)
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

    # --- gradients

    def add_gradient(self, slot: int, gradient: Tensor) -> None:
        """Adds a parameter's local gradient to `local`; it may become `local` itself."""
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if self.local is None:
            if self._may_become_local(gradient):
                self.local = gradient.view(-1)
                self.touched.add(slot)
                return
            self.local = self._open_local()
        s = self.layout.slots[slot]
        if self.local.dtype != self.home_dtype and (slot in self.touched or gradient.dtype != self.local.dtype):
            # One contribution is kept as it came; sums are of full precision.
            self._widen_local()
        target = self.local[s.start : s.stop].view(s.shape)
        if slot in self.touched:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self.touched.add(slot)

    def _may_become_local(self, gradient: Tensor) -> bool:
        """Whether `local` would be a copy of it: embeddings and heads, which are the largest buffers there are."""
        fits = gradient.numel() == self.layout.numel and gradient.dtype == self.dtype
        return fits and not self._in_place and gradient.is_contiguous() and not gradient.requires_grad

    def _open_local(self) -> Tensor:
        if self._in_place:
            self._keep()
            return self._open_full_grad()
        self._taken = self.pages.take(self.layout.numel, self.dtype)
        return self._taken

    def _widen_local(self) -> None:
        assert self.local is not None
        wide = self.pages.take(self.layout.numel, self.home_dtype)
        wide.copy_(self.local)
        self._drop_local()
        self.local = self._taken = wide

    def _drop_local(self) -> None:
        if self._taken is not None:
            self.pages.give(self._taken)
        self.local = self._taken = None

    def _keep(self) -> None:
        """Puts carried gradients aside, before `grad` is written for the first time in a window."""
        if self._kept is None and self.carried and not self.reduced:
            assert self.grad is not None
            self._kept = torch.zeros_like(self.grad)
            for slot in self.carried:
                there, here = self.piece_of_shard(slot, self.grad), self.piece_of_shard(slot, self._kept)
                if there is not None and here is not None:
                    here.copy_(there)

    def _open_full_grad(self) -> Tensor:
        if self.full_grad is None:
            self.full_grad = torch.zeros(self.layout.numel, dtype=self.home_dtype, device=self.device)
            self.grad = self.full_grad[self._own]
        return self.full_grad

    def _open_grad(self) -> Tensor:
        if self.grad is None:
            if self._keeps_full_grad:
                self._open_full_grad()
            else:
                self.grad = torch.zeros(self.layout.shard_numel, dtype=self.home_dtype, device=self.device)
        assert self.grad is not None
        return self.grad

    def start_reduce(self, contribute: bool, several: bool = False) -> None:
        """Starts to add the sum of all ranks' `local` to `grad`, and gives `local` away. Collective.

        Args:
            contribute: False: this rank takes part with zeros and keeps its `local`, which is not complete yet.
            several: some rank's `local` is a sum that has more precision than one contribution; equal on all ranks.
        """
        grad = self._open_grad()
        self._keep()
        if self._in_place or (contribute and self.local is not None):
            local = self.local if self.local is not None else self._open_local()
            self._clear_unwritten(local)
        else:
            local = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        add = self.reduced and not self._in_place
        sent = self._to_send(local, several)
        self._reduction = self.collectives.start_reduce_scatter(sent, grad, f"reduce {self.name}", add)
        if contribute:
            self.touched.clear()
            # Its memory is free when it is sent.
            self._sent, self.local, self._taken = self._taken, None, None
        self.reduced = True

    def finish_reduce(self) -> None:
        """Returns when the sum is in `grad`."""
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            reduction.wait()
        if self._sent is not None:
            self.pages.give(self._sent)
            self._sent = None

    def _to_send(self, local: Tensor, several: bool) -> Tensor:
        if self.collectives.world_size == 1 or local.is_complex():
            return local
        # Every rank has to send the same dtype, whatever arrived at it.
        return local.to(self.reduce_dtype or (self.home_dtype if several or self._keeps_full_grad else self.dtype))

    def holds_a_sum(self) -> bool:
        """Whether `local` has more precision than one contribution."""
        return self.local is not None and self.local.dtype != self.dtype

    def _clear_unwritten(self, local: Tensor) -> None:
        # The memory was used before: what nobody wrote in this window must not carry over, and padding is zero.
        for start, stop in self._gaps:
            local[start:stop].zero_()
        if len(self.touched) < len(self.layout.slots):
            for index, s in enumerate(self.layout.slots):
                if index not in self.touched:
                    local[s.start : s.stop].zero_()

    def finish(self, scale: float) -> None:
        """Ends the window: sums become means; replicated gradients come to every rank. Collective."""
        assert self.grad is not None
        self.ranks.replicate.all_reduce(self.grad, f"reduce {self.name}")
        if scale != 1.0:
            self.grad *= scale
        if self._kept is not None:
            self.grad += self._kept
            self._kept = None
        if not self.plan.shard_gradients and not self.plan.shard_optimizer:
            self.gather_gradients()

    def gather_gradients(self) -> Tensor:
        """Returns the (numel,) mean gradients of the window on every rank. Collective."""
        assert self.grad is not None
        full = (
            self.full_grad
            if self.full_grad is not None
            else torch.empty(self.layout.numel, dtype=self.home_dtype, device=self.device)
        )
        self.collectives.all_gather(full, self.grad, f"gradients of {self.name}")
        return full

    def open_window(self, carried: set[int]) -> None:
        """Forgets the gradients of the last window but for the `carried` slots; the memory is kept for this one."""
        self.touched.clear()
        self._drop_local()
        self._kept = None
        self.reduced = False
        self.carried = carried

    @property
    def written(self) -> bool:
        """Whether this rank wrote gradients since the window was opened."""
        return bool(self.touched) or self.reduced or self._kept is not None

    def drop(self, slot: int) -> None:
        """Forgets the gradient of one parameter within a window."""
        self.touched.discard(slot)
        self.carried.discard(slot)
        # In `local` what was not touched is cleared before it is reduced.
        for flat in (self._kept, self.grad if self.reduced else None):
            part = None if flat is None else self.piece_of_shard(slot, flat)
            if part is not None:
                part.zero_()

    def trainable(self) -> bool:
        """Whether any parameter gets a gradient now."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(p.requires_grad for p in self.params)

    # --- accounting

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that hold model state on this rank now."""
        own = (self.full, self.home, self.wide, self.local, self.grad, self.full_grad, self._kept)
        return [t for t in own if t is not None]

    def slice(self, slot: int, flat: Tensor) -> Tensor:
        """Returns a parameter's part of a (numel,) tensor, in its shape."""
        s = self.layout.slots[slot]
        return flat[s.start : s.stop].view(s.shape)

    def piece_of_shard(self, slot: int, flat: Tensor) -> Tensor | None:
        """Returns this rank's (n,) part of a parameter in a (shard_numel,) tensor, None if it owns nothing of it."""
        piece = self.pieces.get(slot)
        return None if piece is None else flat[piece.offset : piece.offset + piece.stop - piece.start]
