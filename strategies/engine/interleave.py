"""Micro-batches that take turns: each unit's weights serve all of them before the next unit's are gathered.

[Note: layer order] Every micro-batch runs the user's own code, on a thread of its own, and one thread runs at a time.
Where a micro-batch needs a unit that is not gathered it steps aside until all others have come to such a place, too;
those whose unit has been gathered meanwhile go on first. So a forward gathers each unit once for all micro-batches, and
so does a backward, in which autograd runs on the thread that calls it. Graphs stay whole: skip connections, tied
weights and whatever else goes past the border of a unit need no attention. The price is memory: activations of all
micro-batches are kept from their forward to their backward.

What belongs to one micro-batch and is kept in one place (random numbers, attributes of modules) changes with the turn.
"""

import contextvars
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

from shardlight.strategies.engine.unit import Unit

T = TypeVar("T")


class Owned(Protocol):
    """Something that each micro-batch has for itself, though there is one place for it."""

    def enter(self, state: Any) -> None:
        """Puts in place what a micro-batch had when its turn ended; None: it has not had one."""

    def leave(self) -> Any:
        """Returns what the micro-batch has whose turn ends, and puts back what was there before."""

    def end(self, state: Any) -> None:
        """Called when all is done, with what the last micro-batch had."""


class _Stopped(BaseException):
    """Ends a micro-batch because another one failed; not an `Exception`, so that user code lets it pass."""


class _Is(Enum):
    NEW = "new"
    WAITING = "waiting"
    OVER = "over"


class Interleaver:
    """Runs the passes of the micro-batches of one batch as [Note: layer order] says.

    Args:
        parts: how many micro-batches.
        owned: what each has for itself, over all passes.
    """

    def __init__(self, parts: int, owned: Sequence[Owned] = ()) -> None:
        self._owned = tuple(owned)
        self._held: list[list[Any]] = [[None] * len(self._owned) for _ in range(parts)]
        """By micro-batch: what it has of `owned` while others have their turn."""
        self._state: list[_Is] = []
        self._wanted: list[Unit | None] = [None] * parts
        self._go: list[threading.Lock] = []
        self._over = threading.Lock()
        self.turn = 0
        """The number of the micro-batch that runs."""
        self.users: dict[Unit, set[int]] = {}
        """Which micro-batches have used a unit in any pass so far."""
        self._error: BaseException | None = None

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Runs one pass of each micro-batch, given in order; returns what they returned.

        Raises: what the first of them raised that failed; the others are ended where they next step aside.
        """
        results: list[Any] = [None] * len(works)
        self._state = [_Is.NEW] * len(works)
        self._wanted = [None] * len(works)
        self._go = [_closed() for _ in works]
        self._over, self._error = _closed(), None

        def live(number: int, work: Callable[[], T]) -> None:
            self._go[number].acquire()
            try:
                self._enter(number)
                if self._error is None:
                    results[number] = work()
            except _Stopped:
                pass
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._end_turn(number)

        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(live, number, work), name=f"micro-batch {number}"
            )
            for number, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        self._hand_over()
        try:
            self._over.acquire()
        except BaseException as error:
            # Of a signal: the micro-batches end where they next step aside.
            self._error = self._error or error
            self._over.acquire()
        for thread in threads:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return results

    def use(self, unit: Unit) -> None:
        """Called by the micro-batch whose turn it is, before it uses a unit: others may have their turns first."""
        number = self.turn
        self.users.setdefault(unit, set()).add(number)
        # Until all have come to their first unit, nobody knows who needs which.
        if not unit.gathered or _Is.NEW in self._state:
            self._step_aside(number, unit)

    def _step_aside(self, number: int, unit: Unit) -> None:
        self._state[number], self._wanted[number] = _Is.WAITING, unit
        unit.awaited += 1
        following = self._choose()
        if following != number:
            self._leave(number)
            self._start(following)
            self._go[number].acquire()
            self._enter(number)
        unit.awaited -= 1
        self._wanted[number] = None
        if self._error is not None:
            raise _Stopped

    def finish(self) -> None:
        """Called when all passes are done: what the last micro-batch has stays."""
        for owned, state in zip(self._owned, self._held[-1], strict=True):
            owned.end(state)

    def _choose(self) -> int | None:
        """Returns whose turn is next; None: all are done."""
        left = [number for number, state in enumerate(self._state) if state is not _Is.OVER]
        ready = (
            [number for number in left if self._state[number] is _Is.NEW]
            or [number for number in left if (unit := self._wanted[number]) is not None and unit.gathered]
            or left
        )
        return ready[0] if ready else None

    def _end_turn(self, number: int) -> None:
        try:
            self._leave(number)
        except Exception as error:
            self._error = self._error or error
        self._state[number] = _Is.OVER
        self._hand_over()

    def _start(self, number: int) -> None:
        self.turn = number
        self._go[number].release()

    def _hand_over(self) -> None:
        following = self._choose()
        if following is None:
            self._over.release()
        else:
            self._start(following)

    def _enter(self, number: int) -> None:
        for owned, state in zip(self._owned, self._held[number], strict=True):
            owned.enter(state)

    def _leave(self, number: int) -> None:
        self._held[number] = [owned.leave() for owned in self._owned]


def _closed() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
