"""Which checkpoints a run can go on from, the newest first, and why others are not among them. Paths only, no ranks.

[Note: left-overs] A save writes `.NAME.writing` and gives it its name when it is complete. What had the name before is
under `.NAME.replaced`, or under `.NAME.writing` (where two names can be exchanged in one step), until it is removed. A
save that is killed can leave either; one that is complete, where NAME is not there, is what there is.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardlight.strategies.checkpoint.disk import remove_folder
from shardlight.strategies.checkpoint.manifest import Manifest
from shardlight.strategies.errors import CheckpointError

FOLDER = "checkpoints"
"""Of a run folder: where its checkpoints are."""
ENOUGH = 3
"""Older run folders are not looked at once so many candidates are found."""
_LEFT_OVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>writing|replaced)")


@dataclass(frozen=True)
class Found:
    """What was found in the folders of some runs."""

    paths: tuple[Path, ...] = ()
    """Checkpoints whose manifest and files are there, the newest first; what is in the files is not checked."""
    skipped: tuple[str, ...] = ()
    """Of each that would come before the first of `paths`: a line with its path and what is wrong."""


@dataclass(frozen=True)
class _Seen:
    path: Path
    step: int | None
    """None: not known."""
    fault: str
    """Why it cannot be used; "": it can."""
    order: int = 0
    """Among those of one step: the lowest is preferred."""


def find(run_folders: Iterable[Path], *, training: bool = True, damaged: Collection[Path] = ()) -> Found:
    """Looks for checkpoints in the folders of runs, given from the newest to the oldest run.

    Of one run the highest step comes first. A link counts as what it points to, once. What a killed save has left
    counts if it is complete and nothing complete has its name: see [Note: left-overs].

    Args:
        training: training is to go on, for which weights alone are not enough.
        damaged: what is known not to be whole; it is passed over without a word.
    """
    usable: list[_Seen] = []
    skipped: list[str] = []
    known: set[Path] = {path.resolve() for path in damaged}
    for run in run_folders:
        seen = []
        for one in _look(run / FOLDER, training):
            if one.path.resolve() not in known:
                known.add(one.path.resolve())
                seen.append(one)
        good = sorted((s for s in seen if not s.fault), key=lambda s: (-(s.step or 0), s.order, s.path.name))
        if not usable:
            newest = good[0].step or 0 if good else -1
            bad = [s for s in seen if s.fault and (s.step is None or s.step >= newest)]
            bad.sort(key=lambda s: (s.step is None, -(s.step or 0), s.path.name))
            skipped += [f"{s.path} is skipped: {_short(s)}" for s in bad]
        usable += good
        if len(usable) >= ENOUGH:
            break
    return Found(tuple(s.path for s in usable), tuple(skipped))


def tidy(folder: Path) -> None:
    """Removes what killed saves have left in a folder of checkpoints that no run writes to now.

    What is complete, where nothing has its name, gets its name; see [Note: left-overs].

    Raises: OSError: something cannot be removed or renamed.
    """
    for name, left in _left_overs(folder).items():
        target = folder / name
        complete = [p for p in left if not _check(p)[1]]
        if complete and not os.path.lexists(target):
            complete[0].rename(target)
            complete = []
        elif not _check(target)[1]:
            complete = []
        # Where what has the name is damaged, the complete one stays.
        for path in left:
            if path not in complete and path.exists():
                remove_folder(path)


def _look(folder: Path, training: bool) -> Iterator[_Seen]:
    named: dict[str, _Seen] = {}
    for path in _entries(folder):
        if path.name.startswith("."):
            continue
        if path.is_symlink() and not path.exists():
            named[path.name] = _Seen(path, None, f"it is a link to {os.readlink(path)}, which is not there.")
        elif path.is_dir():
            # Said by its own name, not by that of the link.
            target = folder / os.readlink(path) if path.is_symlink() else path
            named[path.name] = _Seen(target, *_check(target, training))
    yield from sorted(named.values(), key=lambda s: s.path.is_symlink())
    for name, paths in _left_overs(folder).items():
        if name in named and not named[name].fault:
            continue
        seen = [_Seen(p, *_check(p, training), order=1 + n) for n, p in enumerate(paths)]
        # A save that was cut off is worth a word only where nothing else has its name.
        yield from [s for s in seen if not s.fault] or ([] if name in named else seen[:1])


def _left_overs(folder: Path) -> dict[str, list[Path]]:
    """By the name they were to have; what was being written is newer than what was to be replaced, and comes first."""
    found: dict[str, list[Path]] = {}
    for path in _entries(folder):
        match = _LEFT_OVER.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.setdefault(match["name"], []).append(path)
    return {name: sorted(paths, key=lambda p: p.name.endswith(".replaced")) for name, paths in found.items()}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _check(path: Path, training: bool = False) -> tuple[int | None, str]:
    """The step of a checkpoint, and what is wrong with it as far as its manifest and the sizes of its files tell."""
    numbers = re.findall(r"\d+", path.name)
    step = int(numbers[0]) if len(numbers) == 1 else None
    try:
        content = Manifest.read(path).content
    except CheckpointError as error:
        return step, str(error)
    stored = content.get("step")
    fault = "it holds weights only." if training and content.get("optimizers") is None else ""
    return stored if isinstance(stored, int) else step, fault


def _short(seen: _Seen) -> str:
    """The fault without the path that the line begins with."""
    text = seen.fault.removeprefix(f"{seen.path} is not a complete checkpoint: ")
    return text.removeprefix(f"{seen.path}/").removeprefix(f"{seen.path} ")
