"""Real text that is on every machine with Python: the source code of the interpreter's own standard library."""

import hashlib
import sysconfig
from collections import Counter
from math import log2
from pathlib import Path

from lightning.pytorch import LightningDataModule
from shardlight.framework.data import ByteTokenizer, TokenDataset, cache_folder, write_tokens
from torch.utils.data import DataLoader

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
"""Folders that are not read: what was installed later, tests, and generated tables."""


def standard_library_files(root: Path) -> list[tuple[str, bytes]]:
    """Reads the Python files below `root`, sorted by their path relative to it.

    Returns: (relative path with forward slashes, content); empty files and files that cannot be read are left out.
    """
    files = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not LEFT_OUT.isdisjoint(relative.parts):
            continue
        try:
            content = path.read_bytes()
        except OSError:  # a broken link, or a file of another user
            continue
        if content:
            files.append((relative.as_posix(), content))
    return sorted(files)


def split_by_file(
    files: list[tuple[str, bytes]], validation_share: float, max_train_bytes: int, max_validation_bytes: int
) -> tuple[bytes, bytes]:
    """Splits by a hash of the path: no file is in both parts, and another file moves none.

    Validation takes as much of every file, from its middle, as makes up `max_validation_bytes` together, so that a
    short text is a fair sample of the library.

    Returns: (train, validation) text.
    """
    train, validation = [], []
    for path, content in files:
        position = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) / 2**64
        (validation if position < validation_share else train).append(content)
    each = max_validation_bytes // max(1, len(validation))
    middles = [content[max(0, len(content) - each) // 2 :][:each] for content in validation]
    return b"\n".join(train)[:max_train_bytes], b"".join(middles)


def unigram_bits(text: bytes) -> float:
    """The entropy of the byte frequencies of `text` in bits per byte: what the best model without context reaches."""
    return -sum(count / len(text) * log2(count / len(text)) for count in Counter(text).values())


class StandardLibraryText(LightningDataModule):
    """Windows of the standard library's source code; the token files are kept in the user's cache folder.

    Args:
        sequence_length: bytes a window.
        batch_size: windows a batch and rank.
        validation_share: share of the files that is kept for validation.
        max_train_bytes: train text is cut here.
        max_validation_bytes: validation text is at most this long, the same share of every file.
    """

    constraints = ("0 < validation_share < 1", "sequence_length >= 1")  # of the arguments, for the check

    def __init__(
        self,
        *,
        sequence_length: int = 128,
        batch_size: int = 8,
        validation_share: float = 0.05,
        max_train_bytes: int = 32_000_000,
        max_validation_bytes: int = 65_537,
    ) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.split = (validation_share, max_train_bytes, max_validation_bytes)
        self.paths: dict[str, Path] = {}
        self.unigram_bpb: float | None = None

    def prepare_data(self) -> None:
        """Writes the two token files, where they are not in the cache yet."""
        self._prepare()

    def setup(self, stage: str) -> None:
        """Finds the token files, and writes them where this machine has none."""
        if not self.paths:
            self._prepare()

    def _prepare(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        train, validation = split_by_file(standard_library_files(root), *self.split)
        self.unigram_bpb = unigram_bits(validation)
        # Keyed by the text itself: another Python, or another split, has files of its own.
        fingerprint = hashlib.sha256(hashlib.sha256(train).digest() + validation).hexdigest()[:16]
        folder = cache_folder("standard_library")
        for name, text in (("train", train), ("validation", validation)):
            path = folder / f"python{sysconfig.get_python_version()}-{fingerprint}-{name}.npy"
            if not path.exists():
                write_tokens(path, [ByteTokenizer().encode(text)])
            self.paths[name] = path

    def train_dataloader(self) -> DataLoader:
        """Batches {"tokens", "labels"}, each (batch_size, sequence_length), in a new order every epoch."""
        dataset = TokenDataset(self.paths["train"], self.sequence_length)
        return DataLoader(dataset, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """As `train_dataloader`, in the order of the text."""
        return DataLoader(TokenDataset(self.paths["validation"], self.sequence_length), self.batch_size)
