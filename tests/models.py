"""Small models that hold the edge cases, and the plain one-process loop that every strategy is compared with."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from shardlight.strategies.engine import partition
from torch import Tensor, nn

partition.MIN_UNIT_NUMEL = 0  # the models are tiny, and their blocks units all the same


class OddMLP(nn.Module):
    """58 parameters, not divisible by 3 or 4."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x):
        return self.layers(x)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Vocabulary 17, width 12, 4 heads, 2 layers, sequence 10, tied head."""

    def __init__(self, vocab=17, width=12, heads=4, layers=2, sequence=10, tied=True):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, idx):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class FrozenMix(nn.Module):
    """A frozen first block, frozen norms in a trainable block, and an unused layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), nn.Tanh()) for _ in range(3)])
        self.unused = nn.Linear(4, 3)
        self.head = nn.Linear(7, 3)
        self.blocks[0].requires_grad_(False)
        self.blocks[1][0].requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class MultiCall(nn.Module):
    """One block called three times in a forward, a parameter used by the parent, and a 0-dim one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2)])
        self.head = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        for _ in range(3):
            x = x + self.blocks[0](x)
        x = F.linear(x + self.blocks[1](x), self.blocks[0][0].weight.t() @ self.blocks[0][0].weight * 0.1)
        return self.head(x) * self.scale


def regression_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def regression_batch(seed: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 7, generator=g, dtype=dtype), torch.randn(rows, 3, generator=g, dtype=dtype)


def token_batch(seed: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(17, (rows, 10), generator=g), torch.randint(17, (rows, 10), generator=g)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable, Callable]] = {
    "odd_mlp": (OddMLP, regression_loss, regression_batch),
    "tiny_gpt": (TinyGPT, token_loss, token_batch),
    "frozen_mix": (FrozenMix, regression_loss, regression_batch),
    "multi_call": (MultiCall, regression_loss, regression_batch),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().to(dtype)


OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


def windows(steps: int, accumulate: int) -> list[list[int]]:
    """Numbers of the micro-batches of each step; the last window is short when there is accumulation."""
    batches = list(range(steps * accumulate - (1 if accumulate > 1 else 0)))
    return [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]


def reference(
    name: str, world: int, steps: int, accumulate: int, clip: float | None, optimizer: str, dtype=torch.float64
):
    """The plain loop: one process, the joined batch. Returns (losses, norms, weights)."""
    model = make(name, dtype)
    _, loss_of, batch_of = MODELS[name]
    opt = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    losses, norms = [], []
    for window in windows(steps, accumulate):
        total = 0.0
        for m in window:
            for rank in range(world):
                loss = loss_of(model, batch_of(1000 * m + rank, 4, dtype)) / (len(window) * world)
                loss.backward()
                total += loss.item()
        params = [p for p in model.parameters() if p.grad is not None]
        norms.append(torch.nn.utils.clip_grad_norm_(params, clip or float("inf")).item())
        opt.step()
        opt.zero_grad()
        losses.append(total)
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}
