"""What an optimizer will keep of a parameter, found by letting it step one of a few elements."""

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SIDE = 3
"""Elements of the tiny parameter along each dimension."""
_FAULTS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def moments_of(
    optimizer: Optimizer, group: dict[str, Any], dims: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int] | None:
    """Returns bytes per element of what is laid out like a parameter in the state that the optimizer would make.

    The optimizer itself is left alone: a shallow copy of it, which holds one parameter of its own, takes a step.

    Args:
        group: one of its groups, for the options in it.
        dims: how many dimensions the parameter has.
        dtype: of what it would update.
    Returns: by name; what is not laid out like the parameter is small, and left out. None: its step needs something
        else, so that nothing is known.
    Example: of AdamW and torch.float32 {"exp_avg": 4, "exp_avg_sq": 4}.
    """
    tiny = nn.Parameter(torch.ones((_SIDE,) * dims, dtype=dtype, device=device))
    tiny.grad = torch.zeros_like(tiny)
    probe = object.__new__(type(optimizer))
    vars(probe).update(vars(optimizer))
    probe.param_groups = [{**group, "params": [tiny]}]
    probe.state = defaultdict(dict)
    probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        # Not the instance's own: schedulers put one of theirs there.
        type(optimizer).step(probe)
    except _FAULTS:
        return None
    found = probe.state.get(tiny, {})
    # A 0-dim parameter's moments look like the count of steps.
    return {
        str(name): value.dtype.itemsize
        for name, value in found.items()
        if isinstance(value, Tensor) and value.shape == tiny.shape and (dims or name != "step")
    }
