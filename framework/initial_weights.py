"""`init_from`: weights that a run starts from, read once the module is sharded, each rank its own part."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from shardlight.framework.schema import InitFromConfig
from shardlight.strategies import load_weights
from shardlight.strategies.notices import notify


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
            notify(f"init_from: {report.fault(config.path)}")
