"""Compares every byte of a checkpoint with its checksums, and tells all that is wrong with it. Needs no torch."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shardlight.ops.crc32 import crc32_chunks
from shardlight.strategies.checkpoint.manifest import MANIFEST, Manifest, StoredFile, open_plain, what_to_pass
from shardlight.strategies.checkpoint.show import checkpoint_folder, checkpoints_in
from shardlight.strategies.errors import CheckpointError

_AT_ONCE = 64
"""Chunks that a thread takes at a time."""
_READ = 4
"""Chunks that it reads by one call."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was found.

    Attributes:
        path: the checkpoint.
        nbytes: what was read of its files.
        faults: what is missing or damaged; none: all is as it was saved.
        not_listed: names in the folder that are no part of the checkpoint; nothing reads them.
    """

    path: Path
    nbytes: int = 0
    faults: tuple[str, ...] = ()
    not_listed: tuple[str, ...] = ()


def verify(path: Path, threads: int = 4) -> Verified:
    """Reads a whole checkpoint."""
    try:
        folder = checkpoint_folder(path)
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        return Verified(path=path, faults=(str(error),))
    known = {MANIFEST, *(f.name for f in manifest.files)}
    extra = tuple(sorted(p.name for p in folder.iterdir() if p.name not in known))
    jobs = [
        (file, range(start, min(start + _AT_ONCE, file.n_chunks)))
        for file in manifest.files
        for start in range(0, file.n_chunks, _AT_ONCE)
    ]
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda job: _broken(path, *job), jobs))
    faults = []
    for file in manifest.files:
        results = [result for (other, _), result in zip(jobs, found, strict=True) if other is file]
        unreadable = [text for text, _ in results if text]
        faults += [f"{path / file.name} {text}" for text in dict.fromkeys(unreadable)]
        for first, last in _runs([number for _, numbers in results for number in numbers]):
            start, stop = file.span(first, last + 1)
            faults.append(
                f"{path / file.name} is damaged between byte {start:,} and {stop:,}: it does not have the CRC-32 it "
                "was saved with."
            )
    return Verified(path=path, nbytes=sum(f.nbytes for f in manifest.files), faults=tuple(faults), not_listed=extra)


def _broken(folder: Path, file: StoredFile, numbers: range) -> tuple[str, list[int]]:
    """Returns why a file cannot be read ("" if it can), and the chunks that are not as they were saved."""
    try:
        opened = open_plain(folder / file.name)
        try:
            wrong = []
            for at in range(0, len(numbers), _READ):
                part = numbers[at : at + _READ]
                start, stop = file.span(part[0], part[-1] + 1)
                found = crc32_chunks(os.pread(opened, stop - start, start), file.chunk_bytes)
                # A file that has become shorter has fewer chunks.
                wrong += [number for i, number in enumerate(part) if found[i : i + 1] != [file.crc32[number]]]
            return "", wrong
        finally:
            os.close(opened)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}.", []


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (first, last) of each run of consecutive numbers. Example: [1, 2, 5] gives (1, 2) and (5, 5)."""
    if not numbers:
        return []
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
    edges = [0, *breaks, len(numbers)]
    return [(numbers[a], numbers[b - 1]) for a, b in pairwise(edges)]


def find_checkpoints(path: Path) -> list[Path]:
    """Returns the checkpoint a path is, or those in a run folder; of a link and what it names only one.

    Raises: CheckpointError: there is none; says what to pass instead.
    """
    if path.is_file():
        raise CheckpointError(what_to_pass(path))
    if not path.exists() or (path / MANIFEST).exists():
        return [checkpoint_folder(path)]
    found = {p.resolve(): p for p in sorted(checkpoints_in(path), key=lambda p: not p.is_symlink())}
    inside = [p for p in checkpoints_in(path) if p in found.values()]
    if not inside:
        raise CheckpointError(f"{path} is not a complete checkpoint, and there is none in it.")
    return inside
