"""The benchmark's model and data, fixed. Shapes: B rows, T tokens each, D width, V vocabulary."""

import torch
import torch._dynamo  # torch.optim imports it on first use; as an import it is no memory of a contender's
import torch.nn.functional as F
from shardlight.framework.bench.sizes import Size
from torch import Tensor, nn

LEARNING_RATE = 3e-4


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns (B, T, D)."""
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(self.norm1(x_BTD)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class GPT(nn.Module):
    """Learned positions, no dropout, a head of its own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList([Block(size.width, size.heads) for _ in range(size.blocks)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Returns logits, (B, T, V)."""
        x_BTD = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def fixed_gpt(size: Size) -> GPT:
    """Returns the model with the same weights each time: matrices N(0, 0.02), biases 0, norms 1."""
    with torch.device("meta"):
        model = GPT(size)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(number))
            else:
                parameter.fill_(float("norm" in name and name.endswith("weight")))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of every contender."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def rows_of(size: Size, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's rows of a step's batch: tokens and the tokens that follow, each (B / world_size, T)."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(size.vocabulary, (size.batch, size.sequence + 1), generator=generator)
    rows = size.batch // world_size
    mine = tokens[rows * rank : rows * (rank + 1)]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def loss_of(model: nn.Module, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """Returns the mean loss over the rows."""
    return F.cross_entropy(model(tokens_BT).flatten(0, 1), labels_BT.flatten())
