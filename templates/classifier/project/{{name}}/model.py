"""A residual convolutional network in plain PyTorch: nothing about strategies.

Shape suffixes: B batch, C channels, W width (channels inside), H height and width of an image, K classes.
"""

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardlight.framework import TrainingModule
from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = 8
"""Channels are normalised in so many groups: as BatchNorm, but without a dependence on the rest of the batch."""


class Block(nn.Module):
    """Two convolutions, each behind a norm and a ReLU, added to their input (He et al. 2016, figure 4e)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )

    def forward(self, x_BWHH: Tensor) -> Tensor:
        """Returns (B, W, H, H)."""
        return x_BWHH + self.layers(x_BWHH)


class ConvNet(nn.Module):
    """Residual blocks at half the resolution, then the mean over each quarter of the image."""

    def __init__(self, channels: int, classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.GroupNorm(GROUPS, width)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x_BCHH: Tensor) -> Tensor:
        """Returns scores (B, K)."""
        x_BWHH = F.max_pool2d(self.stem(x_BCHH), 2)
        for block in self.blocks:
            x_BWHH = block(x_BWHH)
        return self.head(F.adaptive_avg_pool2d(self.norm(x_BWHH).relu(), 2).flatten(1))


class Classifier(TrainingModule):
    """Trains the network, and counts how many validation images it gets right.

    Args:
        channels: of an image.
        classes: what there is to choose from.
        width: channels inside the network, a multiple of 8.
        depth: residual blocks.
    """

    constraints = ("width % 8 == 0", "classes >= 2", "depth >= 0")  # of the arguments, for the check; 8 is GROUPS

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.classes = classes
        self.model = ConvNet(channels, classes, width, depth)

    def setup(self, stage: str) -> None:
        """Compares the number of classes with the data's."""
        found = self.trainer.datamodule.images.classes
        if stage == "fit" and len(found) != self.classes:
            some = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
            raise MisconfigurationException(f"The data has {len(found)} classes ({some}): set module.classes to that.")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean cross entropy, exact over all images of all ranks."""
        x_BCHH, y_B = batch
        loss = self.token_loss(self.model(x_BCHH), y_B)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the loss and the share of images that are classified right."""
        x_BCHH, y_B = batch
        scores_BK = self.model(x_BCHH)
        self.log("val/loss", self.token_loss(scores_BK, y_B))
        right = (scores_BK.argmax(-1) == y_B).float().sum()
        self.log("val/accuracy", self.weighted(right, len(y_B)), prog_bar=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Returns the probability of each class, and the likeliest."""
        probabilities_BK = self.model(batch[0]).softmax(-1)
        return {"probabilities": probabilities_BK, "class": probabilities_BK.argmax(-1)}
