"""How a strategy hands data to its ranks: loaders in lockstep, with a position; every sample of an evaluation once."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage
from shardlight.strategies.data_position import DataPosition
from shardlight.strategies.loaders import LockstepLoader, SizedLockstepLoader, count_every_sample_once, has_length
from shardlight.strategies.random_state import EpochRandomness
from shardlight.strategies.saving import Saving


class DataLoading(Saving):
    """The part of Lightning's contract that is about data loaders."""

    _position: DataPosition | None
    _randomness: EpochRandomness

    @property
    def data_rank(self) -> int:
        """This rank's number among those that see different data."""
        return self.global_rank

    @property
    def data_world_size(self) -> int:
        """How many ranks see different data."""
        return self.world_size

    def process_dataloader(self, dataloader: Any) -> Any:
        """Counts every sample once in evaluation; keeps ranks in lockstep, and a position, in training."""
        stage = _stage_of_loader()
        if stage is RunningStage.TRAINING:
            return self._lockstep(dataloader)
        return count_every_sample_once(dataloader, stage, self.data_world_size, self.data_rank)

    def _lockstep(self, dataloader: Any) -> Any:
        # May be called by `trainer.estimated_stepping_batches` in configure_optimizers, before there is an engine.
        length = len(dataloader) if has_length(dataloader) else -1
        lengths = [length] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(lengths, length)
        agree = self._agree_on_next_batch if len(set(lengths)) > 1 or (-1 in lengths and self.world_size > 1) else None
        position = self._data_position()
        if -1 in lengths:
            return LockstepLoader(dataloader, agree, position)
        return SizedLockstepLoader(dataloader, agree, position, min(lengths))

    def _data_position(self) -> DataPosition:
        if self._position is None:
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            self._position = DataPosition(trainer, self._randomness, self.data_world_size, self.data_rank)
        return self._position

    def _agree_on_next_batch(self, more: bool) -> list[bool]:
        self.engine.agreement.meet("next training batch")
        row = torch.tensor([int(more)], dtype=torch.int64, device=self.root_device)
        return [bool(n) for n in self.engine.everyone.gather_small(row, "next training batch").flatten().tolist()]


def _stage_of_loader() -> RunningStage:
    """Finds what the loader that is being processed is for: within fit the strategy is not told."""
    frame = sys._getframe(2)
    stage = frame.f_locals.get("stage")
    assert isinstance(stage, RunningStage), "process_dataloader is called by Lightning's _process_dataloader alone"
    return stage
