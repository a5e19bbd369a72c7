"""What each micro-batch has for itself where micro-batches take turns: see [Note: layer order], interleave.py."""

from copy import copy
from typing import Any

import torch
from shardlight.strategies.engine.seeding import seed_generators
from torch import nn

_MISSING = object()
_Place = tuple[nn.Module, str]


class RandomNumbers:
    """The generators of the CPU and of a device. Each micro-batch begins with a seed of its own.

    Args:
        seeds: by micro-batch.
    """

    def __init__(self, seeds: list[int], device: torch.device) -> None:
        self._device = device
        self._seeds = iter(seeds)
        self._before = self._now()

    def _now(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        on_cuda = self._device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if on_cuda else None

    def enter(self, state: Any) -> None:
        """See Owned; who has had no turn begins with the next seed."""
        if state is None:
            seed_generators(next(self._seeds), self._device)
        else:
            self._put(state)

    def leave(self) -> Any:
        """See Owned."""
        return self._now()

    def end(self, state: Any) -> None:
        """Random numbers go on as if the batch had drawn none."""
        self._put(self._before)

    def _put(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._device)


class DefaultDtype:
    """The dtype that tensors are made with: under 64-true it is another one while a step runs."""

    def __init__(self) -> None:
        self._before = torch.get_default_dtype()

    def enter(self, state: Any) -> None:
        """See Owned."""
        torch.set_default_dtype(state or self._before)

    def leave(self) -> Any:
        """See Owned."""
        found = torch.get_default_dtype()
        torch.set_default_dtype(self._before)
        return found

    def end(self, state: Any) -> None:
        """See Owned."""


class Fields:
    """Attributes of an object of ours. What the last micro-batch has does not stay."""

    def __init__(self, owner: Any, *names: str) -> None:
        self._owner = owner
        self._names = names

    def enter(self, state: Any) -> None:
        """See Owned."""
        if state is not None:
            for name, value in zip(self._names, state, strict=True):
                setattr(self._owner, name, value)

    def leave(self) -> Any:
        """See Owned."""
        return [getattr(self._owner, name) for name in self._names]

    def end(self, state: Any) -> None:
        """See Owned."""


class ModuleAttributes:
    """What user code keeps in attributes of modules in the course of a step (an auxiliary loss, a list of them).

    A micro-batch finds what was there before the batch, and what it has written itself; what the last one leaves stays.
    Lists, dicts and sets that it changes are copies of its own. Parameters and buffers are everyone's.
    """

    def __init__(self, module: nn.Module) -> None:
        # PyTorch's own modules write none.
        self._modules = [m for m in module.modules() if not type(m).__module__.startswith("torch.nn.")]
        self._before: dict[_Place, Any] = {}
        """What was there before the turn, of what the micro-batch has values of its own for."""
        self._seen: list[dict[str, Any]] = []
        self._contents: dict[_Place, Any] = {}
        """Copies of containers as they were at the beginning of the turn."""

    def enter(self, state: Any) -> None:
        """See Owned."""
        own: dict[_Place, Any] = state or {}
        self._before = {place: vars(place[0]).get(place[1], _MISSING) for place in own}
        _put(own)
        self._seen = [dict(vars(module)) for module in self._modules]
        self._contents = {
            (module, name): copy(value)
            for module, seen in zip(self._modules, self._seen, strict=True)
            for name, value in seen.items()
            if type(value) in (list, dict, set) and not name.startswith("_")
        }

    def leave(self) -> Any:
        """See Owned."""
        own = {place: vars(place[0]).get(place[1], _MISSING) for place in self._before}
        for module, seen in zip(self._modules, self._seen, strict=True):
            now = vars(module)
            changed = [n for n, value in now.items() if seen.get(n, _MISSING) is not value]
            changed += [n for n in seen if n not in now] if len(now) != len(seen) or changed else []
            for name in changed:
                own[module, name] = now.get(name, _MISSING)
                self._before.setdefault((module, name), seen.get(name, _MISSING))
        for (module, name), content in self._contents.items():
            held = vars(module).get(name)
            if (module, name) not in self._before and not _same(held, content):
                own[module, name] = copy(held)
                held.clear()
                (held.extend if type(held) is list else held.update)(content)
                self._before[module, name] = held
        _put(self._before)
        self._before, self._seen, self._contents = {}, [], {}
        return own

    def end(self, state: Any) -> None:
        """See Owned."""
        _put(state or {})


def _put(values: dict[_Place, Any]) -> None:
    for (module, name), value in values.items():
        if value is _MISSING:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = value


def _same(held: Any, content: Any) -> bool:
    if len(held) != len(content):
        return False
    if type(held) is set:
        return held == content
    if type(held) is dict:
        return all(key in content and content[key] is value for key, value in held.items())
    return all(a is b for a, b in zip(held, content, strict=True))
