"""Runs again what a deferred tensor's values depend on; see [Note: recorded initialisation] in record.py."""

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from shardlight.strategies.errors import ShardlightError, StrategyError
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

_EMPTY = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])


@dataclass(eq=False)
class History:
    """All operations that made or wrote one storage, in order; an attribute of the storage itself."""

    device: torch.device
    writes: "list[Node]" = field(default_factory=list)
    known: bool = False
    """Whether the storage was made under a recorder."""
    real: torch.UntypedStorage | None = None
    """Where tensors of this storage that are not parameters live, once they are materialised: they share it."""


@dataclass(frozen=True, eq=False)
class Ref:
    """A tensor as a place in the storage of a history."""

    history: History
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int
    whole: bool
    """Whether it is the whole storage, in order."""


@dataclass(eq=False)
class Real:
    """A real tensor that an operation used, by reference."""

    source: Tensor
    """The tensor itself: tells whether it was changed."""
    tensor: Tensor
    """Its values, also when its `data` is set to something else."""
    version: int | None
    sample: int | None = None
    """Checksum of some elements, of memory that others may write without a tensor (numpy arrays have no version)."""

    def __post_init__(self) -> None:
        storage = self.tensor.untyped_storage() if self.tensor.layout == torch.strided else None
        if storage is not None and self.tensor.device.type == "cpu" and not storage.resizable():
            self.sample = _sample(self.tensor)

    def keep(self) -> None:
        """Takes a copy, since the tensor is about to be changed."""
        self.source = self.tensor = self.tensor.clone()
        self.version, self.sample = self.source._version, None

    def value(self) -> Tensor:
        """Returns the values. Raises: StrategyError: they were changed since."""
        written = self.version is not None and self.source._version != self.version
        if written or (self.sample is not None and _sample(self.tensor) != self.sample):
            raise StrategyError(f"a tensor of shape {tuple(self.tensor.shape)} that it was made from was changed since")
        return self.tensor


def _sample(tensor: Tensor, elements: int = 4096) -> int:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    some = flat[:: max(1, flat.numel() // elements)].contiguous()
    return zlib.crc32(some.view(torch.uint8).numpy().tobytes()) if some.numel() else 0


@dataclass(eq=False)
class Node:
    """One noted operation."""

    number: int
    func: Any
    args: Any
    kwargs: Any
    reads: tuple[History, ...]
    made: tuple[Ref | None, ...]
    random: Tensor | None
    default_dtype: torch.dtype
    covers: frozenset[History]
    """Storages that it overwrites whole, without reading them."""

    @property
    def name(self) -> str:
        """The operation's name without overload."""
        return str(getattr(self.func, "__name__", self.func)).partition(".")[0]


def history_of(tensor: Tensor) -> History:
    """Returns the history of a meta tensor's storage, an unknown one if no recorder saw it made."""
    storage = tensor.untyped_storage()
    found = getattr(storage, "_shardlight_history", None)
    if found is None:
        found = storage._shardlight_history = History(torch.device("cpu"))
    return found


def is_recorded(tensor: Tensor) -> bool:
    """Whether a tensor's values are a recorded initialisation and nothing else."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta and tensor.layout == torch.strided and history_of(tensor).known


def ref_of(tensor: Tensor) -> Ref:
    """Returns where a meta tensor lies in its storage."""
    storage_bytes = tensor.untyped_storage().nbytes()
    return Ref(
        history_of(tensor),
        tensor.dtype,
        tuple(tensor.size()),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        storage_bytes,
        tensor.is_contiguous() and not tensor.storage_offset() and tensor.nbytes == storage_bytes,
    )


def generator_of(device: torch.device) -> torch.Generator:
    """Returns the default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    raise StrategyError(f"random numbers on device '{device}' cannot be recorded: only on cpu and cuda.")


def value_of(tensor: Tensor) -> Tensor:
    """Returns the values of a deferred tensor as a new real tensor. Raises: StrategyError: they cannot be had."""
    with _apart():
        ref = ref_of(tensor)
        return _view(_replay(ref.history), ref)


def fill(out: Tensor, tensor: Tensor) -> None:
    """Writes the values of a deferred tensor into `out`, in place where they can be made in place.

    Args:
        out: contiguous, shape of `tensor`; converted to its dtype and device if these differ.
    Raises: StrategyError: the values cannot be had.
    """
    with _apart():
        ref = ref_of(tensor)
        same = ref.whole and ref.dtype == out.dtype and _same_device(ref.history.device, out.device)
        place = _Place(out.untyped_storage(), out.storage_offset() * out.element_size()) if same else None
        made = _replay(ref.history, place)
        if made is not place:
            out.copy_(_view(made, ref))


def materialised_alias(tensor: Tensor) -> Tensor:
    """Returns the real tensor of a deferred one; tensors that shared a storage share the real one."""
    with _apart():
        ref = ref_of(tensor)
        if ref.history.real is None:
            ref.history.real = _replay(ref.history).storage
        return _view(_Place(ref.history.real, 0), ref)


@dataclass(eq=False)
class _Place:
    """Where a recorded storage is: at a byte offset of a real one."""

    storage: torch.UntypedStorage
    offset_bytes: int = 0


@contextmanager
def _apart() -> Iterator[None]:
    """Around a replay: no mode sees it, autograd does not, and the random generators are as before afterwards."""
    default_dtype = torch.get_default_dtype()
    states: dict[torch.Generator, Tensor] = {torch.default_generator: torch.default_generator.get_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {g: g.get_state() for g in torch.cuda.default_generators}
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(default_dtype)
        for generator, state in states.items():
            generator.set_state(state)


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index or 0) == (b.index or 0)


def _view(place: _Place, ref: Ref) -> Tensor:
    empty = torch.empty(0, dtype=ref.dtype, device=place.storage.device)
    return empty.set_(place.storage, place.offset_bytes // ref.dtype.itemsize + ref.offset, ref.size, ref.stride)


def _needed(history: History) -> list[Node]:
    """Returns the operations that the present values of a storage depend on, in order."""
    found: dict[Node, None] = {}
    open_ends: list[tuple[History, float]] = [(history, math.inf)]
    while open_ends:
        this, before = open_ends.pop()
        if not this.known:
            raise StrategyError("it is on the meta device, and how it is initialised was not recorded")
        for node in reversed(this.writes):
            if node.number >= before:
                continue
            if node not in found:
                found[node] = None
                open_ends += [(h, node.number) for h in node.reads if h not in node.covers]
            elif this not in node.covers:
                break  # what came before it was looked at with it
            if this in node.covers:
                break
    return sorted(found, key=lambda n: n.number)


def _replay(target: History, place: _Place | None = None) -> _Place:
    """Makes a storage's values. Returns: where they are: at `place` if they could be made there."""
    nodes = _needed(target)
    last = {h: n.number for n in nodes for h in (*n.reads, *(r.history for r in n.made if r is not None))}
    last[target] = -1
    places: dict[History, _Place] = {}
    for node in nodes:
        try:
            _run(node, places, target, place)
        except ShardlightError as error:
            raise StrategyError(f"{error} (operation '{node.name}')") from None
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise StrategyError(f"operation '{node.name}' failed when it was run again: {error}") from error
        for history in [h for h in places if last.get(h) == node.number]:
            del places[history]
    return places[target]


def _run(node: Node, places: dict[History, _Place], target: History, place: _Place | None) -> None:
    made = [r for r in node.made if r is not None]
    if node.name in _EMPTY and len(made) == 1:
        _open(made[0], places, target, place)
        return

    def real(item: Any) -> Any:
        if isinstance(item, Ref):
            return _view(_open(item, places, target, place), item)
        if isinstance(item, torch.Generator):
            return _generator(item.device, node.random)
        return item.value() if isinstance(item, Real) else item

    torch.set_default_dtype(node.default_dtype)
    args, kwargs = tree_map(real, (node.args, node.kwargs))
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    if node.random is not None and not any(isinstance(x, torch.Generator) for x in tree_flatten((args, kwargs))[0]):
        device = made[0].history.device if made else tensors[0].device
        generator_of(device).set_state(node.random)
    result = node.func(*args, **kwargs)
    if not made:
        return
    taken = {t.untyped_storage()._cdata for t in tensors}
    for ref, tensor in zip(node.made, tree_flatten(result)[0], strict=True):
        if ref is None or ref.history in places:
            continue
        storage = tensor.untyped_storage()
        fits = tuple(tensor.stride()) == ref.stride and tensor.storage_offset() == ref.offset
        if fits and storage._cdata not in taken and storage.nbytes() >= ref.storage_bytes and tensor.dtype == ref.dtype:
            places[ref.history] = _Place(storage)
        else:
            _view(_open(ref, places, target, place), ref).copy_(tensor)


def _open(ref: Ref, places: dict[History, _Place], target: History, place: _Place | None) -> _Place:
    """Returns where a storage is; memory for it, if it is to be overwritten anyway."""
    if ref.history not in places:
        if ref.history is target and place is not None:
            places[target] = place
        else:
            memory = torch.empty(ref.storage_bytes, dtype=torch.uint8, device=ref.history.device)
            places[ref.history] = _Place(memory.untyped_storage())
    return places[ref.history]


def _generator(device: torch.device, state: Tensor | None) -> torch.Generator:
    generator = torch.Generator(device)
    if state is not None:
        generator.set_state(state)
    return generator
