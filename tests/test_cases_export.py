"""Empty, 0-dim, complex, integer and mixed dtype values through a step, a checkpoint and the export."""

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from loops import build
from safetensors.torch import load_file
from shardlight.strategies.checkpoint.export import export_safetensors
from shardlight.strategies.errors import StrategyError
from test_cases_lightning import Evaluated
from test_cases_numbers import Exotic, Mixed, Sizes
from test_cases_training import batches, strategies
from test_lightning_fit import make_trainer
from torch.utils.data import DataLoader, TensorDataset


class Everything(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.sizes, self.mixed = build(lambda: Sizes(True), None), build(Mixed, None)
        self.exotic = build(Exotic, None)

    def training_step(self, batch, batch_idx):
        x = torch.linspace(-1, 1, 14).view(2, 7)
        return self.sizes() + self.exotic() + self.mixed(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1, momentum=0.9)


def check_export(rank, world_size, folder):
    want = {n: (tuple(t.shape), t.dtype) for n, t in Everything().state_dict().items()}
    for strategy in strategies(world_size):
        module, path = Everything(), f"{folder}/{strategy}"
        trainer = make_trainer(strategy, world_size, folder, precision="32-true")
        trainer.fit(module, batches(*[torch.ones(1)] * 2))
        trainer.save_checkpoint(path)
        with trainer.strategy.gathered():
            values = {n: t.detach().clone() for n, t in module.state_dict().items()}
        resumed = Everything()
        again = make_trainer(strategy, world_size, folder, precision="32-true", max_epochs=2)
        again.fit(resumed, batches(*[torch.ones(1)] * 2), ckpt_path=path)
        assert again.global_step == 4
        assert {n: tuple(t.shape) for n, t in resumed.state_dict(keep_vars=True).items()} == {
            n: shape for n, (shape, _) in want.items()
        }
        if rank == 0:
            export_safetensors(path, f"{path}.safetensors")
            saved = load_file(f"{path}.safetensors")
            assert {n: (tuple(t.shape), t.dtype) for n, t in saved.items()} == want, strategy
            for name, value in values.items():
                assert torch.equal(saved[name], value), (strategy, name)
            assert saved["exotic.table"].tolist() == [3, -7] and saved["exotic.mask"].tolist() == [True, False, True]


@pytest.mark.case("C034")
@pytest.mark.case("C088")
@pytest.mark.case("C089")
@pytest.mark.parametrize("world_size", [1, 2])
def test_shapes_and_dtypes_survive_checkpoint_and_export(world_size, tmp_path):
    run_ranks(check_export, world_size, init=False, folder=str(tmp_path))


def check_too_few(rank, world_size, folder):
    loader = DataLoader(TensorDataset(torch.zeros(1, dtype=torch.float64)))
    trainer = make_trainer("zero2", world_size, folder, use_distributed_sampler=True)
    with pytest.raises(StrategyError, match=r"the test set has 1 samples for 2 ranks"):
        trainer.test(Evaluated(), loader, verbose=False)


@pytest.mark.case("C022")
def test_fewer_samples_than_ranks_is_refused(tmp_path):
    run_ranks(check_too_few, 2, init=False, folder=str(tmp_path), timeout_s=30)
