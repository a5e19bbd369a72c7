"""Rows C of the conformance matrix: a Trainer, its strategy and a module over their whole life."""

import gc
import warnings
import weakref

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from lightning.pytorch import callbacks as lightning_callbacks
from shardlight.strategies import STRATEGIES
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.errors import CollectiveError, StrategyError
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer
from torch import nn

F64 = {"dtype": torch.float64}


def piece(batch: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * batch + rank), **F64)


class Net(pl.LightningModule):
    """Two blocks, a BatchNorm-free head, momentum; `seen` are the outputs of evaluation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.head = nn.Linear(3, 1)
        self.seen = []

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append(self(batch).sum().item())
        self.log("val", self(batch).square().mean(), sync_dist=True, batch_size=len(batch))

    def test_step(self, batch, batch_idx):
        self.seen.append(self(batch).sum().item())

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def plain(world: int, fits: int = 1, steps: int = 2, net: nn.Module | None = None) -> Net:
    """One process on the joined batch; the optimizer is new in each fit."""
    net = net or Net().double()
    for _ in range(fits):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for step in range(steps):
            optimizer.zero_grad()
            net(torch.cat([piece(step, r) for r in range(world)])).square().mean().backward()
            optimizer.step()
    return net


def data(rank: int, count: int = 2):
    return batches(*[piece(m, rank) for m in range(count)])


def check_weights(trainer, module, want: nn.Module, where: str) -> None:
    with trainer.strategy.gathered():
        for (name, a), b in zip(module.named_parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(
                a.detach(), b.detach(), rtol=1e-10, atol=1e-10, msg=lambda m: f"{where} {name} {m}"
            )


# --- C1, C2, C3, C5, C12: every entry point in every order


def check_entry_points(rank, world_size, folder):
    x = piece(7, rank)
    for strategy in strategies(world_size):
        module, where, start = Net(), f"{strategy} on {world_size} ranks", Net().double()
        trainer = make_trainer(strategy, world_size, folder)
        trainer.validate(module, batches(x), verbose=False)  # under inference mode, before there is an optimizer
        assert module.seen == pytest.approx([start(x).sum().item()]), where
        trainer.fit(module, data(rank), batches(x))
        want = plain(world_size)
        check_weights(trainer, module, want, f"{where} after fit")
        trainer.validate(module, batches(x), verbose=False)
        loss = torch.stack([want(piece(7, r)).square().mean() for r in range(world_size)]).mean().item()
        assert float(trainer.callback_metrics["val"]) == pytest.approx(loss), where
        trainer.test(module, batches(x), verbose=False)
        (predicted,) = trainer.predict(module, batches(x))
        assert module.seen == pytest.approx([start(x).sum().item()] + [want(x).sum().item()] * 3), where
        torch.testing.assert_close(predicted, want(x).detach())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data(rank), data(rank, 1))  # again, with a new optimizer
        want = plain(world_size, fits=2)
        check_weights(trainer, module, want, f"{where} after the second fit")
        trainer.save_checkpoint(f"{folder}/fit-{strategy}")
        trainer.test(module, batches(x), verbose=False)
        trainer.save_checkpoint(f"{folder}/test-{strategy}")
        for saved in ("fit", "test"):
            reader = CheckpointReader(f"{folder}/{saved}-{strategy}")
            for name, parameter in want.named_parameters():
                torch.testing.assert_close(reader.read(f"model/{name}"), parameter.detach(), rtol=1e-10, atol=1e-10)
        assert reader.has("optimizer/0/head.weight/momentum_buffer") is False, where
        other = Net()
        again = make_trainer(strategy, world_size, folder)
        again.test(other, batches(x), ckpt_path=f"{folder}/test-{strategy}", verbose=False)
        assert other.seen == pytest.approx([want(x).sum().item()]), where


@pytest.mark.conformance("C1")
@pytest.mark.conformance("C2")
@pytest.mark.conformance("C3")
@pytest.mark.conformance("C5")
@pytest.mark.conformance("C12")
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_entry_point_on_one_trainer(world_size, tmp_path):
    run_ranks(check_entry_points, world_size, init=False, folder=str(tmp_path))


# --- C6, C7, C11


def check_ownership(rank, world_size, folder):
    names = strategies(world_size)
    for strategy, after in zip(names, [*names[1:], names[0]], strict=True):
        # The second Trainer, of another strategy, takes the module over, with the weights that the first has left.
        module = Net()
        make_trainer(strategy, world_size, folder).fit(module, data(rank), data(rank, 1))
        trainer = make_trainer(after, world_size, folder)
        trainer.fit(module, data(rank), data(rank, 1))
        check_weights(trainer, module, plain(world_size, fits=2), f"{strategy} then {after}")
        # One strategy object in two Trainers.
        mine = STRATEGIES[strategy]()
        make_trainer(mine, world_size, folder).fit(Net(), data(rank), data(rank, 1))
        for accelerator in ("cpu", "auto"):
            with pytest.raises(StrategyError, match=rf"this {strategy} strategy object belongs to another Trainer"):
                make_trainer(mine, world_size, folder, accelerator=accelerator)
        # Nothing of it stays when Trainer and module are gone.
        gone = [weakref.ref(o) for o in (trainer, module, trainer.strategy.engine, trainer.strategy.engine.buffers[0])]
        del trainer, module, mine
        gc.collect()
        assert [r() for r in gone] == [None] * 4, after


@pytest.mark.conformance("C6")
@pytest.mark.conformance("C7")
@pytest.mark.conformance("C11")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_changes_trainers_a_strategy_does_not_and_nothing_is_left(world_size, tmp_path):
    run_ranks(check_ownership, world_size, init=False, folder=str(tmp_path))


# --- C8: what a rank saves after an error; other ranks may know nothing of it


class Fails(Net):
    def __init__(self, ranks, hook="training_step"):
        super().__init__()
        self.ranks, self.hook = ranks, hook

    def fail(self, hook, batch_idx):
        if hook == self.hook and batch_idx == 1 and self.global_rank in self.ranks:
            raise ValueError("boom")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.fail("training_step", batch_idx)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.fail("on_train_batch_end", batch_idx)


def saving_on_exception(kind, home):
    if kind == "OnExceptionCheckpoint":
        return lightning_callbacks.OnExceptionCheckpoint(home, "saved")
    return lightning_callbacks.ModelCheckpoint(home, "saved", save_on_exception=True, every_n_epochs=99)


def check_exceptions(rank, world_size, folder, strategy, kind, ranks, hook):
    warnings.filterwarnings("ignore", message=".*(was called without a model|no last checkpoint available)")
    warnings.filterwarnings("ignore", message=".*a checkpoint after an error takes all ranks")
    module = Fails(ranks, hook)
    callback = saving_on_exception(kind, folder)
    trainer = make_trainer(
        STRATEGIES[strategy](timeout_s=20), world_size, folder, callbacks=[callback], enable_checkpointing=True
    )
    with pytest.raises((ValueError, CollectiveError)) as caught:
        trainer.fit(module, data(rank), data(rank, 1))
    return type(caught.value).__name__


@pytest.mark.conformance("C8")
@pytest.mark.conformance("F")
@pytest.mark.parametrize(
    "strategy,kind,hook",
    [("zero3", "OnExceptionCheckpoint", "training_step"), ("zero1", "ModelCheckpoint", "on_train_batch_end")],
)
def test_a_checkpoint_after_an_error_takes_all_ranks_and_never_hangs(strategy, kind, hook, tmp_path):
    settings = {"strategy": strategy, "kind": kind, "hook": hook}
    both, one = tmp_path / "both", tmp_path / "one"
    said = run_ranks(check_exceptions, 2, init=False, folder=str(both), ranks=[0, 1], **settings)
    assert said == ["ValueError", "ValueError"]
    (saved,) = (p.parent for p in both.rglob("manifest.json"))
    want = plain(2, steps=1 if hook == "training_step" else 2)
    for name, parameter in want.named_parameters():
        torch.testing.assert_close(CheckpointReader(saved).read(f"model/{name}"), parameter.detach())
    said = run_ranks(check_exceptions, 2, init=False, folder=str(one), ranks=[1], **settings, timeout_s=40)
    assert said == ["CollectiveError", "ValueError"]
    assert not list(one.rglob("manifest.json"))


# --- one rank alone wants to stop


class Stops(Net):
    def __init__(self, hook, ranks):
        super().__init__()
        self.hook, self.ranks, self.count = hook, ranks, 0

    def stop(self, hook, when=0):
        if hook == self.hook:
            self.count += 1
            if self.global_rank in self.ranks and self.count > when:
                self.trainer.should_stop = True

    def on_train_start(self):
        self.stop("on_train_start")

    def on_train_epoch_start(self):
        self.stop("on_train_epoch_start", 1)

    def on_train_batch_end(self, *args):
        self.stop("on_train_batch_end", 2)

    def on_validation_end(self):
        self.stop("on_validation_end")

    def on_train_epoch_end(self):
        self.stop("on_train_epoch_end")


STOPS = {  # hook: steps made when all ranks set it
    "on_train_start": 0,
    "on_train_epoch_start": 2,
    "on_train_batch_end": 3,
    "on_validation_end": 2,
    "on_train_epoch_end": 2,
}


def check_stops(rank, world_size, folder, cells):
    for strategy, hook, ranks in cells:
        module = Stops(hook, ranks)
        trainer = make_trainer(strategy, world_size, folder, max_epochs=5)
        trainer.fit(module, data(rank), batches(piece(7, rank)))
        steps = trainer.strategy.engine.collectives.gather_objects(trainer.global_step, "steps")
        assert steps == [STOPS[hook]] * world_size, (strategy, hook, ranks, steps)
        assert not vars(trainer.fit_loop).keys() & {"on_advance_start", "on_advance_end"}
        trainer.test(module, batches(piece(7, rank)), verbose=False)


CELLS = [("zero3", "on_train_batch_end", [1]), ("ddp", "on_validation_end", [0]), ("zero2", "on_train_epoch_end", [1])]
CELLS += [
    ("zero1", "on_train_start", [1]),
    ("zero3", "on_train_epoch_start", [0]),
    ("zero2", "on_train_batch_end", [0, 1]),
]


@pytest.mark.conformance("C10")
def test_any_rank_that_wants_to_stop_ends_training_on_all(tmp_path):
    run_ranks(check_stops, 2, init=False, folder=str(tmp_path), cells=CELLS)


@pytest.mark.conformance("C10")
@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_any_rank_that_wants_to_stop_in_every_strategy(world_size, tmp_path):
    choices = [[0], [1], [0, 1]] if world_size == 2 else [[0]]
    cells = [(s, hook, ranks) for s in strategies(world_size) for hook in STOPS for ranks in choices]
    run_ranks(check_stops, world_size, init=False, folder=str(tmp_path), cells=cells, timeout_s=300)
