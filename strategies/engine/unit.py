"""One unit's life: gathered when it is used, released when it is not."""

import time
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Literal

import torch
from shardlight.strategies.engine.buffer import FlatBuffer
from shardlight.strategies.errors import GradientError, StrategyError
from torch import Tensor, nn

_is_gathered = attrgetter("gathered")


class SavedWeight:
    """What autograd keeps instead of a view of a unit's weights: unpacking it gathers the unit first."""

    __slots__ = ("_held", "tensor", "unit", "version")

    def __init__(self, unit: "Unit", tensor: Tensor) -> None:
        self.unit = unit
        self.tensor = tensor
        self.version: int = tensor._version
        # A view keeps what it is a view of: the parameter, or something between them such as `weight.detach()`.
        held, own, saved = [tensor, tensor._base], unit.own, unit.saved
        self._held: list[Tensor] = [
            t for t, n in zip(held, map(id, held), strict=True) if t is not None and n not in own
        ]
        for number in map(id, self._held):
            saved[number] = saved.get(number, 0) + 1

    def __del__(self) -> None:
        saved = self.unit.saved
        for number in map(id, self._held):
            saved[number] -= 1
            if not saved[number]:
                del saved[number]


class SavedCast:
    """What autograd keeps instead of autocast's copy of a weight: unpacking it gathers the unit and casts again."""

    __slots__ = ("_dtype", "_place", "_version", "parameter", "unit")

    def __init__(self, parameter: nn.Parameter, unit: "Unit", copy: Tensor) -> None:
        self.parameter = parameter
        self.unit = unit
        self._dtype = copy.dtype
        self._place = copy.shape, copy.stride(), copy.storage_offset()
        self._version: int = parameter._version

    def again(self) -> Tensor:
        """Returns the copy, made anew. Raises: GradientError: the weight was changed since forward."""
        if self.parameter._version != self._version:
            raise GradientError(
                f"a weight of unit '{self.unit.name}' that backward needs was changed in place after forward. Run "
                "backward before the step, or clone it first."
            )
        with torch.no_grad():
            return self.parameter.detach().to(self._dtype, copy=True).as_strided(*self._place)


LOST = (
    "'{name}' was changed inside a step (in place, or its `data` was set). Weights are sharded, and the change is "
    "lost: make it after the step under `with strategy.gathered(module):`, on every rank."
)


class Unit:
    """Buffers that are gathered and reduced together, one per (dtype, trainable or not).

    [Note: outside views] A tensor that shares a unit's storage and that neither the engine nor a `SavedWeight` holds (a
    module that returns a slice of its weight, a view kept in an attribute) would read freed memory after a release. The
    number of references to the storage tells: with such a view about, the unit stays gathered, and if the view is still
    there at the end of the step that is an error which names the unit.
    """

    def __init__(self, index: int, name: str, keep: bool, buffers: list[FlatBuffer]) -> None:
        self.index = index
        self.name = name
        self.keep = keep
        self.buffers = buffers
        self.sharded: bool = any(b.plan.shard_parameters for b in buffers)
        """Whether it is released at all; else its weights are always there."""
        self.keep_gathered: Literal["no", "backward", "window"] = "no"
        """How long it stays gathered after forward: not at all, to its own backward, or to the optimizer's step."""
        self.depth = 0
        """How many forwards of the unit's modules are running."""
        self.own: frozenset[int] = frozenset(id(p) for b in buffers for p in b.params)
        """By id: the parameters, whose references to the storage are the engine's own."""
        self.saved: dict[int, int] = {}
        """By id: the tensors that some `SavedWeight` holds, and how many do; each is one reference to the storage."""
        self.arriving = False
        """A gather is under way."""
        self.nbytes: int = sum(b.layout.numel * b.dtype.itemsize for b in buffers)
        self.awaited = 0
        """How many micro-batches that take turns wait for their turn to use it; see [Note: layer order]."""
        self.pinned = 0
        """How many `gathered` contexts hold the unit."""
        self.fired: set[tuple[int, int]] = set()
        """The gradients that arrived since the unit was last reduced: whose turn it was, number of the parameter."""
        self.expected = 0
        """How many parameters are trainable."""
        self.frozen = False
        """Whether some parameters are not trainable."""
        self.careful = False
        """A recomputation that we do not see into may still need frozen weights: see [Note: recomputation]."""
        self.recomputed = False
        """Its modules' forward ran again within this backward, as a part of something larger that is recomputed."""
        self.stages: tuple[int, ...] | None = None
        """The stages of a pipeline that share its parameters; these are reduced when a window ends, by all of them."""
        self.several = False
        """Whether several modules use it one after the other."""
        self.awaiting = 0
        """Inputs of a unit with frozen weights whose gradient has not arrived."""
        self.saving: list[AbstractContextManager[Any]] = []
        """One per running forward: how autograd saves tensors in it."""
        self._own_references = sum(b.references() for b in buffers)

    @property
    def gathered(self) -> bool:
        """Whether this rank holds the full weights."""
        return all(map(_is_gathered, self.buffers))

    def refresh(self) -> None:
        """Takes note of which parameters are trainable now (`requires_grad` may change between steps)."""
        with torch._C.DisableTorchFunctionSubclass():
            trainable = [p.requires_grad for b in self.buffers for p in b.params]
        self.expected, self.frozen = sum(trainable), not all(trainable)

    def input_arrived(self, gradient: Tensor) -> None:
        """Called with the gradient of an input: what ran on that input has had its backward."""
        self.awaiting -= 1
        if self.several and self.awaiting > 0:
            return
        if not (self.careful and self.recomputed) and self.keep_gathered != "window":
            self.release()

    def may_release(self) -> bool:
        """Whether nothing more is to come in this backward, once the last gradient of its own has arrived."""
        if self.keep_gathered == "window":
            return False
        return not self.frozen or (not self.careful and self.awaiting <= 0)

    def start_gather(self) -> None:
        """Collective; see FlatBuffer.start_gather."""
        self.arriving = True
        for buffer in self.buffers:
            buffer.start_gather()

    def start_fetch(self) -> None:
        """See FlatWeights.start_fetch."""
        for buffer in self.buffers:
            buffer.start_fetch()

    def drop_fetched(self) -> None:
        """See FlatWeights.drop_fetched."""
        for buffer in self.buffers:
            buffer.drop_fetched()

    def finish_gather(self) -> None:
        """See FlatBuffer.finish_gather."""
        for buffer in self.buffers:
            buffer.finish_gather()
        self.arriving = False

    def finish_reduce(self) -> None:
        """See FlatBuffer.finish_reduce."""
        for buffer in self.buffers:
            buffer.finish_reduce()

    def show_home(self, gathered: bool) -> None:
        """Collective; see FlatBuffer.show_home."""
        for buffer in self.buffers:
            buffer.show_home(gathered)

    def write_back(self, narrow: bool = True) -> None:
        """See FlatBuffer.write_back."""
        for buffer in self.buffers:
            buffer.write_back(narrow)

    def gather_home(self, own: bool) -> None:
        """Collective; see FlatBuffer.gather_home."""
        for buffer in self.buffers:
            if buffer.shows_home:
                buffer.gather_home(own)

    def drop(self) -> None:
        """Frees the full weights without a look at them, unless the unit is in use."""
        if not self.pinned and not self.depth:
            for buffer in self.buffers:
                buffer.release()

    def has_outside_views(self, patience_s: float) -> bool:
        """Whether someone else holds a view of the weights; see [Note: outside views].

        The transport's own threads may hold a view of the buffer for a moment after a collective has returned, so a
        surplus counts only when it lasts.
        """
        deadline: float | None = None
        while sum(map(FlatBuffer.references, self.buffers)) - self._own_references > len(self.saved):
            deadline = deadline or time.monotonic() + patience_s
            if time.monotonic() > deadline:
                return True
            time.sleep(0.0002)
        return False

    def release(self, force: bool = False) -> None:
        """Frees the full weights unless the unit is in use.

        A view that is still about, or a change that would be lost, keeps it gathered; with `force` it is an error.

        Raises: StrategyError: an outside view is about, or a weight was changed, and `force` is given.
        """
        if not self.sharded or self.pinned or self.depth or self.awaited or not any(map(_is_gathered, self.buffers)):
            return
        if self.has_outside_views(1.0 if force else 0.01):
            if force:
                raise StrategyError(
                    f"a view of a weight of unit '{self.name}' is still held when its step ends (an attribute, a list, "
                    "a cached slice, the graph of a result that was computed without `torch.no_grad()`). Sharded "
                    "weights are freed then: keep a copy instead (`weight[...].clone()`)."
                )
            return
        changed = [name for b in self.buffers for name in b.changed(wait=force)]
        if changed and not force:
            return
        self.careful = self.recomputed = False
        for buffer in self.buffers:
            buffer.release()
        if changed:
            raise StrategyError(LOST.format(name=changed[0]))
