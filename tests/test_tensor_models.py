"""Models cut over tensor groups give the numbers of whole ones, with no edit to their code."""

import gc
import math
from itertools import product
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from models import MultiCall, TinyGPT, regression_batch, regression_loss, token_batch, token_loss
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup
from shardlight.strategies.engine.transforms.tensor.products import entering
from tensor_parity import check_equal, tensor_group
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCAB = 24, 12, 17


def double(make, *args, **options):
    torch.manual_seed(0)
    return make(*args, **options).double()


def on_tokens(model):
    return token_loss(model, token_batch(1, 3, torch.float64))


class Derived(nn.Module):
    """Takes all its numbers from the shape of its input, and scales by one of them."""

    def __init__(self):
        super().__init__()
        self.n_head = HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(10, 10)).view(1, 1, 10, 10))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(c // self.n_head))
        att = F.softmax(att.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


class Batched(nn.Module):
    """Heads and batch in one dimension; a bias per head, a temperature, and norms of each head."""

    def __init__(self):
        super().__init__()
        self.heads, self.width = HEADS, WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=b) for b in (True, False, True))
        self.norm, self.o = nn.LayerNorm(self.width), nn.Linear(WIDTH, WIDTH)
        self.bias, self.temperature = nn.Parameter(torch.randn(HEADS, 1, 1)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).reshape(b, t, self.heads, self.width).permute(0, 2, 1, 3) for f in (self.q, self.k, self.v))
        q, k, v = (z.reshape(b * self.heads, t, self.width) for z in (self.norm(q), self.norm(k), v))
        scores = torch.bmm(q, k.mT).view(b, self.heads, t, t) / self.temperature + self.bias
        mixed = torch.einsum("bhts,bhsk->bthk", scores.softmax(-1), v.view(b, self.heads, t, self.width))
        return self.o(mixed.flatten(2))


class Rotated(nn.Module):
    """Complex rotary positions, fused projections with the heads of keys shared, repeated by expand."""

    def __init__(self, key_heads=6):
        super().__init__()
        self.n_heads, self.n_kv, self.head_dim = HEADS, key_heads, 2
        self.wqkv, self.wo = nn.Linear(WIDTH, WIDTH + 4 * key_heads, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.wqkv(x).split([WIDTH, 2 * self.n_kv, 2 * self.n_kv], dim=-1)
        q, k, v = (z.view(b, t, -1, self.head_dim) for z in (q, k, v))
        angles = torch.arange(t, dtype=x.dtype)[:, None, None]
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.view_as_complex(z.double().reshape(*z.shape[:-1], -1, 2)) * turn)
            .flatten(3)
            .type_as(x)
            for z in (q, k)
        )
        k = k[:, :, :, None, :].expand(b, t, self.n_kv, self.n_heads // self.n_kv, 2).reshape(b, t, self.n_heads, 2)
        v = torch.repeat_interleave(v, self.n_heads // self.n_kv, dim=2)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


class Grouped(nn.Module):
    """Heads of keys shared inside attention itself, and norms over the whole width of queries."""

    def __init__(self, key_heads):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, 2
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 2 * key_heads), nn.Linear(WIDTH, 2 * key_heads)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        q = self.q_proj(x)
        q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain
        q, k, v = (z.unflatten(-1, (-1, 2)).transpose(-2, -3) for z in (q, self.k_proj(x), self.v_proj(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(-2, -3).flatten(-2))


class Gated(nn.Module):
    """Gate and up in one layer; a width that few sizes divide."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 2 * 25), nn.Linear(25, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, attention, mlp, drop=0.0):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH), mlp
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Model(nn.Module):
    """The head is a function of the embedding's weight."""

    def __init__(self, attention, mlp=Gated, drop=0.0, recompute=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(1, 16, WIDTH))
        self.blocks = nn.ModuleList([Block(attention(), mlp(), drop) for _ in range(2)])
        self.norm, self.recompute = nn.LayerNorm(WIDTH), recompute

    def forward(self, idx):
        x = self.tokens(idx) + self.positions[:, : idx.shape[1]]
        for block in self.blocks:
            x = (
                block(x)
                if self.recompute is False
                else checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            )
        return F.linear(self.norm(x), self.tokens.weight)


def sequential():
    return nn.Sequential(nn.Linear(WIDTH, 36), nn.GELU(), nn.Linear(36, WIDTH))


ATTENTIONS = [
    Derived,
    Batched,
    Rotated,
    lambda: Rotated(1),
    lambda: Grouped(12),
    lambda: Grouped(4),
    lambda: Grouped(3),
]


def shapes_of_attention(rank, size):
    group = tensor_group()
    for norms, tied in product(("whole", "sharded"), (True, False)):
        check_equal(double(TinyGPT, tied=tied, heads=HEADS), on_tokens, group, norms=norms)
    for attention, norms in product(ATTENTIONS, ("whole", "sharded")):
        plan = check_equal(double(Model, attention, sequential), on_tokens, group, norms=norms)
        assert len(plan.layers) >= 2 * 4 + 1
    check_equal(double(Model, Derived, Gated), on_tokens, group)
    for length in (1, 3):  # fewer positions than ranks, or not as many on each
        batch = [x[:, :length] for x in token_batch(1, 3, torch.float64)]
        check_equal(double(Model, Derived), lambda m, batch=batch: token_loss(m, batch), group, norms="sharded")
    # One weight is used as a function too, outside of its layer.
    check_equal(double(MultiCall), lambda m: regression_loss(m, regression_batch(0, 4, torch.float64)), group)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_attention_however_it_is_written(size):
    run_ranks(shapes_of_attention, size)


@pytest.mark.parametrize("backward", [False, True])
def test_what_layers_share_of_an_input_goes_with_it(backward):
    """Of a leaf too: the input of a stage, or of a recomputation."""
    group = TensorGroup(Collectives(None))
    for leaf in (True, False):
        x = torch.randn(3, 4, requires_grad=True)
        x = x if leaf else x * 2
        entered = entering(x, group)
        assert entering(x, group) is entered
        if backward:
            entered.sum().backward()
        gone = ref(entered)
        del x, entered
        gc.collect()
        assert gone() is None
