"""Carries a schedule out on one rank: runs its stages on micro-batches, and exchanges with the stages next to them."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.pipeline.cut import Cut, Outgoing
from shardlight.strategies.engine.pipeline.messages import Messages
from shardlight.strategies.engine.pipeline.schedules import Action, Kind, Schedule
from shardlight.strategies.engine.pipeline.split_backward import SplitBackward
from shardlight.strategies.engine.seeding import seed_generators
from torch import Tensor

AHEAD = 3
"""For how many actions ahead what they need is being received."""


@dataclass
class _Forward:
    """What a forward leaves for its backward."""

    output: Tensor
    received: Tensor | None


class _Tail:
    """The end of the user's step, behind the last block, on a whole batch.

    Args:
        parts: micro-batches of the batch.
    """

    def __init__(self, cut: Cut, step: Callable[[], Any], loss_of: Callable[[int, Any], Tensor], parts: int) -> None:
        self._cut = cut
        self._step = step
        self._loss_of = loss_of
        self.parts = parts
        self.outputs: list[Tensor] = []
        """Of the last block, by micro-batch."""
        self.gradients: list[Tensor] = []

    def run(self, engine: Engine) -> None:
        """Computes the loss of the batch, and the gradients of `outputs`."""
        hidden = torch.cat([output.detach() for output in self.outputs]).requires_grad_(True)
        with engine.forward():
            loss = self._loss_of(0, self._cut.run_tail(self._step, hidden))
        with engine.gradients.running_backward():
            torch.autograd.backward(loss)
        gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
        self.gradients = list(gradient.split([output.shape[0] for output in self.outputs]))


class Runner:
    """Runs this rank's part of a pipeline.

    Args:
        cut: the model as the stages of this rank run it.
        engine: of the parameters of these stages.
        placement: the rank of each virtual stage.
    """

    def __init__(self, cut: Cut, engine: Engine, placement: tuple[int, ...]) -> None:
        self._cut = cut
        self._engine = engine
        self._ranks = engine.ranks.pipeline
        self._messages = Messages(self._ranks, placement, self._ranks.device)
        self._last = len(placement) - 1
        self._tail: _Tail | None = None
        self.split: type[SplitBackward] = SplitBackward

    def train(
        self,
        schedule: Schedule,
        kinds: Sequence[Hashable],
        step: Callable[[int], Any],
        loss_of: Callable[[int, Any], Tensor],
        seeds: Sequence[int],
        tail: Callable[[], Any] | None = None,
    ) -> None:
        """Runs forward and backward of all micro-batches; gradients are left to the engine's window.

        Args:
            kinds: of each micro-batch, see [Note: known shapes].
            step: runs the user's step on a micro-batch, given its number.
            loss_of: called on the last stage with a number and what the step returned; returns what to backpropagate.
            seeds: of each micro-batch: the random numbers that its steps begin with on every stage.
            tail: runs the user's step on the whole batch; then the last stage runs it once, behind its blocks, whose
                outputs for all micro-batches it gets together. The schedule has all forwards first.
        """
        self._tail = None if tail is None else _Tail(self._cut, tail, loss_of, len(kinds))
        forwards: dict[tuple[int, int], _Forward] = {}
        begun: dict[tuple[int, int], SplitBackward] = {}
        with _random_numbers():
            for action in self._actions(schedule, kinds):
                place = action.stage, action.micro_batch
                if action.kind is Kind.FORWARD:
                    forwards[place] = self._forward(action, kinds[place[1]], step, loss_of, seeds[place[1]])
                elif action.kind is Kind.BACKWARD:
                    self._backward(action, kinds[place[1]], forwards.pop(place), at_once=True)
                elif action.kind is Kind.BACKWARD_INPUT:
                    begun[place] = self._backward(action, kinds[place[1]], forwards.pop(place), at_once=False)
                elif action.kind is Kind.BACKWARD_WEIGHT:
                    with self._engine.gradients.running_backward():
                        begun.pop(place).weight()
        self._messages.finish()

    def evaluate(
        self,
        schedule: Schedule,
        kinds: Sequence[Hashable],
        step: Callable[[int], Any],
        ended: Callable[[], None],
        seeds: Sequence[int],
    ) -> list[Any]:
        """Runs the forward of all micro-batches; returns what the steps returned, on the last stage's rank.

        Args:
            ended: called after each step that ran to its end.
        """
        results = []
        with _random_numbers():
            for action in self._actions(schedule.forward_only(), kinds):
                number = action.micro_batch
                result = self._run(action, kinds[number], step, seeds[number], None)[0]
                if action.stage == self._last:
                    results.append(result)
                    ended()
        self._messages.finish()
        return results

    def _actions(self, schedule: Schedule, kinds: Sequence[Hashable]) -> Iterator[Action]:
        """Yields this rank's actions; what those to come need is being received meanwhile."""
        actions = schedule.actions[self._ranks.rank]
        for number, action in enumerate(actions):
            for coming in actions[number : number + AHEAD]:
                if coming.kind is Kind.FORWARD and coming.stage:
                    self._messages.expect_activation(kinds[coming.micro_batch], coming.stage, coming.micro_batch)
                elif coming.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and coming.stage < self._last:
                    self._messages.expect_gradient(kinds[coming.micro_batch], coming.stage, coming.micro_batch)
            yield action

    def _run(
        self, action: Action, kind: Hashable, step: Callable[[int], Any], seed: int, received: Tensor | None
    ) -> tuple[Any, Tensor | None]:
        """Runs one stage's forward on one micro-batch; hands on what it puts out."""
        stage, number = action.stage, action.micro_batch
        if stage and received is None:
            received = self._messages.take_activation(kind, stage, number)
            if torch.is_grad_enabled() and received.is_floating_point():
                received.requires_grad_(True)
        seed_generators(seed, self._ranks.device)
        own_seed = (seed + 0x9E3779B97F4A7C15 * stage) % (1 << 63)
        with self._engine.forward():
            if self._tail is not None and stage == self._last:
                result: Any = self._cut.run_blocks(stage, lambda: step(number), received, own_seed)
            else:
                result = self._cut.run(stage, lambda: step(number), received, own_seed, number)
        if isinstance(result, Outgoing) and stage < self._last:
            self._messages.send_activation(kind, stage, number, result.hidden)
        return result, received

    def _forward(
        self,
        action: Action,
        kind: Hashable,
        step: Callable[[int], Any],
        loss_of: Callable[[int, Any], Tensor],
        seed: int,
    ) -> _Forward:
        result, received = self._run(action, kind, step, seed, None)
        if self._tail is not None and action.stage == self._last:
            self._tail.outputs.append(result.hidden)
            if len(self._tail.outputs) == self._tail.parts:
                self._tail.run(self._engine)
        if isinstance(result, Outgoing):
            return _Forward(result.hidden, received)
        return _Forward(loss_of(action.micro_batch, result), received)

    def _backward(self, action: Action, kind: Hashable, forward: _Forward, at_once: bool) -> SplitBackward:
        """Runs the backward, up to the weights' gradients unless `at_once`; hands the input's to the stage before."""
        split = self.split(
            forward.output, self._gradient(action, kind), forward.received, self._engine.gradients, at_once
        )
        found = None
        with self._engine.gradients.running_backward():
            if forward.output.requires_grad:
                found = split.input()
        self._hand_back(action, forward.received, found)
        return split

    def _gradient(self, action: Action, kind: Hashable) -> Tensor | None:
        """Returns the gradient of a stage's output; None: the output is the loss."""
        if action.stage == self._last:
            return None if self._tail is None else self._tail.gradients[action.micro_batch]
        return self._messages.take_gradient(kind, action.stage, action.micro_batch)

    def _hand_back(self, action: Action, received: Tensor | None, gradient: Tensor | None) -> None:
        if received is None or not received.requires_grad:
            return
        # The stage before waits for it, whether or not anything depends on its output.
        self._messages.send_gradient(
            action.stage, action.micro_batch, torch.zeros_like(received) if gradient is None else gradient
        )


@contextmanager
def _random_numbers() -> Iterator[None]:
    """Afterwards random numbers go on as if none had been drawn inside."""
    state = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
