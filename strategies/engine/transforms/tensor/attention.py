"""nn.MultiheadAttention on the heads of this rank."""

from collections.abc import Callable
from typing import Any

import torch
from shardlight.strategies.engine.transforms.tensor.exchange import TensorGroup
from shardlight.strategies.engine.transforms.tensor.products import column, row
from shardlight.strategies.engine.transforms.tensor.split import Split
from torch import Tensor
from torch.nn import functional as F


def multihead_forward(split: Split, group: TensorGroup, along_sequence: bool) -> Callable[..., Any]:
    """Returns the forward of an nn.MultiheadAttention whose projections are cut by heads.

    Args:
        split: of the width, by heads.
    """

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        first = module.batch_first or not batched
        q, k, v = _project(module, query, key, value, split, group)
        if not first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (module.num_heads, -1)).transpose(-2, -3) for x in (q, k, v))  # (..., H, T, K)
        mask = _mask(module, q, attn_mask, key_padding_mask, batched)
        drop = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            weights = F.softmax(scores if mask is None else scores + mask, -1)
            weights = F.dropout(weights, drop, drop > 0.0)
            mixed = weights @ v
            weights = weights.mean(-3) if average_attn_weights else weights
        else:
            causal = is_causal and mask is None
            mixed = F.scaled_dot_product_attention(q, k, v, mask, drop, is_causal=causal)
        mixed = mixed.transpose(-2, -3).flatten(-2)
        if not first:
            mixed = mixed.transpose(0, 1)
        out = module.out_proj
        return row(mixed, out.weight, out.bias, split, group, along_sequence), weights

    return forward


def _project(module: Any, query: Tensor, key: Tensor, value: Tensor, split: Split, group: TensorGroup) -> list[Tensor]:
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if query is key and key is value and module._qkv_same_embed_dim:
        fused = Split.fused([split] * 3)
        return list(column(query, module.in_proj_weight, module.in_proj_bias, fused, group).chunk(3, -1))
    inputs = zip((query, key, value), weights, biases, strict=True)
    return [column(x, w, b, split, group) for x, w, b in inputs]


def _mask(module: Any, q: Tensor, attn_mask: Tensor | None, padding: Tensor | None, batched: bool) -> Tensor | None:
    """Returns what is added to the scores: (..., H or 1, T or 1, S), or None."""
    masks = []
    if attn_mask is not None:
        if attn_mask.dim() == 3 and batched:  # (B * H, T, S)
            attn_mask = attn_mask.unflatten(0, (-1, module.num_heads))
        elif attn_mask.dim() == 3:
            pass  # (H, T, S)
        else:
            attn_mask = attn_mask[(None,) * (q.dim() - 2)]
        masks.append(attn_mask)
    if padding is not None:
        masks.append(padding[:, None, None, :] if batched else padding[None, None, :])
    added = [
        torch.zeros_like(m, dtype=q.dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m.to(q.dtype)
        for m in masks
    ]
    return None if not added else added[0] if len(added) == 1 else added[0] + added[1]
