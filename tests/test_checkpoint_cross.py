"""A checkpoint of any strategy and number of ranks opens under any other: every tensor to the last bit, and training
goes on like one process."""

import os
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from loops import build, group, plans, rows
from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.window import StepResult
from test_checkpoint_faults import save, start, step
from torch import nn

WORLDS = (1, 2, 3, 4)
PLAN_NAMES = ("ddp", "zero1", "zero2", "zero3")
SAVED_AFTER, STEPS = 2, 3


class Everything(nn.Module):
    """Odd sizes, a tied weight, a frozen one, one without elements, one without dims, one that has no gradient yet."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)) for _ in range(2)])
        self.tied, self.frozen, self.head = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.tied.weight = self.blocks[0][0].weight
        self.frozen.requires_grad_(False)
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
        self.late = nn.Parameter(torch.ones(5))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x, late):
        for block in self.blocks:
            x = x + block(x)
        x = self.head(self.tied(self.frozen(x))) * self.scale + self.empty.sum()
        return x.square().mean() + (self.late.square().sum() if late else 0.0)


def optimizer_for(model):
    """Two groups with options of their own, whose parameters are interleaved, and an empty one."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    other = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": other, "lr": 0.02, "betas": (0.8, 0.9)}]
    return torch.optim.AdamW([*groups, {"params": [], "lr": 0.5}], lr=0.01)


BATCHES = [torch.cat([rows(number, rank) for rank in range(3)]) for number in range(STEPS)]
"""(12, 7) each: divides by any number of ranks here."""


def reference():
    model = build(Everything)
    optimizer = optimizer_for(model)
    for number in range(STEPS):
        model(BATCHES[number], number >= SAVED_AFTER).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


class Run:
    """A model under a strategy."""

    def __init__(self, plan, world, seed=0, offload=None):
        self.model = build(Everything)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += seed
        self.optimizer = optimizer_for(self.model)
        self.engine = Engine(self.model, PLANS[plan], group(world), offload=offload)
        self.engine.take_optimizer(self.optimizer)

    def step(self, number, rank, world):
        part = slice(rank * 12 // world, (rank + 1) * 12 // world)
        with self.engine.forward():
            loss = self.model(BATCHES[number][part], number >= SAVED_AFTER)
        self.engine.backward(loss)
        assert self.engine.step(self.optimizer) is StepResult.STEPPED

    def state(self):
        return self.model.state_dict(keep_vars=True)

    def save(self, path):
        content = {"state_dict": self.state(), "optimizer_states": []}
        trainer_state.save(self.engine, [self.optimizer], content, {}, Path(path))

    def load(self, reader):
        trainer_state.verify_together(self.engine, reader, False)
        trainer_state.load_model(self.engine, reader, self.state(), list(self.state()), True)
        return trainer_state.load_optimizers(self.engine, reader, [self.optimizer])

    def assert_equals(self, reader, where):
        """Every tensor of the checkpoint is what is here, and nothing is here that is not there."""
        with self.engine.gathered():
            for name, value in self.state().items():
                there = reader.content["aliases"].get(name, name)
                assert torch.equal(reader.read(f"model/{there}"), value.detach()), f"{where}: {name}"
        local = self.engine.local_parameters
        for number, parameter_group in enumerate(self.optimizer.param_groups):
            options = reader.content["optimizers"][0]["groups"][number]["options"]
            assert parameter_group["lr"] == options["lr"] == (0.01, 0.02, 0.5)[number], where
            assert parameter_group["weight_decay"] == options["weight_decay"] == (0.1, 0.01, 0.01)[number], where
            for parameter in parameter_group["params"]:
                name, span = local.name(parameter), local.span(parameter, self.optimizer)
                there = f"optimizer/0/{name}/exp_avg"
                state = self.optimizer.state.get(parameter)
                if name == "late" or not parameter.numel() or local.of(parameter, self.optimizer) is None:
                    assert not state or not parameter.numel(), f"{where}: {name} has state"
                    assert name != "late" or not reader.has(there), f"{where}: {name} was saved"
                    continue
                assert float(state["step"]) == SAVED_AFTER, f"{where}: {name}"
                if reader.has(there):
                    assert torch.equal(reader.read(there, *span), state["exp_avg"].reshape(-1)), f"{where}: {name}"
                    shape = tuple(parameter.shape)
                    assert reader.shape(there) == shape, f"{where}: {name}"


def save_all(rank, world_size, folder):
    for plan in PLAN_NAMES:
        run = Run(plan, world_size)
        for number in range(SAVED_AFTER):
            run.step(number, rank, world_size)
        path = f"{folder}/{plan}-{world_size}"
        run.save(path)
        run.assert_equals(CheckpointReader(path), f"saved by {plan} on {world_size}")
        run.engine.detach()


def load_all(rank, world_size, folder, every):
    want = reference()
    sources = [(plan, world) for world in WORLDS for plan in PLAN_NAMES]
    for here, plan in enumerate(PLAN_NAMES):
        for there, (saved, world) in enumerate(sources):
            if not every and (here + there + there // 4 + world_size) % 4:
                continue
            where = f"{saved} on {world} opened by {plan} on {world_size}"
            reader = CheckpointReader(f"{folder}/{saved}-{world}")
            run = Run(plan, world_size, seed=3)
            assert run.load(reader) == ([], []), where
            run.assert_equals(reader, where)
            run.step(SAVED_AFTER, rank, world_size)
            with run.engine.gathered():
                for name, value in run.state().items():
                    torch.testing.assert_close(
                        value.detach(), want[name], rtol=1e-9, atol=1e-9, msg=lambda m: f"{where}: {name}: {m}"
                    )
            run.engine.detach()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cross")
    for world in WORLDS:
        run_ranks(save_all, world, folder=str(folder))
    assert len(list(folder.iterdir())) == 16 and len(plans(2)) >= len(PLAN_NAMES)
    return str(folder)


@pytest.mark.case("C001")
@pytest.mark.case("C061")
@pytest.mark.conformance("D7")
@pytest.mark.conformance("D8")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_opens_under_every_strategy_and_number_of_ranks(world, every, checkpoints):
    run_ranks(load_all, world, folder=checkpoints, every=every, timeout_s=200 if every else 90)


def save_large(rank, world_size, folder):
    model, optimizer, engine = start(world_size, "zero3", 1500)
    step(model, optimizer, engine, 1)
    save(model, optimizer, engine, f"{folder}/zero3", 1)


def shares(rank, world_size, folder):
    for plan in PLAN_NAMES:
        model, optimizer, engine = start(world_size, plan)
        step(model, optimizer, engine, 1)
        save(model, optimizer, engine, f"{folder}/{plan}", 1)
        engine.detach()


def test_ranks_write_equal_shares_also_of_what_they_all_have(tmp_path):
    run_ranks(shares, 3, folder=str(tmp_path))
    for plan in PLAN_NAMES:
        sizes = [f.nbytes for f in CheckpointReader(tmp_path / plan).files]
        assert max(sizes) < 1.2 * min(sizes), (plan, sizes)
        assert sum(sizes) < 12.2 * sum(p.numel() for p in start(1)[0].parameters()), "each element once"


def bytes_read(rank, world_size, folder):
    model, optimizer, engine = start(world_size, "zero3", 1500)
    path, state = f"{folder}/zero3", model.state_dict(keep_vars=True)
    total, read = sum(f.nbytes for f in CheckpointReader(path).files), [0]
    preadv = os.preadv

    def counted(file, buffers, at):
        got = preadv(file, buffers, at)
        read[0] += got
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        reader = CheckpointReader(path)
        trainer_state.verify_together(engine, reader, False)
        verified, read[0] = read[0], 0
        trainer_state.load_model(engine, reader, state, list(state), True)
        trainer_state.load_optimizers(engine, reader, [optimizer])
    return total, verified, read[0]


def test_each_rank_reads_its_own_part_and_hardly_more(tmp_path):
    """Whole chunks are read, at both ends of a range: of three kinds of state."""
    run_ranks(save_large, 2, folder=str(tmp_path))
    found = run_ranks(bytes_read, 3, folder=str(tmp_path))
    total = found[0][0]
    assert sum(verified for _, verified, _ in found) == total > 24 << 20
    assert total < sum(read for _, _, read in found) < 1.15 * total
    assert max(read for _, _, read in found) < 1.25 * total / 3
