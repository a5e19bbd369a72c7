"""Progress of a training on rank 0: a bar on a terminal, plain lines elsewhere. It never calls a collective."""

import math
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from shardlight.framework.meter import Meter, count_tokens, data_world_size, peak_memory_bytes, step_loss, token_unit
from torch import Tensor

REFRESH_S = 0.2  # between two drawings of the bar


class Progress(ProgressBar):
    """Shows step, loss, tokens per second of all ranks, time left, peak memory of rank 0, and validation results.

    Tokens per second are rank 0's own times the number of ranks that train on different data.

    Args:
        every_s: seconds between two plain lines; the first and the last step always have one.
        console: where to write; standard output by default.
        clock: seconds, only going up; another one in tests.
    """

    def __init__(
        self, every_s: float = 5.0, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.every_s = every_s
        self._console = console
        self._clock = clock
        self._enabled = True
        self._meter = Meter(clock)
        self._bar: RichProgress | None = None
        self._step = 0
        self._first_step = 0
        self._total: int | None = None
        self._shown_s = -math.inf
        self._line = ""
        self._validation = ""

    @property
    def is_enabled(self) -> bool:
        """False on every rank but 0."""
        return self._enabled

    def disable(self) -> None:
        """Shows nothing from now on."""
        self._enabled = False

    def enable(self) -> None:
        """Shows progress again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar."""
        if self._enabled and self._console is not None:
            self._console.print(*args, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock and, on a terminal, the bar."""
        if not self._enabled:
            return
        # Made here and not earlier, so that it writes to what standard output is now.
        self._console = self._console or Console(highlight=False, soft_wrap=True)
        total = trainer.estimated_stepping_batches
        self._total = int(total) if math.isfinite(total) else None
        self._step = self._first_step = trainer.global_step
        self._meter.resume()
        if self._console.is_terminal:
            whole = Column(no_wrap=True)  # on a narrow terminal the bar gives way, not the text
            count = "step {task.completed}" + ("" if self._total is None else "/{task.total}")
            text = TextColumn("{task.description}", table_column=whole.copy())
            columns = (TextColumn(count, table_column=whole), BarColumn(24), text)
            # No refresh thread: it would take time from the ranks on a small machine.
            self._bar = RichProgress(*columns, console=self._console, auto_refresh=False)
            self._bar.add_task("", total=self._total, completed=self._step)
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch; shows the state where a step ended and enough time has passed."""
        if not self._enabled:
            return
        self._meter.add(count_tokens(batch))
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._meter.step()
        ends = self._step == self._total or self._step == self._first_step + 1
        if ends or self._clock() - self._shown_s >= (REFRESH_S if self._bar else self.every_s):
            self._line = self._state(trainer, step_loss(trainer, outputs), token_unit(batch))
            self._show()

    def _state(self, trainer: Trainer, loss: float | Tensor | None, unit: str) -> str:
        rate = self._meter.recent_tokens_per_s * data_world_size(trainer)
        parts = [] if loss is None else [f"loss {float(loss):.3f}"]
        parts.append(f"{short_number(rate)} {unit}/s")
        if self._total is not None:
            parts.append(f"ETA {clock_time((self._total - self._step) * self._meter.recent_step_s)}")
        narrow = self._bar is not None and self._console is not None and self._console.width < 100
        memory = f"{peak_memory_bytes(trainer.strategy.root_device) / 2**20:.0f} MiB"
        parts.append(memory if narrow else f"memory {memory}")
        return "  ".join(parts)

    def _show(self) -> None:
        self._shown_s = self._clock()
        if self._bar is not None:
            text = "  ".join(filter(None, (self._line, self._validation)))
            self._bar.update(self._bar.task_ids[0], completed=self._step, description=text, refresh=True)
        else:
            self._print_line(self._line)

    def _print_line(self, text: str) -> None:
        total = "" if self._total is None else f"/{self._total}"
        self.print(f"step {self._step}{total}  {text}", markup=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock of the training."""
        if self._enabled and self._in_training(trainer):
            self._meter.pause()
            if self._bar is not None:
                self._validation = "validating"
                self._show()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows what validation logged for the progress bar."""
        if not self._enabled or not self._in_training(trainer):
            return
        # Computed on all ranks by now: reading them here costs no collective.
        metrics = {name: float(v) for name, v in trainer.progress_bar_metrics.items() if name.startswith("val")}
        self._validation = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        if self._bar is not None:
            self._show()
        elif metrics:
            self._print_line(self._validation)
        self._meter.resume()

    @staticmethod
    def _in_training(trainer: Trainer) -> bool:
        return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves the terminal as it was."""
        self._stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the finished bar on the terminal."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the terminal as it was, whatever happened."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def short_number(value: float) -> str:
    """Three digits and a letter: 950, 1.23k, 45.6k, 7.89M."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5 or unit == "G":
            break
        value /= 1000
    return f"{value:.3g}{unit}"


def clock_time(seconds: float) -> str:
    """Minutes and seconds, with hours where there are some: 0:07, 12:00, 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
