"""Classes that the configs of this folder name."""

from typing import Literal

from lightning.pytorch import LightningDataModule, LightningModule
from shardlight.framework import TrainingModule
from torch import nn


class Block(nn.Module):
    """A block."""


class Model(TrainingModule):
    """Takes arguments of several types."""

    def __init__(
        self,
        width: int,
        dropout: float = 0.0,
        sizes: tuple[int, ...] = (),
        kind: Literal["plain", "gated"] = "plain",
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))


class Plain(LightningModule):
    """Makes its own optimizer."""

    def configure_optimizers(self) -> None:
        """Has none."""


class Data(LightningDataModule):
    """Takes the batch size."""

    def __init__(self, batch_size: int = 4, path: str | None = None) -> None:
        super().__init__()
