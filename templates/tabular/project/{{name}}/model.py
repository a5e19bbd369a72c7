"""A perceptron that classifies rows of numbers, in plain PyTorch: nothing about strategies."""

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardlight.framework import TrainingModule
from torch import Tensor, nn


class Perceptron(nn.Module):
    """Hidden layers with ReLU on standardised columns.

    Mean and standard deviation are part of the weights: a trained model takes the numbers as they are in the file.
    """

    def __init__(self, features: int, classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))
        self.first = nn.Linear(features, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns scores (batch, classes) of rows (batch, features)."""
        hidden = self.first((x - self.mean) / self.std).relu()
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.last(hidden)


class Classifier(TrainingModule):
    """Trains the perceptron, and counts how many validation rows it gets right.

    Args:
        features: columns of a row.
        classes: what there is to choose from.
        width: numbers in a hidden layer.
        depth: hidden layers behind the first.
    """

    constraints = ("features >= 1", "classes >= 2", "width >= 1", "depth >= 0")  # of the arguments, for the check

    def __init__(self, features: int, classes: int, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.features = features
        self.classes = classes
        self.model = Perceptron(features, classes, width, depth)

    def setup(self, stage: str) -> None:
        """Takes mean and standard deviation from the training rows; a checkpoint that is loaded has them already."""
        table = self.trainer.datamodule
        found = (len(table.columns), len(table.classes))
        if stage == "fit" and found != (self.features, self.classes):
            raise MisconfigurationException(
                f"{table.path} has {found[0]} columns beside {table.target!r}, which has {found[1]} values: "
                f"set module.features to {found[0]} and module.classes to {found[1]} in config.yaml."
            )
        if stage == "fit":
            self.model.mean, self.model.std = table.train_mean_and_std()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean cross entropy, exact over all rows of all ranks."""
        x, y = batch
        loss = self.token_loss(self.model(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the loss and the share of rows that are classified right."""
        x, y = batch
        scores = self.model(x)
        self.log("val/loss", self.token_loss(scores, y))
        self.log("val/accuracy", self.weighted((scores.argmax(-1) == y).float().sum(), len(y)), prog_bar=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Returns the probability of each class, and the likeliest."""
        probabilities = self.model(batch[0]).softmax(-1)
        return {"probabilities": probabilities, "class": probabilities.argmax(-1)}
