"""SGD with momentum, dampening and Nesterov's momentum, as torch.optim computes it."""

from shardlight.ops.steps import Batch, step_operator, take_step
from torch import Tensor


def sgd_step(
    batch: Batch, *, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool
) -> None:
    """Steps every tensor of a batch in place.

    Args:
        batch: the state is the momentum, which the step with number 1 only writes; none without momentum.
    """

    def reference(p: Tensor, g: Tensor, states: list[Tensor | None], number: float) -> None:
        buffer = states[0]
        if weight_decay:
            g = g + weight_decay * p
        if buffer is not None:
            if number == 1:
                buffer.copy_(g)
            else:
                buffer.mul_(momentum).add_(g, alpha=1 - dampening)
            g = g + momentum * buffer if nesterov else buffer
        p.add_(g, alpha=-lr)

    take_step("sgd", batch, (lr, momentum, dampening, weight_decay, float(nesterov)), reference)


@step_operator("sgd_step", mutates=("params", "buffers", "copies"))
def sgd_op(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    copies: list[Tensor],
    numbers: list[float],
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    scale: float = 1.0,
    clip: float = 1.0,
) -> None:
    """`sgd_step` as an operator of PyTorch; an empty list stands for what is not there."""
    batch = Batch(
        params=params,
        grads=grads,
        states=(buffers or None,),
        numbers=numbers,
        scale=scale,
        clip=clip,
        copies=copies or None,
    )
    sgd_step(batch, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
