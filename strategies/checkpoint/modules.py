"""A bare module, or its state dict, out of a checkpoint: without ranks, a strategy or a Trainer."""

import inspect
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.core.saving import _load_state
from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.lightning_file import open_checkpoint
from shardlight.strategies.checkpoint.stored_values import Reader, stored_state
from shardlight.strategies.errors import CheckpointError, StrategyError
from torch import Tensor

Module = TypeVar("Module", bound=pl.LightningModule)
HPARAMS = "hyper_parameters"
_TYPES = ("hparams_type", "datamodule_hparams_type")
_NOT_FROM_DATA = ("_instantiator", "_class_path")
"""Hyper-parameters that name code, which Lightning would import."""


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Returns the bare module's state dict from a checkpoint: its keys, shapes and dtypes, tied weights once.

    Args:
        path: a checkpoint folder of any strategy and number of ranks, or a file of torch.save (Lightning's .ckpt).
    Raises: CheckpointError: it is not whole; a folder's checksums are compared.
    Example: model.load_state_dict(read_state_dict("runs/gpt/000/checkpoints/step-200"))
    """
    reader = _open(path)
    read: dict[int, Tensor] = {}
    state = stored_state(reader)
    return {n: read.setdefault(id(v), reader.read(v.stored_name)) for n, v in state.items()}


def load_module(
    kind: type[Module],
    path: str | os.PathLike[str],
    *,
    map_location: Any = None,
    strict: bool | None = None,
    hparams: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Module:
    """Makes a LightningModule from its saved hyper-parameters, with the weights of a checkpoint; any class, any code.

    Hyper-parameters are plain containers; dicts in them can be read by attribute as well, as an OmegaConf config that
    was saved could. One tensor at a time is read into the module.

    Args:
        kind: the class to make.
        path: see `read_state_dict`.
        map_location: the device of the module; None: CPU.
        strict: as in load_state_dict; None: as the module's strict_loading says.
        hparams: instead of those that were saved.
        arguments: of the class; they win.
    Raises: CheckpointError: see `read_state_dict`; RuntimeError: names or shapes do not fit.
    """
    if map_location is not None and not isinstance(map_location, str | int | torch.device):
        raise CheckpointError(f"map_location={map_location!r}: give one device, such as 'cpu' or 'cuda:0'.")
    reader = _open(path)
    checkpoint = trainer_state.load_trainer(reader)
    checkpoint["state_dict"] = stored_state(reader)
    given = checkpoint.get(HPARAMS, {}) if hparams is None else hparams
    plain = {k: v for k, v in {**given, **arguments}.items() if k not in _NOT_FROM_DATA}
    checkpoint[HPARAMS] = _by_attribute(plain)
    module: Module = _load_state(kind, checkpoint, strict=strict, **arguments)  # type: ignore[assignment]
    return module if map_location is None else module.to(map_location)


def _open(path: str | os.PathLike[str]) -> Reader:
    reader = open_checkpoint(path)
    reader.verify((0, 1), lambda name: name.startswith(("model/", "trainer")))
    return reader


def _by_attribute(value: Any) -> Any:
    if isinstance(value, dict):
        return AttributeDict({k: _by_attribute(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(_by_attribute(v) for v in value)
    return value


def without_classes(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a Trainer's checkpoint with the names of the classes of hyper-parameters instead of the classes."""
    return {**checkpoint, **{k: checkpoint[k].__name__ for k in _TYPES if inspect.isclass(checkpoint.get(k))}}


def refuse_unresolved(owner: Any) -> None:
    """Makes sure, before training, that hyper-parameters can be saved as plain data.

    Args:
        owner: a LightningModule or LightningDataModule.
    Raises: StrategyError: an interpolation of an OmegaConf config cannot be resolved; names its key.
    """
    held = getattr(owner, "hparams", {})
    for name, value in {"": held}.items() if isinstance(held, Container) else held.items():
        if not isinstance(value, Container):
            continue
        try:
            OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            key = ".".join(part for part in (name, str(getattr(error, "full_key", "") or "")) if part)
            raise StrategyError(
                f"the hyper-parameter '{key}' of {type(owner).__name__} cannot be resolved, so no checkpoint could be "
                f"saved: {str(error).splitlines()[0]}. Set what it refers to, or leave it out of save_hyperparameters."
            ) from None
