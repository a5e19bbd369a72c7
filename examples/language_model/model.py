"""A byte-level GPT in plain PyTorch: pre-norm blocks (Radford et al. 2019, section 2.3), nothing about strategies.

Shape suffixes: B batch, T positions, D model width, H heads, K width of a head (D / H), V vocabulary.
"""
# ruff: noqa: N803, N806 (shape suffixes)

import torch
from shardlight.framework import TrainingModule
from torch import Tensor, nn
from torch.nn import functional as F


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
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
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
    """Decoder-only transformer with learned positions; `tie_head` uses the token embedding as output matrix, too."""

    def __init__(
        self, *, vocab_size: int, context_length: int, width: int, depth: int, heads: int, tie_head: bool
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context_length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(self._init)
        for block in self.blocks:  # keeps the variance of the sum over 2 * depth branches (Radford et al. 2019)
            for branch_end in (block.attention.out, block.mlp[-1]):
                nn.init.normal_(branch_end.weight, std=0.02 / (2 * depth) ** 0.5)
        if tie_head:
            self.head.weight = self.token_embedding.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Returns logits (B, T, V); T is at most context_length."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class LanguageModel(TrainingModule):
    """Trains a GPT to predict the next byte."""

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        context_length: int = 128,
        width: int = 256,
        depth: int = 4,
        heads: int = 4,
        tie_head: bool = True,
    ) -> None:
        super().__init__()
        self.model = GPT(
            vocab_size=vocab_size,
            context_length=context_length,
            width=width,
            depth=depth,
            heads=heads,
            tie_head=tie_head,
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean loss in nats per byte of (B, T) tokens."""
        loss = self.token_loss(self.model(batch["tokens"]), batch["labels"])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs bits per byte, exact over all bytes of all ranks."""
        self.log("val/bpb", self.token_loss(self.model(batch["tokens"]), batch["labels"], unit="bits"), prog_bar=True)
