"""The order of an epoch: described as plain data, drawn again, and dealt to other ranks and batches."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardlight.strategies.sample_order import Deal, draw, order_of
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler


class Endless(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return itertools.count()


class Pairs:
    """A batch sampler that is nobody's subclass."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter([[i, i + 1] for i in range(0, self.length, 2)])

    def __len__(self):
        return self.length // 2


class ShuffledPairs(Pairs):
    """Draws its order from the process's numbers."""

    def __iter__(self):
        return iter(torch.randperm(self.length).view(-1, 2).tolist())


@given(
    length=st.integers(1, 40), ranks=st.integers(1, 5), size=st.integers(1, 4), shuffle=st.booleans(),
    uneven=st.booleans(), data=st.data(),
)  # fmt: skip
def test_a_deal_goes_on_as_the_sampler_would_have(length, ranks, size, shuffle, uneven, data):
    def sampler(rank):
        made = DistributedSampler(range(length), ranks, rank, shuffle, seed=4, drop_last=uneven)
        made.set_epoch(2)
        return made

    whole = [list(sampler(rank)) for rank in range(ranks)]
    described = order_of(DataLoader(range(length), size, sampler=sampler(0)), ranks, 0)
    had = data.draw(st.integers(0, max(0, len(whole[0]) - 1) // size))
    left = Deal(described, had * size * ranks, ranks, size, drop_uneven=uneven)
    if length >= ranks or not uneven:
        assert [left.indices(rank) for rank in range(ranks)] == [w[had * size :] for w in whole]
        assert left.batches == math.ceil(len(whole[0][had * size :]) / size)
    # Dealt to other ranks in other batches, each sample comes once before any comes again.
    others, other_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    dealt = Deal(described, had * size * ranks, others, other_size)
    shares = [dealt.indices(rank) for rank in range(others)]
    rest = draw(described)[had * size * ranks :].tolist()
    assert [i for turn in zip(*shares, strict=True) for i in turn][: len(rest)] == rest
    assert 0 <= sum(map(len, shares)) - len(rest) < others
    full = Deal(described, had * size * ranks, others, other_size, drop_last=True)
    assert full.batches == max(1, dealt.each // other_size) and full.repeated_to_fill == (dealt.each < other_size)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_random_order_is_drawn_again(replacement, own):
    torch.manual_seed(8)
    generator = torch.Generator().manual_seed(9) if own else None
    sampler = RandomSampler(range(7), replacement, num_samples=40, generator=generator)
    loader = DataLoader(range(7), 3, sampler=sampler)
    described = json.loads(json.dumps(order_of(loader, 1, 0)))
    assert draw(described).tolist() == list(sampler)
    assert order_of(loader, 2, 0) is None


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        DataLoader(Endless(), 2),
        DataLoader(range(8), batch_sampler=Pairs(8)),
        DataLoader(range(8), batch_sampler=BatchSampler(range(8), 2, False), num_workers=0),
        DataLoader(range(8), sampler=[3, 1, 2]),
    ],
)
def test_other_orders_are_not_known(loader):
    assert order_of(loader, 1, 0) is None
