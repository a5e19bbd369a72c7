"""State on disk gives what state in memory gives, to the last bit."""

import tempfile
from itertools import product

import pytest
import torch
from harness import run_ranks
from loops import optimizer_of, sharded
from models import OddMLP, TinyGPT
from shardlight.strategies.engine.tiers import Offload
from torch import nn

TIERS = ("device", "disk")


def mean_losses(model, batch, step, rank):
    return [model(batch).square().mean()]


def tokens(step, rank):
    return torch.randint(0, 17, (2, 10), generator=torch.Generator().manual_seed(100 * step + rank))


def next_token(model, batch, step, rank):
    return [nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())]


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)


def same_bits(rank, world):
    with tempfile.TemporaryDirectory() as folder:
        for kernel, make in product(("auto", "torch"), (adamw, optimizer_of)):
            settings = {"dtype": torch.float32, "optimizer": make, "batch": tokens, "optimizer_kernel": kernel}
            want = sharded(TinyGPT, next_token, "zero3", rank, world, **settings)
            for parameters, gradients, optimizer in product(TIERS, TIERS, TIERS):
                offload = Offload(
                    parameters=parameters, gradients=gradients, optimizer=optimizer, disk=folder, staging_bytes=4096
                )
                got = sharded(TinyGPT, next_token, "zero3", rank, world, **settings, offload=offload)
                where = (kernel, make.__name__, parameters, gradients, optimizer)
                assert got.losses == want.losses and got.norms == want.norms, where
                for name, weight in want.weights.items():
                    assert torch.equal(got.weights[name], weight), (where, name)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_state_on_disk_gives_the_same_bits(world):
    run_ranks(same_bits, world)
