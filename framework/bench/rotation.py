"""Contenders take turns: who stands ready together, and what is noted of each turn."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardlight.framework.bench import meters
from shardlight.framework.bench.crew import BenchRequestError, Crew
from shardlight.framework.bench.results import Samples
from shardlight.framework.bench.sizes import Size
from shardlight.framework.launch import Sweeper

Say = Callable[[str], None]
TRACED_STEPS = 2
WARM_UP_STEPS = 2
"""After the first step, before the timed ones."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way of training the model, and what is known of it before it is started."""

    name: str
    module: str
    """The module whose `run` is its loop; see contenders/loop.py."""
    processes: int = 2
    state_bytes: float = 16
    """Of memory per parameter and rank; about, for planning only."""
    package: str | None = None
    """What has to be installed."""
    ours: bool = False
    """Its engine names what it does in a trace."""

    def memory_bytes(self, size: Size) -> float:
        """About what all its ranks take while they wait and while they step."""
        own = 0.4e9 * self.processes  # the interpreter with its libraries, and malloc's free pages
        return own + self.state_bytes * size.numel * self.processes + size.activation_bytes


@dataclass
class Standing:
    """A contender whose ranks are ready for its turn."""

    contender: Contender
    crew: Crew
    samples: Samples
    size: Size
    steps: int = 0
    """Taken so far."""
    cpu_s: float = field(default=0.0)
    """Used by its ranks in its turns."""

    def turn(
        self, key: str, steps: int, count: str | None = None, timed: bool = True, traces: Path | None = None
    ) -> float:
        """Lets it take some steps, and notes what they cost. Returns when they ended, in monotonic seconds.

        Args:
            key: of the samples.
            count: a probe of Turns.
            timed: whether the time counts.
            traces: the folder for traces of them.
        """
        who, first = self.contender.name, self.steps
        command = {"do": "turn", "who": who, "first": first, "steps": steps, "count": count}
        if traces is not None:
            command["traces"] = str(traces.absolute())
        sent = meters.loopback_bytes()
        answers = self.crew.ask(command, self.contender.processes)
        sent_after = meters.loopback_bytes()
        self.steps += steps
        self.samples.add_losses(who, first, [answer["losses"] for answer in answers])
        self.cpu_s += sum(answer["per_step"].get("cpu_ms", 0.0) for answer in answers) * steps / 1000
        if timed or count is not None:
            self.samples.add_ranks(who, key, [answer["per_step"] for answer in answers])
        if timed:
            milliseconds = [{"step_ms": 1000 * sum(answer["seconds"]) / steps} for answer in answers]
            self.samples.add_ranks(who, key, milliseconds)
            slowest = max(row["step_ms"] for row in milliseconds)
            self.samples.add(who, "tokens_per_s", key, 1000 * self.size.tokens / slowest)
            if sent is not None and sent_after is not None:
                self.samples.add(who, "loopback_bytes", key, (sent_after - sent) / steps)
        return max(answer["ended_s"] for answer in answers)

    def look(self, alone: bool) -> None:
        """Notes what holds between two steps. `alone`: the processes are its own, and so is their memory."""
        who = self.contender.name
        answers = self.crew.ask({"do": "look", "who": who}, self.contender.processes)
        gauges = [answer["gauges"] for answer in answers]
        of_process = ("steady_memory_bytes", "peak_memory_bytes")
        self.samples.add_ranks(who, "", [{k: v for k, v in g.items() if alone or k not in of_process} for g in gauges])

    def count(self) -> None:
        """Counts over steps that are not timed, since counting takes time."""
        self.turn("", 1, count="python_calls", timed=False)
        if self.contender.processes > 1:
            self.turn("", 1, count="collectives", timed=False)


def groups(
    contenders: list[Contender], together: Iterable[tuple[str, str]], size: Size, memory_bytes: float
) -> list[list[Contender]]:
    """Cuts contenders into groups that fit into memory, with each pair in some group together; a few pairs, first fit.

    Raises: BenchRequestError: two that have to be measured beside each other do not fit.
    """
    cost = {c.name: c.memory_bytes(size) for c in contenders}
    made: list[set[str]] = []
    for pair in together:
        wanted = set(pair)
        needed = sum(cost[name] for name in wanted)
        if needed > memory_bytes:
            raise BenchRequestError(
                f"{' and '.join(sorted(wanted))} at {size.name} need about {needed / 1e9:.1f} GB of memory together, "
                f"and {memory_bytes / 1e9:.1f} GB can be used. Take a smaller --size, or leave one out with --against."
            )
        if any(wanted <= group for group in made):
            continue
        fitting = [g for g in made if sum(cost[name] for name in g | wanted) <= memory_bytes]
        if fitting:
            # The one that has most of the pair already: fewer starts.
            max(fitting, key=lambda g: len(g & wanted)).update(wanted)
        else:
            made.append(wanted)
    return [[c for c in contenders if c.name in group] for group in made]


class Rotation:
    """Starts contenders and lets them take turns.

    Args:
        size: of the model, and how many turns.
        folder: private, removed by the sweeper.
        sweeper: ends the ranks should this process be killed.
        say: told what happens.
        limit_s: see Crew.
        traces: the folder for traces of our contenders' steps.
    """

    def __init__(
        self,
        size: Size,
        folder: Path,
        sweeper: Sweeper,
        say: Say,
        limit_s: float = 600.0,
        traces: Path | None = None,
    ) -> None:
        self.size = size
        self.samples = Samples()
        self.other_cores: list[float] = []
        """Cores that other programs had, in each round."""
        self._folder = folder
        self._sweeper = sweeper
        self._say = say
        self._limit_s = limit_s
        self._traces = traces
        self._started = 0
        self._groups = 0

    def start(self, hosts: Mapping[str, Contender], module: str) -> Crew:
        """Starts the ranks of a crew; they have built their models when it returns."""
        self._started += 1
        folder = self._folder / f"crew{self._started}"
        job = {"module": module, "size": asdict(self.size), "hosts": {n: c.processes for n, c in hosts.items()}}
        processes = max(c.processes for c in hosts.values())
        name = ", ".join(hosts)
        return Crew(name, processes, job, folder, self._sweeper, self._limit_s)

    def start_alone(self, contender: Contender, key: str) -> Standing:
        """Starts a contender in processes of its own; notes the time from the launch to the end of its first step."""
        self._say(f"starting {contender.name}")
        crew = self.start({contender.name: contender}, contender.module)
        standing = Standing(contender, crew, self.samples, self.size)
        ended_s = standing.turn(key, 1, timed=False)
        self.samples.add(contender.name, "startup_s", key, ended_s - crew.launched_s)
        return standing

    def start_again(self, contenders: Iterable[Contender], times: int) -> None:
        """Only starts contenders and ends them again, in turn: a start-up time is noisy."""
        several = list(contenders)
        for number in range(times):
            for contender in several:
                self.start_alone(contender, f"start {number}").crew.end()

    def run_group(self, group: list[Contender]) -> None:
        """Lets a group take turns, each in processes of its own, and ends it."""
        with ExitStack() as stack:
            standing = []
            for contender in group:
                one = self.start_alone(contender, f"group {self._groups}")
                stack.enter_context(one.crew)
                standing.append(one)
            self.rounds(standing, alone=True)

    def run_hosted(self, crews: Mapping[str, list[Contender]]) -> None:
        """Lets contenders take turns that share processes, those of one module each."""
        with ExitStack() as stack:
            standing = []
            for module, hosted in crews.items():
                self._say(f"starting {', '.join(c.name for c in hosted)}")
                crew = stack.enter_context(self.start({c.name: c for c in hosted}, module))
                standing += [Standing(c, crew, self.samples, self.size) for c in hosted]
            self.rounds(standing, alone=False)

    def rounds(self, standing: list[Standing], alone: bool) -> None:
        """Warms up, lets each take its turn in each round, and looks at what the steps left."""
        for one in standing:
            one.turn("", WARM_UP_STEPS, timed=False)
        for number in range(self.size.rounds):
            self._say(f"round {number + 1} of {self.size.rounds}")
            began_s, before_s = time.monotonic(), _others_s(standing)
            for one in standing:
                one.turn(f"group {self._groups} round {number}", self.size.steps_per_turn)
            after_s = _others_s(standing)
            if before_s is not None and after_s is not None:
                self.other_cores.append((after_s - before_s) / (time.monotonic() - began_s))
        self._groups += 1
        for one in standing:
            one.look(alone)
            one.count()
            if self._traces is not None and one.contender.ours:
                one.turn("", TRACED_STEPS, timed=False, traces=self._traces)


def _others_s(standing: list[Standing]) -> float | None:
    """CPU time of all programs but this one and the contenders."""
    busy = meters.busy_s()
    return None if busy is None else busy - meters.cpu_s() - sum(one.cpu_s for one in standing)
