"""What the ranks of a tensor group exchange, as functions that autograd knows.

[Note: whole and partial] A plain tensor is whole: all ranks have the same values, and get the same gradient for it. A
`Sharded` one is divided, and so is its gradient. A whole tensor that is combined with a divided one gets only a part of
its gradient on each rank, so it goes through `shared` first: nothing in forward, the sum over the group in backward.
With this every gradient is complete when it arrives at its parameter, and whole parameters stay equal on all ranks.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.pipeline.taint import Tainted, tainted
from shardlight.strategies.engine.transforms.tensor.split import Split
from torch import Tensor
from torch.autograd import Function

Move = Callable[[Tensor], Tensor]


class TensorGroup:
    """The ranks that a layer's matrices are divided over; every call is collective."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.rank: int = collectives.rank
        self.size: int = collectives.world_size
        self.gathered: Counter[str] = Counter()
        """How often an operation that cannot be computed in parts had its operands gathered, by its name."""

    def sum(self, tensor: Tensor, own: bool = False) -> Tensor:
        """Returns the sum over the group, in rank order.

        Args:
            own: the tensor is nobody else's, and may be overwritten.
        """
        if type(tensor) is Tainted:
            return tensor
        out = tensor if own and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
        self.collectives.all_reduce(out.view(-1), "tensor: sum")
        return out

    def gather(self, local: Tensor, dim: int, split: Split) -> Tensor:
        """Returns the whole tensor."""
        if type(local) is Tainted:
            return _resized(local, dim, split.size)
        front = local.movedim(dim, 0)
        most, rest = max(split.counts), front.shape[1:]
        plain = front.contiguous()
        if local.dtype == torch.bool:
            plain = plain.view(torch.uint8)
        if plain.shape[0] < most:
            plain = torch.cat((plain, plain.new_zeros(most - plain.shape[0], *rest)))
        full = plain.new_empty(self.size * most, *rest)
        self.collectives.all_gather(full.view(-1), plain.view(-1), "tensor: all-gather")
        if not (split.in_order and min(split.counts) == most):
            full = torch.cat([full[r * most + at : r * most + at + b - a] for a, b, r, at in split.cover])
        return full.view(local.dtype).movedim(0, dim).contiguous()

    def sum_parts(self, full: Tensor, dim: int, split: Split) -> Tensor:
        """Returns this rank's part of the sum over the group; no entry is on two ranks."""
        if type(full) is Tainted:
            return _resized(full, dim, split.count(self.rank))
        front, most = full.movedim(dim, 0), max(split.counts)
        if split.in_order and min(split.counts) == most:
            flat = front.contiguous()
        else:
            flat = front.new_zeros(self.size * most, *front.shape[1:])
            for a, b, r, at in split.cover:
                flat[r * most + at : r * most + at + b - a] = front[a:b]
        out = flat.new_empty(most, *flat.shape[1:])
        self.collectives.reduce_scatter(flat.view(-1), out.view(-1), "tensor: reduce-scatter")
        return out[: split.count(self.rank)].movedim(0, dim).contiguous()

    def part(self, full: Tensor, dim: int, split: Split) -> Tensor:
        """Returns this rank's part of a whole tensor; a view where it is one range."""
        parts = [full.narrow(dim, a, b - a) for a, b in split.ranges[self.rank]]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim) if parts else full.narrow(dim, 0, 0)


def _resized(tensor: Tainted, dim: int, size: int) -> Tensor:
    """Returns a tensor without values, as it is with another size: nobody sends anything for it."""
    shape = list(tensor.shape)
    shape[dim] = size
    return tainted(shape, tensor.dtype, tensor.device, tensor.source)


def shared(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Returns a whole tensor as an operand of what is divided; see [Note: whole and partial]."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    return _Exchange.apply(tensor, Tensor.detach, group.sum)  # not a view: one would keep what it is a view of


def summed(partial: Tensor, group: TensorGroup) -> Tensor:
    """Returns the whole sum of what the ranks have; `partial` is used up."""
    return _Exchange.apply(partial, lambda t: group.sum(t.detach(), own=True), lambda gradient: gradient)


def gathered(local: Tensor, dim: int, split: Split, group: TensorGroup) -> Tensor:
    """Returns the whole tensor of parts."""

    def back(gradient: Tensor) -> Tensor:
        part = group.part(gradient, dim, split)
        if split.once:
            return part
        # What several ranks have was taken from one of them, so the others' has no gradient.
        own = [at + n for a, b, r, at in split.cover if r == group.rank for n in range(b - a)]
        index = torch.tensor(own, dtype=torch.int64, device=part.device)
        return torch.zeros_like(part).index_copy(dim, index, part.index_select(dim, index))

    return _Exchange.apply(local, lambda t: group.gather(t, dim, split), back)


def gathered_for_parts(local: Tensor, dim: int, split: Split, group: TensorGroup) -> Tensor:
    """Returns the whole tensor of parts, as an operand of what is divided otherwise."""
    there, back = _gather_and_sum(dim, split, group)
    return _Exchange.apply(local, there, back)


def summed_part(partial: Tensor, dim: int, split: Split, group: TensorGroup) -> Tensor:
    """Returns this rank's part of the sum of what the ranks have."""
    back, there = _gather_and_sum(dim, split, group)
    return _Exchange.apply(partial, there, back)


def part_of(full: Tensor, dim: int, split: Split, group: TensorGroup) -> Tensor:
    """Returns this rank's part of a whole tensor."""

    def back(gradient: Tensor) -> Tensor:
        if split.once:
            return group.gather(gradient, dim, split)
        shape = list(gradient.shape)
        shape[dim] = split.size
        index = torch.tensor(split.places(group.rank), dtype=torch.int64, device=gradient.device)
        return group.sum(gradient.new_zeros(shape).index_copy_(dim, index, gradient), own=True)

    return _Exchange.apply(full, lambda t: group.part(t, dim, split).detach().contiguous(), back)


def _gather_and_sum(dim: int, split: Split, group: TensorGroup) -> tuple[Move, Move]:
    """Returns two functions of which each is the other's backward."""
    return lambda t: group.gather(t, dim, split), lambda t: group.sum_parts(t, dim, split)


class _Exchange(Function):
    """One function in forward, and another one in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient), None, None
