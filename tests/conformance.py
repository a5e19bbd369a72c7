"""Cases of the conformance matrix: a LightningModule and settings of its Trainer, whose numbers must be stock Lightning's.

Each case runs under stock Lightning's single device on the joined batch, and under each strategy on this rank's rows.
Weights, learning rates and what the module saw must be the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from shardlight.strategies import STRATEGIES
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer
from torch import nn
from torch.nn import functional as F

BATCHES, EPOCHS = 6, 2


class Net(nn.Module):
    """Two blocks (units of their own), a head that is tied to the first layer, a frozen norm and an unused layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(6, 7), nn.LayerNorm(7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.LayerNorm(7)) for _ in range(2)])
        self.unused = nn.Linear(3, 2)
        self.norm.requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.stem.weight.t())


class Base(pl.LightningModule):
    """Momentum, decay and a clip, so that any gradient that is off shows."""

    settings: dict[str, Any] = {}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net().double()
        self.seen: list[Any] = []

    def loss(self, x):
        return (self.net(x) - x).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.seen.append(("validated after", self.trainer.global_step))
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch))

    def trained(self):
        return [p for p in self.parameters() if p.requires_grad]

    def optimizer(self):
        return torch.optim.SGD(self.trained(), 0.1, momentum=0.9, weight_decay=0.01)

    def configure_optimizers(self):
        return self.optimizer()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.optimizers:
            self.seen.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])


class Scheduled(Base):
    interval, frequency, monitor = "step", 1, None

    def schedule(self, optimizer):
        raise NotImplementedError

    def configure_optimizers(self):
        optimizer = self.optimizer()
        config = {"scheduler": self.schedule(optimizer), "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": {**config, "monitor": self.monitor} if self.monitor else config}


class Cases(dict[str, type[Base]]):
    """By name; `@case("A1")` adds a class that holds rows of the matrix."""

    def __call__(self, *rows: str) -> Callable[[type[Base]], type[Base]]:
        def add(kind: type[Base]) -> type[Base]:
            self[f"{'-'.join(rows)} {kind.__name__}"] = kind
            return kind

        return add

    def rows(self, test: Callable) -> Callable:
        """Marks a test with every row that some case holds."""
        for row in sorted({row for name in self for row in name.split()[0].split("-")}):
            test = pytest.mark.conformance(row)(test)
        return test


@dataclass
class Run:
    weights: dict[str, torch.Tensor]
    seen: list[Any] = field(default_factory=list)
    steps: int = 0


def batch(number, rank):
    g = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 6, generator=g, dtype=torch.float64)


def run(kind, strategy, world, loader, folder) -> Run:
    module = kind()
    trainer = make_trainer(strategy, world, folder, **{"max_epochs": EPOCHS, **module.settings})
    trainer.fit(module, loader, loader)
    if strategy == "auto":
        weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    else:
        with trainer.strategy.gathered():
            weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    return Run(weights, module.seen, trainer.global_step)


def check_cases(cases, rank, world_size, folder, full):
    """`full`: every strategy and `reduce`; else two strategies per case, in turn; in a world of one, one for every third case."""
    joined = batches(*[torch.cat([batch(n, r) for r in range(world_size)]) for n in range(BATCHES)])
    mine = batches(*[batch(n, rank) for n in range(BATCHES)])
    names = strategies(world_size)
    # First all of them: the Trainer of one process warns when there is a process group.
    chosen_cases = list(cases.items()) if full or world_size > 1 else list(cases.items())[::3]
    stock = {name: run(kind, "auto", 1, joined, folder) for name, kind in chosen_cases}
    for number, (name, kind) in enumerate(chosen_cases):
        want = stock[name]
        assert any(not torch.equal(w, s) for w, s in zip(want.weights.values(), kind().parameters(), strict=True)), name
        # zero3 has every second case, the others take turns.
        chosen = ["zero3" if number % 2 and world_size > 1 else names[number // 2 % len(names)]]
        for strategy in names if full else chosen:
            for reduce in ("micro_batch", "window") if full else (None,):
                compare(
                    run(kind, STRATEGIES[strategy](reduce=reduce), world_size, mine, folder), want, (name, strategy)
                )


def compare(got: Run, want: Run, where: Any) -> None:
    assert got.steps == want.steps, where
    for n, weight in want.weights.items():
        torch.testing.assert_close(got.weights[n], weight, rtol=1e-9, atol=1e-9, msg=lambda m, n=n: f"{where} {n}: {m}")
    assert len(got.seen) == len(want.seen), (where, got.seen, want.seen)
    for mine, theirs in zip(got.seen, want.seen, strict=True):
        assert mine == (pytest.approx(theirs, rel=1e-8) if isinstance(theirs, float) else theirs) or all(
            a == (b if isinstance(b, str) else pytest.approx(b, rel=1e-8, abs=1e-12))
            for a, b in zip(mine, theirs, strict=True)
        ), (where, mine, theirs)
