"""bf16 under every strategy: the numbers of a plain loop under autocast, or of a bf16 model, and of each other."""

import lightning.pytorch as pl
import pytest
import torch
from harness import run_ranks
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from models import TinyGPT, token_batch, token_loss
from shardlight.strategies import DDP, STRATEGIES
from shardlight.strategies.errors import StrategyError
from test_lightning_fit import Batches, make_trainer
from torch.utils.data import DataLoader

STEPS = 4


class TokenModule(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model(torch.float32)

    def training_step(self, batch, batch_idx):
        return token_loss(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_model(dtype):
    torch.manual_seed(0)
    return TinyGPT().to(dtype)


def plain(world, precision):
    """One process on the batches of all ranks."""
    model = make_model(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(world):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = token_loss(model, token_batch(1000 * step + rank, 4, torch.float32)) / world
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().float() for n, p in model.named_parameters()}


def train(rank, world_size, folder, precision):
    want = plain(world_size, precision)
    results = {}
    for name in [s for s in STRATEGIES if s != "single" or world_size == 1]:
        module = TokenModule()
        trainer = make_trainer(name, world_size, folder, precision=precision)
        trainer.fit(module, DataLoader(Batches("tiny_gpt", rank, STEPS), batch_size=None))
        with trainer.strategy.gathered():
            results[name] = {n: p.detach().clone() for n, p in module.model.named_parameters()}
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        assert all(p.dtype == dtype for p in results[name].values())
        assert all(s.dtype == dtype for b in trainer.strategy.engine.buffers for s in b.tensors())
        for n, p in results[name].items():
            # 3 bits of bf16 in fp32 weights that are steps of bf16 gradients; one bf16 step of a bf16 weight.
            torch.testing.assert_close(p.float(), want[n], rtol=2**-7, atol=4e-3, msg=lambda m: f"{name} {n}: {m}")
    first, *others = results.values()
    for other in others:
        assert all(torch.equal(first[n], other[n]) for n in first)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_gives_the_numbers_of_a_plain_loop(world_size, precision, tmp_path):
    run_ranks(train, world_size, init=False, folder=str(tmp_path), precision=precision)


@pytest.mark.parametrize(
    "plugin", [MixedPrecision("16-mixed", "cpu", scaler=object()), HalfPrecision("16-true")], ids=["mixed", "true"]
)
def test_fp16_is_refused(plugin):
    with pytest.raises(
        StrategyError, match=r"trainer.precision='16-(mixed|true)' is not available under ddp: use one of"
    ):
        DDP().precision_plugin = plugin
