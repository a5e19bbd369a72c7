"""The benchmark `ops`: optimizer steps of compiled ops beside PyTorch's, DeepSpeed's and plain traffic of memory.

A step reads and writes so much per number it computes that memory is the limit: a loop of the same loads and stores
without arithmetic is what it is held against.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardlight.framework.bench import meters
from shardlight.framework.bench.crew import BenchError, BenchRequestError, Crew
from shardlight.framework.bench.results import Bar, BarSpec, Result, Row, Samples
from shardlight.framework.bench.rotation import Say
from shardlight.framework.bench.sizes import SIZES
from shardlight.framework.faults import suggest
from shardlight.framework.launch import Sweeper

MODULE = "shardlight.framework.bench.contenders.steps"
OURS, FUSED, LIMIT, ALONE = "shardlight", "torch-fused", "same-traffic", "one-process"
DEEPSPEED = "deepspeed"
PEERS = (DEEPSPEED,)
NUMEL, ROUNDS, MUON_ROUNDS, STARTS = 20_000_000, 31, 9, 5
QUICK_NUMEL, QUICK_ROUNDS = 1_000_000, 7
THREADS = (1, 2)
BYTES = 28
"""An element's: in fp32 4 loads and 3 stores; with masters 3 loads and 3 stores in fp32, one of each in 16 bits."""
MUON, FIRST, INSTALL = "step of Muon - AdamW's, small", "first call - tenth", "install"


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The dtypes of a step, and what is asked of it."""

    name: str
    narrow: bool
    """16-bit gradients, and a 16-bit copy of the parameters."""
    peers: tuple[tuple[str, str, str], ...]
    """Contender, what to call it, and how many times its speed is asked for."""
    limit: str


MIXES = (
    Mix(name="fp32 AdamW", narrow=False, peers=((FUSED, "torch fused's", ">= 0.97"),), limit=">= 0.92"),
    Mix(name="bf16 AdamW", narrow=True, peers=((DEEPSPEED, "DeepSpeedCPUAdam's", ">= 2"),), limit=">= 0.85"),
)
"""bf16: fp32 master weights and moments, gradients and a copy of the weights in bf16. DeepSpeed's step is on fp32; with
it count the passes that its optimizers make around it, gradients to fp32 and weights to bf16."""


def case_of(mix: Mix, threads: int) -> str:
    """Returns the name of a case."""
    return f"{mix.name}, {threads} thread{'s' if threads > 1 else ''}"


def _bars() -> dict[str, list[BarSpec]]:
    """By case."""
    found: dict[str, list[BarSpec]] = {}
    for threads in THREADS:
        for mix in MIXES:
            case = case_of(mix, threads)
            asked = [*mix.peers, (LIMIT, "the same traffic's", mix.limit)]
            found[case] = [
                BarSpec(name=f"speed of {case} / {what}", target=target, metric="call_us", who=who, against=OURS)
                for who, what, target in asked
            ]
    found[MUON] = [BarSpec(name=f"{MUON} / one process's", target="<= 1.3", metric="extra_ms", who=OURS, against=ALONE)]
    found[FIRST] = [BarSpec(name=f"{FIRST}, ms", target="<= 5", metric="first_call_ms", who=OURS)]
    found[INSTALL] = [BarSpec(name="install from a checkout, s", target="<= 60", metric="install_s", who=OURS)]
    return found


BARS = _bars()
"""What is asked for, on two cores."""


def run(
    against: Sequence[str] | None = None,
    quick: bool = False,
    install: bool = False,
    say: Say = lambda text: None,
    limit_s: float = 600.0,
) -> Result:
    """Runs the benchmark.

    Args:
        against: names of PEERS; None: all that are installed, with `quick` none. DeepSpeed compiles its op at its first
            use, which takes minutes and is not measured.
        quick: small sizes, few rounds, no Muon.
        install: also builds the package from its checkout.
        say: told what happens.
        limit_s: for the start, and for each case.
    Raises: BenchRequestError: there is no such peer, or no compiled ops; BenchError: a contender failed, or a step was
        wrong.
    """
    wanted = ([] if quick else list(PEERS)) if against is None else list(dict.fromkeys(against))
    for name in wanted:
        if name not in PEERS:
            raise BenchRequestError(f"--against {name}: no such peer.{suggest(name, PEERS)}")
    missing = {n: "is not installed" for n in wanted if importlib.util.find_spec(n) is None}
    folder = Path(tempfile.mkdtemp(prefix="shardlight-bench-"))
    sweeper = Sweeper(folder)
    measured: dict[str, Samples] = {}
    try:
        if install:
            say("building a wheel from the checkout")
            measured[INSTALL] = Samples()
            measured[INSTALL].add(OURS, "install_s", "", install_s(folder))
        for threads in THREADS:
            say(f"starting a process of {threads} threads")
            peers = [name for name in wanted if name not in missing]
            with Crew(
                f"ops-{threads}",
                1,
                {"module": MODULE, "threads": threads},
                folder / f"crew{threads}",
                sweeper,
                limit_s,
                threads,
            ) as crew:
                _look(crew, measured, f"{threads} threads")
                if peers:
                    say("DeepSpeed: loading its op, which it compiles at its first use")
                    if (why := crew.ask({"do": "build"})[0]["why_not"]) is not None:
                        missing[DEEPSPEED], peers = f"has no CPU op here: {why}", []
                for mix in MIXES:
                    case = case_of(mix, threads)
                    say(case)
                    numel, rounds = (QUICK_NUMEL, QUICK_ROUNDS) if quick else (NUMEL, ROUNDS)
                    request = {"do": "step", "numel": numel, "narrow": mix.narrow, "rounds": rounds}
                    (answer,) = crew.ask(request | {"peers": bool(peers)})
                    measured[case] = samples_of(answer["seconds"], numel)
        if not quick:
            _starts(measured, folder, sweeper, limit_s, say)
            _muon(measured, folder, sweeper, limit_s, say)
    finally:
        sweeper.finish()
    return report(measured, quick, missing)


def _look(crew: Crew, measured: dict[str, Samples], key: str) -> None:
    (answer,) = crew.ask({"do": "look"})
    if answer["why_not"] is not None:
        raise BenchRequestError(f"compiled ops are not used, so there is nothing to measure: {answer['why_not']}.")
    samples = measured.setdefault(FIRST, Samples())
    for op, value in answer["first_ms"].items():
        samples.add(f"{OURS} {op}", "first_call_ms", key, value)
    samples.add(OURS, "first_call_ms", key, max(answer["first_ms"].values()))


def _starts(measured: dict[str, Samples], folder: Path, sweeper: Sweeper, limit_s: float, say: Say) -> None:
    for number in range(STARTS - len(THREADS)):
        say(f"{FIRST}: another process")
        with Crew("ops", 1, {"module": MODULE, "threads": 1}, folder / f"start{number}", sweeper, limit_s) as crew:
            _look(crew, measured, f"start {number}")


def _muon(measured: dict[str, Samples], folder: Path, sweeper: Sweeper, limit_s: float, say: Say) -> None:
    say(MUON)
    with Crew("muon", 2, {"module": MODULE, "threads": 1}, folder / "muon", sweeper, limit_s) as crew:
        answers = crew.ask({"do": "muon", "size": asdict(SIZES["small"]), "rounds": MUON_ROUNDS})
    samples = measured[MUON] = Samples()
    for who in (OURS, ALONE):
        ranks = [answer["seconds"][who] for answer in answers if who in answer["seconds"]]
        for number, seconds in enumerate(zip(*ranks, strict=True)):
            samples.add_ranks(who, f"round {number}", [{"extra_ms": 1000 * value} for value in seconds])


def install_s(folder: Path) -> float:
    """Returns the seconds that a wheel takes, built from a clean copy of the checkout; downloads do not count.

    Raises: BenchRequestError: the package runs from no checkout; BenchError: the build failed.
    """
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        raise BenchRequestError(f"--install: {root} is no checkout, from which the package could be built.")
    leave = shutil.ignore_patterns(".*", "tests", "examples", "build", "__pycache__", "*.so", "*.egg-info")
    shutil.copytree(root, folder / "checkout", ignore=leave)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    command += ["--disable-pip-version-check", "-w", str(folder / "wheel"), str(folder / "checkout")]
    began_s = time.monotonic()
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    lasted_s = time.monotonic() - began_s
    if made.returncode:
        raise BenchError(f"--install: pip wheel failed:\n{(made.stdout + made.stderr).strip()[-2000:]}")
    return lasted_s


def samples_of(seconds: dict[str, list[float]], numel: int) -> Samples:
    """Returns the samples of one case. Args: seconds: by contender, those of each round."""
    samples = Samples()
    for who, values in seconds.items():
        for number, value in enumerate(values):
            samples.add(who, "call_us", f"round {number}", 1e6 * value)
            samples.add(who, "buffer_bytes_per_s", f"round {number}", BYTES * numel / value)
            samples.add(who, "speed_to_traffic", f"round {number}", seconds[LIMIT][number] / value)
    return samples


def report(measured: dict[str, Samples], quick: bool, missing: dict[str, str]) -> Result:
    """Makes rows and bars of what was measured, by case. Args: missing: peers, and why each is."""

    def reason(case: str, spec: BarSpec) -> str:
        if case == INSTALL:
            return "with --install"
        if spec.who in missing:
            return f"{spec.who} {missing[spec.who]}"
        return "not with --quick" if quick else "left out by --against"

    bars: list[Bar] = [
        Samples().judge(spec, reason(case, spec))
        # Small sizes stay in a cache, where memory is no limit.
        if quick and spec.metric == "call_us"
        else measured.get(case, Samples()).judge(spec, reason(case, spec))
        for case, specs in BARS.items()
        for spec in specs
    ]
    rows: list[Row] = [row for case, samples in measured.items() for row in samples.rows(case)]
    notes = [f"{name} {why}: left out, and not measured." for name, why in missing.items()]
    notes.append(
        f"GB/s: of the {BYTES} bytes per element that a step has to move (fp32: 4 loads, 3 stores; bf16: 3 of each in "
        "fp32, and one of each in bf16)."
    )
    machine = meters.machine() | {"numel": QUICK_NUMEL if quick else NUMEL, "quick": quick}
    return Result(machine, rows, bars, missing=list(missing), notes=notes)
