"""The benchmark `infinity`: what does not fit into memory trains from disk, and how fast.

Four parts. *wall*: one GPT whose training state is several times the memory that two ranks may have, under DDP, zero3
and infinity, all under the same limit. *depth*: the memory of infinity at 4 to 32 blocks of one width. *step*: a whole
step beside DeepSpeed's of the same kind, and beside zero3 with all state in memory. *stream*: the optimizer's step by
itself, in turn with the same step in memory and with plain reads and writes of the same bytes.
"""

import importlib.util
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardlight.framework.bench import meters
from shardlight.framework.bench.crew import BenchError, BenchRequestError, Crew
from shardlight.framework.bench.results import Bar, BarSpec, Result, Row, Samples
from shardlight.framework.bench.rotation import Contender, Rotation, Say, Standing
from shardlight.framework.bench.sizes import SIZES, Size
from shardlight.framework.faults import suggest
from shardlight.framework.launch import Sweeper

MODULE = "shardlight.framework.bench.contenders.infinity"
RANKS = 2
STATE_BYTES = 16
"""A parameter's while it trains with Adam in fp32: itself, its gradient and two moments."""
DISK_BYTES = 16
OURS, ZERO3, IN_MEMORY, DEEPSPEED = "infinity", "shardlight-zero3", "infinity, in memory", "deepspeed-nvme"
PEERS = {"ddp": ["ddp"], "deepspeed": [DEEPSPEED]}
ROUNDS, LARGE_ROUNDS, QUICK_ROUNDS = 15, 7, 3
DEPTHS = (4, 8, 16, 32)
STEADY_FROM = 3
"""The number of the step, from 0, after which memory is not to grow: passes are repeated as agreed from there on."""
COMPILE_S = 3600.0
MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wall:
    """A model and the memory that it may take."""

    model: Size
    cap_bytes: int
    """Of each rank, above what it has when everything is imported and nothing is built."""
    steps: int
    staging_bytes: int | None = None

    @property
    def state_bytes(self) -> int:
        """Of all ranks together, were it in memory."""
        return STATE_BYTES * self.model.numel


def _deep(name: str, width: int, blocks: int) -> Size:
    """Rows are short: what is computed with takes less than what is trained."""
    return Size(name=name, vocabulary=512, width=width, blocks=blocks, heads=8, sequence=32, batch=RANKS)


WALLS = {
    "tiny": Wall(model=_deep("tiny", 256, 12), cap_bytes=56 * MB, steps=5, staging_bytes=1 << 18),
    "small": Wall(model=_deep("small", 512, 40), cap_bytes=160 * MB, steps=6, staging_bytes=1 << 20),
    "medium": Wall(model=_deep("medium", 1024, 32), cap_bytes=512 * MB, steps=6),
}
JUDGED = ("small", "medium")
"""Sizes at which bars are asked for: what smaller ones take is mostly not state."""
WALLED = ("ddp", "zero3", OURS)


def _bars() -> dict[str, list[BarSpec]]:
    """By part."""
    spec = lambda name, target, metric, who, **more: BarSpec(  # noqa: E731
        name=name, target=target, metric=metric, who=who, sizes=JUDGED, **more
    )
    wall = [
        spec("training state / memory of all ranks", ">= 6.0", "state_share", OURS),
        spec("ddp does not fit", ">= 1", "over_cap", "ddp"),
        spec("zero3 does not fit", ">= 1", "over_cap", "zero3"),
        spec("peak memory of infinity / what it may have", "<= 1.0", "cap_share", OURS),
        spec("loss of infinity, last step / first", "<= 1.0", "loss_share", OURS),
        spec(f"growth of infinity after step {STEADY_FROM} / what it may have", "<= 0.02", "growth_share", OURS),
    ]
    return {
        "wall": wall,
        "depth": [spec("peak memory per added block / its training state", "<= 0.02", "block_share", OURS)],
        "step": [
            spec("step of infinity / DeepSpeed's from disk", "<= 0.67", "step_ms", OURS, against=DEEPSPEED),
            spec("step of infinity, all in memory / zero3's", "<= 1.03", "step_ms", IN_MEMORY, against=ZERO3),
        ],
        "stream": [spec("max(compute, plain traffic) / streamed step", ">= 0.90", "stream_share", OURS)],
    }


BARS = _bars()
"""What is asked for, at 2 ranks of one host."""


def choose(against: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Returns the peers that take part, and those that are not installed.

    Raises: BenchRequestError: there is no such peer.
    """
    wanted = list(PEERS) if against is None else list(dict.fromkeys(against))
    for name in wanted:
        if name not in PEERS:
            raise BenchRequestError(f"--against {name}: no such peer.{suggest(name, PEERS)}")
    missing = [name for name in wanted if name == "deepspeed" and importlib.util.find_spec(name) is None]
    return [name for name in wanted if name not in missing], missing


@dataclass
class Bench:
    """A run of the benchmark: what it needs, and what was measured so far."""

    size: Size
    wall: Wall
    folder: Path
    sweeper: Sweeper
    say: Say
    limit_s: float
    peers: list[str]
    quick: bool
    measured: dict[str, Samples] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def samples(self, part: str) -> Samples:
        """Of one part."""
        return self.measured.setdefault(part, Samples())

    def train(self, samples: Samples, who: str, wall: Wall, kept: str, capped: bool = True) -> bool:
        """Lets a contender take the steps of a wall; returns False where it was ended for the memory it took.

        Args:
            kept: the name that its figures are kept under.
            capped: whether memory is limited.
        """
        folder = self.folder / f"{kept}-{wall.model.blocks}"
        verdict = self.folder / f"{folder.name}.json"
        cap_bytes = wall.cap_bytes if capped else None
        watch = {"who": who, "cap_bytes": cap_bytes, "verdict": str(verdict), "staging_bytes": wall.staging_bytes}
        job = {"module": MODULE, "size": asdict(wall.model), "hosts": {kept: RANKS}, "watch": watch}
        doing = "being built"
        try:
            with Crew(kept, RANKS, job, folder, self.sweeper, self.limit_s) as crew:
                standing = Standing(Contender(name=kept, module=MODULE), crew, samples, wall.model)
                for number in range(wall.steps):
                    doing = f"step {number + 1} of {wall.steps}"
                    self.say(f"{kept}: {doing}")
                    standing.turn(f"step {number}", 1, timed=number > 0)
                    gauges = [a["gauges"] for a in crew.ask({"do": "look", "who": kept})]
                    samples.add_ranks(kept, f"step {number}", [{"held_bytes": g["held_bytes"]} for g in gauges])
                    samples.add_ranks(kept, "", [{"sampled_peak_bytes": g["sampled_peak_bytes"]} for g in gauges])
        except BenchError:
            if not verdict.exists():
                raise
            found = json.loads(verdict.read_text())
            self.notes.append(f"{who}: rank {found['rank']} went over the memory it may have while {doing}.")
            samples.add(kept, "sampled_peak_bytes", "", found["bytes"])
            return False
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return True


def run(
    size: Size,
    against: Sequence[str] | None = None,
    quick: bool = False,
    folder: Path | None = None,
    say: Say = lambda text: None,
    limit_s: float = 900.0,
    wall: Wall | None = None,
) -> Result:
    """Runs the benchmark.

    Args:
        size: one of SIZES, or another; of the parts *step* and *stream*.
        against: names of PEERS; None: all that are there.
        quick: a few rounds, no DeepSpeed unless it is named, no *depth*.
        folder: an existing one on the disk that is measured; None: the working directory.
        say: told what happens.
        limit_s: for a start, or a turn, of any contender.
        wall: instead of that of the size.
    Raises: BenchRequestError: there is no such peer, or not enough of the disk is free; BenchError: a contender failed.
    """
    peers, missing = choose(against)
    wall, place = wall or WALLS[size.name], (folder or Path.cwd()).resolve()
    needed, free = DISK_BYTES * max(wall.model.numel, 2 * size.numel), shutil.disk_usage(place).free
    if needed > free:
        raise BenchRequestError(
            f"{place} has {free / 1e9:.1f} GB left, and {size.name} needs {needed / 1e9:.1f} GB for a while. "
            "Take a smaller --size, or another --folder."
        )
    if quick:
        size = replace(size, rounds=QUICK_ROUNDS, steps_per_turn=1)
        peers = [name for name in peers if name != "deepspeed" or (against and name in against)]
    elif size.name == "medium":
        size = replace(size, rounds=LARGE_ROUNDS)
    private = Path(tempfile.mkdtemp(prefix="shardlight-bench-", dir=place))
    sweeper = Sweeper(private)
    try:
        bench = Bench(size, wall, private, sweeper, say, limit_s, peers, quick)
        _wall(bench)
        if not quick:
            _depth(bench)
        _stream(bench)
        _step(bench, missing)
    finally:
        sweeper.finish()
    return report(bench.measured, size, wall, quick, peers, missing, bench.notes, place)


def _wall(bench: Bench) -> None:
    samples, wall = bench.samples("wall"), bench.wall
    for who in WALLED:
        if who == "ddp" and "ddp" not in bench.peers:
            continue
        fits = bench.train(samples, who, wall, who)
        samples.add(who, "over_cap", "", 0.0 if fits else 1.0)
        samples.add(who, "cap_bytes", "", wall.cap_bytes)
        samples.add(who, "cap_share", "", samples.values[who, "sampled_peak_bytes"][""] / wall.cap_bytes)
        samples.add(who, "state_share", "", wall.state_bytes / (RANKS * wall.cap_bytes))
        if not fits:
            continue
        losses = samples.losses[who]
        finite = all(map(math.isfinite, losses.values()))
        samples.add(who, "first_loss", "", losses[0])
        samples.add(who, "last_loss", "", losses[wall.steps - 1])
        samples.add(who, "loss_share", "", losses[wall.steps - 1] / losses[0] if finite else math.inf)
        held = samples.values[who, "held_bytes"]
        last, early = (held[f"step {number}"] for number in (wall.steps - 1, min(STEADY_FROM, wall.steps - 1)))
        samples.add(who, "growth_share", "", (last - early) / wall.cap_bytes)
        _split(samples, who)


def _split(samples: Samples, who: str) -> None:
    """What is left of each step when the waits are taken away, of the rank that computes longest."""
    for key in samples.values.get((who, "step_ms"), {}):
        rests = []
        for rank in range(RANKS):
            found = {m: samples.values.get((f"{who} rank {rank}", m), {}).get(key, 0.0) for m in _PARTS}
            rests.append(found["step_ms"] - found["disk_wait_ms"] - found["rank_wait_ms"])
        samples.add(who, "compute_ms", key, max(rests))


_PARTS = ("step_ms", "disk_wait_ms", "rank_wait_ms")


def _depth(bench: Bench) -> None:
    samples, peaks = bench.samples("depth"), {}
    model = WALLS["small"].model if bench.wall.model.name in WALLS else bench.wall.model
    for blocks in DEPTHS:
        wall = replace(bench.wall, model=replace(model, blocks=blocks), steps=STEADY_FROM + 1)
        kept = f"{OURS}, {blocks} blocks"
        bench.train(samples, OURS, wall, kept, capped=False)
        peaks[blocks] = samples.values[kept, "sampled_peak_bytes"][""]
    block = (replace(model, blocks=1).numel - replace(model, blocks=0).numel) * STATE_BYTES
    slope = statistics.linear_regression(list(peaks), list(peaks.values())).slope
    samples.add(OURS, "block_bytes", "", slope)
    samples.add(OURS, "block_share", "", slope / block)


def _stream(bench: Bench) -> None:
    samples, size = bench.samples("stream"), bench.size
    names = {"disk": OURS, "memory": "in memory", "raw": "plain traffic"}
    job = {"module": MODULE, "size": asdict(size), "alone": True}
    bench.say("stream: building")
    with Crew("stream", RANKS, job, bench.folder / "stream", bench.sweeper, bench.limit_s) as crew:
        for number in range(-1, size.rounds):
            bench.say(f"stream: round {number + 1} of {size.rounds}")
            for what in list(names) if number % 2 else reversed(names):
                answers = crew.ask({"do": "time", "what": what, "number": number + 3})
                if number >= 0:
                    samples.add_ranks(names[what], f"round {number}", answers)
            if number >= 0:
                took = {w: samples.values[name, "step_ms"][f"round {number}"] for w, name in names.items()}
                samples.add(OURS, "stream_share", f"round {number}", max(took["memory"], took["raw"]) / took["disk"])
    shutil.rmtree(bench.folder / "stream", ignore_errors=True)


def _step(bench: Bench, missing: list[str]) -> None:
    contenders = [Contender(name=name, module=MODULE, state_bytes=18) for name in (ZERO3, IN_MEMORY, OURS)]
    if "deepspeed" in bench.peers:
        why = _why_no_deepspeed(bench.say)
        if why is None:
            module = f"{MODULE.rpartition('.')[0]}.deepspeed_nvme"
            contenders.append(Contender(name=DEEPSPEED, module=module, state_bytes=60, package="deepspeed"))
        else:
            missing.append("deepspeed")
            bench.notes.append(f"deepspeed cannot be measured here: {why}")
    rotation = Rotation(bench.size, bench.folder, bench.sweeper, bench.say, bench.limit_s)
    if bench.quick:
        shared: dict[str, list[Contender]] = {}
        for contender in contenders:
            shared.setdefault(contender.module, []).append(contender)
        rotation.run_hosted(shared)
    else:
        rotation.run_group(contenders)
    bench.measured["step"] = rotation.samples
    for name in (OURS, DEEPSPEED):
        difference = rotation.samples.loss_difference(name, ZERO3)
        if difference is not None:
            rotation.samples.add(name, "loss_difference", "", difference)
    _split(rotation.samples, OURS)


def _why_no_deepspeed(say: Say) -> str | None:
    """Compiles what it reads and writes files with, which takes minutes once; returns why that cannot be."""
    say("compiling DeepSpeed's async_io and cpu_adam, where that was not done before (minutes)")
    code = (
        "from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder\n"
        "import sys\n"
        "if not AsyncIOBuilder().is_compatible(verbose=False): sys.exit('async_io needs libaio-dev')\n"
        "AsyncIOBuilder().load(); CPUAdamBuilder().load()"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=COMPILE_S
        )
    except subprocess.TimeoutExpired:
        return f"its compilation took more than {COMPILE_S:g} s."
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else f"{lines[-1] if lines else 'its compilation failed'}."


def report(
    measured: dict[str, Samples],
    size: Size,
    wall: Wall,
    quick: bool,
    peers: Sequence[str],
    missing: Sequence[str],
    notes: Sequence[str],
    folder: Path,
) -> Result:
    """Makes rows and bars of what was measured, by part."""

    def judged(part: str, spec: BarSpec) -> Bar:
        if size.name not in JUDGED:
            return Samples().judge(spec, f"asked for at {' and '.join(JUDGED)}")
        reason = "not with --quick" if quick else "left out by --against"
        if spec.against == DEEPSPEED and "deepspeed" in missing:
            reason = "deepspeed is not installed, or cannot be built"
        return measured.get(part, Samples()).judge(spec, reason)

    bars = [judged(part, spec) for part, specs in BARS.items() for spec in specs]
    rows: list[Row] = [row for part, samples in measured.items() for row in samples.rows(part)]
    text = [
        f"wall: {wall.model.numel / 1e6:.1f} M parameters, {wall.state_bytes / 1e6:.0f} MB of training state; "
        f"{RANKS} ranks may have {wall.cap_bytes / 1e6:.0f} MB each (proportional set size above that after imports, "
        "sampled). A rank that has more is ended: oom.",
        f"Swap files are in {folder}. Waits for ranks include the copying that is done meanwhile.",
        *notes,
        *(f"{name} is not installed, or cannot be built: left out, and not measured." for name in missing),
    ]
    machine: dict[str, Any] = meters.machine() | {"size": size.name, "quick": quick}
    machine["left_out"] = [name for name in PEERS if name not in peers or name in missing]
    return Result(machine, rows, bars, list(missing), text)


__all__ = ["BARS", "PEERS", "SIZES", "WALLS", "choose", "report", "run"]
