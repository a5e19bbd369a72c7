"""From a checked config to a Lightning Trainer with everything in it, and the run itself on this rank."""

import dataclasses
import logging
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from shardlight.framework.config import to_dict
from shardlight.framework.exports import WeightExports
from shardlight.framework.initial_weights import InitialWeights
from shardlight.framework.module import TrainingModule
from shardlight.framework.predictions import PredictionWriter
from shardlight.framework.progress import Progress
from shardlight.framework.report import write_report
from shardlight.framework.resume import FRESH, Choice, Resume
from shardlight.framework.room_table import show_line, show_room
from shardlight.framework.schema import AUTO, CheckpointConfig, Config, StrategyConfig
from shardlight.framework.show import dump
from shardlight.framework.summary import RunSummary
from shardlight.strategies import STRATEGIES, MixedFP16, Pipeline, ShardedStrategy, deferred_init
from shardlight.strategies.errors import ShardlightError
from shardlight.strategies.notices import show_plainly
from shardlight.strategies.options import offload_of

Verb = Literal["fit", "validate", "test", "predict"]


def quiet() -> None:
    """Keeps notices of the libraries that a user can do nothing about off the screen; warnings of theirs stay.

    Our own are shown as their text alone.
    """
    show_plainly()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Of each run we know: it has a folder of its own, and only a fit has the callbacks of a fit.
    messages = (r"The dirpath has changed", r"Be aware that when using `ckpt_path`")
    messages += (r"The number of training batches .* is smaller than the logging interval",)
    messages += (r".*isinstance\(treespec, LeafSpec\)", r"torch\.distributed\.nn\.functional\.all_gather")
    for message in messages:
        warnings.filterwarnings("ignore", message=message)


def make_run_dir(config: Config) -> Path:
    """Makes the next free folder run.dir/run.name/NNN and saves the resolved config there.

    Two runs that start at once get two folders: making one is atomic.
    """
    base = Path(config.run.dir) / (config.run.name or "run")
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ShardlightError(
            f"run.dir: the folder {base} cannot be made ({error.strerror}): set run.dir to one that you can write to."
        ) from None
    number = max((int(item.name) for item in base.iterdir() if item.name.isdecimal()), default=-1) + 1
    while True:
        made = base / f"{number:03d}"
        try:
            made.mkdir()
        except FileExistsError:
            number += 1
            continue
        save_config(config, made)
        return made


def save_config(config: Config, run_dir: Path) -> None:
    """Writes the resolved config as config.yaml."""
    (run_dir / "config.yaml").write_text(dump(to_dict(config)), encoding="utf-8")


class FailureReport(Callback):
    """Leaves this rank's exception for the supervisor before anything is torn down, which may hang."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes the report."""
        write_report(exception)


class StopBeforeFirstStep(Callback):
    """Ends a fit where its first batch would start: processes, data, model and optimizer are up by then."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Asks the loop to stop."""
        trainer.should_stop = True


class Checkpoints(ModelCheckpoint):
    """Lightning's ModelCheckpoint with folders named step-N; the state at the end of training is always kept."""

    FILE_EXTENSION = ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the step that a run goes on from as saved: in this folder it would be saved within the next window."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = max(self._last_global_step_saved, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last step where the intervals did not."""
        super().on_train_end(trainer, pl_module)
        if self.save_top_k != 0 and 0 < trainer.global_step != self._last_global_step_saved:
            trainer.save_checkpoint(os.path.join(str(self.dirpath), f"step-{trainer.global_step}"))


def make_checkpoints(config: CheckpointConfig, run_dir: Path) -> Checkpoints:
    """The callback that saves what the config asks for into run_dir/checkpoints."""
    return Checkpoints(
        dirpath=run_dir / "checkpoints",
        filename="step-{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=config.every_n_steps,
        monitor=config.monitor,
        mode=config.mode,
        save_top_k=config.save_top_k,
        save_last=config.save_last,
    )


def build_module(config: Config) -> LightningModule:
    """The module, with the optimizer and schedule of the config where it takes them; under zero3 without memory."""
    defer = config.strategy.options.defer
    if defer is None:
        defer = STRATEGIES[config.strategy.name].defers()
    with deferred_init("cpu") if defer else nullcontext():
        module = config.module.build()
    if isinstance(module, TrainingModule):
        module.optimizer_config = config.optimizer
        module.schedule_config = config.schedule
    return module


def build_strategy(config: StrategyConfig, *, force: bool = False) -> ShardedStrategy:
    """Makes the strategy for a Trainer.

    Args:
        force: see EngineOptions.
    """
    given = {field.name: getattr(config.options, field.name) for field in dataclasses.fields(config.options)}
    return STRATEGIES[config.name](**given | ({"force": True} if force else {}))


def build_callbacks(
    config: Config,
    verb: Verb,
    run_dir: Path,
    *,
    dry_run: bool = False,
    started: float | None = None,
    resume: Choice = FRESH,
) -> list[Callback]:
    """Ours and the user's; the user's run before ours, so that what they log is seen."""
    callbacks: list[Callback] = [FailureReport()]
    if config.init_from is not None and (config.resume is None or config.resume.path == AUTO):
        callbacks.append(InitialWeights(config.init_from, unless_resumed=bool(resume.paths)))
    callbacks += [item.build() for item in config.callbacks.values() if item is not None]
    if config.trainer.enable_progress_bar:
        callbacks.append(Progress())
    if dry_run:
        return [*callbacks, StopBeforeFirstStep()]
    if verb == "fit":
        callbacks.append(Resume(config, resume.paths))
        callbacks.append(RunSummary(run_dir, started))
        if config.checkpoint is not None:
            every = config.checkpoint.export_every_n_steps
            if every is not None:
                callbacks.append(WeightExports(run_dir, every, config.checkpoint.export_dtype))
            callbacks.append(make_checkpoints(config.checkpoint, run_dir))
    if verb == "predict":
        callbacks.append(PredictionWriter(run_dir))
    return callbacks


def build_trainer(
    config: Config,
    verb: Verb,
    run_dir: Path,
    *,
    launched: bool,
    dry_run: bool = False,
    started: float | None = None,
    resume: Choice = FRESH,
    force: bool = False,
) -> Trainer:
    """Makes the Trainer.

    Args:
        config: the checked config.
        verb: what it will run.
        run_dir: where it writes.
        launched: this process is one of several ranks that a launcher started.
        dry_run: stop before the first step, and write nothing.
        started: time.time() when the command started; now where None.
        resume: what it goes on from.
        force: start even where state cannot fit.
    """
    trainer = config.trainer
    passed = ("accelerator", "devices", "num_nodes", "accumulate_grad_batches", "gradient_clip_val")
    passed += ("gradient_clip_algorithm", "val_check_interval", "check_val_every_n_epoch", "limit_train_batches")
    passed += ("limit_val_batches", "limit_test_batches", "limit_predict_batches", "log_every_n_steps", "max_epochs")
    passed += ("num_sanity_val_steps", "enable_progress_bar", "deterministic", "detect_anomaly")
    logs = verb != "predict" and not dry_run
    plugins: list[Any] = [TorchElasticEnvironment()] if launched else []
    if trainer.precision == "16-mixed":
        on_cuda = trainer.accelerator != "cpu" and torch.cuda.is_available()
        plugins.append(MixedFP16("cuda" if on_cuda else "cpu"))
    strategy = build_strategy(config.strategy, force=force)
    strategy.run_config = to_dict(config)
    offload = offload_of(strategy.options)
    if verb == "fit" and (dry_run or (offload is not None and offload.elsewhere)):
        strategy.on_room = show_room
    if verb == "fit" and isinstance(strategy, Pipeline):
        strategy.on_cut = show_line
    if config.resume is not None:
        strategy.skip_on_load = config.resume.skip
        strategy.resume_order = resume.paths
    return Trainer(
        **{name: getattr(trainer, name) for name in passed},
        max_steps=-1 if trainer.max_steps is None else trainer.max_steps,
        strategy=strategy,
        precision=None if trainer.precision == "16-mixed" else trainer.precision,
        plugins=plugins,
        callbacks=build_callbacks(config, verb, run_dir, dry_run=dry_run, started=started, resume=resume),
        logger=TensorBoardLogger(run_dir, name="tensorboard", version="") if logs else False,
        default_root_dir=run_dir,
        enable_checkpointing=verb == "fit" and config.checkpoint is not None and not dry_run,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )


def run_rank(
    config: Config,
    verb: Verb,
    run_dir: Path,
    *,
    launched: bool,
    dry_run: bool = False,
    started: float | None = None,
    resume: Choice = FRESH,
    force: bool = False,
) -> Trainer:
    """Builds everything on this rank and runs it to the end; all ranks call it with the arguments of `build_trainer`.

    Returns: the Trainer, after the run.
    """
    seed_everything(config.seed, workers=True, verbose=False)
    module = build_module(config)
    data: LightningDataModule = config.data.build()
    trainer = build_trainer(
        config, verb, run_dir, launched=launched, dry_run=dry_run, started=started, resume=resume, force=force
    )
    arguments: dict[str, Any] = {"datamodule": data, "ckpt_path": resume.paths[0] if resume.paths else None}
    if verb == "predict":
        arguments["return_predictions"] = False
    getattr(trainer, verb)(module, **arguments)
    return trainer
