"""What one rank writes to a checkpoint: boxes of named tensors, from where they are into one file."""

from collections.abc import Iterable
from pathlib import Path

from shardlight.strategies.checkpoint.boxes import boxes_of_range
from shardlight.strategies.checkpoint.manifest import ITEMSIZE, StoredFile, StoredPiece, StoredTensor
from shardlight.strategies.checkpoint.safetensors_file import ChecksummedFile, Entry, bytes_of, dtype_name, header
from shardlight.strategies.errors import CheckpointError
from torch import Tensor


class RankWriter:
    """Collects what one rank writes; nothing is copied before `write`.

    Args:
        rank: this rank's number, which names its file.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.file = f"rank-{rank:05d}.safetensors"
        self._held: list[tuple[str, tuple[int, ...], Tensor, int, str]] = []

    def add(self, name: str, tensor: Tensor, shape: Iterable[int] | None = None, start: int = 0) -> None:
        """Adds a whole tensor, or (with `shape`) the 1-dim range of a tensor of that shape that starts at `start`.

        Raises: CheckpointError: its dtype or layout cannot be stored.
        """
        full = tuple(tensor.shape if shape is None else shape)
        self._held.append((name, full, tensor, start, dtype_name(tensor, f"'{name}'")))

    def write(self, folder: Path) -> tuple[StoredFile, list[StoredTensor]]:
        """Writes the file and waits until it is on disk; returns it, and the pieces it holds (of file number `rank`).

        Raises: OSError: such as a full disk; CheckpointError: a name was added twice with ranges that overlap.
        """
        entries: list[Entry] = []
        pieces: list[tuple[str, str, tuple[int, ...], list[tuple[Entry, StoredPiece]]]] = []
        for name, full, tensor, start, dtype in self._held:
            mine = []
            for box in boxes_of_range(full, start, start + tensor.numel()):
                at = ",".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.sizes, strict=True))
                key = name if box.sizes == full else f"{name}[{at}]"
                entry = Entry(key, dtype, box.sizes)
                mine.append((entry, StoredPiece(self.rank, 0, box)))
                entries.append(entry)
            pieces.append((name, dtype, full, mine))
        if len({e.key for e in entries}) != len(entries):
            raise CheckpointError(f"{self.file}: something has two names that are the same")
        # Largest elements first: every tensor is aligned to its element.
        entries.sort(key=lambda e: -ITEMSIZE[e.dtype])
        held = sorted(self._held, key=lambda h: -ITEMSIZE[h[4]])
        file = ChecksummedFile(folder / self.file)
        try:
            file.write(header(entries))
            for _, _, tensor, _, _ in held:
                for part in bytes_of(tensor):
                    file.write(part)
            stored = file.finish()
        finally:
            file.close()
        return stored, [
            StoredTensor(name, dtype, full, tuple(StoredPiece(p.file, e.at, p.box) for e, p in mine))
            for name, dtype, full, mine in pieces
        ]
