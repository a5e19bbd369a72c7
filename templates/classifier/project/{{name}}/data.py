"""Images with classes: folders of files, or the handwritten digits that scikit-learn ships."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardlight.framework import DirectoryPath
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

PROJECT = Path(__file__).resolve().parents[1]
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """The images of a folder that has one folder per class, read when they are used.

    Args:
        folder: with one folder per class.
        size: height and width that images are scaled to.
        channels: 1 or 3.
    Raises: MisconfigurationException: there are no such folders.
    """

    def __init__(self, folder: Path, size: int, channels: int) -> None:
        self.size, self.channels = size, channels
        self.classes = sorted(path.name for path in folder.glob("*") if path.is_dir())
        files = [(path, i) for i, name in enumerate(self.classes) for path in sorted((folder / name).rglob("*"))]
        self.files = [(path, label) for path, label in files if path.suffix.lower() in SUFFIXES]
        if not self.files:
            raise MisconfigurationException(
                f"data.folder: {folder} has no folders with images in them. It needs one for each class, "
                f"with files of these kinds: {', '.join(SUFFIXES)}."
            )
        self.labels = [label for _, label in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Returns (pixels (channels, size, size) from -1 to 1, number of the class)."""
        from PIL import Image  # here: only who has image files needs it

        path, label = self.files[index]
        try:
            with Image.open(path) as image:
                scaled = image.convert("L" if self.channels == 1 else "RGB").resize((self.size, self.size))
        except OSError as error:
            raise MisconfigurationException(f"{path} is no image that can be read ({error}).") from None
        pixels = torch.frombuffer(bytearray(scaled.tobytes()), dtype=torch.uint8)
        return pixels.view(self.size, self.size, self.channels).movedim(-1, 0).float() / 127.5 - 1, label


class Digits(Dataset[tuple[Tensor, int]]):
    """1,797 handwritten digits of 8 x 8 pixels (E. Alpaydin and C. Kaynak 1998), as scikit-learn ships them.

    Args:
        size: height and width that images are scaled to.
        channels: 1 or 3, which are then equal.
    """

    def __init__(self, size: int, channels: int) -> None:
        from sklearn.datasets import load_digits  # here: only who has no images of their own needs it

        digits = load_digits()
        pixels = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
        self.pixels = F.interpolate(pixels, (size, size), mode="bilinear").repeat(1, channels, 1, 1)
        self.labels = digits.target.tolist()
        self.classes = [str(digit) for digit in range(10)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Returns (pixels (channels, size, size) from -1 to 1, the digit)."""
        return self.pixels[index], self.labels[index]


def split(labels: Sequence[int], validation_share: float) -> tuple[list[int], list[int]]:
    """Splits at random, each class by itself, the same in every run.

    Returns: (indices to train on, indices to validate on), each in order.
    """
    train, validation = [], []
    for label in sorted(set(labels)):
        own = [index for index, other in enumerate(labels) if other == label]
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(label)).tolist()
        kept = round(len(own) * validation_share)
        validation += [own[i] for i in order[:kept]]
        train += [own[i] for i in order[kept:]]
    return sorted(train), sorted(validation)


class Images(LightningDataModule):
    """Images split into training and validation.

    Args:
        folder: with one folder of images per class; a relative path starts at the project's folder. None: the digits.
        size: height and width that images are scaled to.
        channels: 1 for grey, 3 for colour.
        batch_size: images a batch and rank.
        validation_share: share of each class that is kept for validation.
        workers: processes per rank that load images.
    """

    constraints = ("0 < validation_share < 1", "size >= 2", "workers >= 0")  # of the arguments, for the check

    def __init__(
        self,
        *,
        folder: DirectoryPath | None = None,
        size: int = 8,
        channels: Literal[1, 3] = 1,
        batch_size: int = 32,
        validation_share: float = 0.2,
        workers: int = 0,
    ) -> None:
        super().__init__()
        self.folder = None if folder is None else PROJECT / folder
        self.size, self.channels = size, channels
        self.batch_size, self.validation_share, self.workers = batch_size, validation_share, workers
        self.images: ImageFiles | Digits | None = None
        self.train: Subset | None = None
        self.validation: Subset | None = None

    def setup(self, stage: str) -> None:
        """Finds the images, every rank for itself."""
        if self.folder is None:
            self.images = Digits(self.size, self.channels)
        else:
            self.images = ImageFiles(self.folder, self.size, self.channels)
        train, validation = split(self.images.labels, self.validation_share)
        self.train, self.validation = Subset(self.images, train), Subset(self.images, validation)

    def train_dataloader(self) -> DataLoader:
        """Batches of (pixels (batch_size, channels, size, size), classes (batch_size,)), in a new order every epoch."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """As `train_dataloader`, in a fixed order."""
        return self._loader(self.validation)

    def predict_dataloader(self) -> DataLoader:
        """All images, sorted by class and file name."""
        return self._loader(self.images)

    def _loader(self, images: Dataset | None, *, shuffle: bool = False) -> DataLoader:
        return DataLoader(images, batch_size=self.batch_size, shuffle=shuffle, num_workers=self.workers)
