"""Adagrad (Duchi, Hazan & Singer 2011), as torch.optim computes it."""

from shardlight.ops.steps import Batch, step_operator, take_step
from torch import Tensor


def adagrad_step(batch: Batch, *, lr: float, lr_decay: float, weight_decay: float, eps: float) -> None:
    """Steps every tensor of a batch in place. The state is the sum of squares."""

    def reference(p: Tensor, g: Tensor, states: list[Tensor | None], number: float) -> None:
        total = states[0]
        assert total is not None
        if weight_decay:
            g = g + weight_decay * p
        total.addcmul_(g, g)
        p.addcdiv_(g, total.sqrt().add_(eps), value=-lr / (1 + (number - 1) * lr_decay))

    take_step("adagrad", batch, (lr, lr_decay, weight_decay, eps), reference)


@step_operator("adagrad_step", mutates=("params", "sums", "copies"))
def adagrad_op(
    params: list[Tensor],
    grads: list[Tensor],
    sums: list[Tensor],
    copies: list[Tensor],
    numbers: list[float],
    lr: float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    scale: float = 1.0,
    clip: float = 1.0,
) -> None:
    """`adagrad_step` as an operator of PyTorch; an empty list stands for what is not there."""
    batch = Batch(
        params=params, grads=grads, states=(sums,), numbers=numbers, scale=scale, clip=clip, copies=copies or None
    )
    adagrad_step(batch, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
