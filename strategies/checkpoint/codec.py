"""Trainer state as JSON and tensors, and back: plain data only, refused by name when it is anything else."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import Container, OmegaConf
from shardlight.strategies.errors import CheckpointError
from torch import Tensor

_TAG = "__kind__"
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Returns `value` as JSON data; tensors in it go into `tensors` and leave their key.

    Args:
        where: dotted path of the value, for messages and as the tensors' key.
    Raises: CheckpointError: a value that is neither plain data nor a tensor; names it.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": str(float(value))}
    if isinstance(value, np.generic):
        return encode(value.item(), where, tensors)
    if isinstance(value, Tensor):
        return {_TAG: "tensor", "value": _keep(value.detach(), where, tensors)}
    if isinstance(value, np.ndarray):
        return {_TAG: "array", "value": _keep(torch.from_numpy(np.ascontiguousarray(value)), where, tensors)}
    if isinstance(value, Container):
        return encode(OmegaConf.to_container(value, resolve=True), where, tensors)
    if isinstance(value, Path):
        return {_TAG: "path", "value": str(value)}
    if isinstance(value, torch.dtype | torch.device):
        return {_TAG: type(value).__name__, "value": str(value).removeprefix("torch.")}
    if isinstance(value, list):
        return [encode(v, f"{where}.{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {_TAG: kind, "value": [encode(v, f"{where}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, tensors)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be written as plain data: "
        "return numbers, text, lists, dicts and tensors from state_dict / on_save_checkpoint / save_hyperparameters."
    )


def _keep(value: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    """Returns the key under which a tensor is kept: keys with dots can give two values one path."""
    while where in tensors:
        where += "'"
    tensors[where] = value
    return where


def _encode_mapping(value: Mapping, where: str, tensors: dict[str, Tensor]) -> Any:
    if all(isinstance(k, str) for k in value) and _TAG not in value:
        return {k: encode(v, f"{where}.{k}", tensors) for k, v in value.items()}
    pairs = [[encode(k, f"{where}.key", tensors), encode(v, f"{where}.{k}", tensors)] for k, v in value.items()]
    return {_TAG: "dict", "value": pairs}


def decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns what `encode` was given.

    Raises: CheckpointError: it is nothing that `encode` returns, or a tensor is missing.
    """
    try:
        return _decode(data, tensors)
    except (TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"a value of the manifest cannot be read ({error!r:.200}).") from None


def _decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(data, list):
        return [_decode(v, tensors) for v in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {k: _decode(v, tensors) for k, v in data.items()}
    kind, value = data[_TAG], data.get("value")
    if kind in ("tensor", "array"):
        if value not in tensors:
            raise CheckpointError(f"the tensor '{value}' is missing.")
        return tensors[value] if kind == "tensor" else tensors[value].numpy()
    if kind == "float" and value in ("inf", "-inf", "nan"):
        return float(value)
    if kind == "path":
        return Path(value)
    if kind == "device":
        return torch.device(value)
    if kind == "dtype" and value in _DTYPES:
        return _DTYPES[value]
    if kind == "tuple":
        return tuple(_decode(v, tensors) for v in value)
    if kind == "set":
        return {_decode(v, tensors) for v in value}
    if kind == "dict":
        return {_decode(k, tensors): _decode(v, tensors) for k, v in value}
    raise CheckpointError(f"'{kind}' is not a kind of value that a manifest can hold.")
