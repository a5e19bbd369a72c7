"""Unmodified models of transformers, cut over tensor groups."""

import pytest
import torch
from harness import run_ranks
from hf import GROUPED, VOCAB, transformers
from tensor_parity import check_equal, tensor_group

WIDE = {"hidden_size": 24, "num_attention_heads": 12, "intermediate_size": 25, "num_hidden_layers": 2}


def step(model):
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(3, VOCAB, (3, 7), generator=generator)
    labels = words.masked_fill(torch.rand(3, 7, generator=generator) < 0.2, -100)
    mask = torch.ones_like(words)
    mask[0, 5:] = 0
    model.eval()
    return model(words, attention_mask=mask, labels=labels).loss


def wide(kind):
    name, sizes = kind.rsplit(" ", 1)
    options = dict(GROUPED, **WIDE, num_key_value_heads=int(sizes))
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, attention_bias=True))
    if name == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options, head_dim=4, tie_word_embeddings=True))
    if name == "mixtral":
        config = transformers.MixtralConfig(**options, num_local_experts=4, num_experts_per_tok=2)
        config._experts_implementation = "eager"
        return transformers.MixtralForCausalLM(config)
    options = {k: v for k, v in options.items() if k != "num_key_value_heads"}
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
    return transformers.BertForMaskedLM(transformers.BertConfig(**options))


def compared(rank, size, kinds, norms):
    group = tensor_group()
    for kind in kinds:
        for implementation in ("sdpa", "eager"):
            torch.manual_seed(0)
            model = wide(kind).double()
            model.set_attn_implementation(implementation)
            check_equal(model, step, group, 3e-6, norms=norms)


KINDS = ["llama 12", "llama 6", "llama 2", "llama 4", "qwen3 6", "qwen3 2", "gpt2 12", "bert 12", "mixtral 6"]


@pytest.mark.parametrize("norms", ["whole", "sharded"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_models_are_cut(size, norms):
    run_ranks(compared, size, timeout_s=120, kinds=KINDS, norms=norms)
