"""Stops early when shardlight is not installed, and fails a test that leaves something behind."""

import gc
import importlib.util
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

# Variables and files that libraries leave on first use, whatever a test does. Nothing of ours belongs here.
KEPT_VARIABLES = {"PYTEST_CURRENT_TEST", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR"}
KEPT_VARIABLES |= {"PYTORCH_NVML_BASED_CUDA_CHECK"}
KEPT_FILES = ("pymp-", "torchinductor_")  # multiprocessing's socket folder of this process; torch.compile's cache
ENDING_S = 2.0  # for a process that is about to end anyway


def _installed() -> bool:
    try:
        return all(importlib.util.find_spec(f"shardlight.{name}") for name in ("framework", "strategies"))
    except ModuleNotFoundError:
        return False


if not _installed():
    pytest.exit("shardlight is not installed here; run: pip install -e '.[dev]'", returncode=4)


def pytest_collection_finish() -> None:
    """[Note: inherited objects] What is imported by now (PyTorch, Lightning, all tests: a million objects) stays.

    A collection that looks at all of it takes a second, and in a forked process copies the pages it lies on. The engine
    asks for collections, and so do tests: those look at what the test itself has made.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # workers that take all cores each would wait for one another
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`, a file runs in one worker, which sets up its fixtures once, and the files go out by name.

    By the number of tests, as xdist would have it, the longest would come last: they are the files of few tests.
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory):
    """Everything this session writes to the system's temporary folder, in one place that can be looked at."""
    folder = tmp_path_factory.mktemp("system")
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    yield folder
    os.environ.pop("TMPDIR")
    if before[0] is not None:
        os.environ["TMPDIR"] = before[0]
    tempfile.tempdir = before[1]


@pytest.fixture(autouse=True)
def nothing_left_behind(temporary_folder):
    """Fails a test that leaks a process, a process group, a variable or a file; puts the environment back."""
    variables, home = dict(os.environ), Path.cwd()
    files, children = _files(home, temporary_folder), _children()
    yield
    left = _ended_late(children)
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()
        left.append("an initialised process group: destroy it")
    now = dict(os.environ)
    changed = {k for k in {*variables, *now} - KEPT_VARIABLES if variables.get(k) != now.get(k)}
    for name in changed:
        left.append(f"the variable {name}={now.get(name)!r} (was {variables.get(name)!r}): use monkeypatch.setenv")
        if name in variables:
            os.environ[name] = variables[name]
        else:
            del os.environ[name]
    if Path.cwd() != home:
        left.append(f"the working directory {Path.cwd()}: use monkeypatch.chdir")
        os.chdir(home)
    left += [f"the file {path}: write under tmp_path" for path in sorted(_files(home, temporary_folder) - files)]
    assert not left, "this test left behind " + "; ".join(left)


def _files(home: Path, temporary: Path) -> set[Path]:
    """What lies directly in the working directory and in the session's temporary folder."""
    found = {p for p in home.iterdir() if not p.name.startswith((".", "__pycache__"))}
    return found | {p for p in temporary.iterdir() if not p.name.startswith(KEPT_FILES)}


def _children() -> dict[int, str]:
    """Living child processes, id to command line, without the servers that serve the whole session."""
    servers = {multiprocessing.forkserver._forkserver._forkserver_pid}
    servers |= {multiprocessing.resource_tracker._resource_tracker._pid}
    found = {}
    for entry in map(Path("/proc").joinpath, _pids()):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z" and int(entry.name) not in servers:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
    return found


def _pids() -> list[str]:
    """Ids that may be those of child processes; elsewhere than on Linux none, and nothing is checked."""
    try:
        # To look at every process costs milliseconds, twice in each of thousands of tests.
        lists = [Path(task, "children").read_text() for task in Path("/proc/self/task").iterdir()]
        return " ".join(lists).split()
    except (FileNotFoundError, ProcessLookupError):  # a system without such lists; a thread that ended meanwhile
        return [path.name for path in Path("/proc").glob("[0-9]*")]


def _ended_late(before: dict[int, str]) -> list[str]:
    deadline = time.monotonic() + ENDING_S
    while (new := {pid: line for pid, line in _children().items() if pid not in before}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return [f"the process {pid} ({line[:100]})" for pid, line in new.items()]
