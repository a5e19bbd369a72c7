"""What training has logged so far: callbacks and plateau schedulers ask for it, also right after a resume."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities import move_data_to_device
from shardlight.strategies.errors import CheckpointError
from torchmetrics import Metric

_REDUCTIONS = {f"{f.__module__}.{f.__name__}": f for f in (min, max, sum, torch.mean, torch.min, torch.max, torch.sum)}
"""All that Lightning takes, by the name that a checkpoint has: nothing else is looked up for it."""
_PLAIN = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "metric_attribute")

LOSS_WEIGHT = "_shardlight_weight"
"""Attribute of a tensor that is a mean: what it was taken over."""


def logged_state(trainer: pl.Trainer, in_epoch: bool) -> dict[str, Any]:
    """Returns, as plain data and tensors, what this rank keeps in a checkpoint.

    Args:
        in_epoch: training is in the middle of an epoch: with the means and metrics of the epoch so far.
    """
    state: dict[str, Any] = {"latest": dict(trainer.callback_metrics)}
    if in_epoch:
        results, evaluated = trainer.fit_loop.epoch_loop._results, trainer.fit_loop.epoch_loop.val_loop._results
        state["epoch"] = [_entry(r) for r in results.values() if not r.has_reset and r.meta.sync.group is None]
        others = {id(r.value) for r in evaluated.values() if not r.is_tensor}
        state["metrics"] = {
            name: {"updates": m._update_count, "values": {k: getattr(m, k) for k in m._defaults}}
            for name, m in _metrics(trainer).items()
            if m.update_called and id(m) not in others
        }
    return state


def restore_logged(trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    """Takes up what `logged_state` returned, when training starts."""
    state = move_data_to_device(dict(state), trainer.strategy.root_device)
    trainer._logger_connector._callback_metrics.update(state["latest"])
    metrics = _metrics(trainer)
    for name, saved in state.get("metrics", {}).items():
        if name in metrics and metrics[name]._defaults.keys() == saved["values"].keys():
            for key, value in saved["values"].items():
                setattr(metrics[name], key, value)
            metrics[name]._update_count, metrics[name]._computed = saved["updates"], None
    for entry in state.get("epoch", ()):
        _add(trainer, entry)


def _metrics(trainer: pl.Trainer) -> dict[str, Metric]:
    return {name: m for name, m in trainer.lightning_module.named_modules() if isinstance(m, Metric)}


def _entry(result: _ResultMetric) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    entry = {name: getattr(meta, name) for name in _PLAIN}
    entry["reduce"] = f"{meta.reduce_fx.__module__}.{meta.reduce_fx.__name__}"
    entry |= {"sync": sync.should, "rank_zero_only": sync.rank_zero_only, "add_dataloader_idx": meta.add_dataloader_idx}
    return entry | {"values": {k: getattr(result, k) for k in result._defaults}}


def _add(trainer: pl.Trainer, entry: Mapping[str, Any]) -> None:
    reduce = _REDUCTIONS.get(str(entry["reduce"]))
    if reduce is None:
        raise CheckpointError(f"'{entry['name']}' was logged with {entry['reduce']!r}, which is no reduction.")
    meta = _Metadata(
        **{name: entry[name] for name in (*_PLAIN, "add_dataloader_idx")}, dataloader_idx=None, reduce_fx=reduce
    )
    meta.sync = _Sync(fn=trainer.strategy.reduce, _should=entry["sync"], rank_zero_only=entry["rank_zero_only"])
    attribute = entry["metric_attribute"]
    if attribute and attribute not in _metrics(trainer):
        return
    result = _ResultMetric(meta, is_tensor=not attribute)
    for key in result._defaults.keys() & entry["values"].keys():
        setattr(result, key, entry["values"][key])
    if attribute:
        result.value = attrgetter(attribute)(trainer.lightning_module)
    result._update_count = 1
    trainer.fit_loop.epoch_loop._results[f"{entry['fx']}.{entry['name']}"] = result.to(trainer.strategy.root_device)
