"""What a checkpoint is and holds, as plain data; which one is meant by a path that is not quite one. Needs no torch."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardlight.strategies.checkpoint.manifest import MANIFEST, Manifest
from shardlight.strategies.errors import CheckpointError

KINDS = ("weights", "optimizer state", "averages", "accumulated gradients", "other state")
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "C128": "complex128", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""PyTorch's names of dtypes."""
_GRADIENT = re.compile(r"(rank/\d+/)?gradient/")


def kind_of(name: str) -> str:
    """Returns which of `KINDS` a tensor of a checkpoint is, by its name."""
    if _GRADIENT.match(name):
        return "accumulated gradients"
    return {"model": "weights", "optimizer": "optimizer state", "ema": "averages"}.get(
        name.partition("/")[0], "other state"
    )


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns what should be checkpoints in a run folder or its folder `checkpoints`, the one with most steps last.

    Names that begin with a dot are those of a save that was interrupted, and are left out.
    """
    home = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    try:
        found = [p for p in home.iterdir() if p.is_dir() and not p.name.startswith(".")]
    except OSError as error:
        raise CheckpointError(f"{home} cannot be read: {error.strerror}.") from None
    if home == folder:
        found = [p for p in found if (p / MANIFEST).exists()]
    return sorted(found, key=lambda p: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", p.name)])


def checkpoint_folder(path: str | os.PathLike) -> Path:
    """Returns the path of a checkpoint.

    Raises: CheckpointError: there is nothing, or it is a folder of checkpoints: says which one to pass.
    """
    folder = Path(path)
    if not folder.exists():
        raise CheckpointError(f"{folder}: there is no such folder.")
    if folder.is_dir() and not (folder / MANIFEST).exists():
        inside = checkpoints_in(folder)
        if inside:
            raise CheckpointError(f"{folder} is a folder of checkpoints: pass one of them, such as {inside[-1]}.")
    return folder


@contextmanager
def understood(*paths: str | os.PathLike) -> Iterator[None]:
    """Makes an error of what a manifest says where it should say something else: it may come from anywhere."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        where = " or ".join(map(str, paths))
        raise CheckpointError(f"{where}: a part of the manifest is not what it has to be ({error!r:.200}).") from None


def describe(path: str | os.PathLike) -> dict[str, Any]:
    """Returns what a checkpoint is (step, strategy, versions, ...) and the table of its tensors, as plain data.

    Raises: CheckpointError: it is not complete, or its manifest is damaged.
    """
    manifest = Manifest.read(checkpoint_folder(path))
    with understood(path):
        return _describe(path, manifest)


def _describe(path: str | os.PathLike, manifest: Manifest) -> dict[str, Any]:
    content, sizes = manifest.content, dict.fromkeys(KINDS, 0)
    tensors = []
    for name, tensor in manifest.tensors.items():
        sizes[kind_of(name)] += tensor.nbytes
        row = {"name": name, "shape": list(tensor.shape), "dtype": DTYPES[tensor.dtype], "bytes": tensor.nbytes}
        tensors.append({**row, "pieces": len(tensor.pieces)})
    known = ("step", "epoch", "strategy", "world_size", "mesh", "saved_at", "versions")
    return {
        "path": str(path),
        **{key: content.get(key) for key in known},
        "optimizers": [_optimizer(manifest, i, o) for i, o in enumerate(content.get("optimizers") or [])],
        "window": content.get("window"),
        "models": [_model(m) for m in content.get("hf") or []],
        "trainable": len(content.get("trainable") or []),
        "aliases": content.get("aliases", {}),
        "bytes": sizes,
        "files": [{"name": f.name, "bytes": f.nbytes} for f in manifest.files],
        "tensors": tensors,
    }


def _optimizer(manifest: Manifest, index: int, data: dict[str, Any]) -> dict[str, Any]:
    prefix = f"optimizer/{index}/"
    kept = sorted({n.rpartition("/")[2] for n in manifest.tensors if n.startswith(prefix)})
    groups = data.get("groups", [])
    return {
        "class": data.get("class"),
        "groups": len(groups),
        "parameters": sum(len(g["params"]) for g in groups),
        "with_state": len(data.get("states", {})),
        "keeps": kept,
    }


def _model(data: dict[str, Any]) -> dict[str, Any]:
    kind = (data.get("config", {}).get("architectures") or ["?"])[0]
    return {"prefix": data["prefix"], "class": kind, "adapters": sorted(data.get("adapters") or {})}
