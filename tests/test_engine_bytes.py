"""Counted bytes at 25 M parameters: model state per rank and bytes on the wire stay within the ZeRO table."""

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import TinyGPT, token_loss
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS

VOCABULARY, WIDTH, SEQUENCE, LAYERS = 6144, 512, 128, 6


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (1, 16), generator=g), torch.randint(VOCABULARY, (1, 16), generator=g)


def measure(rank, world_size, micro_batches):
    out = {}
    for plan_name in ("ddp", "zero1", "zero2", "zero3"):
        plan = PLANS[plan_name]
        with torch.device("meta"):
            model = TinyGPT(VOCABULARY, WIDTH, 8, LAYERS, SEQUENCE, tied=False)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.02)
        numel = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        engine = Engine(model, plan, dist.group.WORLD)
        engine.take_optimizer(optimizer)
        for _ in range(2):
            before = engine.collectives.bytes_sent
            for m in range(micro_batches):
                with engine.forward():
                    loss = token_loss(model, batch(10 * m + rank))
                engine.backward(loss)
            engine.close_window()
            engine.clip(optimizer, 1.0)
            engine.step(optimizer)
        sent = engine.collectives.bytes_sent - before
        state = engine.state_bytes([optimizer])
        out[plan_name] = (
            state / plan.state_bytes(numel, world_size),
            sent / (4 * plan.wire_elements(numel, world_size, micro_batches, plan.reduce)),
            [u.name for u in engine.table.units if plan.shard_parameters and u.gathered],
            numel,
        )
        del model, optimizer, engine
    return out


@pytest.mark.parametrize("world_size", [2, 3])
def test_state_and_wire_bytes_are_those_of_the_table(world_size):
    for ratios in run_ranks(measure, world_size, micro_batches=2, timeout_s=240):
        for plan, (state, wire, gathered, numel) in ratios.items():
            assert 24e6 < numel < 27e6
            assert state <= 1.02, f"{plan}: model state is {state:.4f} x the formula"
            assert state > 0.98, f"{plan}: {state:.4f} x the formula: something is not counted"
            assert wire <= 1.01, f"{plan}: {wire:.4f} x the wire bytes of the table"
            assert gathered == []
