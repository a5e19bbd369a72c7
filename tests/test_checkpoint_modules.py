"""A bare module out of a checkpoint, without ranks: hyper-parameters as plain containers, weights, wrong paths."""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf
from shardlight.framework import TrainingModule
from shardlight.strategies import load_module, read_state_dict
from shardlight.strategies.checkpoint.manifest import Manifest
from shardlight.strategies.errors import CheckpointError, StrategyError
from test_cases_training import batches
from test_conformance_lifecycle import data, piece
from test_lightning_fit import make_trainer
from torch import nn

CONF = {"model": {"d": 3}, "sizes": [1, 2], "out": "${model.d}", "home": "${oc.env:SHARDLIGHT_TEST_HOME,none}"}
PLAIN = {"model": {"d": 3}, "sizes": [1, 2], "out": 3, "home": "there"}


class Configured(TrainingModule):
    """Takes an OmegaConf config, whole or among other arguments."""

    def __init__(self, conf, rate: float = 0.1, whole: bool = False):
        super().__init__()
        self.save_hyperparameters(*(["conf"] if not whole else []))
        if whole:
            self.save_hyperparameters(conf)
        torch.manual_seed(2)
        self.first = nn.Linear(conf.model.d, conf.out)
        self.last = nn.Linear(conf.out, len(conf.sizes))
        self.tied = nn.Linear(conf.model.d, conf.out, bias=False)
        self.tied.weight = self.first.weight
        self.rate, self.home = rate, conf.home

    def training_step(self, batch, batch_idx):
        return self.last(self.first(batch) + self.tied(batch)).square().mean()

    test_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.rate)

    def on_before_optimizer_step(self, optimizer):
        return


class Whole(LightningModule):
    """Its hyper-parameters are an OmegaConf config, which Lightning wants to save with its class."""

    def __init__(self, conf):
        super().__init__()
        self.save_hyperparameters(conf)
        self.layer = nn.Linear(conf.model.d, conf.out)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def train(rank, world_size, folder):
    os.environ["SHARDLIGHT_TEST_HOME"] = "there"
    for kind in (Configured, Whole):
        trainer = make_trainer("zero3", world_size, folder)
        module = kind(OmegaConf.create(CONF))
        trainer.fit(module, data(rank))
        trainer.save_checkpoint(f"{folder}/{kind.__name__}")
        with trainer.strategy.gathered():
            weights = {n: t.detach().clone() for n, t in module.state_dict().items()}
        torch.save(weights, f"{folder}/{kind.__name__}-{rank}.pt")
    trainer = make_trainer("zero1", world_size, folder)
    with pytest.raises(
        StrategyError, match=r"the hyper-parameter 'conf.a\[1\]' of Broken cannot be resolved, so no check"
    ):
        trainer.fit(Broken(), data(rank))
    for path, message in (("Configured/manifest.json", f"pass {folder}/Configured"), ("nowhere", "no manifest.json")):
        with pytest.raises(CheckpointError, match=message):
            make_trainer("ddp", world_size, folder).test(
                Configured(OmegaConf.create(CONF)), batches(piece(0, rank)), ckpt_path=f"{folder}/{path}"
            )


class Broken(Whole):
    def __init__(self):
        super().__init__(OmegaConf.create(PLAIN))
        self.save_hyperparameters({"conf": OmegaConf.create({"a": [1, "${nowhere.b}"]})})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(train, 2, init=False, folder=str(folder))
    return folder


def equal(state, path) -> bool:
    want = torch.load(path, weights_only=True)
    return state.keys() == want.keys() and all(torch.equal(state[n], want[n].to(state[n].dtype)) for n in want)


@pytest.mark.case("C020")
@pytest.mark.conformance("D9")
def test_a_state_dict_and_a_module_come_out_of_a_folder_in_one_line(saved):
    state = read_state_dict(saved / "Configured")
    assert equal(state, saved / "Configured-0.pt") and state["tied.weight"] is state["first.weight"]
    assert state["last.bias"].dtype == torch.float64
    module = Configured.load_from_checkpoint(saved / "Configured")
    assert equal(module.state_dict(), saved / "Configured-0.pt") and module.tied.weight is module.first.weight
    assert equal(load_module(Whole, saved / "Whole").state_dict(), saved / "Whole-1.pt")
    for path, message in (
        ("Configured/rank-00000.safetensors", "is a file, .* pass .*Configured"),
        ("no", "no manifest"),
    ):
        for read in (read_state_dict, Configured.load_from_checkpoint):
            with pytest.raises(CheckpointError, match=message):
                read(saved / path)
    file = saved / "Whole" / "rank-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(CheckpointError, match="rank-00000.safetensors is damaged"):
        read_state_dict(saved / "Whole")
    file.write_bytes(whole)


@pytest.mark.case("C077")
@pytest.mark.conformance("D11")
def test_hyper_parameters_are_plain_containers_with_the_values_of_the_run(saved):
    assert "SHARDLIGHT_TEST_HOME" not in os.environ
    stored = Manifest.read(saved / "Configured").content["trainer"]["hyper_parameters"]
    assert stored == {"conf": PLAIN} and json.dumps(stored)
    assert Manifest.read(saved / "Whole").content["trainer"]["hyper_parameters"] == PLAIN
    module = Configured.load_from_checkpoint(saved / "Configured", rate=0.5)
    assert module.hparams == {"conf": PLAIN} and module.home == "there" and module.rate == 0.5
    assert load_module(Whole, saved / "Whole").hparams == PLAIN
    (saved / "arguments.yaml").write_text("conf: {model: {d: 3}, sizes: [4, 5], out: 3, home: file}\nrate: 2.0\n")
    module = Configured.load_from_checkpoint(saved / "Configured", hparams_file=saved / "arguments.yaml", rate=3.0)
    assert (module.home, module.rate) == ("file", 3.0)
    with pytest.raises(RuntimeError, match="size mismatch for last.weight"):
        Configured.load_from_checkpoint(saved / "Configured", conf=OmegaConf.create({**PLAIN, "sizes": [1]}))
    with pytest.raises(CheckpointError, match="give one device"):
        Configured.load_from_checkpoint(saved / "Configured", map_location={"cuda:0": "cpu"})
    assert Configured.load_from_checkpoint(saved / "Configured", map_location="meta").first.weight.is_meta


def test_a_file_of_lightning_gives_a_module_and_imports_nothing_that_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = Configured(OmegaConf.create(PLAIN))
    hparams = {"conf": PLAIN, "_instantiator": "antigravity.geohash", "_class_path": "os.system"}
    file = {"state_dict": module.state_dict(), "hyper_parameters": hparams, "pytorch-lightning_version": "2.6.0"}
    torch.save(file, "a.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = Configured.load_from_checkpoint("a.ckpt")
    assert equal(other.state_dict(), _save(module.state_dict()))
    torch.save({**file, "hyper_parameters": {"conf": OmegaConf.create(CONF)}}, "b.ckpt")
    with pytest.raises(CheckpointError, match=r"b.ckpt is not opened: .*omegaconf.dictconfig.DictConfig"):
        Configured.load_from_checkpoint("b.ckpt")


def _save(state) -> Path:
    torch.save(state, "state.pt")
    return Path("state.pt")
