"""Small blocks share a unit: fewer and larger collectives, the same numbers, and released just as early."""

import pytest
from harness import run_ranks
from loops import check_equal, plain, sharded
from shardlight.strategies.engine import partition
from shardlight.strategies.engine.partition import find_units
from torch import nn


class Blocks(nn.Module):
    """Five blocks of 56 parameters, two of another list, of which some may be left out or run twice."""

    def __init__(self, frozen=()):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(7, 7) for _ in range(5))
        self.second = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.order = [0, 1, 2, 3, 4]
        for number in frozen:
            self.first[number].requires_grad_(False)

    def forward(self, x):
        for number in self.order:
            x = x + self.first[number](x).tanh()
        for block in self.second:
            x = block(x)
        return x


def units(numel, model=None):
    before, partition.MIN_UNIT_NUMEL = partition.MIN_UNIT_NUMEL, numel
    try:
        return find_units(model or Blocks())
    finally:
        partition.MIN_UNIT_NUMEL = before


def test_blocks_share_a_unit_until_it_is_large_enough():
    names = {n: [u.name for u in units(n)] for n in (0, 56, 57, 113, 10**6)}
    alone = [*(f"first.{i}" for i in range(5)), "second.0", "second.1"]
    assert names[0] == names[56] == alone
    assert names[57] == ["first.0 to first.1", "first.2 to first.3", "first.4", "second.0 to second.1"]
    assert names[113] == ["first.0 to first.2", "first.3 to first.4", "second.0 to second.1"]
    assert names[10**6] == ["first.0 to first.4", "second.0 to second.1"], "lists stay apart"
    merged = units(113)[0]
    assert len(merged.roots) == 3 and len(merged.params) == 6 and merged.block and not merged.keep
    assert [u.name for u in find_units(Blocks(), ["Linear"])] == alone, "units that were named are as they were named"


def squares(order):
    def losses(model, batch, step, rank):
        model.order = order(step, rank)
        return [model(batch).square().mean()]

    return losses


def merge(rank, world_size):
    out = {}
    orders = {
        "all": lambda step, rank: [0, 1, 2, 3, 4],
        "some": lambda step, rank: [0, 1] if step == 1 and rank == 0 else [0, 3, 4],
        "twice": lambda step, rank: [0, 1, 2, 0, 1, 2, 4],
        "backwards": lambda step, rank: [4, 3, 2, 1, 0],
    }
    for frozen in ((), (0, 2), (0, 1, 2, 3, 4)):
        for name, order in orders.items():

            def make(frozen=frozen):
                return Blocks(frozen)

            want = plain(make, squares(order), world_size, steps=5)
            for plan, numel in (("zero3", 113), ("zero2", 113), ("zero3", 0), ("zero2", 0)):
                if numel or name == "all":
                    partition.MIN_UNIT_NUMEL = numel
                    got = sharded(make, squares(order), plan, rank, world_size, steps=5)
                    check_equal(got, want, f"{name} frozen={frozen} {plan} merged={numel}")
                    out[frozen, name, plan, numel] = got.calls[-1]["all_gather"], got.calls[-1]["reduce_scatter"]
    return out


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3))])
def test_merged_units_give_the_same_numbers_with_fewer_collectives(world_size):
    (out, *_) = run_ranks(merge, world_size, timeout_s=180)
    if world_size > 1:
        # Gathered in forward and in backward, where the last is still there, and the first block alone has no input
        # that asks for a gradient.
        assert out[(), "all", "zero3", 0] == (7 + 5, 7) and out[(), "all", "zero3", 113] == (3 + 2, 3)
        assert out[(), "all", "zero2", 0] == (7, 7) and out[(), "all", "zero2", 113] == (3, 3)
        frozen = (0, 1, 2, 3, 4)
        # Nothing below the second list has a gradient.
        assert out[frozen, "all", "zero3", 0] == (7, 2) and out[frozen, "all", "zero3", 113] == (3, 1)
