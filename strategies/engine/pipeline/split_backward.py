"""A stage's backward in two parts: the gradient of its input, for which another stage waits, and those of its weights.

PyTorch's pipelining library has the surgery on autograd's graph that this takes (Qi et al. 2023, Zero Bubble Pipeline
Parallelism, arXiv 2401.10241, section 2). It sets `weight.grad` by itself and calls no hook of a weight, so whoever
waits for gradients has to be told of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class SplitBackward:
    """The backward of one micro-batch on one stage.

    Args:
        output: the stage's output or its loss.
        gradient: of the output; None: the output is a loss.
        received: the stage's input; None: the stage has none, and all of it is done with the weights.
        weights: the stage's trainable parameters.
    """

    def __init__(
        self, output: Tensor, gradient: Tensor | None, received: Tensor | None, weights: Sequence[nn.Parameter]
    ) -> None:
        self._output = output
        self._gradient = gradient
        self._received = received
        self._weights = weights
        self._groups: list[dict[str, Any]] | None = None

    def input(self) -> Tensor | None:
        """Computes the gradient of the input, and returns it."""
        if self._received is None or not self._received.requires_grad:
            return None
        gradients = None if self._gradient is None else [self._gradient]
        with torch._C.DisableTorchFunctionSubclass():
            _, self._groups = stage_backward_input([self._output], gradients, [self._received], iter(self._weights))
        gradient, self._received.grad = self._received.grad, None
        return gradient

    def weight(self, arrived: Callable[[nn.Parameter], None]) -> None:
        """Computes the weights' gradients. Args: arrived: called for each that has one now, as `weight.grad`."""
        if self._groups is None:
            torch.autograd.backward(self._output, self._gradient)
            return
        with torch._C.DisableTorchFunctionSubclass():
            stage_backward_weight(iter(self._weights), self._groups)
            self._groups = None
            there = [weight for weight in self._weights if weight.grad is not None]
        with torch.no_grad():
            for weight in there:
                arrived(weight)
