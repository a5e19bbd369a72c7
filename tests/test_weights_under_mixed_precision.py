"""Code that reads or writes weights itself under bf16-mixed sees and changes fp32 weights, as under Lightning's ddp."""

import copy

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from shardlight.strategies import STRATEGIES
from shardlight.strategies.engine.dtypes import DtypePolicy
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from test_lightning_fit import make_trainer
from test_precision import weights_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 5))
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean() + self.penalty()

    def penalty(self):
        return 0.0

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)


class Decay(Net):
    """Decay by hand, smaller than a bf16 step."""

    def on_train_batch_end(self, *args):
        if self.trainer.strategy.engine.plan.shard_parameters:
            with self.trainer.strategy.gathered(), torch.no_grad():
                self.decay()
        else:
            self.decay()

    def decay(self):
        for p in self.parameters():
            p.data.mul_(1 - 1e-3)


class InPlace(Net):
    def on_train_batch_start(self, *args):
        if not self.trainer.strategy.engine.plan.shard_parameters:
            with torch.no_grad():
                for p in self.parameters():
                    p.clamp_(-0.2, 0.2)


class Teacher(Net):
    """A moving average by hand, inside the module."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if not self.trainer.strategy.engine.plan.shard_parameters:
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    t.mul_(0.999).add_(s, alpha=0.001)
        with torch.no_grad():
            target = self.teacher(batch)
        return (self.net(batch) - target - 1).square().mean()


class Penalty(Net):
    def __init__(self):
        super().__init__()
        self.start = [p.detach().clone() for p in self.net.parameters()]

    def penalty(self):
        far = sum((p - q).square().sum() for p, q in zip(self.net.parameters(), self.start, strict=True))
        self.seen.append(float(far.detach()))
        return far + 0.05 * sum(p.abs().sum() for p in self.net.parameters())


class Convolved(Penalty):
    """Convolutions keep the weight itself for backward, and the penalty comes after they ran."""

    def __init__(self):
        Net.__init__(self)
        self.net = nn.Sequential(nn.Unflatten(1, (1, 7)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Conv1d(3, 2, 3))
        self.start = [p.detach().clone() for p in self.net.parameters()]


class Inside(Net):
    """A weight that its own block uses in a matrix product and in a norm, and one with autocast switched off."""

    def training_step(self, batch, batch_idx):
        first = self.net[0].weight
        x = F.linear(batch, first / first.norm(dim=1, keepdim=True))
        with torch.autocast("cpu", enabled=False):
            x = self.net[2](x.float())
        return x.square().mean() + self.net(batch).square().mean()


class Reading(Net):
    def on_train_batch_end(self, *args):
        if not self.trainer.strategy.engine.plan.shard_parameters:
            state = self.state_dict()
            assert all(t.dtype == torch.float32 for t in state.values())
            assert all(
                p.dtype == torch.float32 and torch.zeros_like(p).dtype == torch.float32 for p in self.parameters()
            )
            self.seen.append(sum(float(p.detach().norm()) for p in self.parameters()))
            self.seen.append(float(copy.deepcopy(self.net[0].weight).detach().sum()))


class Alone(Net):
    """One rank looks by itself; the others are on their way to the next step."""

    def on_train_batch_end(self, *args):
        if self.trainer.is_global_zero and not self.trainer.strategy.engine.plan.shard_parameters:
            self.seen.append(float(self.net[0].weight.detach().norm()))


def check(rank, world_size, folder, kinds):
    for kind in kinds:
        runs = {}
        for name in ("ddp", "zero1", "zero2", "zero3", "zero3 with small ones whole"):
            if "zero3" in name and kind in (InPlace, Teacher, Reading, Alone):
                continue  # sharded weights are used under `gathered`
            options = {"keep_small": 8} if "whole" in name else {}
            g = torch.Generator().manual_seed(rank)
            data = [torch.randn(4, 7, generator=g) for _ in range(6)]
            module = kind()
            trainer = make_trainer(
                STRATEGIES[name.split()[0]](reduce="window", **options), world_size, folder, precision="bf16-mixed"
            )
            trainer.fit(module, DataLoader(data, batch_size=None))
            trainer.strategy.engine.take_in_changes()  # of the last batch's hooks, as a save does
            runs[name] = weights_of(trainer.strategy.engine) | {"seen": torch.tensor(module.seen)}
            for b in trainer.strategy.engine.buffers:
                assert not (b.wide is not None and b.plan.shard_parameters)
        for name, got in runs.items():
            for n, want in runs["ddp"].items():
                where = f"{kind.__name__} {name} {n}"
                torch.testing.assert_close(got[n], want, rtol=1e-6, atol=1e-7, msg=lambda m: f"{where}: {m}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_are_fp32_for_who_uses_them(world_size, tmp_path):
    kinds = [Decay, InPlace, Teacher, Penalty, Convolved, Inside, Reading, Alone]
    run_ranks(check, world_size, init=False, folder=str(tmp_path), kinds=kinds, timeout_s=150)


def check_written_parts(rank, world_size):
    """A part that is written after a hook looked at the weights (an average swapped in, weights loaded) counts."""
    for plan in ("zero1", "zero2", "zero3"):
        torch.manual_seed(0)
        model = nn.Linear(7, 5)
        group = dist.group.WORLD if world_size > 1 else None
        mixed = DtypePolicy(compute=torch.bfloat16, mixed=True)
        engine = Engine(model, PLANS[plan], group, dtypes=mixed, keep_small=35 if plan == "zero3" else 0)
        with torch.no_grad():
            model.weight.mul_(1 + 2**-12)  # a look, and a write smaller than a bf16 step
            assert any(b.wide is not None for b in engine.buffers)
            for parameter in model.parameters():
                _, part = engine.owned_piece(parameter)
                part.add_(1.0)
        engine.weights_changed()
        assert model.weight.detach().sum() > 0 and any(b.wide is not None for b in engine.buffers)
        with engine.forward(), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert all(b.wide is None for b in engine.buffers), "a look ends with the next use of the model"
            got = model(torch.eye(7))
        torch.manual_seed(0)
        want = nn.Linear(7, 5)
        with torch.no_grad():
            want.weight.mul_(1 + 2**-12)
            for parameter in want.parameters():
                parameter.add_(1.0)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(got, want(torch.eye(7))), plan
        with engine.gathered():
            assert torch.equal(model.weight, want.weight), plan


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_that_are_written_after_a_look_count(world_size):
    run_ranks(check_written_parts, world_size)
