"""Full weights of a running model as an export, in 16 bits or another dtype: each rank writes its own ranges in place.

The places of all tensors in all files are known before a byte is written (`layouts.py`), so no rank ever holds more
than its own shards and a part of one of them in another dtype; there is no gather.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from shardlight.strategies.checkpoint.disk import publish, sync_folder, write_all, write_file
from shardlight.strategies.checkpoint.export import DTYPES, HF_SHARD_BYTES
from shardlight.strategies.checkpoint.layouts import (
    CHUNK_BYTES,
    OutFile,
    OutFolder,
    OutTensor,
    cast,
    hf_folders,
    make_folder,
    out_dtype,
)
from shardlight.strategies.checkpoint.parts import replica_share
from shardlight.strategies.checkpoint.safetensors_file import bytes_of
from shardlight.strategies.checkpoint.trainer_state import together
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.errors import CheckpointError
from torch import Tensor, nn


def export_running(
    engine: Engine,
    state: Mapping[str, Any],
    path: Path,
    *,
    dtype: str | None = "bf16",
    models: Sequence[Mapping[str, Any]] | None = None,
    max_file_bytes: int = HF_SHARD_BYTES,
) -> list[str]:
    """Writes the folder that `export` would make of a checkpoint of this moment, byte for byte. Collective.

    Args:
        state: the module's state dict with the engine's parameters themselves.
        path: the folder, on a disk that all ranks share; appears when it is complete, in place of what was there.
        dtype: see `export`.
        models: see `describe_models`; with some, the layout is that of "hf".
        max_file_bytes: of each file.
    Returns: names that are in none of the models, and not written.
    Raises: CheckpointError: on every rank, when any rank could not write; nothing is at `path` then, or what was there.
    """
    rank = engine.everyone.rank
    engine.agreement.meet(f"export {path.name}")
    engine.take_in_changes()
    tensors = _tensors(engine, state, None if dtype is None else DTYPES[dtype])
    folders, left_out = (
        hf_folders(tensors, models, max_file_bytes) if models else ([make_folder(tensors, max_file_bytes)], [])
    )
    partial = path.with_name(f".{path.name}.partial")
    places = [(partial / folder.name / file.name, file) for folder in folders for file in folder.files]

    def prepare() -> None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in folders:
                (partial / folder.name).mkdir(parents=True, exist_ok=True)
            for place, file in places:
                _make_file(place, file)

    def write() -> None:
        for place, file in places:
            _write_own(engine, state, place, file)

    def finish() -> None:
        if rank == 0:
            _finish(folders, partial, path)

    try:
        for work in (prepare, write, finish):
            together(engine, path, work, "the weights were not exported")
    finally:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
    return left_out


def _tensors(engine: Engine, state: Mapping[str, Any], dtype: torch.dtype | None) -> list[OutTensor]:
    """Returns what to write, a tied weight under each of its names; in the order of `export`: other names come last.

    Where ranks have parts of the model it is what all of them have. Collective then.
    """
    first: dict[int, str] = {}
    found, aliases = [], []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"state_dict['{name}'] is a {type(value).__name__}, not a tensor.")
        source = first.setdefault(id(value), name) if isinstance(value, nn.Parameter) else name
        piece = engine.owned_piece(value) if isinstance(value, nn.Parameter) else None
        kind = out_dtype(value.dtype if piece is None else piece[1].dtype, dtype)
        (found if source == name else aliases).append(OutTensor(name, source, engine.slice_of(value).shape, kind))
    if engine.ranks.model.world_size > 1:
        by_stage = engine.ranks.model.gather_objects((found, aliases), "tensors of an export")
        every = [tensor for kind in (0, 1) for stage in by_stage for tensor in stage[kind]]
        return list({tensor.name: tensor for tensor in every}.values())
    return found + aliases


def _make_file(path: Path, file: OutFile) -> None:
    """Makes a file in its full length, with its header."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(out, file.header)
        os.ftruncate(out, file.nbytes)
    finally:
        os.close(out)


def _write_own(engine: Engine, state: Mapping[str, Any], path: Path, file: OutFile) -> None:
    """Writes this rank's elements of a file's tensors, and waits until they are on disk."""
    out = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for tensor in file.tensors:
            if tensor.source not in state:
                continue  # another stage of a pipeline has it
            value = state[tensor.source]
            start, flat = _own_part(engine, tensor.source, value)
            of, width = engine.slice_of(value), tensor.dtype.itemsize
            step = max(1, CHUNK_BYTES // width)
            for low in range(0, flat.numel(), step):
                chunk = cast(flat[low : low + step], tensor.dtype, tensor.name)
                runs = ((start + low, chunk),) if of.is_whole else of.runs(chunk, start + low)
                for first, run in runs:
                    at = file.offsets[tensor.name] + first * width
                    for data in bytes_of(run):
                        at += _write_at(out, data, at)
        os.fsync(out)
    finally:
        os.close(out)


def _own_part(engine: Engine, name: str, value: Tensor) -> tuple[int, Tensor]:
    """Returns (start, flat part) of what this rank writes; each element is written by one rank."""
    piece = engine.owned_piece(value) if isinstance(value, nn.Parameter) else None
    if piece is None:
        mine = engine.writes_whole and engine.part.writes(name)
        return 0, value.detach().reshape(-1) if mine else value.detach().reshape(-1)[:0]
    return replica_share(engine, value, *piece)


def _write_at(file: int, data: memoryview, at: int) -> int:
    written = 0
    while written < data.nbytes:
        written += os.pwrite(file, data[written:], at + written)
    return written


def _finish(folders: Sequence[OutFolder], partial: Path, path: Path) -> None:
    for folder in folders:
        for name, text in folder.texts.items():
            write_file(partial / folder.name / name, text.encode())
        sync_folder(partial / folder.name)
    publish(partial, path)
