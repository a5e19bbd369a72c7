"""SIGTERM ends training after the step that runs, on all ranks together; callbacks save, and the run ends well.

Lightning's own handler communicates inside the signal, and its loop broadcasts rank 0's flag before each batch with its
errors swallowed: ranks that wait there for one that is elsewhere hang. Both give way to an agreement before each
batch, in which a signal on any rank counts and ranks at different points get an error.
"""

import signal
from types import FrameType

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from shardlight.strategies.engine.engine import Engine


class GracefulStop:
    """Takes over SIGTERM for one fit; made when Lightning's handlers are registered.

    `agreed`: all ranks know that training ends with the step that runs.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine) -> None:
        self.agreed = False
        self._trainer = trainer
        self._engine = engine
        self._received = False
        handlers = signal.getsignal(signal.SIGTERM)
        if isinstance(handlers, _HandlersCompose):
            own = trainer._signal_connector._sigterm_notifier_fn
            handlers.signal_handlers = [self._note if h == own else h for h in handlers.signal_handlers]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self._agree  # type: ignore[method-assign]

    def _note(self, signum: int, frame: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._received and launcher is not None:
            launcher.kill(signum)
        self._received = True
        if self._trainer.world_size == 1:
            self.agreed = True

    def _agree(self) -> None:
        self._engine.agreement.meet("start of a training batch")
        row = torch.tensor([int(self._received)], dtype=torch.int64, device=self._engine.collectives.device)
        rows = self._engine.collectives.gather_small(row, "start of a training batch")
        self.agreed = self.agreed or bool(rows.any())

    def after_step(self) -> None:
        """Called after each optimizer step: ends the loop here if that was agreed, without a last validation."""
        if self.agreed:
            self._trainer.should_stop = True
            self._trainer.fit_loop.epoch_loop._skip_next_val = True
