"""A Chrome trace of a few steps of a contender, for ui.perfetto.dev or chrome://tracing: one file per rank.

torch.profiler puts all it sees of a thread in one row, where ranges that begin in one autograd node and end in another
overlap what is in it, and viewers drop them. So the ranges of [Note: ranges] get rows of their own, and the time
between the start of a transfer and the end of the wait for it, in which it is under way, is shown beside them.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch
from shardlight.strategies.engine.ranges import COMPUTING, STEP, TRANSFERS
from torch.autograd.profiler import record_function

TRAINING_STEP = "training step"
ROWS = {"steps": (TRAINING_STEP, STEP), "compute": COMPUTING, "transfers": TRANSFERS}
"""Names of rows, and what the names of the ranges in them begin with."""
STARTED, WAITED = " (start)", " (wait)"

Event = dict[str, Any]


class StepTrace:
    """Traces steps of one contender on this rank.

    Args:
        who: the contender.
        folder: where the file "WHO-rankN.json" goes.
    """

    def __init__(self, who: str, folder: str) -> None:
        rank = os.environ["RANK"]
        self._process = f"{who}, rank {rank}"
        self._file = Path(folder) / f"{who}-rank{rank}.json"
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profile.start()
        self._step = record_function(TRAINING_STEP)

    def begin_step(self) -> None:
        """Opens the range of a step."""
        self._step = record_function(TRAINING_STEP)
        self._step.__enter__()

    def end_step(self) -> None:
        """Closes it."""
        self._step.__exit__(None, None, None)

    def write(self) -> None:
        """Ends the trace and writes the file."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._file))
        trace = json.loads(self._file.read_text())
        trace["traceEvents"] = arrange(trace["traceEvents"], self._process)
        self._file.write_text(json.dumps(trace))


def arrange(events: list[Event], process: str) -> list[Event]:
    """Returns the events of a trace with the engine's ranges in rows of their own; `process` is the process's name."""
    rows = {name: number for number, name in enumerate(ROWS, 1)}
    moved = []
    for event in events:
        row = _row(event)
        if row is not None:
            event["tid"] = rows[row]
            moved.append(event)
        elif event.get("name") == "process_name" and event.get("pid") == os.getpid():
            event["args"]["name"] = process
    if not moved:
        return events
    pid = moved[0]["pid"]
    named = [
        {"ph": "M", "name": kind, "pid": pid, "tid": number, "args": args}
        for name, number in rows.items()
        for kind, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": number - 100}))
    ]
    return [*events, *named, *_under_way(moved)]


def _row(event: Event) -> str | None:
    if event.get("ph") != "X" or event.get("cat") != "user_annotation":
        return None
    return next((row for row, names in ROWS.items() if event["name"].startswith(names)), None)


def _under_way(ranges: list[Event]) -> list[Event]:
    """From the start of each transfer to the end of the wait for it, as events that may overlap."""
    started: dict[str, Event] = {}
    numbers, found = itertools.count(), []
    for event in sorted(ranges, key=lambda e: e["ts"]):
        name = event["name"].removesuffix(STARTED).removesuffix(WAITED)
        if event["name"].endswith(STARTED):
            started[name] = event
        elif event["name"].endswith(WAITED) and name in started:
            same = {"cat": "under way", "name": name, "pid": event["pid"], "tid": event["tid"], "id": next(numbers)}
            found.append({"ph": "b", "ts": started.pop(name)["ts"], **same})
            found.append({"ph": "e", "ts": event["ts"] + event["dur"], **same})
    return found
