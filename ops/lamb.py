"""LAMB: Adam whose step is scaled, for each parameter, to the size of the parameter's own values.

Source: You et al. 2020, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, Algorithm 2 (arXiv
1904.00962); which parameters are left unscaled, as in the authors' own code.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lamb(Optimizer):
    """LAMB with bias correction, in plain PyTorch.

    Of each parameter x with gradient g, at step t from 1, all norms over the whole parameter:

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay x
        x = x - lr * |x| / |u| * u           where |x| or |u| is 0: x - lr u

    Args:
        params: parameters, or groups of them; a group may have its own value of every option.
        lr: learning rate, a number or a 1-element tensor.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: part of the update, and so scaled with it.
        adapt: False: the update is not scaled by |x| / |u|; as the authors do for biases and norms.
    Raises: ValueError: an option is out of its range; RuntimeError: in `step`, a sparse or complex gradient.
    """

    needs_whole_parameters = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"Lamb: {name} is {value}; it must be at least 0")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lamb: betas is {betas}; it must be two numbers from 0 up to but not including 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one update of every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.layout != torch.strided or gradient.is_complex():
            raise RuntimeError("Lamb takes dense real gradients only.")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        (beta1, beta2), mean, square = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        steps = float(state["step"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**steps)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1**steps)).div_(root).add_(parameter, alpha=group["weight_decay"])
        if group["adapt"]:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            size, step_size = (torch.linalg.vector_norm(t, dtype=wide) for t in (parameter, update))
            ratio = torch.where((size > 0) & (step_size > 0), size / step_size, 1.0)
            update.mul_(ratio)
        parameter.sub_(update, alpha=float(group["lr"]))
