"""A plain Lightning .ckpt goes on under every strategy; nothing in such a file can run, and what cannot be is refused."""

import os
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from conformance import BATCHES, Base, Net, batch
from harness import run_ranks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from omegaconf import OmegaConf
from shardlight.strategies import load_weights
from shardlight.strategies.checkpoint.lightning_file import LightningFile
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.errors import CheckpointError
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer


class Trained(Base):
    """AdamW in two groups, a schedule, and hyper-parameters."""

    def __init__(self, width: int = 7, sizes: tuple[int, ...] = (1, 2)):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        decayed = [p for p in self.trained() if p.dim() > 1]
        rest = [p for p in self.trained() if p.dim() < 2]
        groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, 0.01, weight_decay=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5), "interval": "step"}]


def callbacks(folder):
    return [EarlyStopping("val_loss", patience=30), ModelCheckpoint(folder, monitor="val_loss", save_top_k=0)]


def fit(strategy, world, folder, loader, epochs, resume=None):
    module = Trained()
    more = {"callbacks": callbacks(folder), "enable_checkpointing": True, "max_epochs": epochs}
    trainer = make_trainer(strategy, world, folder, **more)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return trainer, module


def resumes(rank, world_size, folder):
    warnings.filterwarnings("ignore", message=".*is Lightning's own: it has no random numbers")
    warnings.filterwarnings("ignore", message="The dirpath has changed from")
    joined = batches(*[torch.cat([batch(n, r) for r in range(world_size)]) for n in range(BATCHES)])
    mine = batches(*[batch(n, rank) for n in range(BATCHES)])
    whole, module = fit("auto", 1, f"{folder}/{rank}", joined, 3)
    want = {n: p.detach().clone() for n, p in module.named_parameters()}
    half, _ = fit("auto", 1, f"{folder}/{rank}", joined, 2)
    path = f"{folder}/{rank}/half.ckpt"
    half.save_checkpoint(path)
    for strategy in strategies(world_size):
        trainer, module = fit(strategy, world_size, folder, mine, 3, resume=path)
        assert (trainer.global_step, trainer.current_epoch) == (whole.global_step, 3), strategy
        assert [g["lr"] for g in trainer.optimizers[0].param_groups] == pytest.approx(
            [g["lr"] for g in whole.optimizers[0].param_groups]
        )
        stopping, theirs = trainer.callbacks[0], whole.callbacks[0]
        assert float(stopping.best_score) == pytest.approx(float(theirs.best_score)), strategy
        with trainer.strategy.gathered():
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(
                    parameter.detach(), want[name], rtol=1e-9, atol=1e-9, msg=lambda m: f"{strategy} {name}: {m}"
                )
    other = Trained()
    report = load_weights(other, path)
    assert set(report.loaded) == set(other.state_dict())
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())


@pytest.mark.conformance("D10")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_of_lightning_goes_on_under_every_strategy(world_size, tmp_path):
    for rank in range(world_size):
        (tmp_path / str(rank)).mkdir()
    run_ranks(resumes, world_size, init=False, folder=str(tmp_path))


class Runs:
    def __reduce__(self):
        return os.system, ("touch struck",)


def spread(count: int) -> torch.Tensor:
    return torch.zeros(1).expand(count, count)


REFUSED = {
    "a call": ({"state_dict": {}, "callbacks": Runs()}, r"not opened: .*holds posix.system, which would have been"),
    "a class": ({"state_dict": {"w": torch.ones(1)}, "path": Path("a")}, r"not opened: .*pathlib.*Path"),
    "omegaconf": ({"state_dict": {}, "hyper_parameters": OmegaConf.create({"a": [1]})}, r"omegaconf.dictconfig.DictConfig"),
    "a list": ([torch.ones(1)], r"holds a list, not a checkpoint or a state dict"),
    "other things": ({"epoch": 3}, r"is no checkpoint of Lightning and no state dict: 'epoch' is a int"),
    "text in it": ({"state_dict": {"w": "x"}}, r"no state dict: 'w' is a str"),
    "a bomb": ({"state_dict": {"w": spread(1 << 20)}}, r"'w' of shape \(1048576, 1048576\) has more elements than are"),
    "a bomb below": (
        {"state_dict": {"w": torch.ones(2)}, "optimizer_states": [
            {"state": {0: {"m": spread(1 << 20)}}, "param_groups": [{"params": [0], "lr": 1}]}]},
        r"'optimizer/0/w/m' of shape .* has more elements",
    ),
    "sparse": ({"state_dict": {"w": torch.eye(3).to_sparse()}}, r"'w' is a torch.sparse_coo tensor"),
    "other groups": (
        {"state_dict": {"w": torch.ones(2)}, "optimizer_states": [{"state": {}, "param_groups": [{"params": [0, 1]}]}]},
        r"groups of optimizer 0 have \[2\] parameters there and \[1\] here",
    ),
    "no groups": ({"state_dict": {"w": torch.ones(2)}, "optimizer_states": [{}]}, r"optimizer 0 is not of PyTorch's form"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11, of any sparse tensor that is loaded
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_may_not_hold_is_refused_by_name_and_not_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, message = REFUSED[name]
    torch.save(data, "file.ckpt")
    with pytest.raises(CheckpointError, match=rf"(?s)^file.ckpt.*{message}"):
        LightningFile("file.ckpt").name_parameters([[["w"]]])
    with pytest.raises(CheckpointError, match="file.ckpt"):
        load_weights(Net(), "file.ckpt")
    assert not Path("struck").exists()


def test_what_is_no_zip_of_tensors_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = {"state_dict": Net().state_dict(), "optimizer_states": []}
    torch.save(good, "good.ckpt")
    torch.save({"a": Runs()}, "old.ckpt", _use_new_zipfile_serialization=False)
    data = Path("good.ckpt").read_bytes()
    for n, size in enumerate((0, 3, 100, len(data) // 2, len(data) - 10)):
        Path(f"cut{n}.ckpt").write_bytes(data[:size])
    with zipfile.ZipFile("good.ckpt") as source, zipfile.ZipFile("packed.ckpt", "w", zipfile.ZIP_DEFLATED) as packed:
        for item in source.namelist():
            packed.writestr(item, source.read(item))
    messages = {"old": "not a zip of tensors.*Make it new: python -c", "packed": "is compressed", "cut0": "not a zip"}
    for name in ("old", "packed", *(f"cut{n}" for n in range(5))):
        with pytest.raises(CheckpointError, match=rf"{name}.ckpt.*{messages.get(name, '')}"):
            LightningFile(f"{name}.ckpt")
    assert not Path("struck").exists()
    with pytest.raises(CheckpointError, match="is a file, and checkpoints here are folders: this is none"):
        Path("text").write_text("hello")
        CheckpointReader("text")


def test_a_bare_state_dict_gives_weights_and_tied_ones_once(tmp_path):
    torch.manual_seed(1)
    net = Net()
    net.register_parameter("also", net.stem.weight)
    torch.save(net.state_dict(), tmp_path / "weights.bin")
    found = LightningFile(tmp_path / "weights.bin")
    assert found.content["aliases"] == {"stem.weight": "also"} and not found.has("model/stem.weight")
    assert found.content["optimizers"] is None and found.dtype("model/also") is torch.float32
    assert torch.equal(found.read("model/also", 3, 9), net.stem.weight.detach().flatten()[3:9])
    other = Net()
    assert load_weights(other, tmp_path / "weights.bin", strict=False).unexpected == {"also": (7, 6)}
    assert torch.equal(other.stem.weight, net.stem.weight)
