"""How a strategy writes and reads checkpoints: folders, each rank its own pieces."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.disk import remove_folder
from shardlight.strategies.checkpoint.lightning_file import LightningFile
from shardlight.strategies.checkpoint.modules import without_classes
from shardlight.strategies.checkpoint.opening import NothingToRestore, names_to_skip, open_first
from shardlight.strategies.checkpoint.parts import SHARDED, StoredParts
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.stored_values import EditedState, load_state, stored_state
from shardlight.strategies.checkpoint.window import load_window
from shardlight.strategies.data_position import DataPosition
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.window import Window
from shardlight.strategies.errors import CheckpointError, CollectiveError
from shardlight.strategies.loss_log import LossLog
from shardlight.strategies.notices import Notice, notify
from shardlight.strategies.random_state import EpochRandomness
from shardlight.strategies.ranks import RankCalls
from torch import nn
from torch.optim import Optimizer

_SCHEDULERS = "lr_scheduler_classes"
"""Of each scheduler, in a checkpoint's part of the Trainer."""


class Saving(RankCalls):
    """The part of Lightning's contract that is about checkpoints."""

    engine: Engine
    _reader: CheckpointReader | LightningFile | None
    _randomness: EpochRandomness
    _losses: LossLog
    _data_position: Callable[[], DataPosition]
    _before_batch: tuple[Window, int] | None = None
    """The window, and how many micro-batches it had, when the training_step that ran last began."""
    skip_on_load: Sequence[str] = ()
    """Names of tensors that a loaded checkpoint leaves as they are, with their optimizer state; `head.*`: all below."""
    resume_order: Sequence[Any] = ()
    """Checkpoints to take the first whole one of, where the Trainer is asked to load the first; newest first."""
    resumed_from: Path | None = None
    """The checkpoint that was loaded last."""
    _skip: frozenset[str] = frozenset()
    run_config: Mapping[str, Any] | None = None
    """The resolved config of the run as plain data, which checkpoints keep; None: it has none."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state dict; sharded parameters are in it as themselves, not as values."""
        return _plain_state(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns a marker: optimizer state goes from each rank straight into its file."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint folder. Collective.

        After an error (ModelCheckpoint(save_on_exception=True), OnExceptionCheckpoint) others may be elsewhere. Then
        nothing is written, with a warning, so that the error itself goes on.

        Raises: CheckpointError: something cannot be written; CollectiveError: not all ranks make the call.
        """
        if storage_options is not None:
            raise CheckpointError(
                f"{filepath}: storage_options are not supported: checkpoints are folders on a local or shared disk."
            )
        path = Path(os.fspath(filepath)).absolute()
        checkpoint = without_classes(checkpoint)
        if "lr_schedulers" in checkpoint:
            checkpoint[_SCHEDULERS] = [type(c.scheduler).__name__ for c in self.lr_scheduler_configs]
        optimizers = [_inner(o) for o in self.optimizers]
        try:
            if self._engine is None and self.interrupted:
                raise CollectiveError("The error came before anything was sharded.")
            window = "optimizer_states" in checkpoint and self._saves_window(path)
            self._losses.put_into(checkpoint)
            rank_state = self._randomness.state() | self._data_position().state()
            if not self.interrupted:
                rank_state |= {"logged": self._data_position().loops.logged()}
            trainer_state.save(self.engine, optimizers, checkpoint, rank_state, path, self.run_config, window)
        except CollectiveError as error:
            if not self.interrupted:
                raise
            warnings.warn(
                f"{path}: not saved: a checkpoint after an error takes all ranks, and not all are here. {error}",
                category=Notice,
                stacklevel=2,
            )

    def _saves_window(self, path: Path) -> bool:
        """Whether accumulated gradients belong into a checkpoint: not those of a batch that Lightning will repeat.

        Raises: CheckpointError: they are of such a batch and of earlier ones.
        """
        assert self.lightning_module is not None
        progress = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.current
        window, before = self.engine.window, self._before_batch
        if before is None or progress.started == progress.processed:
            return True
        if before[0] is window and before[1] == window.micro_batches:
            return True
        if self.interrupted:
            warnings.warn(
                f"{path}: saved without accumulated gradients, as the error came in a batch.",
                category=Notice,
                stacklevel=2,
            )
        elif ((before[0] is window and before[1]) or window.carried) and self.engine.gradients.unfinished() is not None:
            raise CheckpointError(
                f"{path}: a checkpoint inside batch {progress.ready - 1}, whose gradients are added up with those of "
                "earlier ones: a run from it would count them twice. Save in on_train_batch_end."
            )
        return False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a checkpoint folder; returns the Trainer's part, and lazily what is read into shards later.

        Every byte that will be read is compared with its checksum first, on all ranks together. Collective.

        Raises: CheckpointError: on every rank: not a complete checkpoint folder, or it is damaged.
        """
        assert self.lightning_module is not None
        order = self.resume_order if str(checkpoint_path) in map(str, self.resume_order[:1]) else (checkpoint_path,)
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        self._reader = open_first(self._engine, order, fitting)
        self.resumed_from = None if self._reader is None else self._reader.path
        if self._reader is None:
            return NothingToRestore({"pytorch-lightning_version": pl.__version__})
        checkpoint = trainer_state.load_trainer(self._reader)
        checkpoint["state_dict"] = stored_state(self._reader)
        if fitting:
            self._keep_other_schedulers(checkpoint)
        # Lightning's tuners restore all of what they have saved a moment ago.
        patterns = () if self._from_tuner else self.skip_on_load
        state, stored = _plain_state(self.lightning_module), checkpoint["state_dict"]
        self._skip = names_to_skip(patterns, state, stored, self._reader.path)
        checkpoint[SHARDED] = StoredParts(self._reader, self._skip)
        if self._reader.content.get("optimizers") is not None:
            checkpoint["optimizer_states"] = [None] * len(self._reader.content["optimizers"])
        return checkpoint

    def _keep_other_schedulers(self, checkpoint: dict[str, Any]) -> None:
        """Leaves schedulers as they are where the checkpoint has the state of another class, with a word of it."""
        states, here = checkpoint.get("lr_schedulers") or [], [c.scheduler for c in self.lr_scheduler_configs]
        for number, name in enumerate(checkpoint.pop(_SCHEDULERS, None) or []):
            mine = type(here[number]).__name__ if number < len(here) else "none"
            if mine != name and number < len(states):
                notify(f"{self.resumed_from}: scheduler {number} was {name} and is {mine}: it starts anew.")
                states[number] = here[number].state_dict() if number < len(here) else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Reads this rank's pieces of the weights, as `on_load_checkpoint` has left their names and values."""
        assert self._reader is not None
        state = {n: t for n, t in _plain_state(self.lightning_module).items() if n not in self._skip}
        edited = {n: t for n, t in checkpoint["state_dict"].items() if n not in self._skip}
        load_state(self.engine, EditedState(self._reader, edited), state, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Reads this rank's part of each optimizer's state, and takes up its random state."""
        assert self._reader is not None
        self._restore_finetuning_groups()
        optimizers = [_inner(o) for o in self.optimizers]
        if isinstance(self._reader, LightningFile):
            name = self.engine.local_parameters.name
            self._reader.name_parameters([[[name(p) for p in g["params"]] for g in o.param_groups] for o in optimizers])
        fresh, unused = trainer_state.load_optimizers(self.engine, self._reader, optimizers, self._skip)
        if fresh:
            notify(f"{self._reader.path} was saved without optimizer state of {_some(fresh)}: it starts anew.")
        if unused:
            notify(f"{self._reader.path} has optimizer state of {_some(unused)}, which no optimizer has here.")
        load_window(self.engine, self._reader, self._skip)
        self._losses.take_from(checkpoint)
        saved_by = self._reader.content["world_size"]
        if saved_by is None:
            notify(
                f"{self._reader.path} is Lightning's own: it has no random numbers and no position in the data, so "
                "that an epoch it is in the middle of has its first samples again."
            )
        else:
            saved = trainer_state.load_rank(self._reader, self.global_rank % saved_by)
            self._data_position().loops.resume(saved.get("logged", {}))
            there, here = self._reader.content.get("mesh") or {}, trainer_state.mesh_of(self.engine)
            if saved_by == self.world_size and all(there.get(axis, 1) == here.get(axis, 1) for axis in _CUT):
                self._randomness.resume(saved)
                self._data_position().resume(saved)
            else:
                notify(
                    f"{self._reader.path} was saved by {_arranged(saved_by, there)} and goes on with "
                    f"{_arranged(self.world_size, here).removesuffix(' ranks')}: weights "
                    "and optimizer state are the same, and so are the samples that are left of an epoch; random "
                    "numbers, such as those of dropout, and which rank has which sample are not."
                )
        # A tuner restores in the middle of a hook, and the loops go on from there.
        if not self._from_tuner:
            self._data_position().go_on()

    @property
    def _from_tuner(self) -> bool:
        assert self._reader is not None
        return self._reader.path.name.startswith((".lr_find_", ".scale_batch_size_"))

    def _restore_finetuning_groups(self) -> None:
        # These callbacks make the groups again that they had added, in on_fit_start: which has been called when weights
        # are read after sharding, before the callbacks had their state.
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, BaseFinetuning) and callback._restarting:
                callback.on_fit_start(trainer, self.lightning_module)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint folder (rank 0); warns where that cannot be."""
        if self.is_global_zero:
            path = Path(os.fspath(filepath))
            try:
                path.unlink() if path.is_file() else remove_folder(path)
            except OSError as error:
                notify(f"{path} cannot be removed: {error}.")


_CUT = {"pipeline": "{} stages", "tensor": "groups of {} that share matrices"}
"""Axes of a mesh over which a model is cut, in words."""


def _arranged(ranks: int, mesh: Mapping[str, int]) -> str:
    parts = [words.format(mesh[axis]) for axis, words in _CUT.items() if mesh.get(axis, 1) > 1]
    return " in ".join([f"{ranks} ranks", *parts])


def _plain_state(module: nn.Module | None) -> dict[str, Any]:
    assert module is not None
    return module.state_dict(keep_vars=True)


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{n}'" for n in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _inner(optimizer: Any) -> Optimizer:
    return getattr(optimizer, "_optimizer", optimizer)
