"""The benchmark `checkpoint`: saving beside torch.save, torch's distributed checkpoints and plain writes of the memory.

What is asked for is about the disk, and a disk is 2 times faster one moment than another: contenders write into one
folder, one after the other, and each file is on disk when its time ends. Loading reads files that the system still has
in memory: there the work of reading shows, which a slow disk would hide.
"""

import os
import re
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardlight.framework.bench import meters
from shardlight.framework.bench.crew import BenchRequestError, Crew
from shardlight.framework.bench.results import Bar, BarSpec, Result, Row, Samples
from shardlight.framework.bench.rotation import Say
from shardlight.framework.bench.sizes import SIZES, Size
from shardlight.framework.faults import suggest
from shardlight.framework.launch import Sweeper

MODULE = "shardlight.framework.bench.contenders.checkpoint"
OURS, RAW = "shardlight", "raw"
PEERS = ("torch.save", "dcp")
SAVED = ("zero3", "ddp")
RANKS = 2
SAME = "same shape"
ROUNDS, LARGE_ROUNDS, QUICK_ROUNDS, PEER_ROUNDS = 15, 7, 3, 5
"""Turns of each; of peers when they load."""
BYTES = 12
"""A parameter's in a checkpoint: its value and two moments."""
JUDGED = ("small", "medium")
"""Sizes at which bars are asked for: what smaller ones take is mostly not bytes."""
RATIOS = {"save_ms": "time_to_raw", "load_ms": "time_to_same"}
"""How times are shown as ratios."""
_MEMORY_SYSTEMS = {"tmpfs", "ramfs", "hugetlbfs"}


def saving(strategy: str) -> str:
    """Returns the name of the case of saving under a strategy."""
    return f"save, {strategy} on {RANKS} ranks"


def loading(strategy: str, ranks: int) -> str:
    """Returns the name of a case of loading."""
    return f"load, {strategy} on {ranks} rank{'s' if ranks > 1 else ''}"


@dataclass(frozen=True)
class Load:
    """A load that is compared with the same shape's: by which ranks and strategy, of which checkpoint."""

    strategy: str
    ranks: int
    origin: str
    """The strategy that saved, on 2 ranks."""

    @property
    def who(self) -> str:
        """Its name in its case."""
        return f"{OURS} from {self.origin} on {RANKS} ranks"


LOADS = (Load("zero3", 2, "ddp"), Load("ddp", 2, "zero3"), Load("zero3", 1, "zero3"), Load("zero3", 3, "zero3"))


def _bars() -> dict[str, list[BarSpec]]:
    """By case."""
    found = {
        saving(s): [
            BarSpec(
                name=f"speed of writing {s} / plain writes'", target=">= 0.85", metric="save_ms", who=RAW, against=OURS
            )
        ]
        for s in SAVED
    }
    for load in LOADS:
        found.setdefault(loading(load.strategy, load.ranks), []).append(
            BarSpec(
                name=f"{loading(load.strategy, load.ranks)} from {load.origin} on {RANKS} / same shape",
                target="<= 1.2",
                metric="load_ms",
                who=load.who,
                against=f"{OURS} {SAME}",
            )
        )
    return found


BARS = _bars()
"""What is asked for. The same shape: saved by as many ranks under the same strategy as load it."""


def choose(against: Sequence[str] | None) -> list[str]:
    """Returns the peers that take part. Raises: BenchRequestError: there is no such peer."""
    wanted = list(PEERS) if against is None else list(dict.fromkeys(against))
    for name in wanted:
        if name not in PEERS:
            raise BenchRequestError(f"--against {name}: no such peer.{suggest(name, PEERS)}")
    return wanted


@dataclass
class Bench:
    """A run of the benchmark: what it needs, and what was measured so far."""

    size: Size
    folder: Path
    sweeper: Sweeper
    say: Say
    limit_s: float
    peers: list[str]
    rounds: int
    measured: dict[str, Samples] = field(default_factory=dict)

    def crew(self, ranks: int) -> Crew:
        """Starts ranks."""
        self.say(f"starting {ranks} rank{'s' if ranks > 1 else ''}")
        job = {"module": MODULE, "size": asdict(self.size)}
        return Crew(f"checkpoint-{ranks}", ranks, job, self.folder / f"crew{ranks}", self.sweeper, self.limit_s)

    def build(self, crew: Crew, names: Sequence[str]) -> None:
        """Lets the ranks of a crew make contenders."""
        for name in names:
            self.say(f"building {name}")
            crew.ask({"do": "build", "who": name})

    def kept(self, name: str, ranks: int) -> Path:
        """Where a checkpoint is that is loaded later."""
        return self.folder / f"{name}-{ranks}"

    def keep(self, crew: Crew, name: str) -> None:
        """Saves one to be loaded later."""
        folder = self.kept(name, len(crew.workers))
        _make_if_needed(name, folder)
        crew.ask({"do": "save", "who": name, "folder": str(folder)})

    def save(self, crew: Crew, strategy: str) -> None:
        """Lets our strategy, plain writes and beside zero3 the peers save in turn."""
        case, ranks = saving(strategy), len(crew.workers)
        told = {OURS: strategy, RAW: f"raw {strategy}"}
        told |= {peer: peer for peer in self.peers} if strategy == "zero3" else {}
        samples, files = self.measured.setdefault(case, Samples()), [dict[str, int]()]
        for number in range(-1, self.rounds):
            self.say(f"{case}: {_round(number, self.rounds)}")
            for who in list(told) if number % 2 else reversed(told):
                folder = self.folder / "saved"
                _make_if_needed(told[who], folder)
                answers = crew.ask({"do": "save", "who": told[who], "folder": str(folder), "files": files})
                sizes = sizes_of(folder)
                files = files_of(sizes, ranks) if who == OURS else files
                if number >= 0:
                    note(samples, who, f"round {number}", "save_ms", answers)
                    samples.add(who, "written_bytes", f"round {number}", sum(sizes.values()))
                _remove(folder)
                if number >= 0 and who == OURS:
                    pass_s = sum(answer["cpu_s"] for answer in crew.ask({"do": "checksum", "who": strategy}))
                    used_s = sum(answer["cpu_s"] for answer in answers)
                    samples.add(OURS, "checksum_cpu_share", f"round {number}", pass_s / used_s)

    def load(self, crew: Crew, strategy: str, origins: Sequence[str]) -> None:
        """Lets ranks load what they have saved themselves, and what 2 ranks have saved, in turn."""
        ranks = len(crew.workers)
        case = loading(strategy, ranks)
        same = self.kept(strategy, ranks)
        told = {f"{OURS} {SAME}": (strategy, same)}
        told |= {Load(strategy, ranks, origin).who: (strategy, self.kept(origin, RANKS)) for origin in origins}
        for peer in self.peers if strategy == "zero3" else ():
            if ranks == RANKS or peer == "dcp":
                told[f"{peer} {SAME}"] = (peer, self.kept(peer, ranks))
            if ranks != RANKS and peer == "dcp":
                told[f"{peer} from {RANKS} ranks"] = (peer, self.kept(peer, RANKS))
        for who, (name, folder) in told.items():
            self.say(f"{case}: checking {who}")
            crew.ask({"do": "load and check", "who": name, "folder": str(folder)})
        samples = self.measured.setdefault(case, Samples())
        for number in range(self.rounds):
            self.say(f"{case}: {_round(number, self.rounds)}")
            for who in list(told) if number % 2 else reversed(told):
                name, folder = told[who]
                if name in self.peers and number >= PEER_ROUNDS:
                    continue
                answers = crew.ask({"do": "load", "who": name, "folder": str(folder)})
                note(samples, who, f"round {number}", "load_ms", answers)
            answers = crew.ask({"do": "verify", "who": strategy, "folder": str(same)})
            alone_ms = [{"verify_ms": 1000 * answer["seconds"]} for answer in answers]
            samples.add_ranks(f"{OURS} {SAME}", f"round {number}", alone_ms)


def note(samples: Samples, who: str, key: str, metric: str, answers: list[dict[str, Any]]) -> None:
    """Notes a turn: time of the slowest rank, CPU time of all, the most memory that any took for it."""
    figures = [{metric: 1000 * answer["seconds"], "cpu_ms": 1000 * answer["cpu_s"]} for answer in answers]
    for row, answer in zip(figures, answers, strict=True):
        row |= {k: v for k, v in answer["memory"].items() if k == "peak_memory_bytes"}
    samples.add_ranks(who, key, figures)


def run(
    size: Size,
    against: Sequence[str] | None = None,
    quick: bool = False,
    folder: Path | None = None,
    say: Say = lambda text: None,
    limit_s: float = 600.0,
) -> Result:
    """Runs the benchmark.

    Args:
        size: one of SIZES, or another.
        against: names of PEERS; None: all.
        quick: a few rounds, and no loading by 3 ranks.
        folder: an existing one on the disk that is measured; None: the working directory.
        say: told what happens.
        limit_s: for a start, or a turn, of any contender.
    Raises: BenchRequestError: there is no such peer, or not enough of the disk is free; BenchError: a contender failed,
        or loaded wrong values.
    """
    peers, place = choose(against), Path.cwd() if folder is None else folder
    needed, free = 8 * BYTES * size.numel, shutil.disk_usage(place).free
    if needed > free:
        raise BenchRequestError(
            f"{place} has {free / 1e9:.1f} GB left, and {size.name} needs {needed / 1e9:.1f} GB for a while. "
            "Take a smaller --size, or another --folder."
        )
    rounds = QUICK_ROUNDS if quick else LARGE_ROUNDS if size.name == "medium" else ROUNDS
    private = Path(tempfile.mkdtemp(prefix="shardlight-bench-", dir=place))
    sweeper, began_s, before_s = Sweeper(private), time.monotonic(), _others_s()
    try:
        bench = Bench(size, private, sweeper, say, limit_s, peers, rounds)
        _measure(bench, quick)
    finally:
        sweeper.finish()
    result, after_s = report(bench.measured, size, quick, peers, place), _others_s()
    if before_s is not None and after_s is not None:
        cores = max(0.0, after_s - before_s) / (time.monotonic() - began_s)
        result.notes.append(f"Other programs had {cores:.2f} cores. Ratios are of turns side by side.")
    return result


def _others_s() -> float | None:
    """CPU time of all programs but this one and the ranks that have ended."""
    busy_s, ranks = meters.busy_s(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return None if busy_s is None else busy_s - meters.cpu_s() - ranks.ru_utime - ranks.ru_stime


def _measure(bench: Bench, quick: bool) -> None:
    # What torch.save writes is what FSDP2 holds, as with dcp.
    sharded = ["dcp"] if bench.peers else []
    pickled = ["torch.save"] if "torch.save" in bench.peers else []
    with bench.crew(RANKS) as crew:
        bench.build(crew, ["zero3", "raw zero3", *sharded, *pickled])
        bench.save(crew, "zero3")
        bench.build(crew, ["ddp", "raw ddp"])
        bench.save(crew, "ddp")
        for name in (*SAVED, *bench.peers):
            bench.keep(crew, name)
        for strategy in SAVED:
            bench.load(crew, strategy, [x.origin for x in LOADS if (x.strategy, x.ranks) == (strategy, RANKS)])
    for load in LOADS:
        if load.ranks == RANKS or (quick and load.ranks > RANKS):
            continue
        with bench.crew(load.ranks) as crew:
            names = [load.strategy, *(peer for peer in bench.peers if peer == "dcp")]
            bench.build(crew, names)
            for name in names:
                bench.keep(crew, name)
            bench.load(crew, load.strategy, [load.origin])
            for name in names:
                _remove(bench.kept(name, load.ranks))


def _round(number: int, rounds: int) -> str:
    return "warming up" if number < 0 else f"round {number + 1} of {rounds}"


def _make_if_needed(name: str, folder: Path) -> None:
    """Makes the folder for those that write into one."""
    if name == "torch.save" or name.startswith(RAW):
        folder.mkdir()


def _remove(folder: Path) -> None:
    """Removes a folder, and waits until the disk knows: the next contender's time is its own."""
    shutil.rmtree(folder)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def sizes_of(folder: Path) -> dict[str, int]:
    """Returns the bytes of each file in a folder."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def files_of(sizes: Mapping[str, int], ranks: int) -> list[dict[str, int]]:
    """Returns which of a checkpoint's files each rank writes: its own, and the first the rest."""
    found: list[dict[str, int]] = [{} for _ in range(ranks)]
    for name, nbytes in sizes.items():
        rank = re.match(r"rank-(\d+)", name)
        found[0 if rank is None else int(rank[1])][name] = nbytes
    return found


def file_system(folder: Path) -> str:
    """Returns the kind of file system that a folder is on, such as "ext4"; "" where the system does not tell."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    mounts = [line.split()[1:3] for line in lines]
    above = [(len(at), kind) for at, kind in mounts if folder.resolve().is_relative_to(at)]
    return max(above, key=lambda found: found[0])[1] if above else ""


def report(measured: dict[str, Samples], size: Size, quick: bool, peers: Sequence[str], folder: Path) -> Result:
    """Makes rows and bars of what was measured, by case."""
    system = file_system(folder)
    for samples in measured.values():
        for who, metric in list(samples.values):
            base = RAW if metric == "save_ms" else f"{who.split()[0]} {SAME}"
            if metric in RATIOS and who != base and " rank " not in who:
                pairs = samples.pairs(BarSpec(name="", target="", metric=metric, who=who, against=base))
                samples.add(who, RATIOS[metric], "", statistics.median(pairs))
    in_memory = system in _MEMORY_SYSTEMS

    def judged(case: str, spec: BarSpec) -> Bar:
        if size.name not in JUDGED:
            return Samples().judge(spec, f"asked for at {' and '.join(JUDGED)}")
        if in_memory and spec.metric == "save_ms":
            return Samples().judge(spec, f"{folder} is memory ({system}), no disk")
        return measured.get(case, Samples()).judge(spec, "not with --quick")

    bars = [judged(case, spec) for case, specs in BARS.items() for spec in specs]
    rows: list[Row] = [row for case, samples in measured.items() for row in samples.rows(case)]
    notes = [
        f"Written to {folder} ({system or 'file system not known'}); every file is on disk when its time ends. "
        "What is loaded is in the system's memory (page cache) already.",
        f"Same shape: saved by as many ranks under the same strategy as load it. {RAW}: plain writes of the same "
        "memory, as many bytes in as many files. Extra: of the rank that takes most, above what it holds.",
    ]
    left_out = [peer for peer in PEERS if peer not in peers]
    machine = meters.machine() | {"size": size.name, "quick": quick, "left_out": left_out, "file_system": system}
    return Result(machine, rows, bars, notes=notes)


__all__ = ["BARS", "PEERS", "SIZES", "choose", "report", "run"]
