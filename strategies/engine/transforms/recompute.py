"""Activation recomputation: blocks keep their inputs only, and run again in backward.

[Note: caches] A block that fills a cache of keys and values which its model hands to it would fill it twice. Models of
transformers know: their layers and the models around them have a flag `gradient_checkpointing`, and with it no cache is
made. So where a block has that flag, the flags are set and the block calls our checkpoint by itself; a compiled block,
whose code must not call it, is left without.

[Note: reentrant] PyTorch's reentrant kind sees only tensors that are arguments and results themselves, and gives no
gradients at all when no argument requires one. So arguments and results are taken apart, and one more argument, an
empty one, requires a gradient.

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from shardlight.strategies.engine.transforms.forward import Forward, replace_forward
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

_FLAG = "gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"
Around = Callable[[], AbstractContextManager[Any]]
Checkpoint = Callable[..., Any]
"""(function, *args, **kwargs) -> what the function returns."""


def recompute(
    model: nn.Module, blocks: Sequence[nn.Module], around: Around = nullcontext, reentrant: bool = False
) -> Callable[[], None]:
    """Makes each block recompute its activations in backward; random numbers (dropout) are drawn the same way again.

    Without gradients (evaluation) the blocks run as they are.

    Args:
        model: what the blocks are in; see [Note: caches].
        around: makes a context that is entered inside each checkpointed forward, the first and the repeated.
        reentrant: PyTorch's older kind: backward runs a block's forward and backward as a whole, instead of the forward
            when the first saved tensor is asked for. See [Note: reentrant].
    Returns: a function that undoes it.
    """
    run = partial(_checkpoint_reentrant if reentrant else _checkpoint, around)
    inside = {b for b in blocks if hasattr(b, _FLAG)}
    flagged = [b for b in blocks if b in inside and "forward" not in vars(b)]
    around_them = [
        m for m in model.modules() if hasattr(m, _FLAG) and m not in inside and not inside.isdisjoint(m.modules())
    ]
    before = [(m, vars(m).get(_FLAG), vars(m).get(_FUNCTION)) for m in (*flagged, *around_them)]
    undos = [replace_forward(b, partial(_recomputed, run)) for b in blocks if b not in flagged]
    for block in flagged:
        setattr(block, _FUNCTION, run)
    for module in (*flagged, *around_them):
        setattr(module, _FLAG, True)

    def undo() -> None:
        for step in undos:
            step()
        for module, *values in before:
            for name, value in zip((_FLAG, _FUNCTION), values, strict=True):
                vars(module).pop(name, None)
                if value is not None:
                    setattr(module, name, value)

    return undo


def _recomputed(run: Checkpoint, forward: Forward) -> Forward:
    def recomputed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        return run(partial(forward, module), *args, **kwargs)

    return recomputed


def _checkpoint(around: Around, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around():
            return function(*args, **kwargs)

    return checkpoint(inside, *args, use_reentrant=False, **kwargs)


def _checkpoint_reentrant(around: Around, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if isinstance(function, partial):
        # Tensors that are bound to the function are arguments as well.
        args, kwargs, function = (*function.args, *args), {**function.keywords, **kwargs}, function.func
    leaves, structure = tree_flatten((args, kwargs))
    if not any(_requires_grad(leaf) for leaf in leaves):
        return function(*args, **kwargs)
    built: list[Any] = []

    def inside(_: Tensor, *leaves: Any) -> tuple[Any, ...]:
        args, kwargs = tree_unflatten(list(leaves), structure)
        with around():
            out, spec = tree_flatten(function(*args, **kwargs))
        built[:] = [spec]
        return tuple(out)

    out = checkpoint(inside, torch.empty(0, requires_grad=True), *leaves, use_reentrant=True)
    return tree_unflatten(list(out), built[0])


def _requires_grad(leaf: Any) -> bool:
    if isinstance(leaf, nn.Module):
        return any(p.requires_grad for p in leaf.parameters())
    return isinstance(leaf, Tensor) and leaf.requires_grad
