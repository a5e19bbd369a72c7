"""Tokens on disk: a byte tokenizer, token files written atomically into the user's cache, windows read through mmap."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class ByteTokenizer:
    """Text as UTF-8 bytes: token = byte, 256 tokens, nothing to train and nothing unknown."""

    vocab_size = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns (number of bytes,) uint8."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return bytes(int(token) for token in tokens).decode(errors="replace")


def cache_folder(name: str) -> Path:
    """The folder `name` of the user's cache, created where needed.

    It is $SHARDLIGHT_CACHE/name, else $XDG_CACHE_HOME/shardlight/name, else ~/.cache/shardlight/name.
    """
    if root := os.environ.get("SHARDLIGHT_CACHE"):
        folder = Path(root) / name
    else:
        # By the XDG specification a relative path counts as unset.
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        folder = (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "shardlight" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_tokens(path: Path, chunks: Iterable[np.ndarray], dtype: type[np.unsignedinteger] = np.uint8) -> int:
    """Writes `chunks` one after the other as a 1-dim .npy file that is complete or not there.

    Processes may write the same file at once: each fills a file of its own and renames it, the last one stays.
    Never holds more than one chunk.

    Args:
        path: of the .npy file; its folder exists.
        chunks: (n,) each, integers that fit into `dtype`.
        dtype: np.uint8, np.uint16 or np.uint32.
    Returns: the number of tokens written.
    Raises: ValueError: a token does not fit into `dtype`.
    """
    descr = np.dtype(dtype).newbyteorder("<").str
    count = 0
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            _write_header(file, descr, 0)
            for chunk in chunks:
                if chunk.size and (chunk.min() < 0 or chunk.max() > np.iinfo(dtype).max):
                    raise ValueError(
                        f"{path}: tokens from {chunk.min()} to {chunk.max()} do not fit into {np.dtype(dtype)}; "
                        "choose a wider dtype"
                    )
                file.write(chunk.astype(descr).tobytes())
                count += chunk.size
            file.seek(0)
            _write_header(file, descr, count)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return count


def _write_header(file, descr: str, count: int) -> None:
    # The .npy header keeps room for a first dim of 21 digits, so that it has one size whatever the count.
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (count,)})


class TokenDataset(Dataset[dict[str, Tensor]]):
    """Windows of a token file, each `sequence_length` tokens with the tokens that follow them as labels.

    Window i starts at token i * sequence_length: every token but the first is a label exactly once, but for a rest
    shorter than a window, which is left out. The file is memory-mapped: ranks and loader workers on a machine share
    its pages, and opening it takes no time.

    Args:
        path: of a file made by `write_tokens`.
        sequence_length: tokens a window.
    Raises: ValueError: the file holds fewer than sequence_length + 1 tokens, or is no token file.
    Example: tokens 0 to 8, sequence_length 4: {tokens: 0..3, labels: 1..4} and {tokens: 4..7, labels: 5..8}.
    """

    def __init__(self, path: Path | str, sequence_length: int) -> None:
        self.path = Path(path)
        self.sequence_length = sequence_length
        self.tokens = self._map()
        if len(self) < 1:
            raise ValueError(
                f"{self.path}: {len(self.tokens)} tokens are too few for one window of {sequence_length} + 1; "
                "use more text or a shorter sequence_length"
            )

    def _map(self) -> np.ndarray:
        tokens = np.load(self.path, mmap_mode="r", allow_pickle=False)
        if tokens.ndim != 1 or tokens.dtype.kind != "u":
            raise ValueError(f"{self.path}: {tokens.dtype} of shape {tokens.shape} is no token file; see write_tokens")
        return tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns {"tokens": (sequence_length,) int64, "labels": (sequence_length,) int64}."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: window {index} of {len(self)}")
        start = index * self.sequence_length
        window = torch.from_numpy(self.tokens[start : start + self.sequence_length + 1].astype(np.int64))
        return {"tokens": window[:-1], "labels": window[1:]}

    def __getstate__(self) -> dict:
        # Sent to a loader worker as a path: a pickled memmap would carry the whole file.
        return {"path": self.path, "sequence_length": self.sequence_length}

    def __setstate__(self, state: dict) -> None:
        self.path, self.sequence_length = state["path"], state["sequence_length"]
        self.tokens = self._map()
