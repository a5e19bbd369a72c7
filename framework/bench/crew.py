"""The benchmark's side of a contender: its standing ranks, what they are told, and their end."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardlight.framework.bench.worker import CHANNEL
from shardlight.framework.launch import TAIL_LINES, Sweeper, Worker, describe, worker_env
from shardlight.framework.report import cause_of

SETTLE_S = 1.0
"""After a rank's failure, for the others to report."""
POLL_S = 0.2


class BenchError(Exception):
    """A contender failed, or see BenchRequestError."""


class BenchRequestError(BenchError):
    """A benchmark cannot be run as asked."""


class Crew:
    """The ranks that host one contender or several; they wait, and step when they are told to.

    Args:
        name: shown in faults.
        processes: number of ranks.
        job: what `worker` runs: `module`, and what that module's `run` needs.
        folder: a private one of this crew, made here.
        sweeper: told of the processes, which it ends should the benchmark be killed.
        limit_s: for any one answer.
        threads: of a rank.
    Raises: BenchError, by every call: a rank failed or did not answer; the ranks have been ended then.
    """

    def __init__(
        self,
        name: str,
        processes: int,
        job: dict[str, Any],
        folder: Path,
        sweeper: Sweeper,
        limit_s: float = 600.0,
        threads: int = 1,
    ) -> None:
        self.name = name
        self.limit_s = limit_s
        self.workers: list[Worker] = []
        self._reports = folder / "reports"
        self._sockets: list[socket.socket] = []
        self._reports.mkdir(parents=True)
        # -P: the working directory is not on sys.path, as under the console script.
        flags = [*subprocess._args_from_interpreter_flags(), "-P"]
        command = [sys.executable, *flags, "-m", "shardlight.framework.bench.worker", json.dumps(job)]
        base = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.launched_s = time.monotonic()
        try:
            for rank in range(processes):
                ours, theirs = socket.socketpair()
                self._sockets.append(ours)
                env = worker_env(rank, processes, folder, base) | {CHANNEL: str(theirs.fileno())}
                with theirs:
                    log = folder / f"rank{rank}.log"
                    self.workers.append(Worker(rank, command, env, log, pass_fds=(theirs.fileno(),)))
                sweeper.tell(str(self.workers[-1].process.pid))
            self._wait_for(range(processes), "become ready")
        except BaseException:
            self.kill()
            raise

    def ask(self, command: dict[str, Any], processes: int | None = None) -> list[dict[str, Any]]:
        """Tells the first `processes` ranks (default: all) one thing, and returns their answers by rank."""
        ranks = range(len(self.workers) if processes is None else processes)
        for rank in ranks:
            # A rank that is gone is noticed below.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._sockets[rank].sendall(json.dumps(command).encode() + b"\n")
        return self._wait_for(ranks, f"do '{command['do']}'")

    def _wait_for(self, ranks: range, what: str) -> list[dict[str, Any]]:
        texts: dict[int, bytes] = dict.fromkeys(ranks, b"")
        waiting, deadline = set(ranks), time.monotonic() + self.limit_s
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self._sockets[rank], selectors.EVENT_READ, rank)
            while waiting:
                for key, _ in selector.select(POLL_S):
                    received = self._sockets[key.data].recv(1 << 20)
                    texts[key.data] += received
                    if texts[key.data].endswith(b"\n"):
                        waiting.discard(key.data)
                    if not received or key.data not in waiting:
                        selector.unregister(key.fileobj)
                if waiting and any([worker.poll() for worker in self.workers]):
                    self._fail()
                if waiting and time.monotonic() > deadline:
                    self._give_up(sorted(waiting), what)
        return [json.loads(texts[rank]) for rank in ranks]

    def _fail(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and not all([worker.poll() for worker in self.workers]):
            time.sleep(POLL_S / 4)
        found = [worker.failure(self._reports, expect_done=True) for worker in self.workers]
        failures = [report for report in found if report is not None]
        self.kill()
        lines = describe(cause_of(failures), failures, self.workers, (), keep_logs=False)
        raise BenchError("\n".join([f"contender '{self.name}' failed; the benchmark ends here.", *lines]))

    def _give_up(self, ranks: list[int], what: str) -> None:
        lines = [f"contender '{self.name}' did not {what} within {self.limit_s:g} s on rank {ranks}:"]
        for rank in ranks:
            self.workers[rank].send(signal.SIGUSR1)
        time.sleep(SETTLE_S)
        for rank in ranks:
            log = self.workers[rank].log
            lines += [] if log is None else log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        self.kill()
        raise BenchError("\n".join([*lines, "The benchmark ends here."]))

    def end(self, grace_s: float = 10.0) -> None:
        """Lets the ranks come to an end, and ends what is left of them."""
        for channel in self._sockets:
            with contextlib.suppress(OSError):
                channel.sendall(b'{"do": "end"}\n')
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and not all([worker.poll() for worker in self.workers]):
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Ends the ranks at once, and their children."""
        for worker in self.workers:
            worker.kill()
        for channel in self._sockets:
            channel.close()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end()
        else:
            self.kill()
