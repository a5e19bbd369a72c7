"""Training ends on all ranks together: after SIGTERM on any rank, or when any rank sets `trainer.should_stop`.

Lightning's own handler communicates inside the signal, and its loop broadcasts rank 0's flag before each batch with
its errors swallowed; `should_stop` is each rank's own affair. Ranks that wait for one that is elsewhere then hang.
Both give way to one exchange after each batch, validation and epoch, in which what any rank wants counts and ranks at
different points get an error.
"""

import signal
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from shardlight.strategies.engine.engine import Engine


class StopTogether:
    """Takes over SIGTERM and `should_stop` for one fit; made when Lightning's handlers are registered."""

    def __init__(self, trainer: pl.Trainer, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._received = False
        """This process got SIGTERM."""
        self._ending = False
        """Some process got SIGTERM, as all ranks know."""
        self._validation_due = False
        """It came after a batch that is to be validated."""
        handlers = signal.getsignal(signal.SIGTERM)
        if isinstance(handlers, _HandlersCompose):
            own = trainer._signal_connector._sigterm_notifier_fn
            handlers.signal_handlers = [self._note if h == own else h for h in handlers.signal_handlers]
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._replaced: list[tuple[Any, str]] = []
        self._replace(epoch, "_broadcast_sigterm_tensor", lambda: None)
        # The places after which a loop looks at `should_stop`.
        self._should_validate = MethodType(type(epoch)._should_check_val_fx, epoch)
        self._replace(epoch, "_should_check_val_fx", self._after_batch)
        self._then_agree(epoch.val_loop, "run", "end of a validation")
        self._then_agree(fit, "on_advance_start", "start of an epoch")
        self._own_end_of_epoch = MethodType(type(fit).on_advance_end, fit)
        self._replace(fit, "on_advance_end", self._end_epoch)
        self._agree("start of training")

    def undo(self) -> None:
        """Gives the loops their own methods back."""
        for loop, name in self._replaced:
            vars(loop).pop(name, None)

    def _replace(self, loop: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(loop, name, method)
        self._replaced.append((loop, name))

    def _note(self, signum: int, frame: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._received and launcher is not None:
            launcher.kill(signum)
        self._received = True

    def _after_batch(self, data_fetcher: Any) -> bool:
        epoch = self._trainer.fit_loop.epoch_loop
        self._agree("end of a training batch")
        if not self._ending or epoch._should_accumulate():
            return self._should_validate(data_fetcher)
        # The window is complete: the loop ends here, without a validation, which may take long.
        due = self._should_validate(data_fetcher)
        self._trainer.should_stop = True
        if due:
            # A checkpoint that is saved now is of a batch before its validation; see [Note: the rest of a batch].
            self._validation_due = True
            epoch.val_loop.batch_progress.current.reset()
            raise StopIteration
        return False

    def _end_epoch(self) -> None:
        if self._validation_due:
            raise StopIteration  # out of the fit loop: the epoch's end comes after the validation
        self._own_end_of_epoch()
        self._agree("end of an epoch")

    def _then_agree(self, loop: Any, name: str, point: str) -> None:
        own = MethodType(getattr(type(loop), name), loop)

        def run() -> Any:
            result = own()
            self._agree(point)
            return result

        self._replace(loop, name, run)

    def _agree(self, point: str) -> None:
        ending, stop = self._received, self._trainer.should_stop
        if self._trainer.world_size > 1:
            self._engine.agreement.meet(point)
            row = torch.tensor([int(ending), int(stop)], dtype=torch.int64, device=self._engine.everyone.device)
            ending, stop = self._engine.everyone.gather_small(row, point).view(-1, 2).any(dim=0).tolist()
        self._ending = self._ending or ending
        self._trainer.should_stop = stop
