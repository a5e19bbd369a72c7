"""One flat buffer: the parameters of one kind of a unit, this rank's part of them, and their gradients.

[Note: tensors of a buffer]
full    (numel,)        the parameters laid end to end, in the dtype they are computed with; they are views of it.
                        Sharded parameters: its storage is emptied between uses and refilled in place, never
                        replaced, because autograd saves views; see [Note: moved pages], backing.py.
home    (numel,) or (shard_numel,)  the authoritative weights that this rank updates: all of them, or its shard where
                        optimizer state is sharded. A view of `full` where that is always there in the same dtype,
                        a tensor of its own else; fp32 where `full` is a 16-bit copy, see [Note: master weights].
shard   (shard_numel,)  this rank's part of the authoritative weights: `home`, or a slice of it.
wide    (numel,)        all authoritative weights, while `gathered` shows them instead of 16-bit copies; else None.
local   (numel,)        this rank's gradients since they were last reduced; a sum over micro-batches.
grad    (shard_numel,)  the reduced gradients of this rank's part; a sum over ranks until `finish` scales it, or, see
                        [Note: factors], until someone looks.
full_grad (numel,)      where gradients are replicated, or kept over the window, `grad` is its slice; else None.
kept  (shard_numel,)    final gradients of an earlier window that this one adds to; else None.
`home`, `shard` and `grad` may be on disk, see [Note: tensors on disk], disk_tensor.py.

[Note: factors] Final gradients are sums multiplied by 1 / total weight, and by a factor for clipping. Where only the
optimizer's op will read them, it does so as it reads them: `factors` are kept, and `settle` applies them for everyone
else. The squares for the norm are taken with the first factor, together with the search for inf and NaN.
"""

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import torch
from shardlight.ops.registry import OPS
from shardlight.ops.sums import all_true, scale_and_check, square_sums
from shardlight.strategies.engine.collectives import Transfer
from shardlight.strategies.engine.disk_tensor import DiskTensor, in_memory
from shardlight.strategies.engine.flat_weights import BufferDtypes, FlatWeights
from shardlight.strategies.engine.groups import Ranks
from shardlight.strategies.engine.part import WHOLE_MODEL, ModelPart
from shardlight.strategies.engine.plan import Reduce, StatePlan
from shardlight.strategies.engine.released import Owner
from shardlight.strategies.engine.tiers import Fetched, Tiers
from torch import Tensor, nn

_requires_grad_of = attrgetter("requires_grad")


class FlatBuffer(FlatWeights):
    """Flat weights with their gradients, and the moves between the tensors of [Note: tensors of a buffer].

    Args:
        reduce: when gradients are reduced; the others are those of FlatWeights.
    """

    def __init__(
        self,
        name: str,
        params: list[tuple[str, nn.Parameter]],
        plan: StatePlan,
        reduce: Reduce,
        ranks: Ranks,
        owner: Owner,
        dtypes: BufferDtypes,
        tiers: Tiers | None = None,
        part: ModelPart = WHOLE_MODEL,
    ) -> None:
        super().__init__(name, params, plan, ranks, owner, dtypes, tiers, part)
        self.reduce: Reduce = reduce
        self.reduce_dtype = dtypes.reduce
        self._reduction: Transfer | None = None
        self._keeps_full_grad = (not plan.shard_gradients or reduce == "window") and not (
            self.mastered and plan.shard_optimizer
        )
        self._in_place = reduce == "window" and self._keeps_full_grad
        """Reduced at the end of the window where it was written: one buffer serves as `local` and `full_grad`."""
        self.full_grad: Tensor | None = None
        self.grad: Tensor | None = None
        self._pieces_of_grad: dict[int, Tensor] = {}
        self.factors: tuple[float, float] | None = None
        """See [Note: factors]; None: `grad` is as it is to be."""
        self._squares: tuple[Tensor, int] | None = None
        """Sums of squares of `grad` by chunk, and the version of `grad` that they belong to."""
        self._expected = 0.0
        """The factor that `finish` had last: where `grad` goes to disk its squares are taken with it before."""
        self._ahead: tuple[Tensor, int | Tensor] | None = None
        """What `square_sums` found of `grad` with that factor; None: not known."""
        self.local: Tensor | None = None
        self.pages = self.collectives.pages
        self._taken: Tensor | None = None
        """The memory that `local` is in, if it is to be given back."""
        self._summed: Tensor | None = None
        """Where a reduction sums up what is to go to disk."""
        self._fetched_sum: Fetched | None = None
        """What it is to be added to, on its way from disk."""
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

    def add_product(self, slot: int, left: Tensor, right: Tensor) -> None:
        """Adds `left @ right` to `local`, straight into it where all have one dtype."""
        if self.local is None or not left.dtype == self.local.dtype == self.home_dtype or left.dim() != 2:
            return self.add_gradient(slot, left @ right)
        s = self.layout.slots[slot]
        target = self.local[s.start : s.stop].view(s.shape)
        if slot in self.touched:
            target.addmm_(left, right)
        else:
            torch.mm(left, right, out=target)
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
        if not self.reduced:
            self.settle()
            self._squares = None
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
                numel = self.layout.shard_numel
                if self.tiers is not None and self.tiers.keeps("gradients"):
                    self.grad = self.tiers.empty(numel, self.home_dtype, "gradients")
                else:
                    self.grad = torch.zeros(numel, dtype=self.home_dtype, device=self.device)
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
        if self.tiers is not None and isinstance(grad, DiskTensor):
            if add:
                self.start_fetch_sum()
            if self._fetched_sum is not None:
                grad, self._fetched_sum = self._fetched_sum.wait(), None
            else:
                grad = self.tiers.staged(grad)
            self._summed = grad
        self._reduction = self.collectives.start_reduce_scatter(sent, grad, f"reduce {self.name}", add)
        if contribute:
            self.touched.clear()
            # Its memory is free when it is sent.
            self._sent, self.local, self._taken = self._taken, None, None
        self.reduced = True

    def start_fetch_sum(self) -> None:
        """Starts to read the sum of earlier micro-batches from disk, for a reduction that is to come."""
        if self.tiers is not None and isinstance(self.grad, DiskTensor) and self.reduced and self._fetched_sum is None:
            self._fetched_sum = self.tiers.fetch(self.grad)

    def finish_reduce(self) -> None:
        """Returns when the sum is in `grad`."""
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            reduction.wait()
        if self._summed is not None and self.tiers is not None and self.grad is not None:
            if self._expected and OPS["sums"].native(self.device.type):
                self._ahead = square_sums(self._summed, scale=self._expected, wait=False)
            self.tiers.write_behind(self.grad, self._summed)
            self._summed = None
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

    def finish(self, scale: float) -> bool | Tensor:
        """Ends the window: sums become means; replicated gradients come to every rank. Collective.

        Returns: whether this rank's part is known to be finite; on a GPU a 0-dim tensor, which nobody has waited for.
        """
        assert self.grad is not None
        if self.ranks.replicate.world_size > 1:
            sums = in_memory(self.grad)
            self.ranks.replicate.all_reduce(sums, f"reduce {self.name}")
            if sums is not self.grad:
                self.grad.copy_(sums)
            self._forget_sum()
        if self.plan.shard_optimizer and self._kept is None and OPS["sums"].native(self.device.type):
            self.factors = (scale, 1.0)
            if self._ahead is not None and scale == self._expected:
                found = [self._ahead]
            else:
                found = [square_sums(part, scale=scale, wait=False) for part in self._grad_blocks()]
            self._ahead, self._expected = None, scale
            self._squares = torch.cat([squares for squares, _ in found]), self.grad._version
            return all_true([not_finite == 0 for _, not_finite in found]) if len(found) > 1 else found[0][1] == 0
        finite = self._scale(scale)
        if self._kept is not None:
            self.grad += self._kept
            self._kept, finite = None, False
        if not self.plan.shard_gradients and not self.plan.shard_optimizer:
            self.gather_gradients()
        return finite

    def settle(self) -> None:
        """Applies `factors` to `grad`, which then is what it is to be for everyone."""
        for factor in self.factors or ():
            if factor != 1.0 and self.grad is not None:
                self._scale(factor)
        self.factors = None

    def _forget_sum(self) -> None:
        """What is known of the sums ahead of time is not so any more."""
        self._ahead = None
        if self._fetched_sum is not None:
            fetched, self._fetched_sum = self._fetched_sum, None
            fetched.give()

    def _grad_blocks(self, change: bool = False) -> Iterator[Tensor]:
        assert self.grad is not None
        return iter((self.grad,)) if self.tiers is None else self.tiers.blocks(self.grad, change)

    def _scale(self, factor: float) -> bool | Tensor:
        found = [scale_and_check(part, factor, wait=False) for part in self._grad_blocks(change=True)]
        return found[0] if len(found) == 1 else all_true(found)

    def clip(self, factor: float) -> bool:
        """Multiplies final gradients by `factor`, when they are read; returns whether that can wait."""
        if self.factors is None or self.factors[1] != 1.0:
            return False
        self.factors, self._squares = (self.factors[0], factor), None
        return True

    def squares(self) -> Tensor | None:
        """Returns the sums of squares of the final gradients by chunk, if they were taken when these became final."""
        known = self._squares is not None and self.grad is not None and self._squares[1] == self.grad._version
        return self._squares[0] if known and self._squares is not None else None

    def gather_gradients(self) -> Tensor:
        """Returns the (numel,) mean gradients of the window on every rank. Collective."""
        assert self.grad is not None
        self.settle()
        full = (
            self.full_grad
            if self.full_grad is not None
            else torch.empty(self.layout.numel, dtype=self.home_dtype, device=self.device)
        )
        self.collectives.all_gather(full, in_memory(self.grad), f"gradients of {self.name}")
        return full

    def gradient_pieces(self) -> dict[int, Tensor]:
        """Returns this rank's part of every parameter's final gradient, by slot; nothing before there are any."""
        self.settle()
        return self.unsettled_pieces()

    def unsettled_pieces(self) -> dict[int, Tensor]:
        """Returns the same, to be multiplied by `factors`."""
        if self.grad is None:
            return {}
        if not self._pieces_of_grad:
            self._pieces_of_grad = {
                n: self.grad[p.offset : p.offset + p.stop - p.start] for n, p in self.pieces.items()
            }
        return self._pieces_of_grad

    def open_window(self, carried: set[int]) -> None:
        """Forgets the gradients of the last window but for the `carried` slots; the memory is kept for this one."""
        self.touched.clear()
        self._drop_local()
        self._kept = None
        self.reduced = False
        self._forget_sum()
        if carried:
            self.settle()
        self.factors = self._squares = None
        self.carried = carried

    @property
    def written(self) -> bool:
        """Whether this rank wrote gradients since the window was opened."""
        return bool(self.touched) or self.reduced or self._kept is not None

    def drop(self, slot: int) -> None:
        """Forgets the gradient of one parameter within a window."""
        self.touched.discard(slot)
        self.carried.discard(slot)
        self._squares = None
        self._forget_sum()
        # In `local` what was not touched is cleared before it is reduced.
        for flat in (self._kept, self.grad if self.reduced else None):
            part = None if flat is None else self.piece_of_shard(slot, flat)
            if part is not None:
                part.zero_()

    def trainable(self) -> bool:
        """Whether any parameter gets a gradient now."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(map(_requires_grad_of, self.params))

    # --- what a window has added up, for checkpoints

    def span(self, slot: int) -> tuple[int, int]:
        """Returns the elements [start, stop) of a flattened parameter that this rank keeps a reduced gradient of."""
        piece = self.pieces.get(slot)
        return (0, 0) if piece is None else (piece.start, piece.stop)

    def unreduced(self) -> dict[int, Tensor]:
        """Returns what this rank has added up since the last reduction: (n,) by slot, whole, in the dtype it has."""
        places = self.layout.slots
        return {} if self.local is None else {s: self.local[places[s].start : places[s].stop] for s in self.touched}

    def reduced_sums(self) -> dict[int, Tensor]:
        """Returns this rank's part of the sums over ranks since the window was opened: (n,) by slot."""
        return dict(self.unsettled_pieces()) if self.reduced else {}

    def final_gradients(self, slots: Iterable[int]) -> dict[int, Tensor]:
        """Returns this rank's part of final gradients, of a closed window or carried into this one: (n,) by slot."""
        if self._kept is None:
            self.settle()
        flat = self.grad if self._kept is None else self._kept
        parts = {} if flat is None else {slot: self.piece_of_shard(slot, flat) for slot in slots}
        return {slot: part for slot, part in parts.items() if part is not None}

    def restore_final(self, slot: int, values: Tensor) -> None:
        """Puts a final gradient back.

        Args:
            values: (n,), the elements `span` of it; all of it where gradients are replicated.
        """
        new = self.grad is None
        grad = self._open_grad()
        if new:
            grad.zero_()
        if self.plan.shard_optimizer:
            target = self.piece_of_shard(slot, grad)
        else:
            target = self.slice(slot, self._open_full_grad()).view(-1)
        if target is not None:
            target.copy_(values)

    def restore_sums(self, parts: Mapping[int, Tensor]) -> None:
        """Puts this rank's part of sums over ranks back: (n,) by slot."""
        grad = self._open_grad()
        self._keep()
        grad.zero_()
        self._forget_sum()
        for slot, part in parts.items():
            target = self.piece_of_shard(slot, grad)
            if target is not None:
                target.copy_(part)
        self.reduced = True

    # --- accounting

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that hold model state on this rank now."""
        full = self.full if self.filled else None
        own = (full, self.home, self.wide, self.local, self.grad, self.full_grad, self._kept)
        return [t for t in own if t is not None and not isinstance(t, DiskTensor)]
