"""How a strategy writes and reads checkpoints: folders, each rank its own pieces."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.disk import remove_folder
from shardlight.strategies.checkpoint.parts import SHARDED, StoredParts
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.checkpoint.window import load_window
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.errors import CheckpointError, CollectiveError
from shardlight.strategies.random_state import EpochRandomness
from shardlight.strategies.ranks import RankCalls
from torch import nn
from torch.optim import Optimizer


class Saving(RankCalls):
    """The part of Lightning's contract that is about checkpoints."""

    engine: Engine
    _reader: CheckpointReader | None
    _randomness: EpochRandomness
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
        optimizers = [_inner(o) for o in self.optimizers]
        try:
            if self._engine is None and self.interrupted:
                raise CollectiveError("The error came before anything was sharded.")
            trainer_state.save(self.engine, optimizers, checkpoint, self._randomness.state(), path, self.run_config)
        except CollectiveError as error:
            if not self.interrupted:
                raise
            warnings.warn(
                f"{path}: not saved: a checkpoint after an error takes all ranks, and not all are here. {error}",
                stacklevel=2,
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a checkpoint folder; returns the Trainer's part, and lazily what is read into shards later.

        Every byte that will be read is compared with its checksum first, on all ranks together. Collective.

        Raises: CheckpointError: on every rank: not a complete checkpoint folder, or it is damaged.
        """
        self._reader = self._open_together(checkpoint_path)
        checkpoint = trainer_state.load_trainer(self._reader)
        aliases = self._reader.content.get("aliases", {})
        checkpoint["state_dict"] = dict.fromkeys([*self._reader.names("model/"), *aliases])
        checkpoint[SHARDED] = StoredParts(self._reader)
        if self._reader.content.get("optimizers") is not None:
            checkpoint["optimizer_states"] = [None] * len(self._reader.content["optimizers"])
        return checkpoint

    def _open_together(self, path: Any) -> CheckpointReader:
        assert self.lightning_module is not None
        reader, fault = None, ""
        try:
            reader = CheckpointReader(path)
        except CheckpointError as error:
            fault = str(error)
        trainer_state.agree(self._engine, fault, "load_checkpoint")
        assert reader is not None
        evaluating = self.lightning_module.trainer.state.fn != TrainerFn.FITTING
        trainer_state.verify_together(self._engine, reader, evaluating)
        return reader

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Reads this rank's pieces of the weights. Names dropped by `on_load_checkpoint` stay as they are."""
        assert self._reader is not None
        state = _plain_state(self.lightning_module)
        trainer_state.load_model(self.engine, self._reader, state, list(checkpoint["state_dict"]), strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Reads this rank's part of each optimizer's state, and takes up its random state."""
        assert self._reader is not None
        self._restore_finetuning_groups()
        optimizers = [_inner(o) for o in self.optimizers]
        fresh, unused = trainer_state.load_optimizers(self.engine, self._reader, optimizers)
        if fresh:
            rank_zero_warn(f"{self._reader.path} was saved without optimizer state of {_some(fresh)}: it starts anew.")
        if unused:
            rank_zero_warn(f"{self._reader.path} has optimizer state of {_some(unused)}, which no optimizer has here.")
        load_window(self.engine, self._reader)
        saved_by = int(self._reader.content["world_size"])
        if saved_by != self.world_size:
            rank_zero_warn(
                f"{self._reader.path} was saved by {saved_by} ranks and goes on with {self.world_size}: weights and "
                "optimizer state are the same, but not the random numbers and the order of the data."
            )
            return
        self._randomness.resume(trainer_state.load_rank(self._reader, self.global_rank))

    def _restore_finetuning_groups(self) -> None:
        # These callbacks make the groups again that they had added, in on_fit_start: which has been called when weights
        # are read after sharding, before the callbacks had their state.
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, BaseFinetuning) and callback._restarting:
                callback.on_fit_start(trainer, self.lightning_module)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint folder (rank 0)."""
        if self.is_global_zero:
            path = Path(os.fspath(filepath))
            if path.is_file():
                path.unlink()
            else:
                remove_folder(path)


def _plain_state(module: nn.Module | None) -> dict[str, Any]:
    assert module is not None
    return module.state_dict(keep_vars=True)


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{n}'" for n in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _inner(optimizer: Any) -> Optimizer:
    return getattr(optimizer, "_optimizer", optimizer)
