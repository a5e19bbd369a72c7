"""What a worker leaves behind when it ends or fails, and how the supervisor tells the cause from its consequences.

A worker writes its exception as JSON into a folder the supervisor gave it, before anything that may hang (process
groups, loaders) is torn down. One rank's error makes its peers fail too, a moment later and with errors of their
own about lost connections: those are consequences, and the supervisor shows them after the cause.
"""

import atexit
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "SHARDLIGHT_REPORTS"
"""Environment variable: the folder reports go to; unset where no supervisor of ours is."""

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|timed out waiting|wait timeout"
    r"|connection closed by peer|DistNetworkError|ncclRemoteError|ncclSystemError|SIGTERMException",
    re.IGNORECASE,
)
_PEER_ERRORS = {"CollectiveError", "DistNetworkError", "DistStoreError", "SIGTERMException"}


@dataclass(frozen=True)
class Report:
    """A worker's failure."""

    rank: int
    """Rank of the worker."""
    time_s: float
    """When it was written, in seconds since the epoch."""
    kind: str
    """Name of the exception's class."""
    message: str
    """Text of the exception, or "exit code 7", "killed by signal 9 (SIGKILL)"."""
    traceback: str
    """The formatted traceback; empty where there is none."""
    consequence: bool
    """Whether it looks like the result of another rank's failure."""
    exit_code: int = 1
    """Exit code of the process, or 128 + signal."""

    @property
    def headline(self) -> str:
        """One line: "ValueError: boom"."""
        first = self.message.strip().split("\n")[0]
        return f"{self.kind}: {first}" if self.kind else first


def report_of(error: BaseException, rank: int) -> Report:
    """Describes an exception; an exception raised while a lost peer was handled is a consequence as well."""
    kind, message, code = type(error).__name__, str(error), 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        kind, message = "", f"exit code {code}"
    return Report(
        rank=rank,
        time_s=time.time(),
        kind=kind,
        message=message,
        traceback="".join(traceback.format_exception(error)),
        consequence=any(map(_is_lost_peer, _chain(error))),
        exit_code=code,
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_lost_peer(error: BaseException) -> bool:
    if any(cls.__name__ in _PEER_ERRORS for cls in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError | OSError) and _LOST_PEER.search(str(error)) is not None


def write_report(error: BaseException) -> bool:
    """Writes the report of this worker, the first time only.

    Returns: whether a supervisor reads it; where none does, nothing is written.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return False
    rank = int(os.environ["RANK"])
    path = Path(folder) / f"rank{rank}.json"
    if not path.exists() and path.parent.is_dir():
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(report_of(error, rank))))
        draft.rename(path)
    return True


def mark_done() -> None:
    """Tells the supervisor that this worker came to its end; exit code 0 without it is a failure."""
    if folder := os.environ.get(FOLDER):
        (Path(folder) / f"rank{os.environ['RANK']}.done").touch()


def read_report(folder: Path, rank: int) -> Report | None:
    """The report of a rank, or None where it left none."""
    try:
        return Report(**json.loads((folder / f"rank{rank}.json").read_text()))
    except FileNotFoundError:
        return None


def cause_of(reports: Iterable[Report]) -> Report:
    """The earliest failure that is not a consequence, else the earliest."""
    return min(reports, key=lambda report: (report.consequence, report.time_s, report.rank))


def leave_well() -> None:
    """Ends a worker that has done its work, without the teardown of native libraries, whose threads can abort it."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
