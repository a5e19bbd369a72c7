"""The optimizers whose step a compiled op takes: the same function, in one pass over memory.

State is made and kept by the optimizer itself, as its own step would, so that state_dict, schedules and checkpoints
know no difference.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from shardlight.ops.adagrad import adagrad_step
from shardlight.ops.adam import adam_step
from shardlight.ops.lion import Lion, lion_step
from shardlight.ops.registry import OPS
from shardlight.ops.rmsprop import rmsprop_step
from shardlight.ops.sgd import sgd_step
from shardlight.ops.steps import Batch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim import optimizer as torch_optimizer

OptimizerKernel = Literal["auto", "torch"]
Factors = tuple[float, float]
Columns = tuple[list[Tensor], list[Tensor], list[list[Tensor]], list[float]]
"""Parameters, gradients, states, numbers of the step."""
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


def why_not(optimizer: Optimizer, kernel: OptimizerKernel, device: torch.device) -> str | None:
    """Returns why the optimizer's own step runs; None: a compiled op takes it. For people, too."""
    if kernel == "torch":
        return "optimizer_kernel is torch"
    if type(optimizer) not in _KINDS:
        return f"there is no op for {type(optimizer).__name__}"
    stem = _KINDS[type(optimizer)][0]
    if not OPS[stem].native(device.type):
        return OPS[stem].why_not("cuda" if device.type == "cuda" else "cpu") or "another device"
    if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
        return "it is differentiable or capturable"
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(len(found) > 1 for found in hooks) or _global_hooks():
        return "hooks on its step may look at gradients"
    return None


def _global_hooks() -> bool:
    return bool(torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks)


def take_step(
    optimizer: Optimizer, factors: Factors | None, held: Mapping[int, tuple[Factors | None, Tensor | None]]
) -> None:
    """Steps what has a gradient in the optimizer's groups, which hold this rank's parts now, and takes it away.

    Args:
        factors: what gradients are to be multiplied by, one after the other; None: nothing, or as `held` says.
        held: by id of a part: the same for its gradient, and where it is also written to, in another dtype. Empty where
            there is nothing to say.
    """
    _, columns_of, take = _KINDS[type(optimizer)]
    with torch.no_grad():
        for group in optimizer.param_groups:
            params, grads, states, numbers = columns_of(optimizer, group)
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
