"""The user's optimizer on this rank's parts of the parameters.

[Note: parameter groups] Between steps an optimizer's groups and state show the user's own parameters, so that code
which goes through `param_groups` (zero_grad, toggle_optimizer, clipping by hand, add_param_group) does what it does in
plain PyTorch. Only while it steps do they hold this rank's parts: a range of each parameter, or, where the optimizer
needs them whole, those that this rank owns ([Note: whole parameters], owners.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from shardlight.strategies.engine.deferred.tensors import materialise_tensors
from shardlight.strategies.engine.kernels import Factors, take_step
from shardlight.strategies.engine.plan import StatePlan
from shardlight.strategies.engine.streaming import StreamedSteps
from shardlight.strategies.engine.units import UnitTable
from shardlight.strategies.engine.whole import WholeParameters
from shardlight.strategies.errors import StrategyError
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

_WHY_NOT = {
    LBFGS: "it evaluates the loss several times per step and needs all gradients in one place",
    SparseAdam: "it needs sparse gradients",
}


class LocalParameters:
    """The part of every parameter that this rank updates, as a parameter for the optimizer.

    Where optimizer state is replicated that is the parameter itself, or its master weights; else a 1-dim view of the
    shard, or nothing for a parameter of which this rank owns no element. For an optimizer that needs parameters whole
    it is the whole parameter, or nothing where another rank owns it.

    Args:
        moments: the dtype in which moments of fp32 parameters are kept; None: the parameter's.
    """

    def __init__(self, table: UnitTable, moments: torch.dtype | None = None) -> None:
        self._table = table
        self.moments = moments
        self.plan: StatePlan = table.plan
        self._parts: dict[int, nn.Parameter | None] = {}
        """By id of a parameter that another one stands in for: what the optimizer gets; made with the first step."""
        self._whole = WholeParameters(table)
        self.streamed: StreamedSteps | None = (
            StreamedSteps(table, table.tiers, moments) if table.tiers is not None else None
        )
        """Takes steps where some of the state is on disk."""

    def of(self, parameter: nn.Parameter, optimizer: Optimizer) -> nn.Parameter | None:
        """Returns what the optimizer gets for `parameter`, None if this rank owns nothing of it."""
        return self._parts_for(optimizer).get(id(parameter), parameter)

    def is_whole(self, parameter: nn.Parameter, optimizer: Optimizer) -> bool:
        """Whether the optimizer's state of the parameter is in one piece where there is any."""
        owned = self._whole.of(optimizer)
        return not self.plan.shard_optimizer or (owned is not None and id(parameter) in owned.parts)

    def _parts_for(self, optimizer: Optimizer) -> Mapping[int, nn.Parameter | None]:
        owned = self._whole.of(optimizer)
        return self._made_parts() if owned is None else {**self._made_parts(), **owned.parts}

    def _made_parts(self) -> dict[int, nn.Parameter | None]:
        if not self._parts:
            sharded = self.plan.shard_optimizer
            for parameter, (_, buffer, slot) in zip(self._table.parameters, self._table.places, strict=True):
                if sharded or buffer.mastered:
                    part = buffer.piece_of_shard(slot, buffer.shard) if sharded else buffer.slice(slot, buffer.home)
                    self._parts[id(parameter)] = None if part is None else nn.Parameter(part)
        return self._parts

    def name(self, parameter: nn.Parameter) -> str | None:
        """Returns the parameter's name in the model, None for one that the engine does not hold."""
        number = self._table.number_of_id.get(id(parameter))
        return None if number is None else self._table.names[number]

    def span(self, parameter: nn.Parameter, optimizer: Optimizer) -> tuple[int, int]:
        """Returns the elements [start, stop) of the flattened parameter that this rank updates."""
        _, buffer, slot = self._table.place[parameter]
        owned = self._whole.of(optimizer)
        if not self.plan.shard_optimizer or (owned is not None and owned.parts.get(id(parameter)) is not None):
            s = buffer.layout.slots[slot]
            return 0, s.stop - s.start
        if self.is_whole(parameter, optimizer):
            return 0, 0
        piece = buffer.pieces.get(slot)
        return (0, 0) if piece is None else (piece.start, piece.stop)

    def moment_dtype(self, mine: nn.Parameter) -> torch.dtype:
        """Returns in which dtype a moment of what the optimizer gets for a parameter is kept."""
        return self.moments if self.moments is not None and mine.dtype == torch.float32 else mine.dtype

    def numbers_of(self, optimizer: Optimizer) -> frozenset[int]:
        """Returns the numbers of the optimizer's parameters in the engine's order, as its groups are now.

        Raises: StrategyError: it holds none of the model's parameters.
        """
        # Mapped in C: with some hundred parameters a loop in Python shows.
        held = [map(self._table.number_of_id.get, map(id, group["params"])) for group in optimizer.param_groups]
        numbers = frozenset(chain.from_iterable(held)) - {None}
        if not numbers and any(g["params"] for g in optimizer.param_groups):
            raise StrategyError(
                f"{type(optimizer).__name__} holds no parameter of the model that {self.plan.name} trains: make it "
                "from the module's parameters in configure_optimizers."
            )
        return numbers

    def gradient(self, number: int) -> Tensor | None:
        """Returns the final gradient of what this rank updates of the parameter with that number."""
        _, buffer, slot = self._table.places[number]
        if not self.plan.shard_optimizer:
            return self._table.parameters[number].grad
        return buffer.gradient_pieces().get(slot)

    def needs_whole(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer gets any parameter whole."""
        return self._whole.of(optimizer) is not None

    def set_gradients(self, optimizer: Optimizer, numbers: list[int]) -> None:
        """Gives the optimizer's parameters their final gradients. Collective where it needs them whole."""
        owned = self._whole.of(optimizer)
        if owned is not None:
            with torch.no_grad():
                self._whole.collect(owned, [n for n in numbers if n in owned.owners])
            numbers = [n for n in numbers if n not in owned.owners]
        self._set(numbers, self.gradient)

    def kernel_step(self, optimizer: Optimizer, numbers: list[int]) -> None:
        """Lets a compiled op step what has a gradient, while the optimizer holds this rank's parts."""
        self._set(numbers, self._unsettled)
        parameters, parts = self._table.parameters, self._made_parts()
        buffers = dict.fromkeys(map(itemgetter(1), map(self._table.places.__getitem__, numbers)))
        copying = [b for b in buffers if b.mastered and not self.plan.shard_parameters]
        factors = {b.factors for b in buffers}
        held: dict[int, tuple[Factors | None, Tensor | None]] = {}
        if copying or len(factors) > 1:
            for number in numbers:
                _, buffer, slot = self._table.places[number]
                part = parts.get(id(parameters[number]), parameters[number])
                held[id(part)] = buffer.factors, buffer.own_copy(slot) if buffer in copying else None
        take_step(optimizer, factors.pop() if len(factors) == 1 else None, held, self.moments)
        for buffer in copying:
            buffer.copied = True

    def streamed_step(self, optimizer: Optimizer, numbers: list[int], op: bool) -> None:
        """Steps what has a gradient range by range, while the optimizer holds this rank's parts; see streaming.py.

        Args:
            op: a compiled op computes it.
        """
        assert self.streamed is not None
        self.streamed.step(optimizer, numbers, self._made_parts(), op)

    def keep_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> None:
        """Brings what an optimizer has in memory of a parameter's state to its home."""
        number = self._table.number_of_id.get(id(parameter))
        if self.streamed is not None and number is not None and parameter in optimizer.state:
            self.streamed.keep(optimizer, number, optimizer.state[parameter])

    def _unsettled(self, number: int) -> Tensor | None:
        if not self.plan.shard_optimizer:
            return self.gradient(number)
        _, buffer, slot = self._table.places[number]
        return buffer.unsettled_pieces().get(slot)

    def clear_gradients(self, optimizer: Optimizer, numbers: list[int]) -> None:
        """After the step: takes them away, so that the next one skips parameters without a gradient; what was whole
        goes back into the shards, which is collective.
        """
        owned = self._whole.of(optimizer)
        if owned is not None:
            with torch.no_grad():
                self._whole.spread(owned, [n for n in numbers if n in owned.owners])
            numbers = [n for n in numbers if n not in owned.owners]
        self._set(numbers, lambda number: None)

    def _set(self, numbers: list[int], gradient: Callable[[int], Tensor | None]) -> None:
        parameters, parts = self._table.parameters, self._made_parts()
        for number, local in zip(numbers, map(parts.get, map(id, map(parameters.__getitem__, numbers))), strict=True):
            if local is not None:
                local.grad = gradient(number)

    def hide_gradients(self, optimizer: Optimizer) -> None:
        """Lets an optimizer whose step is to be skipped find no gradient."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Context in which groups and state hold this rank's parts; see [Note: parameter groups]."""
        groups, state, parts = optimizer.param_groups, optimizer.state, self._parts_for(optimizer)
        shown = [group["params"] for group in groups]
        local = [list(map(parts.get, map(id, params), params)) for params in shown]
        back = dict(zip(map(id, chain(*local)), chain(*shown), strict=True))
        _rename(state, parts)
        for group, mine in zip(groups, local, strict=True):
            group["params"] = [p for p in mine if p is not None]
        try:
            yield
        finally:
            for group, params in zip(groups, shown, strict=True):
                group["params"] = params
            _rename(state, back)
            self._whole.put_away(optimizer)


def _rename(state: dict[Any, Any], names: Mapping[int, Any]) -> None:
    """Gives the entries of an optimizer's state other parameters as their keys: by id of what it is now."""
    keys = list(state)
    renamed = map(names.get, map(id, keys), keys)
    moved = {old if new is None else new: held for old, new, held in zip(keys, renamed, state.values(), strict=True)}
    state.clear()
    state.update(moved)


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
    if local.streamed is not None and local.needs_whole(optimizer):
        raise StrategyError(
            f"{type(optimizer).__name__} needs whole parameters, and state on disk is streamed element by element: "
            "use an element-wise optimizer (AdamW, Adam, SGD, ...), or leave everything in memory (strategy zero3)."
        )
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        mine = local.of(parameter, optimizer)
        state = optimizer.state.pop(parameter, None) if mine is not parameter else None
        if state and mine is not None:
            span = local.span(parameter, optimizer)
            optimizer.state[parameter] = {k: _cut(k, v, parameter, mine, span) for k, v in state.items()}
            local.keep_state(optimizer, parameter)
    made = [(f"optimizer state '{k}'", v) for s in optimizer.state.values() for k, v in s.items()]
    materialise_tensors((k, v) for k, v in made if isinstance(v, Tensor))


def _cut(key: str, value: Any, parameter: nn.Parameter, mine: nn.Parameter, span: tuple[int, int]) -> Any:
    # A 0-dim parameter's moments look like the count of steps.
    if isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() or key != "step"):
        start, stop = span
        return value.reshape(-1)[start:stop].view(mine.shape).to(mine.dtype, copy=True)
    return value
