"""The optimizers whose step a compiled op takes: the same function, in one pass over memory.

State is made and kept by the optimizer itself, as its own step would, so that state_dict, schedules and checkpoints
know no difference.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from shardlight.ops.adagrad import adagrad_step
from shardlight.ops.adam import adam_step
from shardlight.ops.lion import Lion, lion_step
from shardlight.ops.registry import OPS
from shardlight.ops.rmsprop import rmsprop_step
from shardlight.ops.sgd import sgd_step
from shardlight.ops.steps import Batch
from shardlight.strategies.engine.choices import OptimizerKernel
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim import optimizer as torch_optimizer

Factors = tuple[float, float]
Columns = tuple[list[Tensor], list[Tensor], list[list[Tensor]], list[float]]
"""Parameters, gradients, states, numbers of the step."""
_dtype_of = attrgetter("dtype")
Takes = Callable[[Batch, dict[str, Any]], None]


def _count(steps: Sequence[Tensor]) -> list[float]:
    if steps:
        torch._foreach_add_(list(steps), 1.0)
        if steps[0].device.type != "cpu" and len({step.dtype for step in steps}) == 1:
            # Of a fused optimizer: read together.
            return torch.stack(list(steps)).tolist()
    return list(map(float, steps))


def _adam_columns(optimizer: Any, group: dict[str, Any]) -> Columns:
    params, grads, means, squares, most, steps = [], [], [], [], [], []
    optimizer._init_group(group, params, grads, means, squares, most, steps)
    return params, grads, [means, squares, *([most] if group["amsgrad"] else [])], _count(steps)


def _sgd_columns(optimizer: Any, group: dict[str, Any]) -> Columns:
    params, grads, buffers = [], [], []
    optimizer._init_group(group, params, grads, buffers)
    numbers = [1.0 if n < len(buffers) and buffers[n] is None else 2.0 for n in range(len(params))]
    for n, (param, buffer) in enumerate(zip(params, buffers, strict=bool(buffers))):
        if buffer is None:
            buffers[n] = optimizer.state[param]["momentum_buffer"] = torch.empty_like(param)
    return params, grads, [buffers] if buffers else [], numbers


def _adagrad_columns(optimizer: Any, group: dict[str, Any]) -> Columns:
    params, grads, sums, steps = [], [], [], []
    optimizer._init_group(group, params, grads, sums, steps)
    return params, grads, [sums], _count(steps)


def _rmsprop_columns(optimizer: Any, group: dict[str, Any]) -> Columns:
    params, grads, squares, buffers, means, steps = [], [], [], [], [], []
    optimizer._init_group(group, params, grads, squares, buffers, means, steps)
    return params, grads, [squares, buffers, means], _count(steps)


def _lion_columns(optimizer: Any, group: dict[str, Any]) -> Columns:
    params, grads, momenta = [], [], []
    optimizer._init_group(group, params, grads, momenta)
    return params, grads, [momenta], [1.0] * len(params)


def _adam(batch: Batch, group: dict[str, Any]) -> None:
    adam_step(
        batch,
        lr=float(group["lr"]),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
    )


def _sgd(batch: Batch, group: dict[str, Any]) -> None:
    sgd_step(
        batch,
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
    )


def _adagrad(batch: Batch, group: dict[str, Any]) -> None:
    options = {name: group[name] for name in ("lr_decay", "weight_decay", "eps")}
    adagrad_step(batch, lr=float(group["lr"]), **options)


def _rmsprop(batch: Batch, group: dict[str, Any]) -> None:
    options = {name: group[name] for name in ("alpha", "eps", "weight_decay", "momentum")}
    rmsprop_step(batch, lr=float(group["lr"]), **options)


def _lion(batch: Batch, group: dict[str, Any]) -> None:
    lion_step(batch, lr=float(group["lr"]), betas=group["betas"], weight_decay=group["weight_decay"])


_KINDS: dict[type[Optimizer], tuple[str, Callable[[Any, dict[str, Any]], Columns], Takes]] = {
    Adam: ("adam", _adam_columns, _adam),
    AdamW: ("adam", _adam_columns, _adam),
    SGD: ("sgd", _sgd_columns, _sgd),
    Adagrad: ("adagrad", _adagrad_columns, _adagrad),
    RMSprop: ("rmsprop", _rmsprop_columns, _rmsprop),
    Lion: ("lion", _lion_columns, _lion),
}


def why_unknown(optimizer: Optimizer, kernel: OptimizerKernel) -> str | None:
    """Returns why this optimizer's step is its own to take; None: its arithmetic is known here. For people, too."""
    if kernel == "torch":
        return "optimizer_kernel is torch"
    if type(optimizer) not in _KINDS:
        return f"there is no op for {type(optimizer).__name__}"
    if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
        return "it is differentiable or capturable"
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(len(found) > 1 for found in hooks) or _global_hooks():
        return "hooks on its step may look at gradients"
    return None


def why_not_compiled(optimizer: Optimizer, device: torch.device) -> str | None:
    """Returns why PyTorch's operations compute a step whose arithmetic is known; None: compiled code does."""
    op = OPS[_KINDS[type(optimizer)][0]]
    if op.native(device.type):
        return None
    return op.why_not("cuda" if device.type == "cuda" else "cpu") or "another device"


def _global_hooks() -> bool:
    return bool(torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks)


def take_step(
    optimizer: Optimizer,
    factors: Factors | None,
    held: Mapping[int, tuple[Factors | None, Tensor | None]],
    moments: torch.dtype | None = None,
) -> None:
    """Steps what has a gradient in the optimizer's groups, which hold this rank's parts now, and takes it away.

    Args:
        factors: what gradients are to be multiplied by, one after the other; None: nothing, or as `held` says.
        held: by id of a part: the same for its gradient, and where it is also written to, in another dtype. Empty where
            there is nothing to say.
        moments: in which dtype the moments of fp32 parameters are kept; None: as the optimizer makes them.
    """
    _, columns_of, take = _KINDS[type(optimizer)]
    with torch.no_grad():
        for group in optimizer.param_groups:
            params, grads, states, numbers = _columns(optimizer, group, columns_of, moments)
            if not params:
                continue
            if not held:
                take(_batch(group, params, grads, states, numbers, factors), group)
            else:
                found = [held[id(p)] for p in params]
                for some in dict.fromkeys(f for f, _ in found):
                    chosen = [n for n, (f, _) in enumerate(found) if f == some]
                    mine = [[column[n] for n in chosen] if column else [] for column in (params, grads, *states)]
                    at, copies = [numbers[n] for n in chosen], [found[n][1] for n in chosen]
                    take(_batch(group, mine[0], mine[1], mine[2:], at, some, copies), group)
            for param in params:
                param.grad = None


def _columns(
    optimizer: Optimizer,
    group: dict[str, Any],
    columns_of: Callable[[Any, dict[str, Any]], Columns],
    moments: torch.dtype | None,
) -> Columns:
    if moments is None or (type(optimizer) is SGD and not group["momentum"]):
        return columns_of(optimizer, group)
    if all(map(optimizer.state.get, group["params"])):
        return _narrowed(optimizer, columns_of(optimizer, group), moments)
    # One by one, so that no more than one parameter's moments are ever there as the optimizer makes them.
    params, grads, states, numbers = [], [], [], []
    for param in group["params"]:
        found = _narrowed(optimizer, columns_of(optimizer, {**group, "params": [param]}), moments)
        states = states or [[] for _ in found[2]]
        for column, more in zip([params, grads, numbers, *states], [*found[:2], found[3], *found[2]], strict=True):
            column.extend(more)
    return params, grads, states, numbers


def _narrowed(optimizer: Optimizer, columns: Columns, moments: torch.dtype) -> Columns:
    params, _, states, _ = columns
    for column in states:
        # Mapped in C: after the first step there is nothing to do.
        if torch.float32 not in set(map(_dtype_of, column)):
            continue
        for n, (param, wide) in enumerate(zip(params, column, strict=True)):
            if param.dtype == wide.dtype == torch.float32:
                kept = optimizer.state[param]
                name = next(name for name, value in kept.items() if value is wide)
                column[n] = kept[name] = wide.to(moments)
    return columns


def _batch(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    numbers: list[float],
    factors: Factors | None,
    copies: list[Tensor | None] | None = None,
) -> Batch:
    scale, clip = factors or (1.0, 1.0)
    return Batch(
        params=params,
        grads=grads,
        states=tuple(column or None for column in states),
        numbers=numbers,
        scale=-scale if group.get("maximize") else scale,
        clip=clip,
        copies=copies if copies and any(c is not None for c in copies) else None,
    )
