"""Tiny transformers models with random weights, and batches for them: padded, with labels of -100, of uneven length."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from harness import preload
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
preload("warm_transformers")

VOCAB, PAD = 61, 0
FIRST_ODD_WORD = 32
"""Even ranks see words below, odd ranks the others, so that sparse experts can be told apart."""
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": PAD, "bos_token_id": 1}
SIZES |= {"eos_token_id": 2}
GROUPED = {**SIZES, "num_key_value_heads": 2}


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, **options}))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=4, tie_word_embeddings=True))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def bert_classifier():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3))


def mixtral(**options):
    sizes = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 1}
    config = transformers.MixtralConfig(**sizes, **{"experts_implementation": "eager", **options})
    return transformers.MixtralForCausalLM(config)


def mixtral_grouped():
    """All experts of a layer in one matrix product, where the default is; not in fp64."""
    return mixtral(experts_implementation="grouped_mm")


class ExpertList(nn.Module):
    """The experts as a list of modules of which only those with tokens run, as transformers before 5 had them."""

    def __init__(self, config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))
                for _ in range(config.num_local_experts)
            ]
        )

    def forward(self, x, chosen, shares):
        y = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            row, column = torch.where(chosen == number)
            y = y.index_add(0, row, self.experts[number](x[row]) * shares[row, column, None].to(x.dtype))
        return y


def mixtral_list():
    model = mixtral()
    for layer in model.model.layers:
        layer.mlp.experts = ExpertList(model.config)
    return model


def t5():
    config = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config |= {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": 2, "decoder_start_token_id": PAD}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**config, tie_word_embeddings=True))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "bert": bert,
    "bert_classifier": bert_classifier,
    "mixtral": mixtral,
    "mixtral_list": mixtral_list,
    "mixtral_grouped": mixtral_grouped,
    "t5": t5,
}
CAUSAL = ("llama", "qwen3", "gpt2", "mixtral", "mixtral_list", "mixtral_grouped")


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "mixtral_grouped" else torch.float64


def tolerance_of(name: str) -> float:
    """transformers computes RMS norms, router weights and losses in fp32, whatever the weights are in."""
    return 1e-5 if name == "mixtral_grouped" else 5e-7


def build(name: str, attention: str = "sdpa") -> nn.Module:
    """The same weights on every call; without dropout, so that ranks and one process can be compared."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype_of(name))
    model.set_attn_implementation(attention)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.train()


@contextmanager
def old_names() -> Iterator[None]:
    """Names that work in all versions of transformers, and that peft uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated")
        yield


def checkpointed(model: nn.Module, reentrant: bool) -> nn.Module:
    """Switches on activation checkpointing."""
    with old_names():
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def batch(name: str, step: int, rank: int, rows: int = 3) -> dict[str, Tensor]:
    """A batch whose length depends on step and rank; rows are padded on the right, and padding has no label."""
    g = torch.Generator().manual_seed(100 * step + rank)
    length = 5 + (step + 2 * rank) % 4
    low, high = (FIRST_ODD_WORD, VOCAB) if rank % 2 else (3, FIRST_ODD_WORD)
    tokens = torch.randint(low, high, (rows, length), generator=g)
    # Padding is routed to experts as a word is: none where the experts of ranks are to differ.
    padded = 0 if "mixtral" in name else torch.arange(rows).unsqueeze(1)
    mask = (torch.arange(length).expand(rows, -1) < length - padded).long()
    tokens = tokens.where(mask.bool(), PAD)
    labels = tokens.where(mask.bool(), -100)
    if name == "bert":
        labels = labels.where(torch.rand(labels.shape, generator=g) < 0.5, -100)
        labels[0, 0] = 7
    elif name == "bert_classifier":
        labels = torch.randint(3, (rows,), generator=g)
    elif name == "t5":
        labels = torch.cat([labels[:, 1:], labels[:, :2]], dim=1)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One batch of all rows, padded to the longest."""
    length = max(b["input_ids"].shape[1] for b in batches)
    fill = {"input_ids": PAD, "attention_mask": 0, "labels": -100}
    return {
        key: torch.cat([nn.functional.pad(b[key], (0, length - b[key].shape[1]), value=value) for b in batches])
        for key, value in fill.items()
    }
