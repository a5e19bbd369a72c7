"""A CSV file as training and validation rows."""

import csv
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardlight.framework import FilePath
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

PROJECT = Path(__file__).resolve().parents[1]


def read_table(path: Path, target: str, *, with_target: bool = True) -> tuple[list[str], list[list[float]], list[str]]:
    """Reads a CSV file with a line of column names.

    Args:
        path: of the file.
        target: the column that is not read as a number.
        with_target: whether it has to be there; where it is not, its values are "".
    Returns: (names of the columns beside `target`, their numbers by row, values of `target` by row).
    Raises: MisconfigurationException: there is no such file or column, or a value is no number; with file and line.
    """
    try:
        file = path.open(newline="", encoding="utf-8")
    except OSError as error:
        raise MisconfigurationException(f"data.path: {path} cannot be read ({error.strerror}).") from None
    with file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or [])
        if target not in names and with_target:
            raise MisconfigurationException(f"{path}:1: there is no column {target!r} (data.target), only {names}.")
        names = [name for name in names if name != target]
        rows, labels = [], []
        for line in reader:
            try:
                rows.append([float(line[name]) for name in names])
            except (TypeError, ValueError):
                raise MisconfigurationException(
                    f"{path}:{reader.line_num}: all columns but {target!r} have to be numbers, got {line}."
                ) from None
            labels.append(line.get(target, ""))
    return names, rows, labels


class Table(LightningDataModule):
    """Rows of a CSV file, split at random into training and validation; the same split in every run.

    Args:
        path: of the file, with a line of column names; a relative one starts at the project's folder.
        target: the column to predict.
        batch_size: rows a batch and rank.
        validation_share: share of the rows that is kept for validation.
    """

    constraints = ("0 < validation_share < 1",)  # of the arguments, for the check

    def __init__(self, *, path: FilePath, target: str, batch_size: int = 16, validation_share: float = 0.25) -> None:
        super().__init__()
        self.path = PROJECT / path
        self.target = target
        self.batch_size = batch_size
        self.validation_share = validation_share
        self.columns: list[str] = []
        """Names of the columns that the model reads, in the file's order."""
        self.classes: list[str] = []
        """Values of the target: class i is classes[i]."""
        self.rows = self.train = self.validation = TensorDataset()

    def setup(self, stage: str) -> None:
        """Reads the file; every rank for itself. For predictions it needs no target."""
        self.columns, rows, labels = read_table(self.path, self.target, with_target=stage != "predict")
        self.classes = sorted(set(labels))
        x, y = torch.tensor(rows), torch.tensor([self.classes.index(label) for label in labels])
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        kept = round(len(y) * self.validation_share)
        self.rows = TensorDataset(x, y)
        self.train = TensorDataset(x[order[kept:]], y[order[kept:]])
        self.validation = TensorDataset(x[order[:kept]], y[order[:kept]])

    def train_mean_and_std(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every column over the training rows: (features,) each."""
        x = self.train.tensors[0]
        return x.mean(0), x.std(0).clamp(min=1e-6)

    def train_dataloader(self) -> DataLoader:
        """Batches of (rows (batch_size, features), classes (batch_size,)), in a new order every epoch."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """As `train_dataloader`, in a fixed order."""
        return DataLoader(self.validation, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """All rows of the file in its order: `shardlight predict config.yaml data.path=NEW.csv --ckpt PATH`."""
        return DataLoader(self.rows, batch_size=self.batch_size)
