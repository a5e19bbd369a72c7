"""Activation recomputation: blocks keep their inputs only, and run again in backward.

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(
    modules: Sequence[nn.Module], around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[], None]:
    """Makes each module recompute its activations in backward; random numbers (dropout) are drawn the same way again.

    Without gradients (evaluation) the modules run as they are.

    Args:
        around: makes a context that is entered inside each checkpointed forward, the first and the repeated.
    Returns: a function that undoes it.
    """
    for module in modules:
        module.forward = _recomputed(module.forward, around)  # type: ignore[method-assign]

    def undo() -> None:
        for module in modules:
            del module.forward

    return undo


def _recomputed(forward: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with around():
            return forward(*args, **kwargs)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(inside, *args, use_reentrant=False, **kwargs)

    return run
