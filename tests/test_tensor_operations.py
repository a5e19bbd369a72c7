"""Operations on tensors that are divided give what they give on whole ones, with the gradients of all operands."""

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from shardlight.strategies.engine.transforms.tensor.apply import apply  # fills the table
from shardlight.strategies.engine.transforms.tensor.exchange import part_of
from shardlight.strategies.engine.transforms.tensor.sharded import Sharded, full, sharded
from shardlight.strategies.engine.transforms.tensor.split import Split, reshaped
from shardlight.strategies.errors import StrategyError
from tensor_parity import tensor_group

assert apply

# --- how dimensions are divided


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4))
def test_even_parts_are_all_of_it_once(units, ranks, unit):
    split = Split.even(units * unit, ranks, unit)
    assert split.once and split.in_order
    assert [n for r in range(ranks) for n in split.places(r)] == list(range(units * unit))
    assert max(split.counts) - min(split.counts) <= unit
    assert all(count % unit == 0 for count in split.counts)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_reshaped_division_has_the_same_elements(data):
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    ranks = data.draw(st.integers(1, 3))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, shape[dim])] * 2))) for _ in range(ranks)]
    split = Split(shape[dim], tuple(((a, b),) if a < b else () for a, b in bounds))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    sizes = list(whole.flatten().tolist())
    out = []
    left = len(sizes)
    while left > 1:
        out.append(data.draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= out[-1]
        if len(out) > 4:
            out.append(left)
            left = 1
    found = reshaped(shape, dim, split, tuple(out))
    if found is None:
        return
    axis, after = found
    for rank in range(ranks):
        before = whole.index_select(dim, torch.tensor(split.places(rank), dtype=torch.int64)).flatten()
        got = whole.view(out).index_select(axis, torch.tensor(after.places(rank), dtype=torch.int64)).flatten()
        assert before.tolist() == got.tolist()


def test_cover_takes_each_entry_from_the_first_that_has_it():
    split = Split(7, (((0, 4),), ((3, 7),)))
    assert split.cover == ((0, 4, 0, 0), (4, 7, 1, 1)) and not split.once
    assert split.piece(2, 5).ranges == (((0, 2),), ((1, 3),))
    assert split.within(1, 2, 5) == (0, 2)


# --- operations


def operand(shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


W, V, B6 = operand((5, 4), 1), operand((6, 4), 2), operand((6,), 3)
CASES = {  # name: (shape, divided dim, function, whether it needs no gather; None: that depends on the size)
    "add": ((3, 6), 1, lambda x, w: x + w.sum(), True),
    "broadcast": ((3, 6, 2), 1, lambda x, w: x * B6[:, None] + w[0, 0], True),
    "outer": ((3, 6), 0, lambda x, w: x * B6, True),
    "where": ((3, 6), 1, lambda x, w: torch.where(x > 0, x, B6), True),
    "two": ((3, 6), 1, lambda x, w: x * x.exp() / (1 + x.square()), True),
    "other dims": ((6, 6), 0, lambda x, w: x + x.t(), False),
    "softmax": ((3, 6, 4), 1, lambda x, w: x.softmax(-1), True),
    "argmax across": ((3, 6, 4), 1, lambda x, w: x.round().argmax(1) + x.argmax(dim=1, keepdim=True) + x.sum(1), True),
    "softmax across": ((3, 6, 4), 1, lambda x, w: x.softmax(1), False),
    "sum": ((3, 6, 4), 1, lambda x, w: x.sum((0, 1)), True),
    "mean": ((3, 6, 4), 1, lambda x, w: x.mean(dim=1, keepdim=True) * x, True),
    "sum of all": ((3, 6, 4), 1, lambda x, w: x.sum() * x.mean(), True),
    "topk": ((3, 6, 4), 1, lambda x, w: x.topk(2, -1).values, True),
    "sort": ((3, 6, 4), 0, lambda x, w: x.sort(dim=1)[0], True),
    "layer norm": ((3, 6, 4), 1, lambda x, w: F.layer_norm(x, (4,), w[0], w[1]), True),
    "layer norm across": ((3, 6, 4), 2, lambda x, w: F.layer_norm(x, (4,), w[0], w[1]), False),
    "linear": ((3, 6, 4), 1, lambda x, w: F.linear(x, w), True),
    "linear across": ((3, 6, 4), 2, lambda x, w: F.linear(x, w), False),
    "matmul rows": ((3, 6, 4), 1, lambda x, w: x @ w.t(), True),
    "matmul columns": ((4, 6), 1, lambda x, w: w @ x, True),
    "matmul contracted": ((3, 4), 1, lambda x, w: x @ w.t(), True),
    "matmul contracted second": ((4, 6), 0, lambda x, w: w @ x, True),
    "batched": ((6, 3, 4), 0, lambda x, w: torch.bmm(x, x.mT), True),
    "einsum": ((3, 6, 4), 1, lambda x, w: torch.einsum("abc,dc->abd", x, w), True),
    "einsum contracted": ((3, 6, 4), 1, lambda x, w: torch.einsum("abc,bc->ac", x, V), True),
    "attention": (
        (2, 6, 3, 4),
        1,
        lambda x, w: F.scaled_dot_product_attention(x, x * 2, x + w[0], is_causal=True),
        True,
    ),
    "attention of whole keys": (
        (2, 6, 3, 4),
        1,
        lambda x, w: F.scaled_dot_product_attention(
            x, w[:1, None].expand(2, 6, 3, 4) * 1, V[None, :, None].expand(2, 6, 3, 4)
        ),
        True,
    ),
    "attention of positions": ((2, 2, 6, 4), 2, lambda x, w: F.scaled_dot_product_attention(x, x, x), False),
    "view": ((3, 12), 1, lambda x, w: x.view(3, 6, 2).transpose(0, 1).reshape(6, -1), True),
    "view in the middle": ((3, 6, 2), 1, lambda x, w: x.view(3, 12).view(3, 2, 3, 2), None),
    "flatten": ((3, 6, 2), 1, lambda x, w: x.flatten(1).unflatten(1, (6, -1)).flatten(0, 1), True),
    "rows": ((3, 6, 2), 1, lambda x, w: x.reshape(-1, 2) @ w[:2, :2], True),
    "permute": ((3, 6, 2), 1, lambda x, w: x.permute(2, 1, 0).movedim(0, -1).unsqueeze(0).squeeze(), True),
    "split": ((3, 6, 4), 1, lambda x, w: x.split([1, 3], 2)[1] * x.split((1, 3), dim=2)[0], True),
    "split across": ((3, 6), 1, lambda x, w: x.chunk(2, 1)[1] * 2, True),
    "unbind": ((3, 6, 2), 1, lambda x, w: x.unbind(2)[1] + x.unbind(0)[0][:, 1], True),
    "iterated": ((3, 6, 2), 1, lambda x, w: sum(row for row in x), True),
    "index": ((3, 6, 4), 1, lambda x, w: x[1:, ..., 2][:, None], True),
    "index across": ((3, 6, 4), 1, lambda x, w: x[:, 2], False),
    "slice across": ((3, 6, 4), 1, lambda x, w: x[:, 1:5] ** 2, True),
    "step across": ((3, 6, 4), 1, lambda x, w: x[:, ::2], False),
    "negative slices": ((3, 6, 4), 1, lambda x, w: x[..., -3:-1, :] + x[..., 1:3, :], False),
    "mask": ((3, 4, 6), 2, lambda x, w: x[torch.tensor([[True, False, True, True]] * 3)], True),
    "rows by number": ((3, 4, 6), 2, lambda x, w: x[torch.tensor([2, 0, 0])], True),
    "places by number": ((3, 4, 6), 2, lambda x, w: x[torch.tensor([2, 0]), torch.tensor([1, 3])], True),
    "cat": ((3, 6, 4), 1, lambda x, w: torch.cat((x, -x, V.expand(3, 6, 4)), -1), True),
    "cat across": ((3, 6, 4), 1, lambda x, w: torch.cat((x, x), 1), False),
    "stack": ((3, 6), 1, lambda x, w: torch.stack((x, -x), -1).flatten(1), True),
    "repeat": ((3, 6), 1, lambda x, w: x.repeat(2, 3), True),
    "repeat each": ((3, 6), 1, lambda x, w: x.repeat_interleave(2, dim=1), True),
    "expand": ((3, 6, 1), 1, lambda x, w: x.expand(2, -1, -1, 4) + x.expand(3, 6, 4), True),
    "complex": ((3, 6, 2), 1, lambda x, w: torch.view_as_real(torch.view_as_complex(x) * 1j), True),
    "cumsum across": ((3, 6), 1, lambda x, w: x.cumsum(1), False),
    "norm": ((3, 6, 4), 1, lambda x, w: x.norm(2, -1) + x.norm(dim=-1, p=2), True),
    "cross entropy of rows": ((6, 4), 0, lambda x, w: F.cross_entropy(x, torch.tensor([0, 1, 2, 3, 0, 1])), False),
    "roll": ((3, 6), 1, lambda x, w: x.roll(1, 1), False),
    "gather": ((3, 6), 1, lambda x, w: x.gather(1, torch.tensor([[5, 0]] * 3)), False),
    "masked": ((3, 6), 1, lambda x, w: x.masked_fill(torch.eye(6).bool()[:3], 0.0).tril(), False),
    "types": ((3, 6), 1, lambda x, w: x.float().type_as(x).to(w).clone().contiguous(), True),
    "glu": ((3, 6, 4), 1, lambda x, w: F.glu(x), True),
}


def run_case(name, x, w):
    out = CASES[name][2](x, w)
    whole = full(out) if isinstance(out, Sharded) else out
    (whole * torch.linspace(0, 1, whole.numel(), dtype=whole.dtype).view(whole.shape)).sum().backward()
    return whole.detach()


def operations(rank, size):
    group = tensor_group()
    faults = []
    for name, (shape, dim, _, local) in CASES.items():
        split = Split.even(shape[dim], size)
        results = []
        for divided in (False, True):
            x = operand(shape)
            for p in (W, V, B6):
                p.grad = None
            group.gathered.clear()
            try:
                y = sharded(part_of(x, dim, split, group), dim, split, group) if divided else x
                out = run_case(name, y, W)
            except Exception as error:
                out = torch.full((), torch.nan)
                faults.append((name, divided, error))
            results.append([torch.zeros(()) if t is None else t for t in (out, x.grad, W.grad, V.grad, B6.grad)])
        for expected, got in zip(*results, strict=True):
            if expected.shape != got.shape or not torch.allclose(got, expected, rtol=1e-9, atol=1e-10):
                faults.append((name, expected, got))
        if local not in (None, not group.gathered):
            faults.append((name, dict(group.gathered)))
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.parametrize("size", [2, 3])
def test_operations(size):
    run_ranks(operations, size)


def writing(rank, size):
    group = tensor_group()
    split = Split.even(6, size)
    x = sharded(part_of(operand((3, 6)).detach(), 1, split, group), 1, split, group)
    with pytest.raises(StrategyError, match="out of its sight"), torch._C.DisableTorchFunctionSubclass():
        x.add_(1)
    with torch._C.DisableTorchFunctionSubclass():
        torch.testing.assert_close(x + 1, operand((3, 6)).detach() + 1)
    assert "Sharded(shape=(3, 6)" in repr(x) == f"{x}"
    assert [float(v) for v in x[0]] == operand((3, 6))[0].tolist()
    assert x.shape == (3, 6) and len(x) == 3 and x.numel() == 18 and x.dtype == torch.float64


def test_what_the_table_does_not_see_is_gathered_or_refused():
    run_ranks(writing, 2)
