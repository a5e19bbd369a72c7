"""RMSprop (Hinton 2012; centred: Graves 2013, arXiv 1308.0850), as torch.optim computes it."""

from shardlight.ops.steps import Batch, step_operator, take_step
from torch import Tensor


def rmsprop_step(batch: Batch, *, lr: float, alpha: float, eps: float, weight_decay: float, momentum: float) -> None:
    """Steps every tensor of a batch in place.

    Args:
        batch: states are the mean squares, the momentum (None: there is none), and the means (None: not centred).
    """

    def reference(p: Tensor, g: Tensor, states: list[Tensor | None], number: float) -> None:
        square, buffer, mean = states
        assert square is not None
        if weight_decay:
            g = g + weight_decay * p
        square.mul_(alpha).addcmul_(g, g, value=1 - alpha)
        spread = square
        if mean is not None:
            mean.lerp_(g, 1 - alpha)
            spread = square.addcmul(mean, mean, value=-1)
        denominator = spread.sqrt().add_(eps)
        if buffer is None:
            p.addcdiv_(g, denominator, value=-lr)
        else:
            buffer.mul_(momentum).addcdiv_(g, denominator)
            p.add_(buffer, alpha=-lr)

    take_step("rmsprop", batch, (lr, alpha, eps, weight_decay, momentum), reference)


@step_operator("rmsprop_step", mutates=("params", "squares", "buffers", "means", "copies"))
def rmsprop_op(
    params: list[Tensor],
    grads: list[Tensor],
    squares: list[Tensor],
    buffers: list[Tensor],
    means: list[Tensor],
    copies: list[Tensor],
    numbers: list[float],
    lr: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    scale: float = 1.0,
    clip: float = 1.0,
) -> None:
    """`rmsprop_step` as an operator of PyTorch; an empty list stands for what is not there."""
    batch = Batch(
        params=params,
        grads=grads,
        states=(squares, buffers or None, means or None),
        numbers=numbers,
        scale=scale,
        clip=clip,
        copies=copies or None,
    )
    rmsprop_step(batch, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
