"""Layers and heads keep their names, whatever stage and slice they are on."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from models import TinyGPT, token_batch, token_loss
from shardlight.strategies import MeshStrategy, Pipeline, ZeRO3, load_weights, read_state_dict
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.errors import CheckpointError
from shardlight.strategies.notices import Notice
from test_lightning_fit import make_trainer
from torch.utils.data import DataLoader


class Filled(pl.LightningModule):
    """Every parameter of block n is n, but for norms; a head that is tied to the embedding, whose values differ."""

    def __init__(self):
        super().__init__()
        self.model = TinyGPT(layers=4, heads=4)
        with torch.no_grad():
            for n, block in enumerate(self.model.blocks):
                for parameter in block.parameters():
                    parameter.fill_(n)
            self.model.tokens.weight.copy_(torch.arange(17 * 12).view(17, 12))

    def training_step(self, batch, batch_idx):
        return token_loss(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _numbered(rank, world, folder):
    def fitted(strategy, path=None):
        module, fit = Filled(), make_trainer(strategy, world, folder, precision="32-true", max_epochs=1)
        if path is not None:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(-1.0)
        data = [token_batch(n, 8, torch.float32) for n in range(1 + (path is not None))]
        fit.fit(module, DataLoader(data, batch_size=None), ckpt_path=path)
        return module, fit

    _, fit = fitted(MeshStrategy(pipeline=2, tensor=2))
    fit.save_checkpoint(f"{folder}/saved")
    warnings.filterwarnings("ignore", category=Notice)
    for strategy in (Pipeline(stages=4), ZeRO3(), MeshStrategy(pipeline=1, tensor=4)):
        module, fit = fitted(strategy, f"{folder}/saved")
        fit.save_checkpoint(f"{folder}/again")
        found = read_state_dict(f"{folder}/again")
        for name, value in found.items():
            if ".blocks." in name:
                assert (value == int(name.split(".")[2])).all(), f"{strategy.plan.name}: {name}"
        assert torch.equal(found["model.tokens.weight"], torch.arange(17.0 * 12).view(17, 12))
        assert torch.equal(found["model.head.weight"], found["model.tokens.weight"])


@pytest.mark.case("C086")
def test_layers_keep_their_numbers_from_stages_and_slices_to_any_other(tmp_path):
    run_ranks(_numbered, 4, timeout_s=120, init=False, folder=str(tmp_path))
    whole = Filled()
    load_weights(whole, tmp_path / "saved")
    assert (whole.model.blocks[3].up.weight == 3).all()
    manifest = CheckpointReader(tmp_path / "saved")
    absent = {n: t for n, t in read_state_dict(tmp_path / "saved").items() if n != "model.blocks.2.up.weight"}
    with pytest.raises(CheckpointError, match=r"missing there: 'model.blocks.2.up.weight'"):
        load_weights(whole, absent)
    assert manifest.content["mesh"]["pipeline"] == manifest.content["mesh"]["tensor"] == 2
