"""Classes that the configs of this folder name."""

from typing import Literal

from lightning.pytorch import LightningDataModule, LightningModule
from shardlight.framework import TrainingModule
from torch import Tensor, nn
from torch.utils.data import DataLoader


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

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Has no loss."""


class Plain(LightningModule):
    """Makes its own optimizer."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Has no loss."""

    def configure_optimizers(self) -> None:
        """Has none."""


class Data(LightningDataModule):
    """Takes the batch size."""

    def __init__(self, batch_size: int = 4, path: str | None = None) -> None:
        super().__init__()

    def train_dataloader(self) -> DataLoader:
        """Has no samples."""


class Old(TrainingModule):
    """Was written for Lightning 1."""

    def training_epoch_end(self, outputs: list) -> None:
        """Has another name now."""
