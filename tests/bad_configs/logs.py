"""A module that logs."""

import math

from constrained import Transformer
from lightning.pytorch import Callback
from torch import Tensor


class Model(Transformer):
    """Logs what it names."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Logs three values."""
        loss = batch.log().sum() * math.log(2)
        self.log("train/loss", loss, prog_bar=True)
        self.log_dict({"train/bits": loss, "lr": 0.1}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Logs one."""
        self.log(name="val/accuracy", value=batch.mean())


class Watch(Callback):
    """Logs something itself."""

    def on_validation_end(self, trainer, pl_module) -> None:
        """Logs one."""
        pl_module.log("val/seen", 1.0)
