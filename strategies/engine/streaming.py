"""The optimizer's step where some of its state is on disk: range by range, read ahead and written behind.

[Note: streamed step] A buffer's shard is cut into ranges. While one range is stepped, weights, gradients and state of
the next ones are read, and those of the ones before are written. To the optimizer a range is a set of parameters of
their own, with their own state: whatever treats one element at a time computes what it computes for whole parameters.
State that is not laid out like a parameter (the count of steps) is the same for all ranges of one: each starts from
what it was before.

Source: Rajbhandari et al. 2021, ZeRO-Infinity, section 5.2.2 (arXiv 2104.07857).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from shardlight.ops.sums import scale_and_check
from shardlight.strategies.engine.buffer import FlatBuffer
from shardlight.strategies.engine.disk_tensor import DiskTensor
from shardlight.strategies.engine.kernels import take_step
from shardlight.strategies.engine.tiers import Fetched, Tiers
from shardlight.strategies.engine.units import UnitTable
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Range:
    """Elements [low, high) of a buffer's shard, and what of them is stepped."""

    buffer: FlatBuffer
    low: int
    high: int
    members: tuple[tuple[int, int, int], ...]
    """(number of the parameter, first element, end), counted from `low`."""


@dataclass
class Staged:
    """A range in memory, or on its way there."""

    range: Range
    weights: "Part"
    gradients: "Part"
    states: dict[str, "Part"]


class Part:
    """A range of one flat tensor, in memory: a view of it, or a staging buffer where it is on disk."""

    def __init__(self, flat: Tensor, low: int, high: int, tiers: Tiers, read: bool = True) -> None:
        self._tiers = tiers
        self._home = flat[low:high]
        self._fetched: Fetched | None = None
        self._staged: Tensor | None = None
        if not isinstance(flat, DiskTensor):
            self._staged = self._home
        elif read:
            self._fetched = tiers.fetch(self._home)
        else:
            self._staged = tiers.staged(self._home)

    @property
    def on_disk(self) -> bool:
        """Whether `tensor` is a copy."""
        return isinstance(self._home, DiskTensor)

    def tensor(self) -> Tensor:
        """Returns (high - low,) once it is there."""
        if self._staged is None:
            assert self._fetched is not None
            self._staged = self._fetched.wait()
        return self._staged

    def end(self, changed: bool) -> None:
        """Gives the memory back, and first writes what is in it where it was changed."""
        if not self.on_disk:
            return
        staged = self.tensor()
        if changed:
            self._tiers.write_behind(self._home, staged)
        elif self._fetched is not None:
            self._fetched.give()
        else:
            self._tiers.staging.give(staged)


@dataclass
class _Kept:
    """What one optimizer has of state that is laid out like parameters."""

    flats: dict[tuple[FlatBuffer, str], Tensor] = field(default_factory=dict)
    """By buffer and key: (shard_numel,), in the state's home."""
    like_parameters: dict[str, bool] = field(default_factory=dict)
    """By key: whether it is laid out like a parameter; where a parameter of more than one element has told."""
    views: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """By number of a parameter and key: its range of the flat tensor, as the optimizer's state shows it."""


class StreamedSteps:
    """Steps optimizers as [Note: streamed step] says, and keeps their state in its home.

    Args:
        moments: see take_step.
    """

    def __init__(self, table: UnitTable, tiers: Tiers, moments: torch.dtype | None) -> None:
        self._table = table
        self._tiers = tiers
        self._moments = moments
        self._kept: WeakKeyDictionary[Optimizer, _Kept] = WeakKeyDictionary()

    def keep(self, optimizer: Optimizer, number: int, state: dict[str, Any]) -> None:
        """Brings what a parameter's state has in memory, and is laid out like the parameter, to its home."""
        _, buffer, slot = self._table.places[number]
        piece = buffer.pieces.get(slot)
        kept = self._kept_of(optimizer)
        for key, value in state.items():
            if piece is None or value is kept.views.get((number, key)):
                continue
            if self._is_like(kept, key, value, piece.stop - piece.start):
                state[key] = self._view(kept, buffer, slot, number, key, value.dtype)
                state[key].copy_(value)

    def step(self, optimizer: Optimizer, numbers: list[int], parts: dict[int, nn.Parameter | None], op: bool) -> None:
        """Steps the optimizer, whose groups and state hold this rank's parts.

        Args:
            numbers: of the parameters that have a gradient.
            parts: by id of a parameter: what this rank's optimizer has of it.
            op: a compiled op computes it.
        """
        parameters = self._table.parameters
        mine = {n: part for n in numbers if (part := parts.get(id(parameters[n]), parameters[n])) is not None}
        for number, part in mine.items():
            self.keep(optimizer, number, optimizer.state.get(part, {}))
        group_of = {id(p): at for at, group in enumerate(optimizer.param_groups) for p in group["params"]}
        groups = {number: group_of[id(part)] for number, part in mine.items()}
        before = {n: dict(optimizer.state[part]) if part in optimizer.state else None for n, part in mine.items()}
        after: dict[int, dict[str, Any]] = {}
        if not op:
            for buffer in dict.fromkeys(self._table.places[n][1] for n in mine):
                if not isinstance(buffer.grad, DiskTensor):
                    buffer.settle()
        ranges = list(self._ranges(mine))
        count = self._tiers.offload.staging_count
        coming = [self._stage(optimizer, r) for r in ranges[: count - 1]]
        for at in range(len(ranges)):
            coming += [self._stage(optimizer, later) for later in ranges[at + count - 1 : at + count]]
            self._step_range(optimizer, coming.pop(0), groups, before, after, op)
        for number, state in after.items():
            optimizer.state[mine[number]] = state
        self._tiers.reap()
        for buffer in dict.fromkeys(r.buffer for r in ranges):
            buffer.copied = op and buffer.mastered and not buffer.plan.shard_parameters

    def _kept_of(self, optimizer: Optimizer) -> _Kept:
        if optimizer not in self._kept:
            self._kept[optimizer] = _Kept()
        return self._kept[optimizer]

    def _ranges(self, mine: dict[int, nn.Parameter]) -> Iterator[Range]:
        step = self._tiers.range_numel
        for buffer in dict.fromkeys(self._table.places[number][1] for number in sorted(mine)):
            pieces = [(buffer.numbers[slot], p) for slot, p in buffer.pieces.items() if buffer.numbers[slot] in mine]
            for low in range(0, buffer.layout.shard_numel, step):
                high = min(low + step, buffer.layout.shard_numel)
                spans = ((n, max(low, p.offset), min(high, p.offset + p.stop - p.start)) for n, p in pieces)
                members = tuple((n, start - low, stop - low) for n, start, stop in spans if start < stop)
                if members:
                    yield Range(buffer, low, high, members)

    def _stage(self, optimizer: Optimizer, part: Range) -> Staged:
        buffer, low, high = part.buffer, part.low, part.high
        assert buffer.grad is not None
        flats = {key: flat for (b, key), flat in self._kept_of(optimizer).flats.items() if b is buffer}
        return Staged(
            part,
            Part(buffer.shard, low, high, self._tiers),
            Part(buffer.grad, low, high, self._tiers),
            {key: Part(flat, low, high, self._tiers) for key, flat in flats.items()},
        )

    def _step_range(
        self,
        optimizer: Optimizer,
        staged: Staged,
        groups: dict[int, int],
        before: dict[int, dict[str, Any] | None],
        after: dict[int, dict[str, Any]],
        op: bool,
    ) -> None:
        buffer, members = staged.range.buffer, staged.range.members
        weights, gradients = staged.weights.tensor(), staged.gradients.tensor()
        if not op and staged.gradients.on_disk:
            for factor in buffer.factors or ():
                scale_and_check(gradients, factor)
        state: dict[Any, Any] = defaultdict(dict)
        by_group: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        held: dict[int, tuple[tuple[float, float] | None, Tensor | None]] = {}
        made: dict[int, nn.Parameter] = {}
        copying = op and buffer.mastered and not buffer.plan.shard_parameters
        for number, start, stop in members:
            made[number] = parameter = nn.Parameter(weights[start:stop])
            parameter.grad = gradients[start:stop]
            by_group[groups[number]].append(parameter)
            there = before[number]
            if there is not None:
                state[parameter] = {
                    key: staged.states[key].tensor()[start:stop]
                    if isinstance(value, Tensor) and self._streams(optimizer, number, key)
                    else value.clone()
                    if isinstance(value, Tensor)
                    else deepcopy(value)
                    for key, value in there.items()
                }
            if copying:
                held[id(parameter)] = (
                    buffer.factors,
                    buffer.own_range(staged.range.low + start, staged.range.low + stop),
                )
        with _holding(optimizer, by_group, state):
            if op:
                take_step(optimizer, buffer.factors, held, self._moments)
            else:
                type(optimizer).step(optimizer)
        for number, start, stop in members:
            if made[number] in state:
                after[number] = self._take_back(optimizer, staged, number, (start, stop), state[made[number]])
        staged.weights.end(True)
        staged.gradients.end(False)
        for part in staged.states.values():
            part.end(True)

    def _take_back(
        self, optimizer: Optimizer, staged: Staged, number: int, span: tuple[int, int], state: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns a parameter's state as it is shown between steps, with what is new of it in the staging buffers."""
        kept = self._kept_of(optimizer)
        part, (start, stop) = staged.range, span
        _, buffer, slot = self._table.places[number]
        shown: dict[str, Any] = {}
        for key, value in state.items():
            if not self._is_like(kept, key, value, stop - start):
                shown[key] = value
                continue
            shown[key] = self._view(kept, buffer, slot, number, key, value.dtype)
            if key not in staged.states:
                flat = kept.flats[buffer, key]
                # Others may have state there already.
                staged.states[key] = Part(flat, part.low, part.high, self._tiers)
            there = staged.states[key].tensor()[start:stop]
            if there.data_ptr() != value.data_ptr():
                there.copy_(value)
        return shown

    def _streams(self, optimizer: Optimizer, number: int, key: str) -> bool:
        return (number, key) in self._kept_of(optimizer).views

    def _is_like(self, kept: _Kept, key: str, value: Any, numel: int) -> bool:
        if not isinstance(value, Tensor) or not value.dim() or value.numel() != numel:
            return False
        if numel > 1:
            kept.like_parameters[key] = True
        return kept.like_parameters.get(key, key != "step")

    def _view(self, kept: _Kept, buffer: FlatBuffer, slot: int, number: int, key: str, dtype: torch.dtype) -> Tensor:
        flat = kept.flats.get((buffer, key))
        if flat is None or flat.dtype != dtype:
            numel = buffer.layout.shard_numel
            on_disk = self._tiers.keeps("optimizer")
            flat = self._tiers.empty(numel, dtype, "optimizer") if on_disk else torch.empty(numel, dtype=dtype)
            kept.flats[buffer, key] = flat
            kept.views = {k: v for k, v in kept.views.items() if k[1] != key or k[0] not in buffer.numbers}
        if (number, key) not in kept.views:
            view = buffer.piece_of_shard(slot, flat)
            assert view is not None
            kept.views[number, key] = view
        return kept.views[number, key]


@contextmanager
def _holding(optimizer: Optimizer, params: list[list[nn.Parameter]], state: dict[Any, Any]) -> Iterator[None]:
    """Context in which an optimizer has these parameters by group and this state, and no hooks."""
    shown = [group["params"] for group in optimizer.param_groups]
    whole = optimizer.state
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for group, mine in zip(optimizer.param_groups, params, strict=True):
        group["params"] = mine
    optimizer.state = state  # type: ignore[assignment]
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
        optimizer.state = whole
        for group, mine in zip(optimizer.param_groups, shown, strict=True):
            group["params"] = mine
