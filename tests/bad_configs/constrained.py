"""Classes that say what their arguments have to be."""

from lightning.pytorch import LightningDataModule
from shardlight.framework import DirectoryPath, FilePath, TrainingModule
from torch import Tensor
from torch.utils.data import DataLoader


class Transformer(TrainingModule):
    """Says what its arguments have to be."""

    constraints = ("width % heads == 0", "depth >= 1", "0 <= dropout < 1")

    def __init__(self, width: int, heads: int = 4, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Has no loss."""


class Unsaid(Transformer):
    """Has a constraint that is none."""

    constraints = ("len(sizes) > 1",)


class Files(LightningDataModule):
    """Reads what is there."""

    constraints = ("0 < share < 1",)

    def __init__(
        self, *, path: FilePath, folder: DirectoryPath | None = None, batch_size: int = 4, share: float = 0.1
    ) -> None:
        super().__init__()

    def train_dataloader(self) -> DataLoader:
        """Has no samples."""
