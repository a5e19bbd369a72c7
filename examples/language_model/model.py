"""A byte-level GPT in plain PyTorch: pre-norm blocks with rotary positions, nothing about strategies.

Shape suffixes: B batch, T positions, D model width, H heads, K width of a head (D / H), V vocabulary.
"""

import torch
from shardlight.framework import TrainingModule
from torch import Tensor, nn
from torch.nn import functional as F


def rotate(x_BHTK: Tensor, base: float = 10_000.0) -> Tensor:
    """Turns pairs of numbers by an angle that grows with the position (Su et al. 2021, RoFormer, equation 34).

    The dot product of two such vectors depends on how far apart they are, and not on where.

    Returns: (B, H, T, K).
    """
    half = x_BHTK.shape[-1] // 2
    positions_T = torch.arange(x_BHTK.shape[-2], device=x_BHTK.device, dtype=torch.float32)
    speeds_half = base ** (-torch.arange(half, device=x_BHTK.device, dtype=torch.float32) / half)
    angles_Thalf = positions_T[:, None] * speeds_half
    cos_Thalf, sin_Thalf = angles_Thalf.cos().to(x_BHTK.dtype), angles_Thalf.sin().to(x_BHTK.dtype)
    first, second = x_BHTK[..., :half], x_BHTK[..., half:]
    return torch.cat((first * cos_Thalf - second * sin_Thalf, first * sin_Thalf + second * cos_Thalf), dim=-1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns (B, T, D)."""
        q_BHTK, k_BHTK, v_BHTK = (
            part_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part_BTD in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        y_BHTK = F.scaled_dot_product_attention(rotate(q_BHTK), rotate(k_BHTK), v_BHTK, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    """Decoder-only transformer."""

    def __init__(self, vocab_size: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):  # keeps the variance of its input
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:  # the sum over all branches starts small against the embedding
            for branch_end in (block.attention.out, block.mlp[-1]):
                nn.init.normal_(branch_end.weight, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Returns logits (B, T, V)."""
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class LanguageModel(TrainingModule):
    """Trains a GPT to predict the next byte."""

    constraints = ("width % heads == 0", "width // heads % 2 == 0", "depth >= 1")  # of the arguments, for the check

    def __init__(self, vocab_size: int = 256, width: int = 256, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(vocab_size, width, depth, heads)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean loss in nats per byte of (B, T) tokens."""
        loss = self.token_loss(self.model(batch["tokens"]), batch["labels"])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs bits per byte, exact over all bytes of all ranks."""
        self.log("val/bpb", self.token_loss(self.model(batch["tokens"]), batch["labels"], unit="bits"), prog_bar=True)
