"""`checkpoint.export_every_n_steps`: full weights of a run while it trains, for whoever evaluates or serves them."""

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from shardlight.strategies.checkpoint.hf import describe_models
from shardlight.strategies.checkpoint.live_export import export_running
from shardlight.strategies.notices import notify

ExportDtype = Literal["fp32", "bf16", "fp16"]


class WeightExports(Callback):
    """Writes the folder exports/step-N of a run every so many optimizer steps, as `shardlight export` would.

    What `from_pretrained` opens where the module wraps a transformers or peft model, else the module's own names. No
    rank holds more than its shards: each writes its own part of every file.

    Args:
        run_dir: the run folder; rank 0's is used on all ranks.
        every_n_steps: optimizer steps between two exports.
        dtype: of floating point numbers.
    Raises: CheckpointError: in a step, on every rank: some rank cannot write.
    """

    def __init__(self, run_dir: Path, every_n_steps: int, dtype: ExportDtype = "bf16") -> None:
        self.run_dir = run_dir
        self.every_n_steps = every_n_steps
        self.dtype: ExportDtype = dtype
        self._folder: Path | None = None
        self._step = 0
        """Optimizer steps when a batch ended last."""
        self._warned = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learns rank 0's run folder. Collective."""
        self._folder = Path(trainer.strategy.broadcast(str(self.run_dir))) / "exports"
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Exports after every n-th step. Collective then."""
        before, self._step = self._step, trainer.global_step
        if self._step // self.every_n_steps == before // self.every_n_steps or self._folder is None:
            return
        left_out = export_running(
            trainer.strategy.engine,  # type: ignore[attr-defined]
            trainer.strategy.lightning_module_state_dict(),
            self._folder / f"step-{self._step}",
            dtype=self.dtype,
            models=describe_models(pl_module),
        )
        if left_out and not self._warned and trainer.is_global_zero:
            self._warned = True
            names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
            notify(
                f"exports hold the transformers model alone, as from_pretrained opens it, and not {names}: for all of "
                "the module use `shardlight export` on a checkpoint."
            )
