"""`resume`: what a run goes on from, with `auto` the newest whole checkpoint of its name; and what it says of it."""

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from shardlight.framework.schema import AUTO, Config
from shardlight.strategies.checkpoint.candidates import FOLDER, find, tidy
from shardlight.strategies.checkpoint.opening import open_to_go_on
from shardlight.strategies.checkpoint.show import checkpoint_folder
from shardlight.strategies.checkpoint.weights import open_weights
from shardlight.strategies.errors import CheckpointError

VARIABLE = "SHARDLIGHT_RESUME"
"""Environment variable: what the supervisor has chosen for its workers, as a JSON list of paths."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a run goes on from."""

    paths: tuple[str, ...] = ()
    """A checkpoint, and with `auto` older ones to fall back to where its files are damaged. Empty: a fresh start."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""


FRESH = Choice()
"""Nothing to go on from."""


def run_folders(config: Config) -> list[Path]:
    """The folders of all runs of this name, the newest first."""
    base = Path(config.run.dir) / (config.run.name or "run")
    numbered = [item for item in base.iterdir() if item.name.isdecimal()] if base.is_dir() else []
    return sorted(numbered, key=lambda item: int(item.name), reverse=True)


def choose(config: Config, verb: str, env: Mapping[str, str] | None = None) -> Choice:
    """Finds what a run goes on from, and opens it and what `init_from` names; changes nothing on the disk.

    Args:
        verb: what will run: only a fit and a start from given weights (init_from) go without a checkpoint.
        env: of a worker whose supervisor has chosen already: there it says what.
    Raises: CheckpointError: `auto` found nothing for an evaluation; what is named is missing, or is something else.
    """
    if env is not None and VARIABLE in env:
        return Choice(tuple(json.loads(env[VARIABLE])))
    choice = _choose(config, verb)
    if config.resume is not None and config.resume.path != AUTO:
        open_to_go_on(checkpoint_folder(config.resume.path), verb == "fit")
    elif config.init_from is not None and not choice.paths:
        open_weights(config.init_from.path)
    return choice


def _choose(config: Config, verb: str) -> Choice:
    if config.resume is None:
        return FRESH
    if config.resume.path != AUTO:
        return Choice((config.resume.path,))
    found = find(run_folders(config), training=verb == "fit")
    where = Path(config.run.dir) / (config.run.name or "run")
    if not found.paths and verb != "fit" and config.init_from is None:
        raise CheckpointError("\n".join([*found.skipped, f"resume: auto: there is no whole checkpoint in {where}."]))
    end = () if found.paths else (f"resume: auto: there is no whole checkpoint in {where}: a fresh start.",)
    return Choice(tuple(map(str, found.paths)), (*found.skipped, *end))


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """While it lasts other runs know that this one lives, and leave its left-overs alone."""
    with (run_dir / "config.yaml").open("r+") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _is_over(run_dir: Path) -> bool:
    try:
        with (run_dir / "config.yaml").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # it lives, or is being made, or another user's, or nobody can tell
    return True


def tidy_up(config: Config) -> None:
    """Removes what killed runs of this name have left beside their checkpoints; runs that live are left alone."""
    for run_dir in run_folders(config):
        with contextlib.suppress(OSError):  # such as a folder that is read-only
            if (run_dir / FOLDER).is_dir() and _is_over(run_dir):
                tidy(run_dir / FOLDER)


class Resume(Callback):
    """Says what a fit goes on from, and tidies up after killed runs of the same name.

    Args:
        config: of the run.
        paths: see `Choice`.
    """

    def __init__(self, config: Config, paths: Sequence[str]) -> None:
        self.config = config
        self.paths = tuple(paths)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """With `auto`: makes sure that all ranks have found something, or none has.

        Raises: CheckpointError: this rank does not see what rank 0 sees.
        """
        if self.config.resume is None or self.config.resume.path != AUTO:
            return
        first = trainer.strategy.broadcast(self.paths)
        if bool(first) != bool(self.paths):
            raise CheckpointError(
                f"rank {trainer.global_rank} finds {self.paths[0] if self.paths else 'no checkpoint'} and rank 0 "
                f"{first[0] if first else 'none'}: run.dir ({self.config.run.dir}) must be on a disk that all nodes "
                "share."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says from where, which step, and how far into the epoch; then tidies up (rank 0)."""
        if not trainer.is_global_zero:
            return
        resumed = getattr(trainer.strategy, "resumed_from", None)
        if str(resumed) in self.paths:  # and not what a tuner has put back
            progress = trainer.fit_loop.epoch_loop.batch_progress
            batches = 0 if progress.is_last_batch else progress.current.processed
            text = f"Resumed from {resumed}: step {trainer.global_step}, epoch {trainer.current_epoch}, "
            console = Console(highlight=False, soft_wrap=True)
            console.print(f"{text}{batches} batches into it.", markup=False)
        tidy_up(self.config)
