"""Optimizer state is matched by the names of parameters: what is new starts anew, what is lost is an error."""

from pathlib import Path

import pytest
import torch
from harness import run_ranks
from loops import build, group, rows
from shardlight.strategies.checkpoint import trainer_state
from shardlight.strategies.checkpoint.reader import CheckpointReader
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import CheckpointError
from test_checkpoint_cross import PLAN_NAMES
from test_checkpoint_format import edit
from torch import nn


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(7, 7) for _ in range(3))

    def forward(self, x, use_b):
        return (self.a(x) + self.c(x) + (self.b(x) if use_b else 0)).square().mean()


def start(plan, world, frozen=(), groups=None, kind=torch.optim.AdamW):
    model = build(Heads)
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    groups = groups or [["a", "b", "c"]]
    made = [
        {"params": [p for n in names for p in getattr(model, n).parameters() if p.requires_grad], "lr": 0.1 / (1 + i)}
        for i, names in enumerate(groups)
    ]
    optimizer = kind(made)
    engine = Engine(model, PLANS[plan], group(world))
    engine.take_optimizer(optimizer)
    return model, optimizer, engine


def step(model, optimizer, engine, rank, use_b):
    with engine.forward():
        loss = model(rows(0, rank), use_b)
    engine.backward(loss)
    engine.step(optimizer)


def steps_of(engine, optimizer):
    """How many steps each parameter's state has seen, over all ranks."""
    mine = {engine.local_parameters.name(p): int(s["step"]) for p, s in optimizer.state.items() if "step" in s}
    return {k: v for part in engine.collectives.gather_objects(mine, "steps") for k, v in part.items()}


def matched_by_name(rank, world_size, folder):
    for plan in PLAN_NAMES:
        model, optimizer, engine = start(plan, world_size, frozen=["c"])
        step(model, optimizer, engine, rank, False)
        path = f"{folder}/{plan}"
        content = {"state_dict": model.state_dict(keep_vars=True), "optimizer_states": []}
        trainer_state.save(engine, [optimizer], content, {}, Path(path))
        engine.detach()
        # C is trained now, B has its first gradient: both start anew, A goes on.
        model, optimizer, engine = start(plan, world_size)
        fresh, unused = trainer_state.load_optimizers(engine, CheckpointReader(path), [optimizer])
        assert (sorted(fresh), unused) == (["c.bias", "c.weight"], [])
        assert steps_of(engine, optimizer) == {"a.weight": 1, "a.bias": 1}
        step(model, optimizer, engine, rank, True)
        want = {f"{n}.{k}": s for n, s in (("a", 2), ("b", 1), ("c", 1)) for k in ("weight", "bias")}
        assert steps_of(engine, optimizer) == want, plan
        engine.detach()
        # A is frozen now: what was known of it is not used, and said.
        model, optimizer, engine = start(plan, world_size, frozen=["a"])
        _, unused = trainer_state.load_optimizers(engine, CheckpointReader(path), [optimizer])
        assert sorted(unused) == ["a.bias", "a.weight"] and not steps_of(engine, optimizer)
        engine.detach()
        # Other groups: options come with the parameters' names, and parts of two saved groups are no one group.
        model, optimizer, engine = start(plan, world_size, groups=[["c"], ["b", "a"]])
        trainer_state.load_optimizers(engine, CheckpointReader(path), [optimizer])
        assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.1], "the group of A and B has their options again"
        engine.detach()
        # Another optimizer; several of them.
        model, optimizer, engine = start(plan, world_size, kind=torch.optim.SGD)
        with pytest.raises(CheckpointError, match=r"optimizer 0 is AdamW there and SGD here.*init_from"):
            trainer_state.load_optimizers(engine, CheckpointReader(path), [optimizer])
        engine.detach()
        if rank == 0 and plan == "zero3":
            edit(Path(path), lambda c: c["tensors"].pop("optimizer/0/a.weight/exp_avg_sq"))
        model, optimizer, engine = start(plan, world_size)
        engine.agreement.meet("edited")
        if plan == "zero3":
            with pytest.raises(
                CheckpointError, match=r"of 'a.weight' the optimizer's exp_avg_sq is missing. Pass --skip a"
            ):
                trainer_state.load_optimizers(engine, CheckpointReader(path), [optimizer])
            assert not steps_of(engine, optimizer), "nothing is changed"
            trainer_state.load_optimizers(engine, CheckpointReader(path), [optimizer], skip=["a.weight"])
            assert steps_of(engine, optimizer) == {"a.bias": 1}
        engine.detach()


@pytest.mark.case("C062")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_state_is_matched_by_name(world, tmp_path):
    run_ranks(matched_by_name, world, folder=str(tmp_path))


def two_groups(rank, world_size, folder):
    model, optimizer, engine = start("zero2", world_size, groups=[["a"], ["b", "c"]])
    content = {"state_dict": model.state_dict(keep_vars=True), "optimizer_states": []}
    trainer_state.save(engine, [optimizer], content, {}, Path(f"{folder}/c"))
    engine.detach()
    model, optimizer, engine = start("zero2", world_size)
    with pytest.raises(CheckpointError, match=r"group 0 of optimizer 0 holds parameters of groups \[0, 1\] there"):
        trainer_state.load_optimizers(engine, CheckpointReader(f"{folder}/c"), [optimizer])
    assert [g["lr"] for g in optimizer.param_groups] == [0.1], "nothing is changed"
    engine.detach()
    _, optimizer, engine = start("zero2", world_size, groups=[["a"], ["b", "c"]])
    with pytest.raises(CheckpointError, match=r"has no state of optimizer 1: it was saved by a run with fewer"):
        trainer_state.load_optimizers(engine, CheckpointReader(f"{folder}/c"), [optimizer, optimizer])


def test_groups_with_options_of_their_own_are_not_mixed(tmp_path):
    run_ranks(two_groups, 2, folder=str(tmp_path))


def of_two(rank, world_size, folder):
    model = build(Heads)
    two = [
        torch.optim.AdamW(model.a.parameters()),
        torch.optim.SGD([*model.b.parameters(), *model.c.parameters()], 0.1),
    ]
    engine = Engine(model, PLANS["zero2"], group(world_size))
    for optimizer in two:
        engine.take_optimizer(optimizer)
    content = {"state_dict": model.state_dict(keep_vars=True), "optimizer_states": []}
    trainer_state.save(engine, two, content, {}, Path(f"{folder}/two"))
    engine.detach()
    model, optimizer, engine = start("zero2", world_size)
    with pytest.raises(CheckpointError, match=r"2 optimizers were saved \(AdamW, SGD\), and there are 1 here"):
        trainer_state.load_optimizers(engine, CheckpointReader(f"{folder}/two"), [optimizer])


def test_fewer_optimizers_than_were_saved_are_an_error(tmp_path):
    run_ranks(of_two, 1, folder=str(tmp_path))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(2.0)), nn.Linear(7, 3)

    def forward(self, x):
        return (self.layer(x) * self.scale).square().mean()


def of_one_number(rank, world_size, folder):
    found = []
    for plan in PLAN_NAMES:
        model = build(Scaled)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = Engine(model, PLANS[plan], group(world_size))
        engine.take_optimizer(optimizer)
        with engine.forward():
            loss = model(rows(0, rank))
        engine.backward(loss)
        engine.step(optimizer)
        content = {"state_dict": model.state_dict(keep_vars=True), "optimizer_states": []}
        trainer_state.save(engine, [optimizer], content, {}, Path(f"{folder}/{plan}"))
        found.append(CheckpointReader(f"{folder}/{plan}").content["optimizers"][0]["states"]["scale"])
        assert trainer_state.load_optimizers(engine, CheckpointReader(f"{folder}/{plan}"), [optimizer]) == ([], [])
        engine.detach()
    assert all(one == found[0] for one in found), found
    assert sorted(found[0]["scalars"]) == ["exp_avg", "exp_avg_sq", "step"] and not found[0]["tensors"]


def test_the_moments_of_one_number_are_stored_alike_under_every_strategy(tmp_path):
    run_ranks(of_one_number, 2, folder=str(tmp_path))
