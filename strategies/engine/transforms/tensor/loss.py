"""Cross entropy of logits whose vocabulary is divided, without the whole logits on any rank.

Source: Shoeybi et al. 2019, Megatron-LM, section 3 (arXiv 1909.08053).
"""

from collections.abc import Callable
from typing import Any

import torch
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup
from shardlight.strategies.engine.transforms.tensor.sharded import Sharded, local_of, on_parts
from shardlight.strategies.engine.transforms.tensor.split import Split
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F


@on_parts(F.cross_entropy)
def _cross_entropy(func: Callable, args: tuple, kwargs: dict) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, target = given["input"], given["target"]
    options = [given.get(name) for name in ("weight", "size_average", "reduce")]
    if type(x) is not Sharded or type(target) is Sharded or options != [None, None, None]:
        return NotImplemented
    ndim = len(x.whole_shape)
    if target.is_floating_point() or x.axis != min(1, ndim - 1) or target.dim() != max(0, ndim - 1):
        return NotImplemented
    reduction, ignored = given.get("reduction", "mean"), given.get("ignore_index", -100)
    logits = local_of(x).movedim(x.axis, -1)
    losses = token_losses(logits, target, x.division, x.group, ignored, given.get("label_smoothing", 0.0))
    losses = losses.to(x.local.dtype)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if reduction != "mean":
        return NotImplemented
    return losses.sum() / (target != ignored).sum()


def token_losses(
    logits: Tensor, target: Tensor, split: Split, group: TensorGroup, ignored: int = -100, smoothing: float = 0.0
) -> Tensor:
    """Returns the cross entropy of each position, whole; 0 where the target is `ignored`.

    Args:
        logits: (..., v), this rank's part of the vocabulary; 16-bit ones are computed in fp32.
        target: (...), int64, whole.
        smoothing: of labels, as in F.cross_entropy.
    Raises: IndexError: a target is not in the vocabulary.
    Cost: three numbers per position and rank are gathered, once (four with smoothing); nothing is sent in backward.
    """
    bad = (target != ignored) & ((target < 0) | (target >= split.size))
    if target.device.type == "cpu":
        if bad.any():
            raise IndexError(f"Target {int(target[bad][0])} is out of bounds: there are {split.size} classes.")
    else:
        torch._assert_async(~bad.any())
    return _TokenLosses.apply(logits, target, split, group, ignored, smoothing)


class _TokenLosses(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, split: Split, group: TensorGroup, ignored: int, smoothing: float
    ) -> Tensor:
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        own = split.ranges[group.rank]
        first, stop = own[0] if own else (0, 0)
        here = (target >= first) & (target < stop) & (target != ignored)
        place = (target - first).masked_fill(~here, 0)
        kinds = 4 if smoothing else 3
        numbers = wide.new_zeros(kinds, target.numel())
        if stop > first:
            highest = wide.amax(-1)
            powers = (wide - highest[..., None]).exp_()
            chosen = wide.gather(-1, place[..., None])[..., 0].masked_fill(~here, 0.0)
            totals = [wide.sum(-1)] if smoothing else []
            torch.stack([x.reshape(-1) for x in (highest, powers.sum(-1), chosen, *totals)], out=numbers)
        else:
            numbers[0], powers = -torch.inf, wide
        everyone = numbers.new_empty(group.size * numbers.numel())
        group.collectives.all_gather(everyone, numbers.view(-1), "tensor: cross entropy")
        highest, sums, chosen, *totals = everyone.view(group.size, kinds, -1).unbind(1)
        most = highest.amax(0)
        total = (sums * (highest - most).exp()).sum(0)
        losses = total.log() + most - chosen.sum(0) * (1.0 - smoothing)
        if totals:
            losses -= totals[0].sum(0) * (smoothing / split.size)
        scale = ((numbers[0] - most).exp() / total).view(target.shape)
        ctx.save_for_backward(powers, scale, here, place)
        ctx.ignored = target == ignored
        ctx.smoothing, ctx.share, ctx.dtype = smoothing, smoothing / split.size, logits.dtype
        return losses.view(target.shape).masked_fill(ctx.ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        powers, scale, here, place = ctx.saved_tensors
        if not powers.shape[-1]:
            return powers.to(ctx.dtype), None, None, None, None, None
        own = gradient.masked_fill(ctx.ignored, 0.0)
        out = powers * (own * scale)[..., None]
        if ctx.share:
            out -= own[..., None] * ctx.share
        out.scatter_add_(-1, place[..., None], (own * (ctx.smoothing - 1.0) * here)[..., None])
        return out.to(ctx.dtype), None, None, None, None, None
