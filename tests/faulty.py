"""A small module and its data that go wrong on one rank, at one step, in a chosen way: what failure tests train.

Named in a YAML config as `faulty.FaultyModule` and `faulty.FaultyData` (copy this file beside the config).
"""

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

How = Literal["nothing", "raise", "exit", "kill", "hang", "save", "gather"]
Place = Literal["setup", "training_step", "on_train_batch_end", "validation_step", "dataloader"]


class Fault:
    """What goes wrong, and when: `strike(place, step, rank)` is called wherever something could."""

    def __init__(self, rank: int, step: int, how: How, where: Place):
        self.rank, self.step, self.how, self.where = rank, step, how, where

    def strike(self, place: Place, step: int, rank: int, module: LightningModule | None = None) -> None:
        """Goes wrong if this is the place, the step and the rank; leaves the time in a file `struck`.

        Raises: ValueError: with `how="raise"`.
        """
        if (place, step, rank) != (self.where, self.step, self.rank):
            return
        Path("struck").write_text(repr(time.time()))
        if self.how == "raise":
            raise ValueError("boom")
        if self.how == "exit":
            os._exit(7)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            time.sleep(3600)
        if self.how == "save":  # as in "if rank == 0: save", a collective call that the other ranks do not make
            module.trainer.save_checkpoint(Path(module.trainer.default_root_dir) / "alone.ckpt")
        if self.how == "gather":
            with module.trainer.strategy.gathered():
                pass


class FaultyModule(LightningModule):
    """ODD-MLP: 58 parameters, divisible by neither 3 nor 4; trained with SGD on squared errors."""

    def __init__(self, rank: int = 0, step: int = 0, how: How = "nothing", where: Place = "training_step"):
        super().__init__()
        self.fault = Fault(rank, step, how, where)
        self.model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))

    def setup(self, stage: str) -> None:
        self.fault.strike("setup", 0, self.global_rank, self)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.model(batch["x"]) - batch["y"]).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.fault.strike("training_step", batch_idx, self.global_rank, self)
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.fault.strike("on_train_batch_end", batch_idx, self.global_rank, self)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.fault.strike("validation_step", batch_idx, self.global_rank, self)
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FaultySamples(Dataset):
    """Fixed random pairs; goes wrong at the first sample of a batch; counts fetches in its own process."""

    def __init__(self, count: int, batch_size: int, fault: Fault, rank: int):
        generator = torch.Generator().manual_seed(1)
        self.x_NI = torch.randn(count, 7, generator=generator)
        self.y_NO = torch.randn(count, 3, generator=generator)
        self.batch_size, self.fault, self.rank, self.fetched = batch_size, fault, rank, 0

    def __len__(self) -> int:
        return len(self.x_NI)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, first = divmod(self.fetched, self.batch_size)
        if first == 0:
            self.fault.strike("dataloader", step, self.rank)
        self.fetched += 1
        return {"x": self.x_NI[index], "y": self.y_NO[index]}


class FaultyData(LightningDataModule):
    """Samples for `FaultyModule`; with `workers` above 0 they are fetched, and go wrong, in worker processes."""

    def __init__(
        self,
        count: int = 20,
        batch_size: int = 2,
        workers: int = 0,
        rank: int = 0,
        step: int = 0,
        how: How = "nothing",
    ):
        super().__init__()
        self.count, self.batch_size, self.workers = count, batch_size, workers
        self.fault = Fault(rank, step, how, "dataloader")

    def loader(self, fault: Fault, count: int) -> DataLoader:
        samples = FaultySamples(count, self.batch_size, fault, self.trainer.global_rank)
        return DataLoader(samples, batch_size=self.batch_size, num_workers=self.workers)

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.fault, self.count)

    def val_dataloader(self) -> DataLoader:
        return self.loader(Fault(0, 0, "nothing", "dataloader"), self.batch_size * self.trainer.world_size)
