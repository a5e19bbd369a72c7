"""Makes safetensors files, or what `from_pretrained` opens, of a checkpoint: without ranks or the model's code."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from shardlight.strategies.checkpoint.codec import decode
from shardlight.strategies.checkpoint.disk import sync_folder, write_all, write_file
from shardlight.strategies.checkpoint.layouts import (
    OutFile,
    OutFolder,
    OutTensor,
    Read,
    cast,
    chunks,
    hf_folders,
    make_file,
    make_folder,
    out_dtype,
)
from shardlight.strategies.checkpoint.lightning_file import Stored, open_checkpoint
from shardlight.strategies.checkpoint.safetensors_file import bytes_of
from shardlight.strategies.checkpoint.show import checkpoint_folder, understood
from shardlight.strategies.errors import CheckpointError
from torch import Tensor

Format = Literal["safetensors", "hf"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HF_SHARD_BYTES = 5 * 10**9
"""Most of a file in an export for transformers, where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export has written.

    Attributes:
        tensors: how many.
        nbytes: of all files.
        files: how many safetensors files.
        left_out: names of the module that are in none of its transformers models.
    """

    tensors: int
    nbytes: int
    files: int
    left_out: tuple[str, ...] = ()


def export(
    path: str | os.PathLike,
    out: str | os.PathLike,
    *,
    to: Format = "safetensors",
    dtype: str | None = None,
    ema: bool = False,
    trainable: bool = False,
    max_file_bytes: int | None = None,
) -> Exported:
    """Writes the bare module's weights and buffers: the keys, shapes and dtypes of its `state_dict`.

    Never more than a part of one tensor is in memory. `out` appears when it is complete; what is in the way stays.

    Args:
        path: a checkpoint folder, or a .ckpt file of Lightning.
        out: a file; with `max_file_bytes` or for "hf" a folder, which must be new or empty. The folder it is in is
            made, but none above that.
        to: "hf": what transformers' (or peft's) `from_pretrained` opens, if the module held such a model.
        dtype: fp32, bf16 or fp16 for floating point numbers; integers, bools and complex numbers stay. None: as stored,
            which under 16-bit precision are the fp32 master weights.
        ema: the averages that `ShardedEMA` keeps, for the weights that have one.
        trainable: only parameters that were trainable.
        max_file_bytes: several files of at most this size with an index; "hf" has 5 GB without it.
    Raises: CheckpointError: `path` is not a complete checkpoint or has not what is asked for, or `out` cannot be
        written.
    """
    reader = open_checkpoint(checkpoint_folder(path))
    with understood(path):
        return _export(reader, Path(out), to, dtype, ema, trainable, max_file_bytes)


def _export(
    reader: Stored, target: Path, to: Format, dtype: str | None, ema: bool, trainable: bool, max_file_bytes: int | None
) -> Exported:
    tensors = _tensors(reader, None if dtype is None else _dtype(dtype), ema, trainable)
    if to == "hf":
        if trainable and not _has_adapters(reader):
            raise CheckpointError(
                "--only trainable leaves out weights that from_pretrained needs: use it with --to safetensors."
            )
        folders, left_out = hf_folders(tensors, _models(reader), max_file_bytes or HF_SHARD_BYTES)
        return _write_all(reader, folders, target, left_out)
    if max_file_bytes is not None:
        return _write_all(reader, [make_folder(tensors, max_file_bytes)], target, [])
    if target.is_dir():
        raise CheckpointError(
            f"{target} is a folder: give a name for the file to write, such as {target}/model.safetensors."
        )
    file = make_file(target.name, tensors)
    with _appearing(target) as partial:
        _write_file(reader, file, partial)
    return Exported(tensors=len(file.tensors), nbytes=file.nbytes, files=1)


def export_safetensors(path: str | os.PathLike, out: str | os.PathLike, *, ema: bool = False) -> int:
    """Writes one file as `export` does; returns the number of tensors."""
    return export(path, out, ema=ema).tensors


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is not one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _models(reader: Stored) -> Sequence[dict[str, Any]]:
    models = decode(reader.content.get("hf"), {})
    if not models:
        raise CheckpointError(
            f"{reader.path} was saved from a module without a transformers model, which --to hf needs: use "
            "--to safetensors."
        )
    return models


def _has_adapters(reader: Stored) -> bool:
    return any(model.get("adapters") for model in decode(reader.content.get("hf"), {}) or ())


def _tensors(reader: Stored, dtype: torch.dtype | None, ema: bool, trainable: bool) -> list[OutTensor]:
    """Returns what to write in the order of the module; other names of tied weights come last."""
    averages = set(reader.names("ema/")) if ema else set()
    if ema and not averages:
        raise CheckpointError(f"{reader.path} has no averaged weights: train with the callback ShardedEMA.")
    aliases: dict[str, str] = reader.content.get("aliases", {})
    first = {name: name for name in reader.names("model/")} | aliases
    if trainable:
        wanted = set(reader.content.get("trainable", ()))
        first = {name: same for name, same in first.items() if same in wanted}
        if not first:
            raise CheckpointError(f"{reader.path} has no trainable parameter.")
    found = []
    for name, same in first.items():
        stored = f"model/{same}"
        source = f"ema/{same}" if same in averages else stored
        kind = out_dtype(reader.dtype(stored), dtype)
        found.append(OutTensor(name, source, reader.shape(stored), kind))
    return found


def _write_all(reader: Stored, folders: Sequence[OutFolder], target: Path, left_out: list[str]) -> Exported:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target} is there already, and not an empty folder: name a new one with --out.")
    with _appearing(target) as partial:
        for folder in folders:
            (partial / folder.name).mkdir(parents=True, exist_ok=True)
            for file in folder.files:
                _write_file(reader, file, partial / folder.name / file.name)
            for name, text in folder.texts.items():
                write_file(partial / folder.name / name, text.encode())
    files = [file for folder in folders for file in folder.files]
    return Exported(
        tensors=sum(len(f.tensors) for f in files),
        nbytes=sum(f.nbytes for f in files),
        files=len(files),
        left_out=tuple(left_out),
    )


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Gives the name to write to; what is there at the end gets the name `target`, and nothing is left otherwise."""
    partial, folder = target.with_name(f".{target.name}.partial"), target.parent
    if not folder.absolute().parent.is_dir():
        raise CheckpointError(f"{target} cannot be written: neither {folder} is there nor the folder it would be in.")
    made = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        _remove(partial)
        yield partial
        partial.replace(target)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}.") from None
    finally:
        _remove(partial)
        if made:
            with suppress(OSError):  # the export is in it
                folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_file(reader: Stored, file: OutFile, path: Path) -> None:
    def read(name: str, start: int, stop: int) -> Tensor:
        return reader.read(name, start, stop)

    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(out, file.header)
        for tensor in file.tensors:
            for part in parts_of(tensor, read):
                for data in bytes_of(part):
                    write_all(out, data)
        os.fsync(out)
    finally:
        os.close(out)


def parts_of(tensor: OutTensor, read: Read) -> Iterator[Tensor]:
    """Yields a tensor's elements in the dtype they are exported in, a chunk at a time."""
    numel = tensor.nbytes // tensor.dtype.itemsize
    for start, stop in chunks(numel, tensor.dtype.itemsize):
        yield cast(read(tensor.source, start, stop), tensor.dtype, tensor.name)
