"""How much the tensors of two checkpoints differ, whatever strategy and number of ranks saved them."""

import heapq
import math
from dataclasses import dataclass, field

import torch
from shardlight.strategies.checkpoint.layouts import chunks
from shardlight.strategies.checkpoint.lightning_file import Stored
from shardlight.strategies.checkpoint.show import KINDS, kind_of, understood
from torch import Tensor

WORST = 10
"""How many of the tensors that differ most are named."""


@dataclass
class KindDiff:
    """What is different in the tensors of one kind.

    Attributes:
        same: tensors in both with the same values.
        differing: tensors in both of one shape with other values.
        largest: largest absolute difference of two numbers; nan: where only one of them is a number.
        only_first, only_second: names.
        shapes, dtypes: by name in the first and the second.
        worst: (largest difference, name), the largest first.
    """

    kind: str
    same: int = 0
    differing: int = 0
    largest: float = 0.0
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    worst: list[tuple[float, str]] = field(default_factory=list)


def compare(first: Stored, second: Stored) -> list[KindDiff]:
    """Compares all tensors but those of single ranks and of the Trainer, a part of each at a time.

    Returns: one entry per kind that is in one of them.
    Raises: CheckpointError: one of them is damaged.
    """
    with understood(first.path, second.path):
        return _compare(first, second)


def _compare(first: Stored, second: Stored) -> list[KindDiff]:
    a, b = _stored_names(first), _stored_names(second)
    found = {kind: KindDiff(kind) for kind in KINDS}
    for name in dict.fromkeys([*a, *b]):
        diff = found[kind_of(name)]
        if name not in b:
            diff.only_first.append(name)
        elif name not in a:
            diff.only_second.append(name)
        else:
            _compare_tensors(first, a[name], second, b[name], name, diff)
    for diff in found.values():
        diff.worst = heapq.nlargest(WORST, diff.worst, key=lambda w: _order(w[0]))
    used = {kind_of(name) for name in [*a, *b]}
    return [diff for kind, diff in found.items() if kind in used]


def _stored_names(reader: Stored) -> dict[str, str]:
    """Returns by name the name that its values are stored under, which for a tied weight is another's."""
    names = {n: n for n in reader.names() if not (n.startswith(("trainer", "rank/")) and kind_of(n) == "other state")}
    aliases = reader.content.get("aliases", {})
    return names | {f"model/{name}": f"model/{same}" for name, same in aliases.items()}


def _compare_tensors(first: Stored, a: str, second: Stored, b: str, name: str, diff: KindDiff) -> None:
    shape, kinds = first.shape(a), (first.dtype(a), second.dtype(b))
    if shape != second.shape(b):
        diff.shapes[name] = shape, second.shape(b)
        return
    if kinds[0] != kinds[1]:
        diff.dtypes[name] = tuple(str(k).removeprefix("torch.") for k in kinds)  # type: ignore[assignment]
    largest = 0.0
    for start, stop in chunks(math.prod(shape), max(k.itemsize for k in kinds)):
        largest = _larger(largest, largest_difference(first.read(a, start, stop), second.read(b, start, stop)))
    if largest == 0.0:
        diff.same += 1
        return
    diff.differing += 1
    diff.largest = _larger(diff.largest, largest)
    diff.worst.append((largest, name))
    if len(diff.worst) > 8 * WORST:
        diff.worst = heapq.nlargest(WORST, diff.worst, key=lambda w: _order(w[0]))


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Returns the largest |a - b|; 0 for two nans or equal infinities, nan where only one is a number."""
    if a.is_complex() or b.is_complex():
        a, b = torch.view_as_real(a.to(torch.complex128)), torch.view_as_real(b.to(torch.complex128))
    same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() and b.is_floating_point() else a == b
    if bool(same.all()):
        return 0.0
    return float((a.to(torch.float64) - b.to(torch.float64)).abs()[~same].max())


def _larger(a: float, b: float) -> float:
    return max(a, b, key=_order)


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value
