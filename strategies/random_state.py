"""The random generators of a process, and the state that an epoch's order of data was drawn from."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """Returns the state of this process's random generators."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state["numpy"] = (name, keys, int(position), int(has_gauss), float(gauss))
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts the generators back to what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class EpochRandomness:
    """Lets a resumed run draw the order of a half-done epoch again, and then go on with the numbers it had.

    `epoch_start`: by loader, the state when the running epoch of its data was begun.
    """

    def __init__(self) -> None:
        self.epoch_start: dict[int, dict[str, Any]] = {}
        self._resumed: set[int] = set()
        """Numbers of the loaders whose data a checkpoint was in, where it is not begun yet."""
        self._now: Mapping[str, Any] | None = None
        """What a checkpoint's run had, until training goes on."""
        self._after_order: Mapping[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {
            "now": random_state(),
            "epoch_start": [self.epoch_start.get(n) for n in range(1 + max(self.epoch_start, default=-1))],
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Takes what a checkpoint has kept; it is used when training goes on and its data is begun."""
        self.epoch_start = {n: state for n, state in enumerate(saved["epoch_start"]) if state is not None}
        self._now = saved["now"]
        self._resumed = set(self.epoch_start)

    def set_now(self) -> None:
        """Called when training goes on (or there is none): from here the numbers are those that the run had."""
        if self._now is not None:
            set_random_state(self._now)
            self._now = None

    def begin_epoch(self, number: int, half_done: bool) -> None:
        """Called when the data of loader `number` is about to be begun, from its start or in the middle of an epoch."""
        if number in self._resumed and half_done:
            # A loader that is read ahead is begun before training goes on.
            self._after_order = random_state() if self._now is None else self._now
            set_random_state(self.epoch_start[number])
        else:
            self.set_now()
        self._resumed.discard(number)
        self.epoch_start[number] = random_state()

    def go_on(self) -> None:
        """Called when the position in the data is reached: the numbers go on as they were."""
        if self._after_order is not None:
            set_random_state(self._after_order)
            self._after_order = None


class Generators:
    """The random generators that a loader was given, which nobody else saves."""

    def __init__(self, loader: Any) -> None:
        found = [getattr(loader, "generator", None), getattr(getattr(loader, "sampler", None), "generator", None)]
        self._found = [g for n, g in enumerate(found) if isinstance(g, torch.Generator) and g not in found[:n]]

    def state(self) -> list[Tensor]:
        """Returns the state of each."""
        return [g.get_state() for g in self._found]

    def set_state(self, states: list[Tensor]) -> None:
        """Puts them back to what `state` returned."""
        for generator, state in zip(self._found, states, strict=False):
            generator.set_state(state)
