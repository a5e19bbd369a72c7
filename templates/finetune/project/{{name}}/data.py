"""Instructions and responses from a JSONL file, as tokens with labels on the response alone."""

import json
from collections import Counter
from collections.abc import Sequence
from math import log2
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardlight.framework import DirectoryPath, FilePath
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from .tokenizer import PROJECT, load_tokenizer, prompt

NO_LABEL = -100
KEYS = ("instruction", "response")

Sample = dict[str, Tensor]


def read_jsonl(path: Path) -> list[dict[str, str]]:
    """Reads {"instruction", "response"} of every line that is not empty.

    Raises: MisconfigurationException: the file or a line cannot be read; with file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MisconfigurationException(f"data.path: {path} cannot be read ({error}).") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise MisconfigurationException(f"{path}:{number}: no JSON: {error.msg} at column {error.colno}.") from None
        if not isinstance(item, dict):
            raise MisconfigurationException(f"{path}:{number}: a line has to be an object with the keys {KEYS}.")
        for key in KEYS:
            if not isinstance(item.get(key), str) or not item[key]:
                fault = f"is {json.dumps(item[key])}" if key in item else f"is missing; there are {sorted(item)}"
                raise MisconfigurationException(
                    f"{path}:{number}: {key!r} {fault}. It has to be text that is not empty."
                )
        found.append({key: item[key] for key in KEYS})
    if len(found) < 2:
        raise MisconfigurationException(
            f"{path}: {len(found)} samples are too few, training and validation need one each."
        )
    return found


def unigram_bits(texts: Sequence[str]) -> float:
    """The entropy of the byte frequencies in bits per byte: what the best model without context reaches."""
    counts = Counter(b"".join(text.encode() for text in texts))
    return -sum(count / counts.total() * log2(count / counts.total()) for count in counts.values())


class Instructions(LightningDataModule):
    """Samples of a JSONL file, split at random into training and validation; the same split in every run.

    Args:
        path: of the file; a relative one starts at the project's folder.
        model: the folder whose tokenizer is used; None: bytes.
        batch_size: samples a batch and rank.
        max_tokens: longer samples are cut at their end.
        validation_share: share of the lines that is kept for validation.
    Attributes:
        unigram_bpb: bits per byte of the best model without context, on the validation responses; into summary.json.
    """

    constraints = ("0 < validation_share < 1", "max_tokens >= 2")  # of the arguments, for the check

    def __init__(
        self,
        *,
        path: FilePath,
        model: DirectoryPath | None = None,
        batch_size: int = 8,
        max_tokens: int = 512,
        validation_share: float = 0.1,
    ) -> None:
        super().__init__()
        self.path = PROJECT / path
        self.model = model
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.validation_share = validation_share
        self.train: list[Sample] = []
        self.validation: list[Sample] = []
        self.pad = 0
        self.unigram_bpb: float | None = None

    def setup(self, stage: str) -> None:
        """Reads the file and turns it into tokens; every rank for itself."""
        self.tokenizer = load_tokenizer(self.model)
        self.pad = self.tokenizer.eos_token_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        lines = read_jsonl(self.path)
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
        kept = min(len(lines) - 1, max(1, round(len(lines) * self.validation_share)))
        self.validation = [self.encode(**lines[i]) for i in order[:kept]]
        self.train = [self.encode(**lines[i]) for i in order[kept:]]
        self.unigram_bpb = unigram_bits([lines[i]["response"] for i in order[:kept]])

    def encode(self, instruction: str, response: str) -> Sample:
        """One sample: "input_ids" and "labels" (length,), "bytes" () of the response; the prompt has no labels.

        Raises: MisconfigurationException: the prompt alone has max_tokens.
        """
        asked = prompt(self.tokenizer, instruction)
        answer = [*self.tokenizer(response, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        if len(asked) >= self.max_tokens:
            fault = f"the instruction {instruction[:40]!r}... has {len(asked)} tokens"
            raise MisconfigurationException(
                f"{self.path}: {fault}, and data.max_tokens is {self.max_tokens}: raise it."
            )
        tokens = torch.tensor([*asked, *answer])[: self.max_tokens]
        labels = tokens.clone()
        labels[: len(asked)] = NO_LABEL
        return {"input_ids": tokens, "labels": labels, "bytes": torch.tensor(len(response.encode()))}

    def collate(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """A batch (batch_size, longest) of samples that are padded behind their ends, where the mask is 0."""
        tokens = [sample["input_ids"] for sample in samples]
        return {
            "input_ids": pad_sequence(tokens, batch_first=True, padding_value=self.pad),
            "attention_mask": pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True),
            "labels": pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=NO_LABEL),
            "bytes": torch.stack([sample["bytes"] for sample in samples]),
        }

    def train_dataloader(self) -> DataLoader:
        """Batches as `collate` makes them, in a new order every epoch."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, collate_fn=self.collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        """As `train_dataloader`, in a fixed order."""
        return DataLoader(self.validation, batch_size=self.batch_size, collate_fn=self.collate)  # type: ignore[arg-type]
