"""Rows D of the conformance matrix: Lightning's doors into and out of checkpoints, under every strategy."""

import os
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from shardlight.strategies import read_state_dict
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.errors import CheckpointError
from test_cases_training import batches
from test_conformance_lifecycle import Net, data, piece
from test_lightning_fit import make_trainer
from torch import nn


def full(trainer, module) -> dict[str, torch.Tensor]:
    with trainer.strategy.gathered():
        return {n: t.detach().clone() for n, t in module.state_dict().items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


class Scored(Net):
    """Its validation value falls, and then rises."""

    SCORES = {2: 5.0, 4: 3.0, 6: 1.0, 8: 2.0, 10: 9.0}

    def validation_step(self, batch, batch_idx):
        self(batch)
        self.log("score", self.SCORES.get(self.trainer.global_step, 0.5), sync_dist=True)


# --- D2, D3, C020, C094


def keeps(strategy, rank, world_size, folder):
    home = f"{folder}/{strategy}/a"

    def saver(folder, **more):
        return ModelCheckpoint(folder, "{step}", monitor="score", save_top_k=2, **more)

    saving = saver(home, save_last="link" if strategy in ("zero3", "single") else True)
    often = ModelCheckpoint(f"{folder}/{strategy}/c", "{step}", every_n_train_steps=3, save_top_k=-1)
    module = Scored()
    more = {"enable_checkpointing": True, "val_check_interval": 2, "max_epochs": 1}
    trainer = make_trainer(strategy, world_size, folder, callbacks=[saving, often], **more)
    trainer.fit(module, data(rank, 10), data(rank, 1))
    trainer.strategy.barrier()
    there = sorted(p.name for p in Path(home).iterdir())
    assert there == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"]
    assert {p.name for p in Path(folder, strategy, "c").iterdir()} == {f"step={n}.ckpt" for n in (3, 6, 9)}
    assert saving.best_model_path == f"{home}/step=6.ckpt" and float(saving.best_model_score) == 1.0
    assert Path(home, "last.ckpt").is_symlink() == (saving.save_last == "link")
    weights = {}
    for path in ("best", "last", f"{folder}/{strategy}/c/step=9.ckpt"):
        other = Scored()
        trainer.test(other, batches(piece(7, rank)), ckpt_path=path, verbose=False)
        weights[path] = full(trainer, other)
    assert same(weights["best"], read_state_dict(saving.best_model_path))
    assert same(weights["last"], read_state_dict(f"{home}/step=8.ckpt")) and not same(weights["last"], weights["best"])
    trainer.save_checkpoint(f"{home}/after-test")  # of what was tested last
    assert same(read_state_dict(f"{home}/after-test"), weights[path])
    # C094: another run goes on from there, into a folder of its own.
    before = {p: os.stat(p).st_mtime_ns for p in Path(home).rglob("*")}
    second = saver(f"{folder}/{strategy}/b")
    more["max_epochs"] = 2
    trainer = make_trainer(strategy, world_size, folder, callbacks=[second], **more)
    trainer.fit(Scored(), data(rank, 10), data(rank, 1), ckpt_path=f"{home}/step=6.ckpt")
    trainer.strategy.barrier()
    assert {p: os.stat(p).st_mtime_ns for p in Path(home).rglob("*")} == before
    assert len(list(Path(folder, strategy, "b").iterdir())) == 2 and second.best_model_path.startswith(
        f"{folder}/{strategy}/b"
    )


# --- D4: weights only


def weights_only(strategy, rank, world_size, folder):
    path = f"{folder}/{strategy}-weights"
    saving = ModelCheckpoint(folder, f"{strategy}-weights", save_weights_only=True)
    saving.FILE_EXTENSION = ""
    module = Net()
    trainer = make_trainer(strategy, world_size, folder, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, data(rank), data(rank, 1))
    want = full(trainer, module)
    assert CheckpointReader(path).content["optimizers"] is None
    other = Net()
    trainer = make_trainer(strategy, world_size, folder, max_epochs=2)
    trainer.test(other, batches(piece(7, rank)), ckpt_path=path, verbose=False)
    assert same(full(trainer, other), want)
    fresh = Net()
    before = {n: t.clone() for n, t in fresh.state_dict().items()}
    trainer = make_trainer(strategy, world_size, folder, max_epochs=2)
    with pytest.raises(CheckpointError, match=r"-weights holds weights only .*with init_from"):
        trainer.fit(fresh, data(rank), data(rank, 1), ckpt_path=path)
    assert same(full(trainer, fresh), before)


# --- D5, D6, D15, C026: what hooks make of a checkpoint


class Adapted(Net):
    """A frozen layer of 7s, an adapter, something of its own, and names and values that change on the way."""

    def __init__(self, frozen=7.0, names="old", change=False):
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.base.requires_grad_(False).weight.data.fill_(frozen)
        self.lora_a, self.lora_b = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.names, self.change, self.mine = names, change, None
        if names == "new":
            self.top = self.head
            del self.head

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x)) + self.lora_b(self.lora_a(x)) + 0.01 * self.base(x)
        return (self.top if self.names == "new" else self.head)(x)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1, momentum=0.9)

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["mine"] = {"tensor": torch.arange(3), "text": "x"}
        state["extra"] = torch.full((2,), 5.0)
        if self.change == "without frozen":
            for name in [n for n, p in self.named_parameters() if not p.requires_grad]:
                del state[name]

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        self.mine = checkpoint["mine"], state.pop("extra").tolist()
        if self.names == "new":
            for name in [n for n in state if n.startswith("head.")]:
                state[name.replace("head.", "top.")] = state.pop(name)
        if self.change is True:
            assert state["lora_a.weight"].shape == (2, 3) and state["lora_a.weight"].dtype == torch.float64
            state["lora_a.weight"] = 2 * state["lora_a.weight"]
            state["blocks.0.weight"].mul_(3)
            state["blocks.1.bias"] = torch.ones(3, dtype=torch.float64)


def edits(strategy, rank, world_size, folder):
    path = f"{folder}/{strategy}-edits"

    def trainer(epochs=1):
        return make_trainer(strategy, world_size, folder, max_epochs=epochs)

    first, module = trainer(), Adapted()
    first.fit(module, data(rank), data(rank, 1))
    first.save_checkpoint(path)
    want = full(first, module)
    assert torch.equal(want["base.weight"], torch.full((3, 3), 7.0, dtype=torch.float64))
    assert torch.equal(read_state_dict(path)["extra"], torch.full((2,), 5.0))
    # C026: frozen weights come from the file; and the run goes on.
    second, other = trainer(2), Adapted(frozen=0.0)
    second.fit(other, data(rank), data(rank, 1), ckpt_path=path)
    got = full(second, other)
    assert torch.equal(got["base.weight"], want["base.weight"]) and not torch.equal(
        got["lora_b.weight"], want["lora_b.weight"]
    )
    assert other.mine[0]["text"] == "x" and other.mine[0]["tensor"].tolist() == [0, 1, 2] and other.mine[1] == [5, 5]
    # Renamed, changed in place and by a new tensor.
    third, renamed = trainer(), Adapted(names="new", change=True)
    third.test(renamed, batches(piece(7, rank)), ckpt_path=path, verbose=False)
    want |= {"top." + n: want.pop(f"head.{n}") for n in ("weight", "bias")}
    want["lora_a.weight"] = 2 * want["lora_a.weight"]
    want["blocks.0.weight"] = 3 * want["blocks.0.weight"]
    want["blocks.1.bias"] = torch.ones(3, dtype=torch.float64)
    assert same(full(third, renamed), {n: want[n] for n, _ in renamed.named_parameters()})
    # D15, D6: without the frozen ones, into a module that is not strict about them.
    fourth, dropped = trainer(), Adapted(change="without frozen")
    fourth.fit(dropped, data(rank), data(rank, 1))
    fourth.save_checkpoint(path)
    assert not [n for n in read_state_dict(path) if n.startswith("base")]
    for strict in (True, False):
        fifth, loose = trainer(2), Adapted(frozen=4.0)
        loose.strict_loading = strict
        if strict:
            with pytest.raises(CheckpointError, match=r"missing there: 'base.weight' \(3, 3\), 'base.bias' \(3,\)"):
                fifth.fit(loose, data(rank), data(rank, 1), ckpt_path=path)
            continue
        fifth.fit(loose, data(rank), data(rank, 1), ckpt_path=path)
        assert (full(fifth, loose)["base.weight"] == 4.0).all() and fifth.global_step == 4
    # What is skipped is as the fresh module has it, weights and momentum; the rest goes on.
    sixth, fresh = trainer(1), Adapted(frozen=0.0)
    start = {n: t.clone() for n, t in fresh.state_dict().items()}
    sixth.strategy.skip_on_load = ["base.*", "head.weight", "lora_b.*"]
    sixth.fit(fresh, data(rank), data(rank, 1), ckpt_path=path)  # has had its epoch: nothing is trained
    got, saved = full(sixth, fresh), read_state_dict(path)
    skipped = {"base.weight", "base.bias", "head.weight", "lora_b.weight"}
    assert same(got, {**{n: t for n, t in saved.items() if n != "extra"}, **{n: start[n] for n in skipped}})
    sixth.save_checkpoint(f"{path}-skipped")
    moments = {n.split("/")[0] for n in CheckpointReader(f"{path}-skipped").names("optimizer/0/")}
    assert moments == {n for n, p in fresh.named_parameters() if p.requires_grad} - skipped, (strategy, moments)


# --- D13: tuners that save, try and restore in the middle of a run. Lightning refuses its finder of batch sizes where a
# strategy can be distributed (test_conformance_callbacks.py).


class InTheMiddle(LearningRateFinder):
    def on_fit_start(self, trainer, pl_module):
        return

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1 and self.optimal_lr is None:
            self.lr_find(trainer, pl_module)


class Trial(pl.Callback):
    """What a tuner does in the middle of a run, where Lightning's own makes no step."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch != 1 or self.done:
            return
        self.done, loop = True, trainer.fit_loop
        path = f"{trainer.default_root_dir}/.lr_find_trial-{trainer.strategy.plan.name}.ckpt"
        trainer.save_checkpoint(path)
        with trainer.strategy.gathered(), torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.add_(1)
        for state in trainer.optimizers[0].state.values():
            state["momentum_buffer"].mul_(5)
        trainer.optimizers[0].param_groups[0]["lr"] = 3.0
        trainer._checkpoint_connector.restore(path)
        loop.restarting = loop.epoch_loop.restarting = False
        loop.epoch_loop.val_loop._combined_loader = loop._combined_loader = None
        loop.setup_data()

    done = False


def tuners(strategy, rank, world_size, folder):
    warnings.filterwarnings("ignore", message=".*LR finder stopped early")
    warnings.filterwarnings("ignore", message=".*You might have forgotten to call|.*does not have many workers")

    def fit(callbacks, module, *loaders):
        trainer = make_trainer(strategy, world_size, folder, callbacks=callbacks, max_epochs=3)
        trainer.fit(module, *loaders)
        assert trainer.global_step == 6
        return full(trainer, module)

    plain = fit([], Net(), data(rank), data(rank, 1))
    for tuner in (InTheMiddle(num_training_steps=3, update_attr=False), Trial()):
        assert same(fit([tuner], Net(), data(rank), data(rank, 1)), plain), (strategy, tuner)


# --- D14


class Counting(pl.LightningDataModule):
    def __init__(self, rank):
        super().__init__()
        self.rank, self.epochs = rank, 0

    def train_dataloader(self):
        self.epochs += 1
        return data(self.rank)

    def val_dataloader(self):
        return data(self.rank, 1)

    def state_dict(self):
        return {"epochs": self.epochs, "table": torch.tensor([self.epochs])}

    def load_state_dict(self, state):
        self.epochs = state["epochs"] + 10 * int(state["table"])


class Remembers(pl.Callback):
    def __init__(self, name):
        self.name, self.seen = name, 0

    @property
    def state_key(self):
        return f"Remembers {self.name}"

    def on_train_batch_end(self, *args):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint[f"by {self.name}"] = self.seen

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.found = checkpoint[f"by {self.name}"]


def states(strategy, rank, world_size, folder):
    path = f"{folder}/{strategy}-states"
    first = make_trainer(strategy, world_size, folder, callbacks=[Remembers("a"), Remembers("b")])
    first.fit(Net(), datamodule=Counting(rank))
    first.save_checkpoint(path)
    both, there = [Remembers("b"), Remembers("a")], Counting(rank)
    second = make_trainer(strategy, world_size, folder, callbacks=both, max_epochs=2)
    second.fit(Net(), datamodule=there, ckpt_path=path)
    assert [(c.found, c.seen) for c in both] == [(2, 4), (2, 4)] and there.epochs in (11, 12), there.epochs


ROWS = {keeps: ["D2", "D3"], weights_only: ["D4"], edits: ["D5", "D6", "D15"], tuners: ["D13"], states: ["D14"]}


def check(rank, world_size, folder, only):
    for message in (
        "The dirpath has changed from",
        ".*is called with Trainer configured with multiple `ModelCheckp",
        "Be aware that when using `ckpt_path`",
    ):
        warnings.filterwarnings("ignore", message=message)
    for strategy in only:
        for row in ROWS:
            try:
                row(strategy, rank, world_size, folder)
            except Exception as error:
                raise AssertionError(f"{row.__name__} under {strategy}") from error


@pytest.mark.case("C020")
@pytest.mark.case("C026")
@pytest.mark.case("C094")
@pytest.mark.conformance("D2")
@pytest.mark.conformance("D3")
@pytest.mark.conformance("D4")
@pytest.mark.conformance("D5")
@pytest.mark.conformance("D6")
@pytest.mark.conformance("D13")
@pytest.mark.conformance("D14")
@pytest.mark.conformance("D15")
@pytest.mark.parametrize(
    "world_size,only",
    [
        (1, ["single"]),
        (2, ["zero3", "ddp"]),
        pytest.param(2, ["zero1", "zero2"], marks=pytest.mark.long),
        pytest.param(1, ["ddp", "zero1", "zero2", "zero3"], marks=pytest.mark.long),
    ],
)
def test_lightnings_doors(world_size, only, tmp_path):
    run_ranks(check, world_size, init=False, folder=str(tmp_path), only=only, timeout_s=200)
