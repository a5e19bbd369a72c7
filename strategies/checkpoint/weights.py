"""Loading full weights into a module, sharded or not: each rank reads only the elements that it keeps.

Weights come from a safetensors file, a folder of them with an index, a checkpoint folder of ours, a file of torch.save
(Lightning's .ckpt), or a dict of tensors.
All faults are found, and reported together, before anything is changed.
"""

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from shardlight.strategies.checkpoint.lightning_file import LightningFile, is_torch_file
from shardlight.strategies.checkpoint.manifest import MANIFEST
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine.deferred.record import note_overwrite
from shardlight.strategies.engine.deferred.tensors import is_deferred
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.slices import Slice, rows_of
from shardlight.strategies.errors import CheckpointError
from torch import Tensor, nn

Shape = tuple[int, ...]
Rename = Mapping[str, str] | Callable[[str], str | None]
_CHUNK = 1 << 20
_INTEGERS = ("I", "U", "BOOL")


class WeightSource(Protocol):
    """Named tensors that can be read in part."""

    where: str
    """For messages."""

    def names(self) -> Sequence[str]:
        """Returns the names of all tensors."""

    def key(self, name: str) -> str:
        """Returns what is the same for two names of one stored tensor."""

    def shape(self, name: str) -> Shape:
        """Returns the full shape of a tensor."""

    def is_floating(self, name: str) -> bool | None:
        """Whether a tensor holds real or complex numbers, and not integers or bools; None: not known."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) of the flattened tensor. Raises: CheckpointError: they cannot be read."""

    def read_into(self, out: Tensor, name: str, start: int, of: Slice | None = None) -> None:
        """Overwrites `out`, (n,), with elements [start, start + n) of the flattened tensor; see `read`.

        They are converted to its dtype. Sources that can read to where they are kept do it without a copy.

        Args:
            of: the part of the tensor that is meant; None: all of it.
        """
        if of is None or of.is_whole:
            out.copy_(self.read(name, start, start + out.numel()))
            return
        row = math.prod(of.shape[1:])
        for box, to in of.parts(out, start):
            for low, high in rows_of(box, of.shape, _CHUNK):
                rows = self.read(name, low * row, high * row).view(high - low, *of.shape[1:])
                inside = [slice(o, o + n) for o, n in zip(box.offsets[1:], box.sizes[1:], strict=True)]
                to[low - box.offsets[0] : high - box.offsets[0]].copy_(rows[(slice(None), *inside)])


class TensorDict(WeightSource):
    """A dict of tensors as a source; what is not a tensor is left out."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.where = "the given dict"
        self._tensors = {n: t for n, t in tensors.items() if isinstance(t, Tensor)}

    def names(self) -> Sequence[str]:
        """See WeightSource."""
        return list(self._tensors)

    def key(self, name: str) -> str:
        """See WeightSource."""
        return str(id(self._tensors[name]))

    def shape(self, name: str) -> Shape:
        """See WeightSource."""
        return tuple(self._tensors[name].shape)

    def is_floating(self, name: str) -> bool | None:
        """See WeightSource."""
        return self._tensors[name].is_floating_point() or self._tensors[name].is_complex()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See WeightSource."""
        return self._tensors[name].detach().reshape(-1)[start:stop]


class SavedModel(WeightSource):
    """The weights of a checkpoint as a source.

    Args:
        names: those to use; None: all.
    """

    def __init__(self, reader: CheckpointReader | LightningFile, names: Sequence[str] | None = None) -> None:
        self.where = str(reader.path)
        self._reader = reader
        self._aliases: dict[str, str] = reader.content.get("aliases", {})
        every = [*reader.names("model/"), *self._aliases] if names is None else names
        self._names = [n for n in every if reader.has(self.key(n))]

    def key(self, name: str) -> str:
        """See WeightSource."""
        return f"model/{self._aliases.get(name, name)}"

    def names(self) -> Sequence[str]:
        """See WeightSource."""
        return self._names

    def shape(self, name: str) -> Shape:
        """See WeightSource."""
        return self._reader.shape(self.key(name))

    def is_floating(self, name: str) -> bool | None:
        """See WeightSource."""
        dtype = self._reader.dtype(self.key(name))
        return dtype.is_floating_point or dtype.is_complex

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See WeightSource."""
        return self._reader.read(self.key(name), start, stop)

    def read_into(self, out: Tensor, name: str, start: int, of: Slice | None = None) -> None:
        """See WeightSource."""
        self._reader.read_into(out, self.key(name), start, of)

    def verify(self, share: tuple[int, int]) -> None:
        """Compares a share of the weights with their checksums. Raises: CheckpointError: see CheckpointReader."""
        used = {self.key(n) for n in self._names}
        self._reader.verify(share, used.__contains__)


class SafetensorsFiles(WeightSource):
    """A safetensors file, or a folder with one or with the index of several, as a source.

    Raises: CheckpointError: there is no such file, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._open: dict[Path, Any] = {}
        self._file: dict[str, Path] = {}
        index = sorted(path.glob("*.safetensors.index.json")) if path.is_dir() else []
        if len(index) == 1:
            self._file = _files_of_index(index[0])
            absent = sorted({str(f) for f in self._file.values() if not f.is_file()})
            if absent:
                raise CheckpointError(f"{index[0]} names files that are not there: {', '.join(absent)}.")
            for name, file in self._file.items():
                if name not in self._handle(file).keys():  # noqa: SIM118 (a file, not a dict)
                    raise CheckpointError(f"{index[0]} says that '{name}' is in {file.name}, but it is not.")
            return
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if len(files) != 1:
            raise CheckpointError(
                f"{path} holds {len(files)} safetensors files and {len(index)} index files: name one file, or a folder "
                "with one file or one '*.safetensors.index.json'."
            )
        self._file = dict.fromkeys(self._handle(files[0]).keys(), files[0])

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read as a safetensors file: {error}.") from None
        return self._open[file]

    def names(self) -> Sequence[str]:
        """See WeightSource."""
        return list(self._file)

    def key(self, name: str) -> str:
        """See WeightSource."""
        return name

    def _slice(self, name: str) -> Any:
        return self._handle(self._file[name]).get_slice(name)

    def shape(self, name: str) -> Shape:
        """See WeightSource."""
        return tuple(self._slice(name).get_shape())

    def is_floating(self, name: str) -> bool | None:
        """See WeightSource."""
        return not self._slice(name).get_dtype().startswith(_INTEGERS)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See WeightSource."""
        shape = self.shape(name)
        try:
            if stop - start == math.prod(shape):
                return self._handle(self._file[name]).get_tensor(name).reshape(-1)
            row = math.prod(shape[1:])
            first = start // row
            return self._slice(name)[first : -(-stop // row)].reshape(-1)[start - first * row : stop - first * row]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._file[name]}: '{name}' cannot be read: {error}.") from None


def _files_of_index(path: Path) -> dict[str, Path]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = {str(n): str(f) for n, f in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as an index of safetensors files: {error!r}.") from None
    if any(Path(f).name != f for f in names.values()):
        raise CheckpointError(f"{path}: a file must be in the index's folder.")
    return {n: path.parent / f for n, f in names.items()}


def open_weights(source: str | os.PathLike[str] | Mapping[str, Any]) -> WeightSource:
    """Opens a file, a folder or a dict. Raises: CheckpointError: there are no weights that can be read."""
    if isinstance(source, Mapping):
        return TensorDict(source)
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder.")
    if (path / MANIFEST).is_file():
        return SavedModel(CheckpointReader(path))
    if is_torch_file(path):
        return SavedModel(LightningFile(path))
    return SafetensorsFiles(path)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What of a source fits a model, by the model's names; shapes are full shapes."""

    loaded: tuple[str, ...] = ()
    missing: Mapping[str, Shape] = field(default_factory=dict)
    """In the model, not in the source: keeps the value it has."""
    unexpected: Mapping[str, Shape] = field(default_factory=dict)
    """In the source (after renaming), not in the model."""
    mismatched: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Of another shape in the source (first) than in the model (second): keeps the value it has."""

    def fault(self, where: str) -> str:
        """Returns everything that does not fit as one message, "" if all does."""
        parts = []
        if self.missing:
            parts.append("missing there: " + ", ".join(f"'{n}' {s}" for n, s in self.missing.items()))
        if self.unexpected:
            parts.append("not in the model: " + ", ".join(f"'{n}' {s}" for n, s in self.unexpected.items()))
        parts += [f"'{n}' is {there} there and {here} in the model" for n, (there, here) in self.mismatched.items()]
        return f"{where}: {'; '.join(parts)}." if parts else ""


def load_weights(
    module: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> LoadReport:
    """Loads full weights into a module: before it is sharded (deferred or not) or after. Collective once it is sharded.

    A sharded module's ranks each read their own ranges of each tensor. A deferred one reads nothing now: its values are
    read when it is sharded, unit by unit. Values are converted to the dtype of the parameter.

    Args:
        module: the whole model or a part of it; names are those of its `state_dict`.
        source: a .safetensors file, a folder with one or with a `model.safetensors.index.json`, a checkpoint folder of
            ours, a file of torch.save, or a dict of tensors. Of a tied weight any one of its names is enough.
        strict: everything has to fit; False: what fits is loaded, and the report says what did not.
        rename: from the source's names to the model's: prefixes to replace (the longest that fits, once), or a function
            that returns the new name, or None for a tensor to leave out.
    Returns: what was loaded and what was not.
    Raises: CheckpointError: before anything is changed: with all that does not fit, on every rank.
    Example: load_weights(self.model, "llama/", rename={"model.": "decoder."})
    """
    engine = _engine_of(module)
    report, sources, weights = LoadReport(), {}, None
    if engine is not None:
        engine.agreement.meet("load_weights")
    state = {n: t for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    fault = ""
    try:
        weights = open_weights(source)
        if isinstance(weights, SavedModel):
            ranks = None if engine is None else engine.everyone
            weights.verify((0, 1) if ranks is None else (ranks.rank, ranks.world_size))
        report, sources, faults = compare(weights, state, rename, engine)
        if strict and report.fault(weights.where):
            faults.insert(0, report.fault(weights.where))
            faults.append("Rename with `rename`, or pass strict=False to load what fits.")
        if engine is not None and any(unit.pinned for unit in engine.table.units):
            faults.insert(0, "load_weights inside `with strategy.gathered(...)`: leave the context first.")
        fault = " ".join(faults)
    except CheckpointError as error:
        fault = str(error)
    refuse_together(engine, fault)
    assert weights is not None
    write(engine, weights, state, sources)
    return report


def compare(
    weights: WeightSource,
    state: Mapping[str, Tensor],
    rename: Rename | None = None,
    engine: Engine | None = None,
) -> tuple[LoadReport, dict[str, str], list[str]]:
    """Finds where each tensor of a model is in a source.

    Args:
        state: the model's tensors by name; tied ones under each of their names.
        engine: that holds the model's parameters, of which this rank may have a part only.
    Returns: the report; by one name of each model tensor its name in the source; and faults of any kind that no
        `strict=False` makes good: two tensors for one name, integers for reals, tied weights that differ.
    """
    faults: list[str] = []
    there: dict[str, str] = {}
    elsewhere: Collection[str] = () if engine is None else engine.part.elsewhere
    for name in weights.names():
        new = _renamed(name, rename)
        if new is not None and new in there:
            faults.append(f"{weights.where}: '{there[new]}' and '{name}' are both called '{new}' after renaming.")
        if new is not None:
            there[new] = name
    tied: dict[int, list[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(id(tensor), []).append(name)
    loaded, missing, mismatched, sources = [], {}, {}, {}
    for names in tied.values():
        present = [n for n in names if n in there]
        here = tuple(state[names[0]].shape) if engine is None else engine.slice_of(state[names[0]]).shape
        if not present:
            missing |= dict.fromkeys(names, here)
            continue
        wrong = {n: (weights.shape(there[n]), here) for n in present if weights.shape(there[n]) != here}
        mismatched |= wrong
        if wrong:
            continue
        first = weights.key(there[present[0]])
        if weights.is_floating(there[present[0]]) not in (None, _is_floating(state[names[0]])):
            faults.append(
                f"{weights.where}: one of '{present[0]}' there and here holds integers and the other does not."
            )
        elif any(
            _differ(weights, there[present[0]], there[n], math.prod(here))
            for n in present[1:]
            if weights.key(there[n]) != first
        ):
            others = " and ".join(f"'{n}'" for n in present)
            faults.append(f"{weights.where}: {others} are one tied weight in the model and differ there.")
        sources[names[0]] = there[present[0]]
        loaded += names
    unexpected = {n: weights.shape(old) for n, old in there.items() if n not in state and n not in elsewhere}
    report = LoadReport(loaded=tuple(loaded), missing=missing, unexpected=unexpected, mismatched=mismatched)
    return report, sources, faults


def write(
    engine: Engine | None, weights: WeightSource, state: Mapping[str, Tensor], sources: Mapping[str, str]
) -> None:
    """Writes a source's values into a model's tensors: of a sharded one, this rank's part. Collective with an engine.

    Args:
        sources: see `compare`.
    Raises: CheckpointError: on every rank: something cannot be read any more.
    """
    fault = ""
    try:
        with torch.no_grad():
            for name, source in sources.items():
                _write(engine, weights, state[name], source)
    except CheckpointError as error:
        fault = f"{error} The weights are in part those of before."
    refuse_together(engine, fault)
    if engine is not None:
        engine.weights_changed()


def _write(engine: Engine | None, weights: WeightSource, tensor: Tensor, source: str) -> None:
    piece = engine.owned_piece(tensor) if engine is not None and isinstance(tensor, nn.Parameter) else None
    if piece is not None:
        start, part = piece
        if part.numel():
            weights.read_into(part, source, start, engine.slice_of(tensor))
        return

    def read(out: Tensor) -> None:
        if out.is_contiguous():
            weights.read_into(out.view(-1), source, 0)
        else:
            out.copy_(weights.read(source, 0, out.numel()).view(out.shape))

    if is_deferred(tensor):
        note_overwrite(read, tensor)
    else:
        read(tensor)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _differ(weights: WeightSource, a: str, b: str, numel: int) -> bool:
    chunks = ((start, min(start + _CHUNK, numel)) for start in range(0, numel, _CHUNK))
    return any(not torch.equal(weights.read(a, *chunk), weights.read(b, *chunk)) for chunk in chunks)


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if not isinstance(rename, Mapping):
        return rename(name)
    prefixes = [p for p in rename if name.startswith(p)]
    longest = max(prefixes, key=len, default=None)
    return name if longest is None else rename[longest] + name.removeprefix(longest)


def _engine_of(module: nn.Module) -> Engine | None:
    owners = {id(o): o for p in module.parameters() if isinstance(o := getattr(p, "_shardlight_owner", None), Engine)}
    if len(owners) > 1:
        raise CheckpointError(
            "load_weights: the module's parameters are sharded by several strategies; load each part."
        )
    return next(iter(owners.values()), None)


def refuse_together(engine: Engine | None, fault: str) -> None:
    """Raises the first rank's fault on every rank."""
    faults = [fault] if engine is None else engine.everyone.gather_objects(fault, "load_weights")
    first = next((f for f in faults if f), "")
    if first:
        raise CheckpointError(first)
