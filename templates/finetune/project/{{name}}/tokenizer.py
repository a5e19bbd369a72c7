"""The tokenizer of a model's folder, or bytes."""

from pathlib import Path
from typing import Any

import tokenizers
import transformers
from lightning.pytorch.utilities.exceptions import MisconfigurationException

PROJECT = Path(__file__).resolve().parents[1]
PAD, END = 0, 1
"""Tokens of the byte tokenizer that are no bytes: behind the end of a sample in a batch, and that end."""
VOCAB_SIZE = 258
"""Of the byte tokenizer."""


def model_folder(model: str | Path) -> Path:
    """The folder that a config means, seen from the project's.

    Raises: MisconfigurationException: there is none, or it holds no model.
    """
    folder = PROJECT / model
    if not (folder / "config.json").is_file():
        raise MisconfigurationException(
            f"module.model: {folder} is no folder of from_pretrained: no config.json in it."
        )
    return folder


def byte_tokenizer() -> Any:
    """Text as UTF-8 bytes: a tokenizer of transformers with 256 tokens and two that are none; nothing is unknown."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())  # one printable character for each byte
    vocabulary = {"<pad>": PAD, "<end>": END} | {letter: number for number, letter in enumerate(letters, 2)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<pad>", "<end>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


def load_tokenizer(model: str | Path | None) -> Any:
    """The tokenizer of a model's folder; None: bytes.

    Raises: MisconfigurationException: there is none, or it has no token that ends a text.
    """
    if model is None:
        return byte_tokenizer()
    folder = model_folder(model)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        text = f"data.model: the tokenizer in {folder} cannot be opened: {error}"
        raise MisconfigurationException(text) from None
    if tokenizer.eos_token_id is None:
        raise MisconfigurationException(
            f"data.model: the tokenizer in {folder} has no eos_token, which ends a response."
        )
    return tokenizer


def prompt(tokenizer: Any, instruction: str) -> list[int]:
    """What a model is shown before its response: by the tokenizer's chat template, or a plain one where it has none."""
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": instruction}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer(f"### Instruction:\n{instruction}\n### Response:\n")["input_ids"]
