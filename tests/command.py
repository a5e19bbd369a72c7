"""Runs the `shardlight` command as a user would, and tells what it printed, how it ended and what it left running.

Warm (the default): the command and its workers are forked from the server of `harness.py`, so that nothing imports
torch anew: 1 s instead of 10 s. Everything but the start of the interpreter is the real thing: arguments, environment,
working directory, process sessions, output, signals, exit codes. Cold: the interpreter is started as well.
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import harness

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")

PROGRAMS = ("shardlight.cli", "shardlight.framework.bench.worker")
"""Modules that are forked instead of started; each has a `main`."""
SUBREAPER, DIE_WITH_PARENT = 36, 1  # of prctl
ENDING_S = 1.0  # for processes that are about to end when the command has ended


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    """Its exit code; negative for a signal."""
    output: str
    """Standard output and error, in the order written."""
    seconds: float
    """From the start to the end."""
    ended_s: float
    """When it ended, in seconds since the epoch."""
    left_running: tuple[str, ...]
    """Processes it started, directly or not, that outlived it (and were ended then)."""


def run_command(
    arguments: Sequence[str | os.PathLike],
    cwd: Path,
    variables: Mapping[str, str | None] | None = None,
    timeout_s: float = 60.0,
    cold: bool = False,
    signals: Sequence[tuple[float, int]] = (),
) -> Outcome:
    """Runs `shardlight ARGUMENTS...` in `cwd`.

    Args:
        arguments: what follows `shardlight`; with `cold`, a whole command line if the first is an absolute path.
        variables: set in its environment; None removes one.
        timeout_s: it is killed then, and the test fails.
        cold: start the interpreter instead of forking.
        signals: (seconds after the start, signal number) to send to the command.
    Raises: TimeoutError: with what it had printed.
    """
    harness.start_server()
    env = {k: v for k, v in os.environ.items() if k not in harness.LAUNCH_VARIABLES} | dict(variables or {})
    env = {k: v for k, v in env.items() if v is not None}
    ours, theirs = harness.CONTEXT.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        job = (list(map(str, arguments)), str(cwd), env, f"{folder}/output", timeout_s, cold, list(signals))
        keeper = harness.CONTEXT.Process(target=_keep, args=(job, theirs))
        keeper.start()
        theirs.close()
        try:
            word = pickle.loads(ours.recv_bytes()) if ours.poll(timeout_s + 30) else "no word from its keeper"
        finally:
            ours.close()
            keeper.kill()
            keeper.join()
        output = Path(folder, "output").read_text(errors="replace")
    if isinstance(word, str):
        raise TimeoutError(f"shardlight {' '.join(map(str, arguments))}: {word}\n{output}")
    code, seconds, ended_s, left = word
    return Outcome(code, output, seconds, ended_s, tuple(left))


def run_together(lines: Sequence[Sequence[str]], cwd: Path, variables: Sequence[Mapping], **options) -> list[Outcome]:
    """Runs several commands at the same time, each with its own variables, as a cluster's launcher would."""
    harness.start_server()
    with ThreadPoolExecutor(len(lines)) as pool:
        jobs = [pool.submit(run_command, *job, **options) for job in zip(lines, repeat(cwd), variables, strict=False)]
        return [job.result() for job in jobs]


def torchrun_variables(rank: int, world_size: int, port: int = 0) -> dict[str, str]:
    """What torchrun sets for a worker on one node."""
    port = port or harness.free_port()
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    numbers |= {"GROUP_RANK": 0, "MASTER_PORT": port}
    return {k: str(v) for k, v in numbers.items()} | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}


def slurm_variables(rank: int, world_size: int, job: int) -> dict[str, str]:
    """What srun sets for a task on one node."""
    numbers = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_JOB_ID": job}
    numbers |= {"SLURM_NTASKS": world_size, "SLURM_NTASKS_PER_NODE": world_size, "SLURM_NNODES": 1}
    return {k: str(v) for k, v in numbers.items()} | {"SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NAME": "train"}


def _keep(job: tuple, pipe: multiprocessing.connection.Connection) -> None:
    """Starts the command, waits for it, and looks for what it left: orphans come to their nearest subreaper."""
    arguments, cwd, env, output, timeout_s, cold, signals = job
    gc.freeze()  # [Note: inherited objects]
    multiprocessing.set_start_method(None, force=True)  # as in `harness._rank`
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    started = time.monotonic()
    pid = _fork(lambda: _command(arguments, cold), env, cwd=cwd, out=os.open(output, os.O_WRONLY | os.O_CREAT, 0o600))
    code = None
    while code is None and time.monotonic() - started < timeout_s:
        while signals and time.monotonic() - started > signals[0][0]:
            os.kill(pid, signals.pop(0)[1])
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        select.select([], [], [], 0.02)
    seconds, ended_s = time.monotonic() - started, time.time()
    while _descendants() and time.monotonic() - started < seconds + ENDING_S:
        time.sleep(0.05)
    left = _descendants()
    while now := _descendants():
        for other in now:
            os.kill(other, signal.SIGKILL)
        time.sleep(0.05)
    word = (code, seconds, ended_s, list(left.values()))
    if code is None:
        word = f"still running after {timeout_s} s, with the processes {list(left.values())}"
    pipe.send_bytes(pickle.dumps(word))


def _descendants() -> dict[int, str]:
    """Living descendants of this process, id to command line; reaps the dead among its children."""
    parents, lines = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            parents[int(entry.name)] = (int(parent), state)
            lines[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:200]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
    found, front = set(), {os.getpid()}
    while front:
        front = {pid for pid, (parent, _) in parents.items() if parent in front}
        found |= front
    for pid in found:
        if parents[pid] == (os.getpid(), "Z"):
            os.waitpid(pid, os.WNOHANG)
    return {pid: f"{pid}: {lines.get(pid, '')}" for pid in found if parents[pid][1] != "Z"}


def _command(arguments: list[str], cold: bool) -> None:
    if cold:
        line = arguments if arguments[0].startswith("/") else [sys.executable, "-P", "-m", "shardlight.cli", *arguments]
        os.execv(line[0], line)
    from shardlight.framework import launch

    launch.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": popen})
    _main(arguments)


def _main(arguments: list[str], module: str = PROGRAMS[0]) -> None:
    sys.argv = ["shardlight", *arguments]
    importlib.import_module(module).main()


def _fork(
    body,
    env: Mapping[str, str],
    cwd: str | None = None,
    out: int | None = None,
    session: bool = False,
    pass_fds: Sequence[int] = (),
) -> int:
    """Forks a child that runs `body` as a program of its own; returns the child's id."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent, pid = os.getpid(), os.fork()
    if pid:
        if out is not None:
            os.close(out)
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if session:
            os.setsid()
        os.chdir(cwd or ".")
        os.environ.clear()
        os.environ.update(env)
        for number in (1, 2) if out is not None else ():
            os.dup2(out, number)
        for number in pass_fds:
            os.set_inheritable(number, True)
        _reset_as_exec_would()
        body()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reset_as_exec_would() -> None:
    """Drops what a started program would not have: the parent's signal handlers and its files."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            if number > 2 and not os.get_inheritable(number):
                os.close(number)


def popen(command: Sequence[str], **options):
    """A worker is forked, with the modules it would import; any other program is started as ever."""
    forked = any(program in command for program in PROGRAMS)
    return ForkedPopen(command, **options) if forked else subprocess.Popen(command, **options)


class ForkedPopen:
    """What the launcher needs of subprocess.Popen, for a worker forked from this process."""

    def __init__(self, command, env, stdin=None, stdout=None, stderr=None, start_new_session=False, pass_fds=()):
        (module,) = [program for program in PROGRAMS if program in command]
        arguments = list(command[command.index(module) + 1 :])
        out = None if stdout is None else os.dup(stdout.fileno())
        self.pid = _fork(lambda: _main(arguments, module), env, None, out, start_new_session, pass_fds)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
