"""State on disk gives what state in memory gives, to the last bit."""

import tempfile
from itertools import product

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from loops import optimizer_of, sharded
from models import TinyGPT
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine.dtypes import AS_THEY_ARE, DtypePolicy
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.offload import Offload
from shardlight.strategies.engine.plan import PLANS
from test_checkpoint_cross import SAVED_AFTER, Run, reference
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


def same_bits(rank, world, full):
    with tempfile.TemporaryDirectory() as folder:
        every = [*product(("auto", "torch"), (adamw, optimizer_of))]
        for kernel, make in every if full else (every[0], every[3]):
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


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_state_on_disk_gives_the_same_bits(world, full):
    run_ranks(same_bits, world, full=full, timeout_s=120)


def traffic(rank, world, folder):
    """Bytes by kind, of each step; and of how many parameters."""
    torch.manual_seed(0)
    model = TinyGPT(vocab=64, width=96, layers=3)
    opt = adamw(model)
    engine = Engine(model, PLANS["infinity"], dist.group.WORLD if world > 1 else None, offload=everything_on(folder))
    engine.take_optimizer(opt)
    kinds = {**engine.tiers.traffic, "gathers": engine.tiers.gathers}
    found = []
    for step in range(5):
        before = {kind: (t.read_bytes, t.written_bytes) for kind, t in kinds.items()}
        with engine.forward():
            loss = next_token(model, tokens(step, rank), step, rank)[0]
        engine.backward(loss)
        engine.step(opt)
        found.append(
            {kind: (t.read_bytes - before[kind][0], t.written_bytes - before[kind][1]) for kind, t in kinds.items()}
        )
    return found, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_streams_24_bytes_a_parameter(world, tmp_path):
    ranks = run_ranks(traffic, world, folder=str(tmp_path))
    for step in range(2, 5):
        numel, moved = ranks[0][1], {}
        for found, _ in ranks:
            for kind, (read, written) in found[step].items():
                before = moved.get(kind, (0, 0))
                moved[kind] = before[0] + read, before[1] + written
        assert 4 * numel <= min(moved["parameters"]) and 8 * numel <= min(moved["optimizer"]), moved
        assert sum(moved["parameters"]) + sum(moved["optimizer"]) <= 1.02 * 24 * numel, moved
        # Once written and once read; and a unit's weights for its forward and for its backward.
        assert 4 * numel <= min(moved["gradients"]) and sum(moved["gradients"]) <= 1.02 * 8 * numel, moved
        assert 4 * numel < moved["gathers"][0] <= 1.02 * 8 * numel and moved["gathers"][1] == 0, moved


def everything_on(folder):
    return Offload(parameters="disk", gradients="disk", optimizer="disk", disk=folder, staging_bytes=1 << 16)


def save_crosswise(rank, world, folder):
    for plan in ("zero3", "infinity"):
        run = Run(plan, world, offload=everything_on(f"{folder}/swap") if plan == "infinity" else None)
        for number in range(SAVED_AFTER):
            run.step(number, rank, world)
        run.save(f"{folder}/{plan}-{world}")
        run.assert_equals(CheckpointReader(f"{folder}/{plan}-{world}"), f"saved by {plan} on {world}")
        run.engine.detach()


def load_crosswise(rank, world, folder):
    want = reference()
    for saved, plan in (
        ("infinity-2", "zero3"),
        ("infinity-2", "ddp"),
        ("zero3-2", "infinity"),
        ("infinity-2", "infinity"),
    ):
        run = Run(plan, world, seed=3, offload=everything_on(f"{folder}/swap") if plan == "infinity" else None)
        reader = CheckpointReader(f"{folder}/{saved}")
        assert run.load(reader) == ([], [])
        run.assert_equals(reader, f"{saved} opened by {plan} on {world}")
        run.step(SAVED_AFTER, rank, world)
        with run.engine.gathered():
            for name, value in run.state().items():
                torch.testing.assert_close(value.detach(), want[name], rtol=1e-9, atol=1e-9)
        run.engine.detach()


def test_checkpoints_open_under_other_strategies_and_theirs_here(tmp_path):
    run_ranks(save_crosswise, 2, folder=str(tmp_path))
    for file in (tmp_path / "zero3-2").glob("rank-*"):
        assert file.read_bytes() == (tmp_path / "infinity-2" / file.name).read_bytes()
    for world in (1, 2, 3):
        run_ranks(load_crosswise, world, folder=str(tmp_path))
    assert not list((tmp_path / "swap").iterdir())


def whole(rank, world, folder, precision, plan):
    """Accumulation, clipping, a layer that a step does not use, and 16 bits: what is compared is one list of numbers."""
    dtypes = {
        "32": AS_THEY_ARE,
        "mixed": DtypePolicy(compute=torch.bfloat16, mixed=True),
        "bf16": DtypePolicy(compute=torch.bfloat16),
    }
    found = []
    runs = {
        "zero1": {"optimizer": "disk"},
        "zero2": {"optimizer": "disk", "gradients": "disk"},
        "zero3": dict.fromkeys(("parameters", "gradients", "optimizer"), "disk"),
    }
    for offload in (None, Offload(**runs[plan], disk=folder, staging_bytes=4096)):
        torch.manual_seed(0)
        model = TinyGPT(layers=2)
        if precision == "bf16":
            model = model.to(torch.bfloat16)
        opt = adamw(model)
        engine = Engine(
            model, PLANS[plan], dist.group.WORLD if world > 1 else None, dtypes=dtypes[precision], offload=offload
        )
        engine.take_optimizer(opt)
        numbers = []
        for step in range(3):
            for micro in range(3):
                with engine.forward(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "mixed"):
                    loss = next_token(model, tokens(3 * step + micro, rank), step, rank)[0]
                engine.backward(loss / 3, factor=3.0)
            numbers += [float(engine.clip(opt, 0.5)), engine.window.mean_loss]
            engine.step(opt)
        with engine.gathered():
            numbers += [p.detach().double().sum().item() for p in model.parameters()] + [
                p.detach().double().square().sum().item() for p in model.parameters()
            ]
        engine.detach()
        found.append(numbers)
    assert found[0] == found[1], (precision, plan)


def precisions(rank, world, folder):
    for precision, plan in product(("32", "mixed", "bf16"), ("zero1", "zero2", "zero3")):
        whole(rank, world, folder, precision, plan)


@pytest.mark.case("C080")
def test_accumulation_clipping_and_sixteen_bits_give_the_same_bits(tmp_path):
    run_ranks(precisions, 2, folder=str(tmp_path))
