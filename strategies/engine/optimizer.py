"""The user's optimizer on this rank's parts of the parameters.

[Note: parameter groups] Between steps an optimizer's groups and state show the user's own parameters, so that code
which goes through `param_groups` (zero_grad, toggle_optimizer, clipping by hand, add_param_group) does what it does in
plain PyTorch. Only while it steps do they hold this rank's parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from shardlight.strategies.engine.buffer import FlatBuffer
from shardlight.strategies.engine.deferred.tensors import materialise_tensors
from shardlight.strategies.engine.plan import StatePlan
from shardlight.strategies.engine.unit import Unit
from shardlight.strategies.errors import StrategyError
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Optimizer, SparseAdam

_WHY_NOT = {
    LBFGS: "it evaluates the loss several times per step and needs all gradients in one place",
    Adafactor: "it factors the second moment over the rows and columns of whole matrices",
    SparseAdam: "it needs sparse gradients",
}
if hasattr(torch.optim, "Muon"):
    _WHY_NOT[torch.optim.Muon] = "it orthogonalises whole matrices"


class LocalParameters:
    """The part of every parameter that this rank updates, as a parameter for the optimizer.

    Where optimizer state is replicated that is the parameter itself, or its master weights; else a 1-dim view of the
    shard, or nothing for a parameter of which this rank owns no element.
    """

    def __init__(self, place: dict[nn.Parameter, tuple[Unit, FlatBuffer, int]], plan: StatePlan) -> None:
        self._place = place
        self._number: dict[nn.Parameter, int] = {p: i for i, p in enumerate(place)}
        self.plan = plan
        self._local: dict[nn.Parameter, nn.Parameter | None] = {}

    def of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Returns what the optimizer gets for `parameter`, None if this rank owns nothing of it."""
        if not self._stands_in(parameter):
            return parameter
        if parameter not in self._local:
            _, buffer, slot = self._place[parameter]
            sharded = self.plan.shard_optimizer
            part = buffer.piece_of_shard(slot, buffer.shard) if sharded else buffer.slice(slot, buffer.home)
            self._local[parameter] = None if part is None else nn.Parameter(part, requires_grad=parameter.requires_grad)
        return self._local[parameter]

    def _stands_in(self, parameter: nn.Parameter) -> bool:
        place = self._place.get(parameter)
        return place is not None and (self.plan.shard_optimizer or place[1].mastered)

    def name(self, parameter: nn.Parameter) -> str | None:
        """Returns the parameter's name in the model, None for one that the engine does not hold."""
        if parameter not in self._place:
            return None
        _, buffer, slot = self._place[parameter]
        return buffer.layout.slots[slot].name

    def span(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Returns the elements [start, stop) of the flattened parameter that this rank updates."""
        _, buffer, slot = self._place[parameter]
        if not self.plan.shard_optimizer:
            s = buffer.layout.slots[slot]
            return 0, s.stop - s.start
        piece = buffer.pieces.get(slot)
        return (0, 0) if piece is None else (piece.start, piece.stop)

    def numbers_of(self, optimizer: Optimizer) -> frozenset[int]:
        """Returns the numbers of the optimizer's parameters in the engine's order, as its groups are now.

        Raises: StrategyError: it holds none of the model's parameters.
        """
        numbers = frozenset(self._number[p] for g in optimizer.param_groups for p in g["params"] if p in self._number)
        if not numbers and any(g["params"] for g in optimizer.param_groups):
            raise StrategyError(
                f"{type(optimizer).__name__} holds no parameter of the model that {self.plan.name} trains: make it "
                "from the module's parameters in configure_optimizers."
            )
        return numbers

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the final gradient of what this rank updates of `parameter`."""
        _, buffer, slot = self._place[parameter]
        if not self.plan.shard_optimizer:
            return parameter.grad
        return None if buffer.grad is None else buffer.piece_of_shard(slot, buffer.grad)

    def set_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Gives the optimizer's parameters their final gradients."""
        for parameter in parameters:
            local = self.of(parameter)
            if local is not None and local is not parameter:
                local.grad = self.gradient(parameter)

    def clear_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Takes them away again, so that the next step skips parameters without a gradient."""
        for parameter in parameters:
            local = self.of(parameter)
            if local is not None and local is not parameter:
                local.grad = None

    def hide_gradients(self, optimizer: Optimizer) -> None:
        """Lets an optimizer whose step is to be skipped find no gradient."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which groups and state hold this rank's parts; see [Note: parameter groups]."""
        groups, state = optimizer.param_groups, optimizer.state
        shown = [list(group["params"]) for group in groups]
        pairs = [(p, mine) for params in shown for p in params if (mine := self.of(p)) is not None]
        for parameter, mine in pairs:
            if mine is not parameter and parameter in state:
                state[mine] = state.pop(parameter)
        for group, params in zip(groups, shown, strict=True):
            group["params"] = [mine for p in params if (mine := self.of(p)) is not None]
        try:
            yield
        finally:
            for group, params in zip(groups, shown, strict=True):
                group["params"] = params
            for parameter, mine in pairs:
                if mine is not parameter and mine in state:
                    state[parameter] = state.pop(mine)


def shard_optimizer(optimizer: Optimizer, local: LocalParameters) -> None:
    """Cuts the state that the optimizer made in its constructor to what this rank updates.

    The optimizer object, its options and its groups stay the user's; schedulers keep their reference.

    Raises: StrategyError: the optimizer's arithmetic needs more than the elements it updates.
    """
    for kind, why in _WHY_NOT.items():
        if isinstance(optimizer, kind) and (local.plan.shard_optimizer or kind is LBFGS):
            raise StrategyError(
                f"{type(optimizer).__name__} cannot run under {local.plan.name}: {why}. Use an element-wise optimizer "
                "(AdamW, Adam, SGD, ...)" + ("." if kind is LBFGS else " or strategy ddp.")
            )
    local.numbers_of(optimizer)
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        mine = local.of(parameter)
        state = optimizer.state.pop(parameter, None) if mine is not parameter else None
        if state and mine is not None:
            optimizer.state[parameter] = {k: _cut(v, parameter, mine, local) for k, v in state.items()}
    made = [(f"optimizer state '{k}'", v) for s in optimizer.state.values() for k, v in s.items()]
    materialise_tensors((k, v) for k, v in made if isinstance(v, Tensor))


def _cut(value: Any, parameter: nn.Parameter, mine: nn.Parameter, local: LocalParameters) -> Any:
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
        start, stop = local.span(parameter)
        return value.reshape(-1)[start:stop].view(mine.shape).to(mine.dtype, copy=True)
    return value
