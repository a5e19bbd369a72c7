"""Unmodified models of transformers, cut over tensor groups."""

import pytest
import torch
from harness import run_ranks
from hf import GROUPED, SIZES, VOCAB, transformers
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


KINDS = ["llama 12", "llama 4", "llama 2", "qwen3 6", "gpt2 12", "bert 12", "mixtral 6"]


def compared(rank, size):
    group = tensor_group()
    for kind in KINDS:
        torch.manual_seed(0)
        model = wide(kind).double()
        for norms in ("whole", "sharded"):
            check_equal(model, step, group, 3e-6, norms=norms)
        if size == 2:
            model.set_attn_implementation("eager")
            check_equal(model, step, group, 3e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_models_are_cut(size):
    run_ranks(compared, size, timeout_s=120)


def family(name):
    """Small models of families that write their attention in other ways: fused by blocks or by heads, with subclasses of
    layers, scores with a bias, norms over all heads, latent keys, sinks."""
    sizes = {**SIZES, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32}
    grouped = {**sizes, "num_key_value_heads": 2}
    few = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    experts = {"num_experts_per_tok": 2}
    latent = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
    model, options = {
        "phi3": ("Phi3ForCausalLM", grouped),
        "neox": ("GPTNeoXForCausalLM", sizes),
        "bloom": ("BloomForCausalLM", {**few, "hidden_size": 24, "n_layer": 2, "n_head": 4}),
        "gemma": ("GemmaForCausalLM", {**grouped, "head_dim": 8}),
        "olmo2": ("Olmo2ForCausalLM", grouped),
        "falcon": ("FalconForCausalLM", {k: v for k, v in sizes.items() if k != "intermediate_size"}),
        "bart": (
            "BartForConditionalGeneration",
            {**few, "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 2}
            | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32}
            | {"decoder_ffn_dim": 32, "forced_eos_token_id": 2},
        ),
        "t5": (
            "T5ForConditionalGeneration",
            {**few, "d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        ),
        "gpt_oss": ("GptOssForCausalLM", {**grouped, **experts, "head_dim": 8, "num_local_experts": 4}),
        "deepseek": (
            "DeepseekV3ForCausalLM",
            {**sizes, **experts, **latent, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4}
            | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        ),
    }[name]
    kind = getattr(transformers, model)
    made = kind(kind.config_class(**options))
    if name in ("gpt_oss", "deepseek"):
        made.set_experts_implementation("eager")
    return made


FAMILIES = ["phi3", "neox", "bloom", "gemma", "olmo2", "falcon", "bart", "t5", "gpt_oss", "deepseek"]


def families(rank, size):
    group = tensor_group()
    for name in FAMILIES:
        torch.manual_seed(0)
        model = family(name).double()
        check_equal(model, step, group, 1e-5)
        check_equal(model, step, group, 1e-5, gathers=None, norms="sharded")


@pytest.mark.long
def test_families_that_write_attention_in_other_ways():
    run_ranks(families, 2, timeout_s=240)
