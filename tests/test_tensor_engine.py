"""The ZeRO engine over models that are cut over tensor groups."""

from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import run_ranks
from models import TinyGPT, token_batch, token_loss
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.deferred.tensors import deferred_init
from shardlight.strategies.engine.dtypes import DtypePolicy
from shardlight.strategies.engine.engine import Engine
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.engine.transforms.blocks import BlockTransforms
from shardlight.strategies.engine.transforms.tensor.apply import apply
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup
from shardlight.strategies.engine.transforms.tensor.plan import tensor_plan
from tensor_parity import part
from test_tensor_models import Grouped, Model, sequential
from torch import nn

TENSOR, STEPS = 2, 3


def gpt():
    torch.manual_seed(0)
    return TinyGPT(heads=12).double()


def grouped():
    """Every rank has all of the weights of keys and values, and a head that is a function of the embedding's."""
    torch.manual_seed(0)
    return Model(lambda: Grouped(3), sequential).double()


class Queried(TinyGPT):
    """Learned rows go through the layers of an MLP as they are."""

    def __init__(self):
        super().__init__(heads=12)
        self.rows = nn.Parameter(torch.randn(1, 12))
        self.mix = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))

    def forward(self, idx):
        return super().forward(idx) + F.linear(self.mix(self.rows), self.tokens.weight)


def queried():
    torch.manual_seed(0)
    return Queried().double()


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def trained_whole(make, replicas):
    whole = make()
    optimizer = adamw(whole.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for place in range(replicas):
            (token_loss(whole, token_batch(10 * step + place, 4, torch.float64)) / replicas).backward()
        optimizer.step()
    return dict(whole.named_parameters())


def deferred_gpt():
    with deferred_init():
        return gpt()


RUNS = [  # plan, model, norms, recompute
    ("ddp", gpt, "whole", "no"),
    ("zero1", grouped, "whole", "no"),
    ("zero2", gpt, "sharded", "no"),
    ("zero3", queried, "whole", "no"),
    ("zero3", deferred_gpt, "whole", "blocks"),
    ("zero3", grouped, "sharded", "blocks"),
    ("zero3", grouped, "sharded", "blocks_reentrant"),
]


def trained(rank, size):
    """Ranks 0 and 1 are a tensor group, so are 2 and 3; 0 and 2 have the same parts, and see other data."""
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = TensorGroup(Collectives(tensor_groups[rank // TENSOR]))
    expected = {make: trained_whole(make, size // TENSOR) for make in (gpt, grouped, queried)}
    expected[deferred_gpt] = expected[gpt]
    for name, make, norms, recompute in RUNS:
        mine = make()
        plan = tensor_plan(mine, TENSOR, norms=norms)
        apply(mine, plan, group)
        optimizer = adamw(mine.parameters())
        transforms = BlockTransforms(recompute=recompute)
        engine = Engine(mine, PLANS[name], data_groups[rank % TENSOR], transforms=transforms)
        engine.take_optimizer(optimizer)
        for step in range(STEPS):
            with engine.forward():
                loss = token_loss(mine, token_batch(10 * step + rank // TENSOR, 4, torch.float64))
            engine.backward(loss)
            engine.close_window()
            engine.step(optimizer)
        assert not group.gathered
        engine.detach()
        for key, parameter in mine.named_parameters():
            wanted = part(plan, key, expected[make][key].data, group.rank)
            run = f"{name} {make.__name__} {norms} {recompute}: {key}"
            torch.testing.assert_close(parameter.data, wanted, rtol=0, atol=1e-8, msg=run)


def test_weights_are_those_of_one_process_under_every_strategy():
    run_ranks(trained, 4)


class Reused(Model):
    """Uses the weight of a layer that is cut outside of it, too."""

    def __init__(self):
        super().__init__(lambda: Grouped(12), sequential)

    def forward(self, idx):
        return super().forward(idx) + F.linear(self.tokens(idx), self.blocks[0].mlp[0].weight)[..., :17]


def mixed(rank, size):
    """Layers compute with 16-bit copies of their parts; masters are not asked for."""
    group = TensorGroup(Collectives(dist.group.WORLD))
    makes = (lambda: TinyGPT(heads=12), lambda: Model(lambda: Grouped(3), sequential), Reused)
    for make, name in product(makes, ("zero1", "zero3")):
        results = []
        for cut in (False, True):
            torch.manual_seed(0)
            mine = make()
            plan = tensor_plan(mine, size)
            if cut:
                apply(mine, plan, group)
            engine = Engine(mine, PLANS[name], None, dtypes=DtypePolicy(compute=torch.bfloat16, mixed=True))
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
            engine.take_optimizer(optimizer)
            wide = []
            bring = engine.weights.on_copy_use
            engine.weights.on_copy_use = lambda p, bring=bring, wide=wide: (wide.append(p), bring(p))
            with engine.forward(), torch.autocast("cpu", torch.bfloat16):
                loss = token_loss(mine, token_batch(1, 4, torch.float32))
            engine.backward(loss)
            engine.close_window()
            engine.step(optimizer)
            assert not wide
            assert set(group.gathered) <= ({"add"} if make is Reused else set()), group.gathered
            engine.detach()
            results.append({n: p.data for n, p in mine.named_parameters()})
        for key, whole in results[0].items():
            wanted = part(plan, key, whole, rank)
            torch.testing.assert_close(results[1][key].float(), wanted.float(), rtol=0, atol=3e-3, msg=key)


def test_mixed_precision_needs_no_masters_in_layers():
    run_ranks(mixed, 2)
