"""What one rank writes to a checkpoint: boxes of named tensors, from where they are into one file."""

from pathlib import Path

from shardlight.strategies.checkpoint.manifest import ITEMSIZE, StoredFile, StoredPiece, StoredTensor
from shardlight.strategies.checkpoint.safetensors_file import ChecksummedFile, Entry, bytes_of, dtype_name, header
from shardlight.strategies.engine.boxes import Shape
from shardlight.strategies.engine.slices import Slice
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
        self._held: list[tuple[str, Tensor, Slice | None, int, str]] = []

    def add(self, name: str, tensor: Tensor, of: Slice | None = None, start: int = 0) -> None:
        """Adds a whole tensor, or (with `of`) the 1-dim range that starts at `start` of a flattened part of one.

        Raises: CheckpointError: its dtype or layout cannot be stored.
        """
        self._held.append((name, tensor, of, start, dtype_name(tensor, f"'{name}'")))

    def write(self, folder: Path) -> tuple[StoredFile, list[StoredTensor]]:
        """Writes the file and waits until it is on disk; returns it, and the pieces it holds (of file number `rank`).

        Raises: OSError: such as a full disk; CheckpointError: a name was added twice with ranges that overlap.
        """
        entries: list[Entry] = []
        pieces: list[tuple[str, str, Shape, list[tuple[Entry, StoredPiece]]]] = []
        for name, tensor, of, start, dtype in self._held:
            mine = []
            full = tuple(tensor.shape) if of is None else of.shape
            for box in (of or Slice.whole(full)).boxes(start, start + tensor.numel()):
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
            for _, tensor, of, start, _ in held:
                whole = of is None or of.is_whole
                for piece in (tensor,) if whole else (part for _, part in of.parts(tensor, start)):
                    for data in bytes_of(piece):
                        file.write(data)
            stored = file.finish()
        finally:
            file.close()
        return stored, [
            StoredTensor(name, dtype, full, tuple(StoredPiece(p.file, e.at, p.box) for e, p in mine))
            for name, dtype, full, mine in pieces
        ]
