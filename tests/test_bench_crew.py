"""Contenders take turns, in processes that end with the benchmark, also when one of them fails."""

import itertools
import time
from pathlib import Path

import pytest
from shardlight.framework.bench.crew import BenchError
from shardlight.framework.bench.rotation import Contender, Rotation
from shardlight.framework.bench.sizes import Size
from shardlight.framework.launch import Sweeper

SIZE = Size(name="toy", vocabulary=1, width=1, blocks=1, heads=1, sequence=10, batch=2, rounds=4, steps_per_turn=2)
FAILURES = {
    "raises": ("rank 1 of 2 failed: ValueError: boom on purpose", "in misbehave"),
    "dies": ("rank 1 of 2 failed: killed by signal 9 (SIGKILL)",),
    "leaves": ("rank 1 of 2 failed: exit code 0 before the end of the run",),
    "hangs": ("did not do 'turn' within 6.5 s on rank [1]", "bench_toys.py", "in misbehave"),
}


def toy(name: str, processes: int = 2) -> Contender:
    return Contender(name=name, module="bench_toys", processes=processes)


@pytest.fixture
def rotation(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("TOY_LOG", str(tmp_path))
    (tmp_path / "private").mkdir()
    sweeper = Sweeper(tmp_path / "private")
    yield Rotation(SIZE, tmp_path / "private", sweeper, lambda text: None, limit_s=30.0)
    sweeper.finish()


def steps_in(folder: Path, rank: int = 0) -> list[tuple[str, int, float, float]]:
    """Every step of a rank of every contender: whose, its number, from when to when; in the order begun."""
    lines = [line.split() for path in folder.glob(f"*.{rank}") for line in path.read_text().splitlines()]
    return sorted(((w, int(n), float(a), float(b)) for w, n, a, b in lines), key=lambda step: step[2])


def ranks_of(folder: Path) -> list[str]:
    """Command lines of the ranks whose environment names a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_text()
            if "bench.worker" in line and str(folder).encode() in (entry / "environ").read_bytes():
                found.append(line)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended while we looked, or not ours
    return found


def test_contenders_take_turns_and_never_step_at_the_same_time(rotation, tmp_path):
    rotation.run_group([toy("one", 1), toy("two"), toy("slow")])
    done = steps_in(tmp_path)
    assert all(earlier[3] <= later[2] for earlier, later in itertools.pairwise(done)), "two stepped at once"
    order = [who for who, number, *_ in done if 3 <= number < 3 + 8]
    assert order == ["one", "one", "two", "two", "slow", "slow"] * 4
    for who, counting in (("one", 1), ("two", 2), ("slow", 2)):
        assert [n for w, n, *_ in done if w == who] == list(range(3 + 8 + counting)), "each step once, in order"
    assert ranks_of(tmp_path) == []


def test_what_is_noted_of_each(rotation, tmp_path):
    rotation.run_group([toy("two"), toy("slow")])
    samples = rotation.samples
    assert len(samples.values["two", "step_ms"]) == 4
    slow, two = samples.median("slow", "step_ms"), samples.median("two", "step_ms")
    assert two >= 10 and slow >= 30
    assert samples.median("slow", "tokens_per_s") == pytest.approx(1000 * 20 / slow, rel=0.5)
    assert samples.median("two", "sent_bytes") == 60, "per step"
    assert samples.median("two", "state_bytes") == 101 and samples.median("two rank 0", "state_bytes") == 100
    assert 1 <= samples.median("two", "python_calls") < 60
    assert samples.median("two", "collectives") == 7
    assert samples.losses["two"] == {n: float(n) for n in range(3 + 8 + 2)}
    assert 0 < samples.median("two", "startup_s") < 30
    assert samples.median("two", "peak_memory_bytes") >= samples.median("two", "steady_memory_bytes")


def test_contenders_that_share_processes_take_turns_too(rotation, tmp_path):
    rotation.run_hosted({"bench_toys": [toy("one", 1), toy("two")]})
    order = [who for who, number, *_ in steps_in(tmp_path) if 2 <= number < 2 + 8]
    assert order == ["one", "one", "two", "two"] * 4
    assert {who for who, *_ in steps_in(tmp_path, rank=1)} == {"two"}
    assert ("two", "startup_s") not in rotation.samples.values
    assert ("two", "peak_memory_bytes") not in rotation.samples.values, "it is not its own"


def test_a_start_can_be_measured_again(rotation, tmp_path):
    rotation.start_again([toy("one", 1), toy("two")], times=2)
    assert len(rotation.samples.values["two", "startup_s"]) == 2
    assert rotation.samples.values["one", "startup_s"].keys() == rotation.samples.values["two", "startup_s"].keys()
    assert ranks_of(tmp_path) == []


@pytest.mark.parametrize("name", FAILURES)
def test_a_contender_that_fails_is_reported_and_ends_all_others(rotation, tmp_path, name):
    rotation._limit_s = 6.5 if name == "hangs" else 60.0
    started_s = time.monotonic()
    with pytest.raises(BenchError) as caught:
        rotation.run_group([toy("two"), toy(name)])
    assert f"contender '{name}'" in str(caught.value)
    for words in FAILURES[name]:
        assert words in str(caught.value)
    assert time.monotonic() - started_s < 30
    assert ranks_of(tmp_path) == []


def test_a_contender_that_cannot_be_built_is_reported(rotation, tmp_path):
    with pytest.raises(BenchError, match="contender 'two' failed") as caught:
        rotation.run_group([Contender(name="two", module="no_such_module_at_all")])
    assert "ModuleNotFoundError" in str(caught.value)
    assert ranks_of(tmp_path) == []
