"""Adam (Kingma & Ba 2015, arXiv 1412.6980, Algorithm 1) and AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101,
Algorithm 2), as torch.optim computes them.
"""

import torch
from shardlight.ops.steps import Batch, step_operator, take_step
from torch import Tensor


def adam_step(
    batch: Batch,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Steps every tensor of a batch in place.

    Args:
        batch: states are the first moments, the second ones, and, for AMSGrad, the largest second ones.
        decoupled: AdamW's weight decay instead of Adam's, which is added to the gradient.
    """

    def reference(p: Tensor, g: Tensor, states: list[Tensor | None], number: float) -> None:
        mean, square, most = states
        assert mean is not None and square is not None
        if decoupled:
            p.mul_(1 - lr * weight_decay)
        elif weight_decay:
            g = g + weight_decay * p
        mean.lerp_(g, 1 - betas[0])
        square.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        second = square if most is None else torch.maximum(most, square, out=most)
        denominator = (second.sqrt() / (1 - betas[1] ** number) ** 0.5).add_(eps)
        p.addcdiv_(mean, denominator, value=-lr / (1 - betas[0] ** number))

    take_step("adam", batch, (lr, *betas, eps, weight_decay, float(decoupled)), reference)


@step_operator("adam_step", mutates=("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "copies"))
def adam_op(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    numbers: list[float],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    scale: float = 1.0,
    clip: float = 1.0,
) -> None:
    """`adam_step` as an operator of PyTorch; an empty list stands for what is not there."""
    states = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs or None)
    batch = Batch(
        params=params, grads=grads, states=states, numbers=numbers, scale=scale, clip=clip, copies=copies or None
    )
    adam_step(batch, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, decoupled=decoupled)
