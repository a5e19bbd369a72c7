"""Where training is in its data: what Lightning's fit loop says about it, and how it is told of a changed epoch.

[Note: another number of batches] On other ranks, or with another batch size, the rest of a half-done epoch is another
number of batches. Lightning's counters are put to what makes the epoch end when its data ends. In units of the new
batches that is where a run with these ranks would be, but for what does not divide: then the count is moved down to
where an accumulation window begins, and the epoch is that much shorter by Lightning's count until it ends.
"""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from shardlight.strategies.random_state import EpochRandomness
from shardlight.strategies.read_log import ReadLog
from shardlight.strategies.resumed_loops import ResumedLoops


class DataPosition:
    """The position in the training data of one rank, all loaders together.

    Args:
        randomness: what a half-done epoch goes on with.
        ranks: how many ranks see different data.
        rank: the number of this one among them.
    """

    def __init__(self, trainer: pl.Trainer, randomness: EpochRandomness, ranks: int, rank: int) -> None:
        self.randomness, self.ranks, self.rank = randomness, ranks, rank
        self.loops = ResumedLoops(trainer, randomness)
        self._fit = trainer.fit_loop
        self._trainer = trainer
        self._reads_ahead = False
        self._logs: list[ReadLog] = []
        self._logged: list[Mapping[str, Any]] = []
        """What a checkpoint said of loaders that have not begun yet."""
        self._generators: list[Mapping[str, Any]] = []
        """What a checkpoint kept of the loaders' generators, where they are not begun yet."""
        self._epoch_batches: int | None = None
        """Number of batches of the running epoch by Lightning's count, where it is not the ordinary one."""

    # --- what the loop says

    @property
    def epoch(self) -> int:
        """Number of the epoch that samplers draw for."""
        return int(self._fit.epoch_progress.current.processed)

    @property
    def epoch_is_over(self) -> bool:
        """The last batch of the epoch has been trained on."""
        return bool(self._fit.epoch_loop.batch_progress.is_last_batch) and not self._in_training

    @property
    def _in_training(self) -> int:
        progress = self._fit.epoch_loop.batch_progress.current
        return int(progress.ready - progress.processed)

    @property
    def open_window(self) -> int:
        """Micro-batches of the accumulation window that is open."""
        return int(self._fit.epoch_loop.batch_progress.current.processed) % self._trainer.accumulate_grad_batches

    @property
    def reads_ahead(self) -> bool:
        """Without a length Lightning reads one batch ahead, to know which is the last."""
        fetcher = self._fit._data_fetcher
        if fetcher is not None:
            self._reads_ahead = isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None
        return self._reads_ahead

    def held(self, ended: bool) -> int:
        """Returns how many of the batches that a loader gave last training has not had; `ended`: it gave its last."""
        return int(self.reads_ahead and not ended) + self._in_training

    def log(self, loader: Any) -> ReadLog:
        """Returns the log of a loader; after `reload_dataloaders_every_n_epochs` the one of the loader before it."""
        number = self.number(loader)
        if number < 0:
            return ReadLog()
        while len(self._logs) <= number:
            self._logs.append(ReadLog())
            if len(self._logged) >= len(self._logs):
                self._logs[-1].load_state(self._logged[len(self._logs) - 1])
        return self._logs[number]

    def number(self, loader: Any) -> int:
        """Returns the loader's number among those that training reads; -1: it is none of them."""
        return next((number for number, one in enumerate(self._loaders) if one is loader), -1)

    @property
    def _loaders(self) -> list[Any]:
        combined = self._fit._combined_loader
        return [] if combined is None else combined.flattened

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of this rank."""
        logs = [log.state(loader.held) for log, loader in zip(self._logs, self._loaders, strict=False)]
        waiting = dict(enumerate(self._generators))
        generators = [waiting.get(number) or loader.generators() for number, loader in enumerate(self._loaders)]
        return {"order": [*logs, *self._logged[len(logs) :]], "generators": generators or self._generators}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Takes up what `state` returned on the same number of ranks."""
        self._logs, self._logged = [], list(saved.get("order", ()))
        self._generators = list(saved.get("generators", ()))

    def saved_generators(self, loader: Any) -> Mapping[str, Any]:
        """Returns, once, what a checkpoint kept of the generators of a loader."""
        number = self.number(loader)
        if not 0 <= number < len(self._generators):
            return {}
        saved, self._generators[number] = self._generators[number], {}
        return saved

    def go_on(self) -> None:
        """Called when a checkpoint's loop counters are there: has the fit loop go on where they stand.

        Lightning forgets the position of loaders that were made before, as `trainer.estimated_stepping_batches` in
        configure_optimizers makes them.
        """
        half_done = any(state.get("samples") for state in self._fit._combined_loader_states_to_load)
        self.loops.settle(half_done)
        if half_done and self._fit._combined_loader is not None:
            self._fit._load_combined_loader_states()
            iter(self._fit._data_fetcher)

    def fit_rest(self, loader: Any, length: int, rest: int, open_window: float) -> None:
        """Puts Lightning's counters to a rest of the epoch; see [Note: another number of batches].

        Args:
            loader: what gives the rest. One that does not decide when the epoch ends changes nothing.
            length: batches of a whole epoch.
            rest: batches that are left.
            open_window: micro-batches of the accumulation window that was open, in units of the new ones.
        """
        combined = self._fit._combined_loader
        loaders = combined.flattened
        lengths = [sized_len(one) for one in loaders]
        number = [one is loader for one in loaders].index(True)
        if None in lengths or lengths[number] != (min if combined._mode == "min_size" else max)(lengths):
            return
        limit = min(length, int(combined.limits[number]))
        count = min(max(0, length - rest), limit - 1)
        rest = min(rest, limit - count)
        window = self._trainer.accumulate_grad_batches
        inside = min(max(round(open_window), 1), window - 1) if open_window else 0
        aligned = max(count - (count - inside) % window, inside)
        progress = self._fit.epoch_loop.batch_progress.current
        moved = aligned - progress.processed
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, getattr(progress, name) + moved)
        self._epoch_batches = aligned + rest if aligned + rest != limit else None

    def begin_training(self) -> None:
        """Called at the start of training: makes the running epoch as long as its data is, and goes on in it."""
        self.loops.begin_training()
        if self._epoch_batches is None:
            return
        trainer, fit = self._trainer, self._fit
        ordinary = fit.max_batches, trainer.val_check_batch
        fit.max_batches = fit._data_fetcher.length = self._epoch_batches
        if isinstance(trainer.val_check_interval, float) and ordinary[1] is not None:
            trainer.val_check_batch = max(1, int(self._epoch_batches * trainer.val_check_interval))
        elif ordinary[1] == ordinary[0]:
            trainer.val_check_batch = self._epoch_batches
        self._epoch_batches = None
        end_epoch = fit.on_advance_end

        def end_this_epoch(self: Any) -> None:
            end_epoch()
            fit.max_batches, trainer.val_check_batch = ordinary
            fit.on_advance_end = end_epoch

        # Undone at the latest when the fit ends, with the other methods that `StopTogether` has replaced.
        fit.on_advance_end = MethodType(end_this_epoch, fit)
