"""Whether two checkpoints are of the same moment of the same run, to the last bit, and where they differ first."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from shardlight.strategies.checkpoint.layouts import chunks
from shardlight.strategies.checkpoint.lightning_file import Stored
from shardlight.strategies.checkpoint.show import kind_of, understood
from torch import Tensor

NOT_STATE = frozenset({"saved_at", "versions", "config", "hf", "strategy", "mesh"})
"""Parts of a manifest that say where, when and how it was saved, and not what the run was."""
TIMERS = frozenset({"time_elapsed"})
"""Keys of the Trainer's state under which Lightning keeps wall-clock times (its callback Timer)."""
PATHS = frozenset({"dirpath", "best_model_path", "last_model_path", "kth_best_model_path", "best_k_models"})
"""Keys of a ModelCheckpoint's state that hold paths of the run folder."""
KEPT_IN_FOLDER = frozenset({"best_model_score", "kth_value"})
"""What a ModelCheckpoint knows of the checkpoints in its folder: it starts anew in another folder."""
_TAG = "__kind__"


@dataclass(frozen=True)
class Difference:
    """The first difference of one subject, and in how many more places it differs."""

    subject: str
    text: str
    more: int = 0

    def __str__(self) -> str:
        return self.text + (f" (and {self.more} more)" if self.more else "")


def compare_exactly(first: Stored, second: Stored) -> list[Difference]:
    """Compares all state of two checkpoints bit by bit, a part of each tensor at a time.

    What has to differ between two runs is not compared: `NOT_STATE`, `TIMERS`, `PATHS` and `KEPT_IN_FOLDER`.

    Returns: one entry per subject (weights, loss log, ...); empty: they are the same.
    Raises: CheckpointError: one of them is damaged.
    """
    found: dict[str, Difference] = {}
    with understood(first.path, second.path):
        for subject, text in _differences(first, second):
            old = found.get(subject)
            found[subject] = Difference(subject, text) if old is None else Difference(subject, old.text, old.more + 1)
    return list(found.values())


def _differences(first: Stored, second: Stored) -> Iterator[tuple[str, str]]:
    """Yields (subject, in words) of each difference."""
    ranks = [len(r.content.get("ranks", [])) for r in (first, second)]
    if ranks[0] != ranks[1]:
        yield "world size", f"world size: {ranks[0]} and {ranks[1]} ranks"
    a, b = first.content, second.content
    parts = (a.keys() | b.keys()) - NOT_STATE - {"ranks", "trainer", "world_size"}
    yield from _of_parts(sorted(parts & {"step", "epoch"}), first, second)
    yield from _of_tensors(first, second)
    yield from _of_parts(sorted(parts - {"step", "epoch"}), first, second)
    for place in _walk(a.get("trainer"), b.get("trainer"), (), first, second):
        subject, text = _words_of_trainer(place)
        yield subject, text
    for rank, (one, other) in enumerate(zip(a.get("ranks", []), b.get("ranks", []), strict=False)):
        for place in _walk(one, other, (), first, second):
            subject, text = _words_of_rank(place, rank)
            yield subject, text


def _of_parts(keys: Iterable[str], first: Stored, second: Stored) -> Iterator[tuple[str, str]]:
    for key in keys:
        for place in _walk(first.content.get(key), second.content.get(key), (key,), first, second):
            yield key, f"{_dotted(place.path)}: {place.text}"


# --- tensors by name


def _of_tensors(first: Stored, second: Stored) -> Iterator[tuple[str, str]]:
    a, b = ([n for n in r.names() if _by_name(n)] for r in (first, second))
    for name in dict.fromkeys([*a, *b]):
        subject, shown = kind_of(name), name.partition("/")[2]
        if not (first.has(name) and second.has(name)):
            yield subject, f"{subject}: '{shown}' is only in the {'first' if first.has(name) else 'second'}"
            continue
        text = _tensor_difference(first, name, second, name)
        if text:
            yield subject, f"{subject}: '{shown}' {text}"


def _by_name(name: str) -> bool:
    """Whether a tensor is known by its name, and not by a place in the state of the Trainer or a rank."""
    return kind_of(name) != "other state" or not name.startswith(("trainer", "rank/"))


def _tensor_difference(first: Stored, a: str, second: Stored, b: str) -> str:
    """Returns how two tensors differ first, "" if they are the same bits."""
    shape, dtype = first.shape(a), first.dtype(a)
    other_shape = second.shape(b)
    if dtype != second.dtype(b):
        return f"is {_plain(dtype)} and {_plain(second.dtype(b))}"
    if shape != other_shape and not len(shape) == len(other_shape) == 1:
        return f"has shape {shape} and {other_shape}"
    # Of logs of other lengths: what both have.
    for start, stop in chunks(min(math.prod(shape), math.prod(other_shape)), dtype.itemsize):
        one, other = first.read(a, start, stop), second.read(b, start, stop)
        at = first_other_bits(one, other)
        if at is not None:
            where = f"differs first at {_index(shape, start + at)}:" if shape else "is"
            return f"{where} {_number(one[at])} and {_number(other[at])}"
    return "" if shape == other_shape else f"has {shape[0]} and {other_shape[0]} entries"


def first_other_bits(a: Tensor, b: Tensor) -> int | None:
    """Returns the first element whose bits differ in two (n,) tensors of one dtype; None: there is none."""
    x, y = (t.contiguous().view(torch.uint8) for t in (a, b))
    if torch.equal(x, y):
        return None
    return int((x != y).nonzero()[0, 0]) // a.element_size()


def _index(shape: tuple[int, ...], at: int) -> str:
    index = []
    for size in reversed(shape):
        at, place = divmod(at, size)
        index.append(place)
    return str(list(reversed(index)))


def _number(value: Tensor) -> str:
    bits = value.reshape(1).view(torch.uint8).tolist()
    shown = str(value.item())
    return f"{shown} (bits {bytes(reversed(bits)).hex()})" if "nan" in shown else shown


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- plain state, as codec.encode has written it


@dataclass(frozen=True)
class Place:
    """Where two encoded values differ, and how."""

    path: tuple[str | int, ...]
    text: str


def _walk(a: Any, b: Any, path: tuple[str | int, ...], first: Stored, second: Stored) -> Iterator[Place]:
    """Yields each place at which two encoded values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        yield from _walk_dicts(a, b, path, first, second)
    elif isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _walk(x, y, (*path, i), first, second)
        if len(a) != len(b):
            yield Place(path, f"{len(a)} and {len(b)} entries")
    elif not _same_scalar(a, b):
        yield Place(path, f"{_shown(a)} and {_shown(b)}")


def _walk_dicts(a: dict, b: dict, path: tuple[str | int, ...], first: Stored, second: Stored) -> Iterator[Place]:
    kinds = a.get(_TAG), b.get(_TAG)
    if kinds[0] != kinds[1]:
        yield Place(path, f"{_shown(a)} and {_shown(b)}")
    elif kinds[0] in ("tensor", "array"):
        lost = [v for r, v in ((first, a["value"]), (second, b["value"])) if not r.has(v)]
        text = f"'{lost[0]}' is missing" if lost else _tensor_difference(first, a["value"], second, b["value"])
        if text:
            yield Place(path, text)
    elif kinds[0] == "dict":
        x, y = ({json.dumps(k): (k, v) for k, v in data["value"]} for data in (a, b))
        yield from _walk_keys({k: v for k, (_, v) in x.items()}, {k: v for k, (_, v) in y.items()}, path, first, second)
    elif kinds[0] == "set":
        if sorted(map(json.dumps, a["value"])) != sorted(map(json.dumps, b["value"])):
            yield Place(path, f"{_shown(a)} and {_shown(b)}")
    elif kinds[0] is not None:
        yield from _walk(a.get("value"), b.get("value"), path, first, second)
    else:
        moved = a.get("dirpath") != b.get("dirpath")
        left_out = TIMERS | PATHS | (KEPT_IN_FOLDER if moved else frozenset())
        yield from _walk_keys(
            {k: v for k, v in a.items() if k not in left_out}, {k: v for k, v in b.items() if k not in left_out},
            path, first, second,
        )  # fmt: skip


def _walk_keys(a: dict, b: dict, path: tuple[str | int, ...], first: Stored, second: Stored) -> Iterator[Place]:
    for key in dict.fromkeys([*a, *b]):
        if key in a and key in b:
            yield from _walk(a[key], b[key], (*path, key), first, second)
        else:
            yield Place((*path, key), f"only in the {'first' if key in a else 'second'}")


def _same_scalar(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    return type(a) is type(b) and a == b


def _shown(value: Any) -> str:
    if isinstance(value, dict) and _TAG in value:
        inner = value.get("value")
        return str(inner) if value[_TAG] in ("float", "path", "dtype", "device") else f"a {value[_TAG]}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- words


def _words_of_trainer(place: Place) -> tuple[str, str]:
    head, rest = str(place.path[0]) if place.path else "", place.path[1:]
    subject = {"losses": "loss log", "lr_schedulers": "schedulers", "loops": "loop counters"}.get(
        head, head or "trainer"
    )
    if head == "losses":
        # Their entry i is that of step i + 1.
        text = re.sub(
            r"^differs first at \[(\d+)\]", lambda found: f"differs first at step {int(found[1]) + 1}", place.text
        )
        return subject, f"{subject}: {text}"
    where = f" {_dotted(rest)}" if rest else ""
    return subject, f"{subject}{where}: {place.text}"


def _words_of_rank(place: Place, rank: int) -> tuple[str, str]:
    head = str(place.path[0]) if place.path else ""
    if head == "order":
        inner = f" ({_dotted(place.path[1:])}: {place.text})"
        return (
            f"sample order {rank}",
            f"rank {rank}: sample order differs{inner if place.path[1:] else f' ({place.text})'}",
        )
    if head in ("now", "epoch_start"):
        when = "" if head == "now" else "of the epoch's start "
        return f"random {rank} {head}", f"rank {rank}: random numbers {when}differ ({_dotted(place.path[1:])})"
    return f"rank {rank} {head}", f"rank {rank}: {_dotted(place.path)}: {place.text}"


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))
