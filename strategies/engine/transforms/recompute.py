"""Activation recomputation: blocks keep their inputs only, and run again in backward.

[Note: caches] A block that fills a cache of keys and values which its model hands to it would fill it twice. Models of
transformers know: their layers and the models around them have a flag `gradient_checkpointing`, and with it no cache is
made. So where a block has that flag, the flags are set and the block calls our checkpoint by itself.

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_FLAG = "gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"
Around = Callable[[], AbstractContextManager[Any]]


def recompute(model: nn.Module, blocks: Sequence[nn.Module], around: Around = nullcontext) -> Callable[[], None]:
    """Makes each block recompute its activations in backward; random numbers (dropout) are drawn the same way again.

    Without gradients (evaluation) the blocks run as they are.

    Args:
        model: what the blocks are in; see [Note: caches].
        around: makes a context that is entered inside each checkpointed forward, the first and the repeated.
    Returns: a function that undoes it.
    """
    wrapped = [b for b in blocks if not hasattr(b, _FLAG)]
    flagged = [b for b in blocks if hasattr(b, _FLAG)]
    inside = set(flagged)
    around_them = [
        m for m in model.modules() if hasattr(m, _FLAG) and m not in inside and not inside.isdisjoint(m.modules())
    ]
    before = [(m, vars(m).get(_FLAG), vars(m).get(_FUNCTION)) for m in (*flagged, *around_them)]
    for block in wrapped:
        block.forward = _recomputed(block.forward, around)  # type: ignore[method-assign]
    for block in flagged:
        setattr(block, _FUNCTION, partial(_checkpoint, around))
    for module in (*flagged, *around_them):
        setattr(module, _FLAG, True)

    def undo() -> None:
        for block in wrapped:
            del block.forward
        for module, *values in before:
            for name, value in zip((_FLAG, _FUNCTION), values, strict=True):
                vars(module).pop(name, None)
                if value is not None:
                    setattr(module, name, value)

    return undo


def _checkpoint(around: Around, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around():
            return function(*args, **kwargs)

    return checkpoint(inside, *args, use_reentrant=False, **kwargs)


def _recomputed(forward: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return _checkpoint(around, forward, *args, **kwargs)

    return run
