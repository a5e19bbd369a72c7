"""Faults of other frameworks that tensor parallelism must not have; each test holds a row of the list."""

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from shardlight.strategies.engine.transforms.tensor.plan import tensor_plan
from shardlight.strategies.errors import TensorError
from tensor_parity import check_equal, cut, gradients, tensor_group
from test_tensor_models import WIDTH, Block, Model, double, on_tokens, sequential
from torch import nn


class NormedHeads(nn.Module):
    """Norms of the heads of queries and keys, which every rank uses for heads of its own."""

    def __init__(self):
        super().__init__()
        self.num_heads = 12
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm, self.k_norm = nn.LayerNorm(2), nn.RMSNorm(2)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (12, 2)) for f in (self.q, self.k, self.v))
        q, k, v = (z.transpose(1, 2) for z in (self.q_norm(q), self.k_norm(k), v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def copies(rank, size):
    group = tensor_group()
    for norms in ("whole", "sharded"):
        whole = double(Model, NormedHeads, sequential)
        mine, plan = cut(whole, group, norms=norms)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (mine, whole)]
        for _ in range(5):
            for model, optimizer in zip((mine, whole), optimizers, strict=True):
                optimizer.zero_grad()
                on_tokens(model).backward()
                optimizer.step()
            for (name, p), q in zip(mine.named_parameters(), whole.parameters(), strict=True):
                if name not in plan.cuts:
                    rows = group.collectives.gather_small(p.detach().flatten(), "checksum")
                    assert (rows == rows[0]).all(), name
                    if not name.endswith(
                        ".k.bias"
                    ):  # whose gradient is zero but for rounding, which Adam makes steps of
                        torch.testing.assert_close(p.data, q.data, rtol=0, atol=1e-7, msg=name)


@pytest.mark.case("C049")
def test_whole_parameters_stay_the_same_on_all_ranks():
    run_ranks(copies, 2)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.down(self.up(x))


def biased(rank, size):
    group = tensor_group()
    model = double(Pair)
    with torch.no_grad():
        model.down.weight.zero_()
        model.down.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for norms in ("whole", "sharded"):
        mine, plan = cut(model, group, norms=norms)
        assert plan.layers["down"].how == "row"
        x = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert (mine(x) == torch.tensor([1.0, 2.0, 3.0])).all()
        assert torch.equal(mine.down.bias, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        check_equal(double(Pair), lambda m: m(x).square().sum(), group, norms=norms)
        mine(x).square().sum().backward()
        assert torch.equal(gradients(mine)["down.bias"], 2 * 10 * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


@pytest.mark.case("C050")
def test_the_bias_of_what_is_added_up_is_added_once():
    run_ranks(biased, 2)


class Few(nn.Module):
    """4 heads, 2 of keys."""

    def __init__(self, bias):
        super().__init__()
        self.num_heads, self.head_dim = 4, 6
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 12, bias), nn.Linear(WIDTH, 12, bias)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, 6).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (z[:, :, None].expand(b, 2, 2, t, 6).reshape(b, 4, t, 6) for z in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH))


def few(rank, size):
    group = tensor_group()
    for bias in (True, False):
        plan = check_equal(double(Model, lambda bias=bias: Few(bias), sequential), on_tokens, group)
        assert plan.layers["blocks.0.attention.k_proj"].how == "shared heads"
        assert "blocks.0.attention.k_proj.weight" not in plan.slices(rank), "there is one of it, in checkpoints too"


@pytest.mark.case("C052")
def test_more_ranks_than_heads_of_keys():
    run_ranks(few, 4)
    with pytest.raises(
        TensorError, match=r"4 heads \(2 of keys\), which do not divide by size 3.\nSizes that work: 1, 2, 4"
    ):
        tensor_plan(Block(Few(True), sequential()), 3)


class Many(nn.Module):
    """28 heads, 7 of keys."""

    def __init__(self):
        super().__init__()
        self.num_heads = 28
        self.q, self.k, self.v, self.o = nn.Linear(8, 56), nn.Linear(8, 14), nn.Linear(8, 14), nn.Linear(56, 8)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


def ratio(rank, size):
    group = tensor_group()
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        check_equal(double(Many), lambda m: m(x).square().sum(), group)
        assert check_equal(double(Model, lambda: Few(True), sequential), on_tokens, group).size == 2


@pytest.mark.case("C047")
def test_heads_of_queries_stay_with_their_heads_of_keys():
    run_ranks(ratio, 2)
