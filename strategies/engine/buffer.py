"""One flat buffer: the parameters of one dtype of a unit, this rank's shard of them, and their gradients.

[Note: tensors of a buffer]
full    (numel,)        the parameters laid end to end; they are views of it. Sharded parameters: its storage is
                        emptied between uses (`resize_(0)`) and refilled in place, never replaced, because autograd
                        saves views.
shard   (shard_numel,)  this rank's part: a view of `full` where parameters are replicated, a tensor of its own else.
local   (numel,)        this rank's gradients since they were last reduced; a sum over micro-batches.
grad    (shard_numel,)  the reduced gradients of this rank's part; a sum over ranks until `finish` scales it.
full_grad (numel,)      where gradients are replicated, or kept over the window, `grad` is its slice; else None.
"""

import torch
from shardlight.ops.sums import CHUNK
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.layout import FlatLayout, Piece
from shardlight.strategies.engine.plan import Reduce, StatePlan
from shardlight.strategies.engine.released import Owner, mark_gathered, mark_released
from torch import Tensor, nn


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
        collectives: Collectives,
        owner: Owner,
    ) -> None:
        self.name = name
        self.plan = plan
        self.reduce_policy = reduce
        self.collectives = collectives
        self.params: list[nn.Parameter] = [p for _, p in params]
        self.layout = FlatLayout.pack([(n, tuple(p.shape)) for n, p in params], collectives.world_size, CHUNK)
        self.dtype: torch.dtype = self.params[0].dtype
        self.device: torch.device = self.params[0].device
        self.pieces: dict[int, Piece] = {p.slot: p for p in self.layout.pieces(collectives.rank)}
        self.gathered = True
        self.full: Tensor = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        self.views: list[Tensor] = [self.full[s.start : s.stop].view(s.shape) for s in self.layout.slots]
        self._own = slice(*self.layout.shard_range(collectives.rank))
        for parameter, view in zip(self.params, self.views, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
            parameter._shardlight_owner = owner
        self._versions: list[int] = [p._version for p in self.params]
        collectives.broadcast(self.full, f"start weights of {name}")
        self.shard: Tensor = self.full[self._own].clone() if plan.shard_parameters else self.full[self._own]
        nan = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
        self.nans: list[Tensor] = [nan.expand(s.shape) for s in self.layout.slots]

        keep_full_grad = not plan.shard_gradients or reduce == "window"
        self._keeps_full_grad = keep_full_grad
        self.full_grad: Tensor | None = None
        self.grad: Tensor | None = None
        self.local: Tensor | None = None
        self.touched: set[int] = set()
        """Slots with a contribution in `local`."""
        self.reduced = False
        """Whether `grad` holds sums of this window."""

    # --- parameters

    def gather(self) -> None:
        """Fills `full` from the shards of all ranks and makes every parameter a view of it. Collective."""
        self.full.untyped_storage().resize_(self.layout.numel * self.full.element_size())
        self.collectives.all_gather(self.full, self.shard, f"gather {self.name}")
        if not self.gathered:
            self._attach()

    def _attach(self) -> None:
        for parameter, view in zip(self.params, self.views, strict=True):
            mark_gathered(parameter)
            parameter.data = view
        self._note_versions()
        self.gathered = True

    def _note_versions(self) -> None:
        self._versions = [p._version for p in self.params]

    def changed(self) -> list[str]:
        """Returns the names of parameters that were written in place, or given other data, since they were gathered."""
        if not self.gathered:
            return []
        held = zip(self.layout.slots, self.params, self.views, self._versions, strict=True)
        found = [s.name for s, p, view, v in held if p._version != v or p.data_ptr() != view.data_ptr()]
        if found or torch.equal(self.full[self._own].view(torch.uint8), self.shard.view(torch.uint8)):
            return found
        # Written by `p.data`, which has no version: it shows in this rank's part alone.
        for slot in self.pieces:
            there, here = self.piece_of_shard(slot, self.full[self._own]), self.piece_of_shard(slot, self.shard)
            if (
                there is not None
                and here is not None
                and not torch.equal(there.view(torch.uint8), here.view(torch.uint8))
            ):
                found.append(self.layout.slots[slot].name)
        return found

    def release(self) -> None:
        """Empties `full`; every parameter becomes a NaN of its full shape. Only where parameters are sharded."""
        if not self.gathered:
            return
        for parameter, nan in zip(self.params, self.nans, strict=True):
            parameter.data = nan
            mark_released(parameter)
        self.full.untyped_storage().resize_(0)
        self.gathered = False

    def publish(self) -> None:
        """After a step: every rank's updated shard becomes everyone's parameters. Collective."""
        if self.plan.shard_optimizer and not self.plan.shard_parameters:
            self.collectives.all_gather(self.full, self.shard, f"publish {self.name}")

    def write_back(self) -> None:
        """Takes changes made to the gathered parameters into this rank's shard."""
        if self.gathered:
            self.adopt_data()
            self.shard.copy_(self.full[self._own])
            self._note_versions()

    def adopt_data(self) -> None:
        """Takes the values of parameters whose `data` was set to another tensor into the buffer."""
        for parameter, view in zip(self.params, self.views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view

    def references(self) -> int:
        """Returns how many tensors share the storage of `full`; see [Note: outside views]."""
        return torch._C._storage_Use_Count(self.full.untyped_storage()._cdata)

    # --- gradients

    def add_gradient(self, slot: int, gradient: Tensor) -> None:
        """Adds a parameter's local gradient to `local`."""
        if self.local is None:
            self.local = self._open_local()
        s = self.layout.slots[slot]
        target = self.local[s.start : s.stop].view(s.shape)
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if slot in self.touched:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self.touched.add(slot)

    def _open_local(self) -> Tensor:
        if self.reduce_policy == "window":
            # Reduced in place at the end of the window, so one buffer serves as `local` and `full_grad`.
            return self._open_full_grad()
        return self._zeros()

    def _zeros(self) -> Tensor:
        return torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)

    def _open_full_grad(self) -> Tensor:
        if self.full_grad is None:
            self.full_grad = self._zeros()
            self.grad = self.full_grad[self._own]
        return self.full_grad

    def _open_grad(self) -> Tensor:
        if self.grad is None:
            if self._keeps_full_grad:
                self._open_full_grad()
            else:
                self.grad = torch.zeros(self.layout.shard_numel, dtype=self.dtype, device=self.device)
        assert self.grad is not None
        return self.grad

    def reduce(self, contribute: bool) -> None:
        """Adds the sum of all ranks' `local` to `grad`, and empties `local`. Collective.

        Args:
            contribute: False: this rank takes part with zeros and keeps its `local`, which is not complete yet.
        """
        grad = self._open_grad()
        caller = f"reduce {self.name}"
        if self.reduce_policy == "window":
            local = self._open_local()
            self._clear_untouched(local)
            self.collectives.reduce_scatter(local, grad, caller)
            self.touched.clear()
            self.local = None
        else:
            local = self.local if contribute and self.local is not None else self._zeros()
            target = torch.empty_like(grad) if self.reduced else grad
            self.collectives.reduce_scatter(local, target, caller)
            if self.reduced:
                grad += target
            if contribute:
                self.touched.clear()
                self.local = None
        self.reduced = True

    def _clear_untouched(self, local: Tensor) -> None:
        # The buffer is kept between windows: what nobody wrote in this one must not carry over.
        for index, s in enumerate(self.layout.slots):
            if index not in self.touched:
                local[s.start : s.stop].zero_()

    def finish(self, scale: float) -> None:
        """Ends the window: sums become means; replicated gradients come to every rank. Collective."""
        assert self.grad is not None
        if scale != 1.0:
            self.grad *= scale
        if not self.plan.shard_gradients and not self.plan.shard_optimizer:
            self.gather_gradients()

    def gather_gradients(self) -> Tensor:
        """Returns the (numel,) mean gradients of the window on every rank. Collective."""
        assert self.grad is not None
        full = (
            self.full_grad
            if self.full_grad is not None
            else torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        )
        self.collectives.all_gather(full, self.grad, f"gradients of {self.name}")
        return full

    def clear_gradients(self) -> None:
        """Forgets the gradients of the window; the memory is kept for the next."""
        self.touched.clear()
        self.local = None
        self.reduced = False

    def trainable(self) -> bool:
        """Whether any parameter gets a gradient now."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(p.requires_grad for p in self.params)

    # --- accounting

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that hold model state on this rank now."""
        return [t for t in (self.full, self.shard, self.local, self.grad, self.full_grad) if t is not None]

    def slice(self, slot: int, flat: Tensor) -> Tensor:
        """Returns a parameter's part of a (numel,) tensor, in its shape."""
        s = self.layout.slots[slot]
        return flat[s.start : s.stop].view(s.shape)

    def piece_of_shard(self, slot: int, flat: Tensor) -> Tensor | None:
        """Returns this rank's (n,) part of a parameter in a (shard_numel,) tensor, None if it owns nothing of it."""
        piece = self.pieces.get(slot)
        return None if piece is None else flat[piece.offset : piece.offset + piece.stop - piece.start]
