"""Numeric kernels against plain PyTorch."""

import itertools

import pytest
import torch
from shardlight.ops import bits
from shardlight.ops.sums import scale_and_check, sum_in_rank_order

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8]


@pytest.mark.parametrize("native", [True, False])
def test_same_bits_sees_every_bit_and_no_more(native, monkeypatch):
    if not native:
        monkeypatch.setattr(bits, "_compare", None)
    for dtype, n in itertools.product(DTYPES, (0, 1, 7, 1024, 1031)):
        a = torch.arange(n).to(dtype)
        assert bits.same_bits(a, a.clone()), (dtype, n)
        for at in {0, n // 2, n - 1} & set(range(n)):
            b = a.clone()
            bits.bits(b)[at] ^= 1
            assert not bits.same_bits(a, b), (dtype, n, at)
    nan = torch.tensor([float("nan"), 0.0])
    assert bits.same_bits(nan, nan.clone()) and not bits.same_bits(nan, torch.tensor([float("nan"), -0.0]))
    assert bits.same_bits(torch.arange(10.0)[1:5], torch.arange(1.0, 5.0)) and not bits.same_bits(nan, nan[:1])
    assert bits.same_bits(torch.arange(10.0)[::2], torch.arange(0.0, 10.0, 2.0))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:5])
def test_sums_in_rank_order_are_left_to_right_and_may_end_in_a_part(dtype, add):
    for ranks in (1, 2, 3, 4):
        parts = [torch.randn(33, dtype=torch.float64).to(dtype) for _ in range(ranks)]
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        expected = parts[0].to(wide)
        for part in parts[1:]:
            expected = expected + part.to(wide)
        for own in range(ranks):
            mine = [p.clone() for p in parts]
            total = (mine[own].to(wide) + expected if add else expected).to(dtype)
            assert torch.equal(sum_in_rank_order(mine, mine[own], add), total), (ranks, own)
            assert all(torch.equal(m, p) for i, (m, p) in enumerate(zip(mine, parts, strict=True)) if i != own)
        out = torch.ones(33, dtype=wide)
        assert torch.equal(sum_in_rank_order(parts, out, add), expected + 1 if add else expected)


def test_scaling_finds_what_is_not_finite():
    for dtype, n in itertools.product(DTYPES[:5], (0, 1, 7, (1 << 18) - 1, (1 << 18) + 3)):
        flat = torch.ones(n).to(dtype)
        assert scale_and_check(flat, 0.5) and torch.equal(flat, torch.full((n,), 0.5).to(dtype))
        for bad, at in itertools.product(
            (float("inf"), -float("inf"), float("nan")), {0, n // 2, n - 1} & set(range(n))
        ):
            spoilt = flat.clone()
            spoilt[at] = bad
            assert not scale_and_check(spoilt, 1.0), (dtype, n, bad, at)
