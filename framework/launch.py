"""Starts the local workers of a run and ends all of them when one fails. Standard library only.

[Note: how a run ends] Each worker leads a session of its own, so that its children (loader workers) end with it, and
dies with the supervisor (PR_SET_PDEATHSIG, Linux). When a rank raises, exits or is killed, the others are given a
moment to report what they see, then SIGTERM, a short grace, SIGKILL. The rank that was the cause is shown first.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from shardlight.framework.report import FOLDER, Report, cause_of, read_report

STORE = "SHARDLIGHT_STORE"
"""Environment variable: path of the file the ranks of a local run meet at, so that no port is needed."""

_FOREIGN = ("TORCHELASTIC_", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables of another launcher, which would make a worker take itself for one of that launcher's."""

POLL_S = 0.05
TAIL_LINES = 20

# Sets PR_SET_PDEATHSIG (1) to SIGKILL, which an exec keeps, and becomes the worker. Not a preexec_fn: forking with
# Python code after the fork is unsafe once the supervisor has threads.
_DIE_WITH_PARENT = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,9)\n"
    "os.getppid()==int(sys.argv[1]) or os._exit(1)\n"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)

# Reads the ids of workers, one a line, until its input ends: that is when the supervisor is gone, killed even. Where
# that was not the good end ("done"), it ends their groups, which are their children's too. Then it removes the folder.
_SWEEP = (
    "import os,shutil,sys\n"
    "lines=sys.stdin.read().split()\n"
    "for line in lines if 'done' not in lines else []:\n"
    "    try: os.killpg(int(line),9)\n"
    "    except (ProcessLookupError,PermissionError): pass\n"
    "shutil.rmtree(sys.argv[1],ignore_errors=True)"
)


class Sweeper:
    """A process of its own that removes a run's private folder, and its workers, even where the supervisor is killed.

    Where it was killed as well, the next one removes the folder: this process holds a lock in it while it lives.

    Args:
        folder: the private folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._alive = _hold(folder)
        _remove_stale(folder.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SWEEP, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def tell(self, word: str) -> None:
        """Gives it the id of a worker, or "done"."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(word, file=self.process.stdin, flush=True)

    def finish(self) -> None:
        """Lets it remove the folder, and waits for that."""
        self.tell("done")
        self.process.communicate()
        # Where someone has killed the sweeper, the folder is still there.
        shutil.rmtree(self.folder, ignore_errors=True)
        self._alive.close()


def _hold(folder: Path) -> TextIO:
    """Puts a file into a run's folder that is locked until this process ends."""
    # It gets its name when it is locked: without a lock it would be taken for that of a run that is gone.
    new = (folder / "alive.new").open("w")
    fcntl.flock(new, fcntl.LOCK_EX)
    (folder / "alive.new").rename(folder / "alive")
    return new


def _remove_stale(parent: Path) -> None:
    """Removes private folders whose supervisor and sweeper were both killed."""
    for path in parent.glob("shardlight-*/alive"):
        with contextlib.suppress(OSError):  # removed meanwhile, or another user's
            with path.open("r+") as alive:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)


class Worker:
    """One started worker process.

    Args:
        pass_fds: open files that it keeps.

    Attributes:
        rank: its rank.
        log: file its output goes to; None for the terminal.
        exit_code: None while it runs; negative for a signal, as in subprocess.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path | None,
        pass_fds: Sequence[int] = (),
    ):
        self.rank = rank
        self.log = log
        self.exit_code: int | None = None
        self.ended_s = 0.0
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        with contextlib.ExitStack() as stack:
            out = None if log is None else stack.enter_context(log.open("ab"))
            self.process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
            )

    def poll(self) -> bool:
        """Whether it has ended; then what is left of its session is ended as well.

        The group is killed before the leader is reaped: until then its id cannot belong to anyone else.
        """
        if self.exit_code is not None:
            return True
        if hasattr(os, "waitid"):
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                return False
            self._kill_group()
            self.exit_code = self.process.wait()
        else:
            self.exit_code = self.process.poll()
            if self.exit_code is None:
                return False
            self._kill_group()
        self.ended_s = time.time()
        return True

    def send(self, number: int) -> None:
        """Sends a signal to the worker itself."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill(self) -> None:
        """Ends the worker and its children at once."""
        if self.exit_code is None:
            self._kill_group()
            while not self.poll():
                time.sleep(POLL_S / 5)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def failure(self, reports: Path, *, expect_done: bool) -> Report | None:
        """What went wrong with this worker so far, or None."""
        report = read_report(reports, self.rank)
        if report is not None or self.exit_code is None:
            return report
        done = (reports / f"rank{self.rank}.done").exists() or not expect_done
        if self.exit_code == 0 and done:
            return None
        message, code = f"exit code {self.exit_code}", self.exit_code
        if self.exit_code < 0:
            message, code = f"killed by signal {-code} ({_signal_name(-code)})", 128 - code
            if -self.exit_code == signal.SIGKILL:
                message += ", which is what the system does when memory runs out (see dmesg)"
        elif self.exit_code == 0:
            message, code = "exit code 0 before the end of the run", 1
        return Report(self.rank, self.ended_s, "", message, "", consequence=False, exit_code=code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def worker_env(rank: int, world_size: int, folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: torchrun's variables, the store file, the threads it may use.

    Args:
        rank: of the worker.
        world_size: workers of the run, all on this machine.
        folder: the private folder of the run.
        env: what to build on.
    """
    made = {name: value for name, value in env.items() if not name.startswith(_FOREIGN)}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    made.setdefault("OMP_NUM_THREADS", str(max(1, cores // world_size)))
    made |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "NODE_RANK": "0"}
    made |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "GROUP_WORLD_SIZE": "1"}
    # Nothing listens on this port: the ranks meet at the store file.
    made |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "shardlight"}
    made |= {STORE: str(folder / "store"), FOLDER: str(folder / "reports")}
    return made


class _Signals:
    """Takes SIGINT, SIGTERM and SIGHUP while the workers run."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handles the signals; one that is ignored (nohup) stays so. Only a main thread can."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._take)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Supervisor:
    """Watches the workers of one run to their end; see [Note: how a run ends].

    Args:
        workers: the started workers.
        reports: folder the workers write their failures into.
        signals: taken by this process.
        expect_done: exit code 0 counts only with `mark_done`.
        settle_s: how long to wait for the reports of the others after a failure; five times that while every
            failure seen is the consequence of another one.
        grace_s: between SIGTERM and SIGKILL.
        stop_s: between a signal to this process and SIGKILL for workers that do not end.
    """

    def __init__(
        self,
        workers: list[Worker],
        reports: Path,
        signals: _Signals,
        *,
        expect_done: bool,
        settle_s: float,
        grace_s: float,
        stop_s: float,
    ):
        self.workers = workers
        self.reports = reports
        self.signals = signals
        self.expect_done = expect_done
        self.settle_s = settle_s
        self.grace_s = grace_s
        self.stop_s = stop_s
        self.forwarded = 0

    def failures(self) -> list[Report]:
        """What went wrong so far, on any rank."""
        found = [worker.failure(self.reports, expect_done=self.expect_done) for worker in self.workers]
        return [report for report in found if report is not None]

    def running(self) -> bool:
        """Whether any worker still runs."""
        return not all([worker.poll() for worker in self.workers])

    def watch(self) -> list[Report]:
        """Returns when every worker has ended; with the failures seen before any worker was ended from here."""
        stop_at = None
        while self.running():
            if self._forward():
                if len(self.signals.received) > 1:
                    break
                stop_at = time.monotonic() + self.stop_s if stop_at is None else stop_at
                if any(worker.exit_code for worker in self.workers):
                    stop_at = min(stop_at, time.monotonic() + self.grace_s)
                    self.stop_s = self.grace_s
                if time.monotonic() > stop_at:
                    break
            elif self.failures():
                return self._settle()
            time.sleep(POLL_S)
        self.end(0.0)
        return self.failures()

    def _forward(self) -> bool:
        for number in self.signals.received[self.forwarded :]:
            for worker in self.workers:
                worker.send(number)
            self.forwarded += 1
        return self.forwarded > 0

    def _settle(self) -> list[Report]:
        start = time.monotonic()
        while self.running() and not self.signals.received:
            only_consequences = all(report.consequence for report in self.failures())
            if time.monotonic() - start > self.settle_s * (5 if only_consequences else 1):
                break
            time.sleep(POLL_S)
        failures = self.failures()
        self.end(self.grace_s)
        return failures

    def end(self, grace_s: float) -> None:
        """SIGTERM, up to `grace_s`, then SIGKILL for every worker and its children."""
        if grace_s and self.running():
            for worker in self.workers:
                worker.send(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self.running() and time.monotonic() < deadline and len(self.signals.received) <= 1:
                time.sleep(POLL_S)
        for worker in self.workers:
            worker.kill()


def run_workers(
    command: Sequence[str],
    world_size: int,
    *,
    env: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    expect_done: bool = False,
    settle_s: float = 1.0,
    grace_s: float = 5.0,
    stop_s: float = 60.0,
    terse: tuple[str, ...] = (),
    err: TextIO | None = None,
) -> int:
    """Runs `command` once per rank on this machine and waits for all of them.

    Args:
        command: the worker's program and arguments; the rank is in its environment.
        world_size: number of workers.
        env: base environment; this process's where None.
        log_dir: output of ranks 1, 2, ... goes to log_dir/rank1.log, ...; rank 0 has the terminal. None: not kept.
        expect_done: a worker that ends without `mark_done` failed, even with exit code 0.
        settle_s, grace_s, stop_s: see `Supervisor`.
        terse: names of exceptions that are shown without their traceback.
        err: where failures are shown; sys.stderr where None.
    Returns: 0, or the exit code of the worker that was the cause (128 + n for signal n).
    """
    folder = Path(tempfile.mkdtemp(prefix="shardlight-"))
    logs = folder / "logs" if log_dir is None else log_dir
    signals, workers, sweeper = _Signals(), [], Sweeper(folder)
    try:
        (folder / "reports").mkdir()
        logs.mkdir(parents=True, exist_ok=True)
        limits = {"settle_s": settle_s, "grace_s": grace_s, "stop_s": stop_s}
        with signals.installed():
            watcher = Supervisor(workers, folder / "reports", signals, expect_done=expect_done, **limits)
            try:
                for rank in range(world_size):
                    made = worker_env(rank, world_size, folder, os.environ if env is None else env)
                    workers.append(Worker(rank, command, made, None if rank == 0 else logs / f"rank{rank}.log"))
                    sweeper.tell(str(workers[-1].process.pid))
                failures = watcher.watch()
            finally:
                watcher.end(0.0)
        return _outcome(failures, workers, signals.received, terse, err or sys.stderr, keep_logs=log_dir is not None)
    finally:
        sweeper.finish()


def _outcome(
    failures: list[Report],
    workers: list[Worker],
    received: list[int],
    terse: tuple[str, ...],
    err: TextIO,
    *,
    keep_logs: bool,
) -> int:
    if received and any(worker.exit_code for worker in workers):
        print(f"shardlight: ended by {_signal_name(received[0])}.", file=err)
        return 128 + received[0]
    if not failures:
        return 0
    cause = cause_of(failures)
    print("\n".join(describe(cause, failures, workers, terse, keep_logs=keep_logs)), file=err, flush=True)
    return cause.exit_code or 1


def describe(
    cause: Report, failures: list[Report], workers: list[Worker], terse: tuple[str, ...], *, keep_logs: bool
) -> list[str]:
    """The lines that tell a person what ended a run: the cause with its traceback, then what followed from it."""
    lines = [f"shardlight: rank {cause.rank} of {len(workers)} failed: {cause.headline}"]
    log = workers[cause.rank].log
    if cause.kind in terse:
        lines += cause.message.strip().split("\n")[1:]
    elif cause.traceback:
        lines.append(cause.traceback.rstrip())
    elif log is not None and log.exists():
        tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        lines += [f"The end of its output{f' ({log})' if keep_logs else ''}:", *tail] if tail else []
    for other in sorted(failures, key=lambda report: report.rank):
        if other.rank != cause.rank:
            same = (other.kind, other.message) == (cause.kind, cause.message)
            lines.append(f"rank {other.rank} then ended with {'the same error' if same else other.headline}")
    return lines
