"""order: layer: each unit serves all micro-batches before the next, with the numbers of one batch after the other."""

import threading

import lightning.pytorch as pl
import pytest
import torch
from harness import RanksFailedError, run_ranks
from models import MODELS, TinyGPT, reference, token_loss
from shardlight.strategies import STRATEGIES
from shardlight.strategies.engine.interleave import Interleaver
from shardlight.strategies.engine.own_state import ModuleAttributes, RandomNumbers
from shardlight.strategies.errors import StrategyError
from test_lightning_fit import Batches, Module, make_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

PARTS = 3


class Joined(Dataset):
    """Item n is what `PARTS` micro-batches of a window of `reference` are together; the last window is short."""

    def __init__(self, name, rank, steps):
        self.name, self.rank, self.steps = name, rank, steps

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        numbers = range(PARTS * step, min(PARTS * (step + 1), PARTS * self.steps - 1))
        parts = [MODELS[self.name][2](1000 * m + self.rank, 4, torch.float64) for m in numbers]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def loaders(name, rank, steps=3):
    """Of training and validation."""
    return [DataLoader(data, batch_size=None) for data in (Joined(name, rank, steps), Batches(name, rank, 2))]


def fit(rank, world, folder, name, **options):
    module = Module(name, "adamw")
    disk = {"disk": f"{folder}/swap", "staging_bytes": 4096} if options.pop("plan", "infinity") == "infinity" else {}
    strategy = STRATEGIES["infinity" if disk else "zero3"](order="layer", micro_batches=PARTS, **disk, **options)
    trainer = make_trainer(strategy, world, folder, gradient_clip_val=0.05)
    trainer.fit(module, *loaders(name, rank))
    assert threading.active_count() == 1 or not [t for t in threading.enumerate() if t.name.startswith("micro-batch")]
    with strategy.gathered():
        return trainer, {n: p.detach().clone() for n, p in module.model.named_parameters()}


def equal_to_a_plain_loop(rank, world, folder):
    # Of the edge cases one world size has all.
    for name in MODELS if world == 2 else ["tiny_gpt"]:
        _, _, want = reference(name, world, 3, PARTS, 0.05, "adamw")
        for options in ({}, {"plan": "zero3", "recompute": "blocks"}):
            if name == "odd_mlp" and options:
                continue
            _, got = fit(rank, world, folder, name, **options)
            for n, weight in want.items():
                torch.testing.assert_close(got[n], weight, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name} {n}: {m}")


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_layer_order_equals_a_plain_loop(world, tmp_path):
    run_ranks(equal_to_a_plain_loop, world, init=False, folder=str(tmp_path), timeout_s=120)


class Counted(pl.LightningModule):
    """Keeps what each batch has read for gathers, and how many gathers and reductions it took."""

    def __init__(self, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.model = TinyGPT(layers=layers, tied=False)
        self.found, self.before = [], None

    def training_step(self, batch, batch_idx):
        return token_loss(self.model, batch)

    def on_train_batch_start(self, batch, batch_idx):
        engine = self.trainer.strategy.engine
        self.before = engine.tiers.gathers.read_bytes, engine.tiers.traffic["gradients"].written_bytes

    def on_train_batch_end(self, outputs, batch, batch_idx):
        engine = self.trainer.strategy.engine
        now = engine.tiers.gathers.read_bytes, engine.tiers.traffic["gradients"].written_bytes
        self.found.append([a - b for a, b in zip(now, self.before, strict=True)])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def reads(rank, world, folder):
    found = {}
    rows = torch.arange(24 * 10).view(24, 10) % 17
    for parts in (1, 2, 6):
        for recompute in ("no", "blocks"):
            module = Counted()
            options = {"order": "layer", "micro_batches": parts, "disk": f"{folder}/swap", "recompute": recompute}
            trainer = make_trainer(STRATEGIES["infinity"](**options), world, folder, precision="32-true")
            trainer.fit(module, DataLoader([(rows, rows)] * 4, batch_size=None))
            found[parts, recompute] = module.found[-1]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_each_unit_is_read_as_often_for_many_micro_batches_as_for_one(world, tmp_path):
    for found in run_ranks(reads, world, init=False, folder=str(tmp_path), timeout_s=120):
        assert found[1, "no"][0] and found[1, "no"][1]
        assert len({tuple(moved) for moved in found.values()}) == 1, found


def as_its_own(module, works):
    """Runs works on a module whose units are none, with a switch wherever they ask for one."""

    class Unit:
        awaited, gathered = 0, False

    attributes, random_numbers = ModuleAttributes(module), RandomNumbers(list(range(len(works))), torch.device("cpu"))
    interleaver = Interleaver(len(works), [random_numbers, attributes])
    found = interleaver.run([lambda work=work: work(lambda: interleaver.use(Unit())) for work in works])
    interleaver.finish()
    return found


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss, self.losses, self.seen = None, [], {}

    def forward(self, number, switch):
        assert self.loss is None and self.losses == [] and self.seen == {}
        self.loss, self.new = number, 10 * number
        self.losses.append(number)
        self.seen[number] = self.loss
        first = torch.rand(3)
        switch()
        self.losses.append(-number)
        second = torch.rand(3)
        switch()
        assert self.loss == number and self.losses == [number, -number] and self.seen == {number: number}
        return torch.cat([first, second]), self.new


def test_what_a_micro_batch_keeps_in_its_module_is_its_own():
    module, before = Keeping(), torch.get_rng_state()
    found = as_its_own(module, [lambda switch, n=n: module(n, switch) for n in range(3)])
    assert torch.equal(torch.get_rng_state(), before)
    for number, (drawn, new) in enumerate(found):
        assert torch.equal(drawn, torch.rand(6, generator=torch.Generator().manual_seed(number)))
        assert new == 10 * number
    assert module.loss == 2 and module.losses == [2, -2] and module.seen == {2: 2} and module.new == 20


def test_the_first_failure_ends_all_micro_batches():
    ended = []

    def work(number, switch):
        try:
            switch()
            if number == 1:
                raise ValueError("micro-batch 1")
            switch()
        finally:
            ended.append(number)

    with pytest.raises(ValueError, match="micro-batch 1") as raised:
        as_its_own(nn.Linear(1, 1), [lambda switch, n=n: work(n, switch) for n in range(3)])
    assert sorted(ended) == [0, 1, 2]
    assert any(entry.name == "work" for entry in raised.traceback)
    assert not [t for t in threading.enumerate() if t.name.startswith("micro-batch")]


class Failing(Module):
    def training_step(self, batch, batch_idx):
        if batch[0].shape[0] == 3:
            raise ValueError(f"rows of batch {batch_idx}")
        return super().training_step(batch, batch_idx)


def failing(rank, world, folder):
    module = Failing("tiny_gpt", "sgd")
    strategy = STRATEGIES["infinity"](order="layer", micro_batches=PARTS, disk=f"{folder}/swap")
    # The last batch has 8 rows: 3, 3 and 2.
    make_trainer(strategy, world, folder).fit(module, *loaders("tiny_gpt", rank))


def test_an_error_of_the_users_step_is_shown_as_it_is(tmp_path):
    with pytest.raises(RanksFailedError, match="rows of batch 2"):
        run_ranks(failing, 1, init=False, folder=str(tmp_path))


class Logging(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("rows", float(batch[0].shape[0]), reduce_fx="sum")
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert float(outputs["loss"]) == pytest.approx(float(self.trainer.callback_metrics["loss"]))
        self.seen = [*getattr(self, "seen", []), float(self.trainer.callback_metrics["loss"])]


def logged(rank, world, folder):
    found = []
    for parts in (1, PARTS):
        module = Logging("tiny_gpt", "sgd")
        strategy = STRATEGIES["zero3"](order="layer", micro_batches=parts)
        trainer = make_trainer(strategy, world, folder)
        trainer.fit(module, *loaders("tiny_gpt", rank))
        found.append((module.seen, float(trainer.callback_metrics["rows"]), len(module.losses)))
    return found


def test_a_batch_is_logged_once_over_its_micro_batches(tmp_path):
    for (whole, rows, _), (parts, rows_of_parts, kept) in run_ranks(logged, 2, init=False, folder=str(tmp_path)):
        assert parts == pytest.approx(whole) and len(parts) == 3
        assert rows == rows_of_parts == 8.0
        # What the module keeps is what the last micro-batch leaves: one more per batch.
        assert kept == 3


@pytest.mark.parametrize(
    "name,options,text",
    [
        ("zero3", {"order": "layer"}, "needs micro_batches"),
        ("zero3", {"micro_batches": 2}, "accumulate_grad_batches"),
        ("infinity", {"order": "layer", "micro_batches": 0}, "at least 1"),
        ("infinity", {"order": "depth"}, "'batch' or 'layer'"),
        ("zero2", {"order": "layer", "micro_batches": 2}, "order is for zero3 and infinity"),
        ("ddp", {"micro_batches": 2}, "micro_batches is for zero3, infinity"),
        ("pipeline", {"order": "layer"}, "order is for zero3 and infinity"),
    ],
)
def test_what_does_not_go_together_is_refused(name, options, text):
    with pytest.raises(StrategyError, match=text):
        STRATEGIES[name](**options)


class Manual(Module):
    def __init__(self):
        super().__init__("tiny_gpt", "sgd")
        self.automatic_optimization = False


def manual(rank, world, folder):
    strategy = STRATEGIES["zero3"](order="layer", micro_batches=2)
    make_trainer(strategy, world, folder).fit(Manual(), *loaders("tiny_gpt", rank, 1))


def test_manual_optimization_is_refused(tmp_path):
    with pytest.raises(RanksFailedError, match="Use automatic optimization, or order: batch"):
        run_ranks(manual, 1, init=False, folder=str(tmp_path))
