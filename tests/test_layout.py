"""Layouts, plans and partitions: arithmetic that is checked without ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FrozenMix, MultiCall, OddMLP, TinyGPT
from shardlight.ops.sums import CHUNK, abs_max, square_sums, sum_in_rank_order
from shardlight.strategies.engine.layout import ALIGN, FlatLayout
from shardlight.strategies.engine.partition import OWN_UNIT_NUMEL, find_units
from shardlight.strategies.engine.plan import PLANS
from shardlight.strategies.errors import StrategyError
from torch import nn

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(shapes=shapes, world_size=st.integers(1, 9), multiple=st.sampled_from([1, ALIGN, CHUNK]))
def test_layout_covers_every_element_once(shapes, world_size, multiple):
    layout = FlatLayout.pack([(f"p{i}", s) for i, s in enumerate(shapes)], world_size, multiple)
    assert layout.numel == layout.shard_numel * world_size and layout.shard_numel % multiple == 0
    assert layout.used <= layout.numel < layout.used + world_size * multiple or layout.numel == layout.used
    at = 0
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.start >= at and slot.start % ALIGN == 0 and slot.stop - slot.start == math.prod(shape)
        at = slot.stop
    seen = [[0] * math.prod(s) for s in shapes]
    for rank in range(world_size):
        low, _ = layout.shard_range(rank)
        for piece in layout.pieces(rank):
            assert piece.offset >= 0 and piece.offset + piece.stop - piece.start <= layout.shard_numel
            assert layout.slots[piece.slot].start + piece.start == low + piece.offset
            for i in range(piece.start, piece.stop):
                seen[piece.slot][i] += 1
    assert all(n == 1 for counts in seen for n in counts)


@pytest.mark.parametrize(
    "plan,state,wire",
    [("ddp", 16, 2), ("zero1", 8 + 8 / 4, 2), ("zero2", 4 + 12 / 4, 4), ("zero3", 16 / 4, 9), ("single", 16, 2)],
)
def test_plan_is_the_zero_table(plan, state, wire):
    assert PLANS[plan].state_bytes(1000, 4) == pytest.approx(1000 * state)
    assert PLANS[plan].wire_elements(1000, 4, 3, PLANS[plan].reduce) == pytest.approx(1000 * wire * 3 / 4)


def test_wire_of_the_other_reduce_setting():
    assert PLANS["zero2"].wire_elements(1000, 4, 3, "window") == pytest.approx(1000 * 2 * 3 / 4)
    assert PLANS["ddp"].wire_elements(1000, 4, 3, "micro_batch") == pytest.approx(1000 * 4 * 3 / 4)


def names(units):
    return {u.name: [n for n, _ in u.params] for u in units}


def test_blocks_are_units_and_small_modules_share_one():
    units = names(find_units(TinyGPT()))
    assert list(units) == ["rest", "blocks.0", "blocks.1"]
    assert units["rest"] == ["tokens.weight", "positions.weight", "norm.weight", "norm.bias"]
    assert len(units["blocks.0"]) == 12 and units["blocks.0"][0] == "blocks.0.norm1.weight"


def test_large_embedding_and_head_are_units_of_their_own():
    big = OWN_UNIT_NUMEL // 12 + 1
    units = find_units(TinyGPT(vocab=big, tied=False))
    assert [u.name for u in units] == ["tokens", "rest", "blocks.0", "blocks.1", "head"]
    tied = find_units(TinyGPT(vocab=big))
    assert [u.name for u in tied] == ["tokens", "rest", "blocks.0", "blocks.1"]
    assert len(tied[0].roots) == 2 and tied[0].keep


@pytest.mark.parametrize("model", [OddMLP, TinyGPT, FrozenMix, MultiCall])
def test_every_parameter_is_in_one_unit(model):
    model = model()
    found = [p for u in find_units(model) for _, p in u.params]
    assert {id(p) for p in found} == {id(p) for p in model.parameters()} and len(found) == len({id(p) for p in found})


def test_units_by_class_name():
    assert [u.name for u in find_units(TinyGPT(), ["LayerNorm"])][:3] == ["rest", "blocks.0.norm1", "blocks.0.norm2"]
    with pytest.raises(
        StrategyError, match=r"strategy.units: no module is of class \['Blok'\]. The model has \['Block'"
    ):
        find_units(TinyGPT(), ["Blok"])


def test_integers_belong_to_no_unit_and_lazy_modules_are_refused():
    model = OddMLP()
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    assert "codes" not in [n for u in find_units(model) for n, _ in u.params]
    model.lazy = nn.LazyLinear(3)
    with pytest.raises(StrategyError, match="'lazy.weight' of a lazy module has no shape yet"):
        find_units(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_square_sums_do_not_depend_on_the_partition(dtype):
    flat = torch.randn(6 * CHUNK, dtype=torch.float32).to(dtype)
    whole, _ = square_sums(flat)
    parts = torch.cat([square_sums(part)[0] for part in flat.chunk(3)])
    assert whole.dtype == torch.float64 and torch.equal(whole, parts)
    large = torch.randn(601 * CHUNK, dtype=torch.float32).to(dtype)
    for cuts in ([601], [1] * 601, [255, 1, 300, 45], [256, 256, 89]):
        parts = [square_sums(part)[0] for part in large.split([n * CHUNK for n in cuts])]
        assert torch.equal(torch.cat(parts), square_sums(large)[0]), cuts
    assert float(whole.sum()) == pytest.approx(float(flat.to(torch.complex128).abs().square().sum()), rel=1e-12)
    assert square_sums(flat[:0])[0].shape == (0,) and float(abs_max(flat[:0])) == 0


def test_square_sums_leave_their_argument_alone():
    flat = torch.full((CHUNK,), 3.0, dtype=torch.float64)
    assert float(square_sums(flat)[0]) == 9 * CHUNK and float(flat[0]) == 3


def test_sum_in_rank_order_is_left_to_right():
    rows = torch.tensor([[1e8], [1.0], [-1e8]], dtype=torch.float32)
    assert float(sum_in_rank_order(rows, torch.empty(1))) == float((rows[0] + rows[1]) + rows[2])
    half = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert float(sum_in_rank_order(half, torch.empty(1, dtype=torch.bfloat16))) == 258  # 256 if added in bf16
    assert float(abs_max(torch.tensor([1.0, -3.0]))) == 3
