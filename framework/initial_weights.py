"""`init_from`: weights that a run starts from, read once the module is sharded, each rank its own part."""

import dataclasses
from collections.abc import Mapping

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from shardlight.strategies import load_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitFromConfig:
    """Where the first weights come from; nothing else is taken from there (no optimizer state, no position)."""

    path: str
    """A .safetensors file, a folder with one or with its index of several, a checkpoint, or a file of torch.save."""
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Prefixes of names in the file and what they become; '' puts a prefix before every other name."""
    strict: bool = True
    """Everything has to fit. false: what fits is loaded, and the rest is said."""


class InitialWeights(Callback):
    """Loads the weights before training or evaluation; a checkpoint that the Trainer restores comes after it.

    Args:
        config: which weights.
        unless_resumed: only where no checkpoint was restored.
    """

    def __init__(self, config: InitFromConfig, *, unless_resumed: bool = False) -> None:
        self.config = config
        self.unless_resumed = unless_resumed

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads them for a fit, unless a checkpoint comes after them."""
        if not self.unless_resumed:
            self._load(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads them for a fit after all, where every checkpoint that there was turned out to be damaged."""
        if self.unless_resumed:
            self._load(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads them for a validation of its own."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._load(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads them for a test."""
        self._load(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads them for a prediction."""
        self._load(trainer, pl_module)

    def _load(self, trainer: Trainer, module: LightningModule) -> None:
        if self.unless_resumed and trainer.strategy.resumed_from is not None:
            return
        config = self.config
        report = load_weights(module, config.path, strict=config.strict, rename=config.rename or None)
        if report.fault(config.path):
            rank_zero_info(f"init_from: {report.fault(config.path)}")
