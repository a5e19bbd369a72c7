"""Lion (Chen et al. 2023, arXiv 2302.06675, Algorithm 2): its step, and the optimizer, which torch.optim has not."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from shardlight.ops.steps import Batch, step_operator, take_step
from torch import Tensor


def lion_step(batch: Batch, *, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    """Steps every tensor of a batch in place. The state is the momentum."""

    def reference(p: Tensor, g: Tensor, states: list[Tensor | None], number: float) -> None:
        momentum = states[0]
        assert momentum is not None
        direction = (momentum * betas[0]).add_(g, alpha=1 - betas[0])
        # PyTorch's sign of NaN is 0, which would hide it.
        direction = torch.where(direction.isnan(), direction, direction.sign())
        p.sub_(direction.add_(p, alpha=weight_decay), alpha=lr)
        momentum.mul_(betas[1]).add_(g, alpha=1 - betas[1])

    take_step("lion", batch, (lr, *betas, weight_decay), reference)


@step_operator("lion_step", mutates=("params", "momenta", "copies"))
def lion_op(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    copies: list[Tensor],
    numbers: list[float],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    scale: float = 1.0,
    clip: float = 1.0,
) -> None:
    """`lion_step` as an operator of PyTorch; an empty list stands for what is not there."""
    batch = Batch(
        params=params, grads=grads, states=(momenta,), numbers=numbers, scale=scale, clip=clip, copies=copies or None
    )
    lion_step(batch, lr=lr, betas=(beta1, beta2), weight_decay=weight_decay)


class Lion(torch.optim.Optimizer):
    """Lion: the sign of an interpolation of momentum and gradient, with decoupled weight decay.

    Args:
        params: parameters or groups.
        lr: the paper advises 3 to 10 times less than for AdamW, with as many times its weight decay.
        betas: of the update, and of the momentum.
    Raises: ValueError: a value that makes no sense.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"Lion: lr is {lr}; it must be 0 or more.")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Lion: betas are {betas}; they must be from 0 to below 1.")
        if not weight_decay >= 0.0:
            raise ValueError(f"Lion: weight_decay is {weight_decay}; it must be 0 or more.")
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, params, grads, momenta)
            batch = Batch(
                params=params,
                grads=grads,
                states=(momenta,),
                numbers=[1.0] * len(params),
                scale=-1.0 if group["maximize"] else 1.0,
            )
            lion_step(batch, lr=float(group["lr"]), betas=group["betas"], weight_decay=group["weight_decay"])
        return loss

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]
    ) -> None:
        for param in group["params"]:
            if param.grad is not None:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                params.append(param)
                grads.append(param.grad)
                momenta.append(state["momentum"])
