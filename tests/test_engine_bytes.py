"""Counted bytes at 25 M parameters: model state per rank and bytes on the wire stay within the ZeRO table."""

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import TinyGPT, token_loss
from shardlight.strategies.engine.dtypes import DtypePolicy
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import MASTERED, PLANS

VOCABULARY, WIDTH, SEQUENCE, LAYERS = 6144, 512, 128, 6
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
MIXED, HALF = DtypePolicy(compute=torch.bfloat16, mixed=True), DtypePolicy(compute=torch.bfloat16)


def batch(seed):
    """Two tokens: the bytes of weights and gradients are the same with any number, and a step of two takes less time."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (1, 2), generator=g), torch.randint(VOCABULARY, (1, 2), generator=g)


def small():
    with torch.device("meta"):
        model = TinyGPT(VOCABULARY, WIDTH, 8, LAYERS, SEQUENCE, tied=False)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.02, 0.02)
    return model


def run(rank, world_size, plan, micro_batches, **options):
    """Two steps; returns the engine, its optimizer and what the second step sent."""
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    engine = Engine(model, plan, dist.group.WORLD, **options)
    engine.take_optimizer(optimizer)
    policy = options.get("dtypes")
    for _ in range(2):
        before = engine.collectives.bytes_sent
        for m in range(micro_batches):
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=policy is MIXED, cache_enabled=False)
            with engine.forward(), autocast:
                loss = token_loss(model, batch(10 * m + rank))
            engine.backward(loss)
        engine.close_window()
        engine.clip(optimizer, 1.0)
        engine.step(optimizer)
    return engine, optimizer, engine.collectives.bytes_sent - before


def measure(rank, world_size, micro_batches):
    out = {}
    for name in STRATEGIES:
        plan = PLANS[name]
        engine, optimizer, sent = run(rank, world_size, plan, micro_batches)
        numel = sum(p.numel() for p in engine.table.parameters)
        out[name] = (
            engine.state_bytes([optimizer]) / plan.state_bytes(numel, world_size),
            sent / (4 * plan.wire_elements(numel, world_size, micro_batches, plan.reduce)),
            [u.name for u in engine.table.units if plan.shard_parameters and u.gathered],
            numel,
        )
    return out


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_state_and_wire_bytes_are_those_of_the_table(world_size):
    for ratios in run_ranks(measure, world_size, micro_batches=2, timeout_s=240):
        for plan, (state, wire, gathered, numel) in ratios.items():
            assert 24e6 < numel < 27e6
            assert state <= 1.02, f"{plan}: model state is {state:.4f} x the formula"
            assert state > 0.98, f"{plan}: {state:.4f} x the formula: something is not counted"
            assert wire <= 1.01, f"{plan}: {wire:.4f} x the wire bytes of the table"
            assert gathered == []


def measure_16_bit(rank, world_size):
    out = {}
    for precision, policy in (("bf16-mixed", MIXED), ("bf16-true", HALF)):
        for name in STRATEGIES:
            plan = PLANS[name]
            if policy is MIXED and not plan.shard_optimizer:
                continue  # fp32, as without autocast
            if world_size == 2 and (name, policy) in (("zero1", HALF), ("zero2", MIXED)):
                continue  # long: on three ranks
            engine, optimizer, sent = run(rank, world_size, plan, 1, dtypes=policy)
            numel = sum(p.numel() for p in engine.table.parameters)
            unit = max(sum(4 * b.layout.numel for b in u.buffers) for u in engine.table.units)
            fp32 = sum(b.layout.used for b in engine.buffers if b.dtype == torch.float32)
            elements = plan.wire_elements(numel, world_size, 1, plan.reduce)
            out[f"{name} {precision}"] = (
                engine.state_bytes([optimizer]),
                plan.state_bytes(numel, world_size, MASTERED),
                unit,
                sent / (2 * elements * (1 + fp32 / numel)),
            )
    return out


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_state_and_wire_bytes_under_16_bit_precision(world_size):
    for rows in run_ranks(measure_16_bit, world_size, timeout_s=240):
        for where, (state, formula, unit, wire) in rows.items():
            assert state <= 1.02 * formula + unit, f"{where}: model state is {state / formula:.4f} x the formula"
            assert state > 0.98 * formula, f"{where}: {state / formula:.4f} x the formula: something is not counted"
            if not where.startswith("ddp"):
                assert wire <= 1.01, f"{where}: {wire:.4f} x the wire bytes of weights and gradients in bf16"
