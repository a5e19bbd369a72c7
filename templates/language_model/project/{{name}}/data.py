"""Text files as windows of bytes; by default text that every machine with Python has, its library's source code."""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from math import log2
from pathlib import Path

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardlight.framework import DirectoryPath
from shardlight.framework.data import ByteTokenizer, TokenDataset, cache_folder, write_tokens
from torch.utils.data import DataLoader

PROJECT = Path(__file__).resolve().parents[1]
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
"""Folders of Python's library that are not read: what was installed later, tests, and generated tables."""
FEW = 20
"""With fewer files than this, validation is the end of each instead of some of them."""

Piece = tuple[Path, int, int]
"""Bytes `start` to `end` of a file."""


def text_files(folder: Path, pattern: str, left_out: set[str] = frozenset()) -> list[tuple[Path, int]]:
    """Finds the files below `folder`, sorted by their paths; (path, bytes), empty ones left out.

    Raises: MisconfigurationException: there are none.
    """
    paths = (path for path in folder.rglob(pattern) if left_out.isdisjoint(path.relative_to(folder).parts))
    files = sorted((path, path.stat().st_size) for path in paths if path.is_file())
    files = [(path, size) for path, size in files if size]
    if not files:
        raise MisconfigurationException(f"data.folder: {folder} has no file {pattern} (data.pattern) with text in it.")
    return files


def split(
    files: Sequence[tuple[Path, int]], folder: Path, validation_share: float, max_validation_bytes: int
) -> tuple[list[Piece], list[Piece]]:
    """Splits by a hash of the path: no file is in both parts, and another file moves none. Few files: the end of each.

    Validation takes as much of every file, from its middle, as makes up `max_validation_bytes` together, so that a
    short text is a fair sample.

    Returns: pieces of files to (train, validate) on.
    """
    if len(files) < FEW:
        cuts = [(path, size - round(size * validation_share), size) for path, size in files]
        train = [(path, 0, cut) for path, cut, _ in cuts]
        held = [(path, cut, size) for path, cut, size in cuts]
    else:
        places = {path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest()[:8] for path, _ in files}
        kept = {path for path, place in places.items() if int.from_bytes(place) / 2**64 < validation_share}
        train = [(path, 0, size) for path, size in files if path not in kept]
        held = [(path, 0, size) for path, size in files if path in kept]
    each = max_validation_bytes // max(1, len(held))
    validation = []
    for path, start, end in held:
        first = start + max(0, end - start - each) // 2
        validation.append((path, first, min(end, first + each)))
    return train, validation


def read(pieces: Sequence[Piece], max_bytes: int | None = None) -> Iterator[np.ndarray]:
    """Reads the pieces one after the other, each as bytes (n,) with a line break behind it, until `max_bytes`."""
    left = max_bytes
    for path, start, end in pieces:
        with path.open("rb") as file:
            file.seek(start)
            text = file.read(end - start) + b"\n"
        yield ByteTokenizer().encode(text[:left])
        if left is not None:
            left -= len(text)
            if left <= 0:
                return


def unigram_bits(tokens: np.ndarray) -> float:
    """The entropy of the byte frequencies in bits per byte: what the best model without context reaches."""
    shares = np.bincount(tokens, minlength=256) / len(tokens)
    return -sum(share * log2(share) for share in shares.tolist() if share)


class TextFiles(LightningDataModule):
    """Windows of text files; the bytes are kept in the user's cache folder, and read from there through mmap.

    Args:
        folder: of the files; a relative path starts at the project's folder. None: that of Python's library.
        pattern: which files in it, and in the folders below.
        sequence_length: bytes a window.
        batch_size: windows a batch and rank.
        validation_share: share of the files that is kept for validation; of fewer than 20, the end of each.
        max_train_bytes: train text is cut here; None: all.
        max_validation_bytes: validation text is at most this long, and a line break a file; the same share of each.
    Attributes:
        unigram_bpb: bits per byte of the best model without context, on the validation text; goes into summary.json.
    """

    constraints = ("0 < validation_share < 1", "sequence_length >= 1")  # of the arguments, for the check

    def __init__(
        self,
        *,
        folder: DirectoryPath | None = None,
        pattern: str = "*.py",
        sequence_length: int = 128,
        batch_size: int = 8,
        validation_share: float = 0.05,
        max_train_bytes: int | None = 32_000_000,
        max_validation_bytes: int = 65_537,
    ) -> None:
        super().__init__()
        self.folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else PROJECT / folder
        self.left_out = LEFT_OUT if folder is None else set()
        self.pattern = pattern
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.split = (validation_share, max_validation_bytes)
        self.max_train_bytes = max_train_bytes
        self.paths: dict[str, Path] = {}
        self.unigram_bpb: float | None = None

    def prepare_data(self) -> None:
        """Writes the two token files, where they are not in the cache yet; once on every machine."""
        files = text_files(self.folder, self.pattern, self.left_out)
        parts = dict(zip(("train", "validation"), split(files, self.folder, *self.split), strict=True))
        # Keyed by all that they are made from: changed files, or another split, have token files of their own.
        state = [(str(path), size, path.stat().st_mtime_ns) for path, size in files]
        key = hashlib.sha256(repr((state, self.split, self.max_train_bytes)).encode()).hexdigest()[:16]
        limits = {"train": self.max_train_bytes, "validation": None}
        for name, pieces in parts.items():
            path = cache_folder("text_files") / f"{key}-{name}.npy"
            if not path.exists():
                write_tokens(path, read(pieces, limits[name]))
            self.paths[name] = path

    def setup(self, stage: str) -> None:
        """Finds the token files."""
        if not self.paths:
            self.prepare_data()
        self.unigram_bpb = unigram_bits(np.load(self.paths["validation"], mmap_mode="r"))

    def train_dataloader(self) -> DataLoader:
        """Batches {"tokens", "labels"}, each (batch_size, sequence_length), in a new order every epoch."""
        dataset = TokenDataset(self.paths["train"], self.sequence_length)
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """As `train_dataloader`, in the order of the text."""
        return DataLoader(TokenDataset(self.paths["validation"], self.sequence_length), batch_size=self.batch_size)
