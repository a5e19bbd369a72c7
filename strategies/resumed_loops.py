"""Lightning's fit loop after a resume: what came after the save comes after the resume.

[Note: the rest of a batch] Most checkpoints are saved in a hook at the end of a batch, a validation or an epoch. When
it resumes, Lightning goes on with the next batch: a validation that was due after the save is left out, the ends of
the epoch with its hooks and schedulers too, and a hook that begins an epoch may be called twice or not at all. Random
numbers and the order of data then differ as well, since validation draws a seed. So the counters are put to where the
hook of the save has ended, and Lightning is only told that it restarts until it has taken them over; what was left of
the batch or the epoch is then done before anything new. The hook in which a checkpoint is saved counts as done:
callbacks that stand behind the one that saves, and the module, do not see it again.
"""

from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops import _Loop
from lightning.pytorch.trainer.states import TrainerFn
from shardlight.strategies.logged_values import logged_state, restore_logged
from shardlight.strategies.random_state import EpochRandomness


class ResumedLoops:
    """The loops of one Trainer, from a checkpoint's counters until training goes on.

    Args:
        randomness: what the numbers go on with when training does.
    """

    def __init__(self, trainer: pl.Trainer, randomness: EpochRandomness) -> None:
        self.before_data = False
        """Of a resume: the next epoch's data is not to be begun yet, since something comes before it."""
        self._trainer, self._fit, self._epoch = trainer, trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._randomness = randomness
        self._resumed = self._inside = False
        self._rest: str | None = None
        """What is left of the `batch` (with the validation that is due or, `validated`, without) or `epoch`."""
        self._logged: Mapping[str, Any] = {}

    def logged(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of what this rank has logged."""
        if self._trainer.state.fn != TrainerFn.FITTING:
            return {}
        epoch = self._fit.epoch_progress.current
        return logged_state(self._trainer, in_epoch=epoch.started > epoch.processed)

    def resume(self, logged: Mapping[str, Any]) -> None:
        """Takes what `logged` returned; it is used when training goes on."""
        self._logged = logged

    def settle(self, half_done: bool) -> None:
        """Puts the counters that a checkpoint had to where its hook has ended; see [Note: the rest of a batch].

        Args:
            half_done: data of the epoch is left. An epoch in whose middle training was stopped (`max_steps`,
                `max_time`, SIGTERM) is over by Lightning's count: the rest of its data would be lost, and its order
                taken for the next epoch's.
        """
        epochs, batches = self._fit.epoch_progress, self._epoch.batch_progress
        epoch, batch, validation = epochs.current, batches.current, self._epoch.val_loop.batch_progress.current
        self._resumed, self._inside, self._rest = True, True, None
        if epoch.ready > epoch.started:  # in on_train_epoch_start
            epochs.increment_started()
            steps = self._epoch.automatic_optimization.optim_progress
            for progress in (batches, self._epoch.scheduler_progress, steps):
                progress.reset_on_run()
            self._epoch.val_loop.batch_progress.total.reset()
        elif epoch.started > epoch.processed:
            if batch.processed > batch.completed:  # in on_train_batch_end
                batches.increment_completed()
                self._rest = "batch"
            elif batch.ready > batch.completed:  # in the middle of a batch, which is repeated
                for count in (batches.total, batch):
                    count.reset_on_restart()
                batches.is_last_batch = False
            elif batch.ready:  # during or after its validation
                self._rest = "validated" if validation.completed == validation.ready > 0 else "batch"
        elif half_done:
            for count in (epochs.total, epoch):
                count.processed -= 1
                count.completed = count.processed
        else:
            self._inside = False
            if epoch.processed > epoch.completed:  # in on_train_epoch_end
                self._rest = "epoch"
                epochs.increment_completed()
            self._fit._resuming_from_checkpoint = False
        # The fit loop's own setter takes any run with `max_steps` for one in the middle of an epoch.
        _Loop.restarting.fset(self._fit, self._inside)  # type: ignore[attr-defined]
        self.before_data = batches.is_last_batch if self._inside else epoch.completed > 0

    def begin_training(self) -> None:
        """Called at the end of `on_train_start`: goes on to where the next batch, or epoch, begins."""
        self._randomness.set_now()
        if not self._resumed:
            return
        self._resumed = self.before_data = False
        if self._logged:
            restore_logged(self._trainer, self._logged)
            self._logged = {}
        else:
            self._epoch.update_lr_schedulers = partial(self._step_schedulers, self._trainer.current_epoch)
        if every := self._trainer.reload_dataloaders_every_n_epochs:
            self._fit._last_train_dl_reload_epoch -= self._trainer.current_epoch % every
        if self._inside:
            self._epoch.on_run_start = MethodType(self._begin_epoch, self._epoch)
        elif self._rest == "epoch":
            self._end_epoch()

    def _begin_epoch(self, loop: Any, data_fetcher: Any) -> None:
        del loop.on_run_start
        loop.on_run_start(data_fetcher)
        _Loop.restarting.fset(self._fit, False)  # type: ignore[attr-defined]
        loop.reset_restart_stage()
        if self._rest is not None:
            ready = loop.batch_progress.current.ready
            # On other ranks the epoch may be back at its start, by their count of batches.
            loop._skip_next_val = self._rest == "validated" or not ready
            self._trainer._logger_connector._first_loop_iter = ready == 1
            loop.on_advance_end(data_fetcher)

    def _end_epoch(self) -> None:
        if self._epoch._num_ready_batches_reached():
            current = self._fit.epoch_progress.current
            current.completed -= 1  # schedulers count the epochs before this one
            self._epoch.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            current.completed += 1

    def _step_schedulers(self, resumed_epoch: int, interval: str, update_plateau_schedulers: bool) -> None:
        # What Lightning's own checkpoints do not have is not logged yet when a ReduceLROnPlateau asks for it.
        trainer = self._trainer
        plateaus = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == interval]
        missing = any(c.monitor not in trainer.callback_metrics for c in plateaus)
        if not (update_plateau_schedulers and missing and trainer.current_epoch <= resumed_epoch):
            type(self._epoch).update_lr_schedulers(self._epoch, interval, update_plateau_schedulers)

    def undo(self) -> None:
        """Gives the loop its own methods back."""
        for name in ("on_run_start", "update_lr_schedulers"):
            vars(self._epoch).pop(name, None)
