"""One rank of a contender: `python -m shardlight.framework.bench.worker JOB`, JOB being JSON.

Knows neither torch nor a contender: it imports the module that the job names, whose `run(job, turns)` is the loop.
"""

import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import traceback

from shardlight.framework.bench.turns import Message, Turns
from shardlight.framework.report import write_report

CHANNEL = "SHARDLIGHT_BENCH_CHANNEL"
"""Environment variable: the number of the socket to the benchmark, one JSON object a line in either direction."""


def main() -> None:
    """Runs the loop of the job that the command line holds; a failure is left as a report."""
    # For a rank that does not answer: the benchmark shows where it stands.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    job = json.loads(sys.argv[1])
    channel = socket.socket(fileno=int(os.environ[CHANNEL]))
    lines = channel.makefile("r", encoding="utf-8")

    def receive() -> Message:
        line = lines.readline()
        # The benchmark is gone.
        return json.loads(line) if line else {"do": "end"}

    def send(message: Message) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    code = 0
    try:
        module = importlib.import_module(job["module"])
        module.run(job, Turns(receive, send))
    except BaseException as error:
        write_report(error)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads and process groups of a failed run may never come to an end.
    os._exit(code)


if __name__ == "__main__":
    main()
