"""The pipeline strategy under Lightning's Trainer: losses, norms and weights of one process."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from models import OPTIMIZERS, TinyGPT
from shardlight.strategies import Pipeline
from test_lightning_fit import make_trainer as trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

STEPS = 3
ROWS = 8


def batch(number, rows=ROWS):
    g = torch.Generator().manual_seed(number)
    return torch.randint(17, (rows, 10), generator=g), torch.randint(17, (rows, 10), generator=g)


class Module(pl.LightningModule):
    def __init__(self, tied=True, layers=4, optimizer="adamw", recorded=None):
        super().__init__()
        torch.manual_seed(0)
        self.model = TinyGPT(layers=layers, tied=tied).double()
        self.optimizer_name = optimizer
        self.losses, self.norms = [], []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten()), sync_dist=True)

    def on_before_optimizer_step(self, optimizer):
        strategy = self.trainer.strategy
        if hasattr(strategy, "gradient_norm"):
            self.norms.append(float(strategy.gradient_norm()))
            self.losses.append(strategy.window_loss)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer_name](self.parameters())


def reference(data, accumulate, clip, pipelines=1, steps=STEPS, make=Module, **kwargs):
    """One process on the joined batches."""
    module = make(**kwargs)
    optimizer = module.configure_optimizers()
    losses, norms = [], []
    for first in range(0, steps * accumulate, accumulate):
        total = 0.0
        for number in range(first, first + accumulate):
            for pipeline in range(pipelines):
                x, y = data(number * pipelines + pipeline)
                loss = F.cross_entropy(module.model(x).flatten(0, 1), y.flatten()) / (accumulate * pipelines)
                loss.backward()
                total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf")).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {n: p.detach() for n, p in module.named_parameters()}


def settings_body(rank, world, folder, cases, steps=STEPS):
    for case in cases:
        options, accumulate, clip, optimizer = case
        stages = options["stages"]
        pipelines, place = world // stages, rank % (world // stages)
        module = Module(optimizer=optimizer, layers=8)
        fit = trainer(
            Pipeline(**options),
            world,
            folder,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip,
        )
        data = [batch(number * pipelines + place) for number in range(steps * accumulate)]
        fit.fit(module, DataLoader(data, batch_size=None), DataLoader([batch(99, 7)], batch_size=None))
        losses, norms, weights = reference(batch, accumulate, clip, pipelines, steps, optimizer=optimizer, layers=8)
        note = f"{case} on {world} ranks"
        torch.testing.assert_close(
            module.losses, losses, rtol=1e-10, atol=1e-12, msg=lambda m, n=note: f"{n} losses: {m}"
        )
        torch.testing.assert_close(module.norms, norms, rtol=1e-10, atol=1e-12, msg=lambda m, n=note: f"{n} norms: {m}")
        with torch.no_grad():
            whole = Module(layers=8)
            whole.load_state_dict(weights, strict=False)
            there = F.cross_entropy(whole.model(batch(99, 7)[0]).flatten(0, 1), batch(99, 7)[1].flatten())
        torch.testing.assert_close(fit.callback_metrics["val_loss"].double(), there, rtol=1e-6, atol=1e-6)
        with fit.strategy.gathered():
            own = {n: p.detach().clone() for n, p in module.named_parameters()}
        assert own and len(own) < len(weights)
        for name, value in own.items():
            torch.testing.assert_close(
                value, weights[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=note: f"{n} {name}: {m}"
            )


AXES = {
    "stages": (2, 3, 4),
    "data": (1, 2),
    "schedule": ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"),
    "micro_batches": (1, 4, 5),
    "zero": (0, 1, 2, 3),
    "accumulate": (1, 2),
    "clip": (None, 0.5),
}


def product(most_ranks):
    """All settings on up to so many ranks, with blocks for all their stages (8)."""
    cells = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    return [c for c in cells if c["stages"] * c["data"] <= most_ranks]


def pairwise(cells):
    """A few of the cells, in which every pair of values that occurs in any of them occurs."""

    def pairs(cell):
        return set(itertools.combinations(cell.items(), 2))

    left, chosen = set().union(*map(pairs, cells)), []
    while left:
        chosen.append(max(cells, key=lambda cell: len(pairs(cell) & left)))
        left -= pairs(chosen[-1])
    return chosen


def by_ranks(cells):
    worlds = {}
    for number, cell in enumerate(cells):
        options = {key: cell[key] for key in ("stages", "schedule", "micro_batches", "zero")}
        case = options, cell["accumulate"], cell["clip"], ("adamw", "sgd")[number % 2]
        worlds.setdefault(cell["stages"] * cell["data"], []).append(case)
    return worlds


PAIRS = by_ranks(pairwise(product(most_ranks=4)))


@pytest.mark.parametrize("world", PAIRS)
def test_any_layout_gives_the_numbers_of_one_process(world, tmp_path):
    run_ranks(settings_body, world, timeout_s=240, init=False, folder=str(tmp_path), cases=PAIRS[world])


@pytest.mark.long
@pytest.mark.parametrize(("world", "part"), [(world, part) for world in PAIRS for part in AXES["schedule"]])
def test_the_whole_product_gives_the_numbers_of_one_process(world, part, tmp_path):
    cases = [case for case in by_ranks(product(most_ranks=4))[world] if case[0]["schedule"] == part]
    run_ranks(settings_body, world, timeout_s=3000, init=False, folder=str(tmp_path), cases=cases, steps=10)
