"""The rank's side of a benchmark: a training loop that takes a step when it is told to.

A contender's loop is an ordinary one over `Turns`, as over a data loader: the next step's number comes when it is this
contender's turn, so that no two contenders compute at the same time, and asking for the next one ends the step that
is measured. That way a loop of our own and Lightning's Trainer are timed alike.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from shardlight.framework.bench import meters

Message = dict[str, Any]


class Probe(Protocol):
    """Counts something over one step."""

    def start(self) -> None:
        """Counts from here on."""

    def stop(self) -> int:
        """Returns the count since `start`."""


class Trace(Protocol):
    """Traces steps."""

    def begin_step(self) -> None:
        """A step begins."""

    def end_step(self) -> None:
        """It is over."""

    def write(self) -> None:
        """That was the last one."""


class Turns(Iterator[tuple[str, int]]):
    """The steps that this rank is told to take; made when everything is imported and nothing is built.

    Args:
        receive: waits for the next command.
        send: answers it.
    """

    def __init__(self, receive: Callable[[], Message], send: Callable[[Message], None]) -> None:
        self._receive = receive
        self._send = send
        self.probes: dict[str, Callable[[], Probe]] = {"python_calls": meters.CallProbe}
        self.counters: Callable[[str], dict[str, float]] = lambda who: {}
        """Of a contender: what it has counted so far; shown per step."""
        self.gauges: Callable[[str], dict[str, float]] = lambda who: {}
        """Of a contender: what holds at any time between two steps."""
        self.tracer: Callable[[str, str], Trace] | None = None
        """Of a contender and a folder: starts a trace that is to be written there."""
        self._ready = False
        self._command: Message | None = None
        self._next = 0
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._before: Message = {}
        self._probe: Probe | None = None
        self._trace: Trace | None = None
        self._began_s = 0.0
        meters.reset_peak()
        self._base = meters.memory()

    def __next__(self) -> tuple[str, int]:
        """Ends the step before, and waits for this one. Returns: whose step, and its number."""
        now_s = time.perf_counter()
        count = None if self._probe is None else self._probe.stop()
        command = self._command
        if command is not None:
            if self._trace is not None:
                self._trace.end_step()
            self._seconds.append(now_s - self._began_s)
            if self._next == command["first"] + command["steps"]:
                self._answer(command, count)
                command = self._command = None
        if command is None:
            command = self._wait()
        number, self._next = self._next, self._next + 1
        self._began_s = time.perf_counter()
        if self._probe is not None:
            self._probe.start()
        if self._trace is not None:
            self._trace.begin_step()
        return command["who"], number

    def report(self, loss: float) -> None:
        """Notes the loss of the step that is under way, the mean over this rank's rows."""
        self._losses.append(loss)

    def requests(self) -> Iterator[Message]:
        """Every command until the end, for a rank that takes no steps; it answers each with `reply`."""
        self._send({"ready": True})
        while (command := self._receive())["do"] != "end":
            yield command

    def reply(self, answer: Message) -> None:
        """Answers a command of `requests`."""
        self._send(answer)

    def _wait(self) -> Message:
        if not self._ready:
            self._ready = True
            self._send({"ready": True})
        while (command := self._receive())["do"] != "turn":
            if command["do"] == "end":
                raise StopIteration
            who = command["who"]
            self._send({"gauges": {**self.gauges(who), **meters.above(self._base, meters.memory())}})
        self._command = command
        self._next = command["first"]
        self._losses, self._seconds = [], []
        self._probe = self.probes[command["count"]]() if command.get("count") else None
        traces = command.get("traces")
        self._trace = self.tracer(command["who"], traces) if self.tracer is not None and traces else None
        faults = meters.page_faults()
        self._before = {"counters": self.counters(command["who"]), "cpu_s": meters.cpu_s(), "page_faults": faults}
        return command

    def _answer(self, command: Message, count: int | None) -> None:
        before, steps = self._before, command["steps"]
        used_s, faults = meters.cpu_s() - before["cpu_s"], meters.page_faults() - before["page_faults"]
        after = self.counters(command["who"])
        per_step: dict[str, float] = {"cpu_ms": 1000 * used_s / steps, "page_faults": faults / steps}
        per_step |= {name: (after[name] - before["counters"][name]) / steps for name in after}
        if count is not None:
            per_step = {command["count"]: count}
        if self._trace is not None:
            self._trace.write()
        self._probe = self._trace = None
        answer = {"losses": self._losses, "seconds": self._seconds, "per_step": per_step}
        self._send({**answer, "ended_s": time.monotonic()})
