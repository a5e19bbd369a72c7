"""Reads from disk what a unit needs before it is gathered, along the order in which units were gathered before."""

from collections.abc import Sequence

from shardlight.strategies.engine.unit import Unit

Gather = tuple[str, int]
"""The pass and the unit."""


class ReadAhead:
    """Starts to read one unit more than what is gathered or about to be.

    Each gather is remembered as what followed the two before it. This rank's reading is its own affair: where the order
    turns out different, what was read for nothing is given back.

    Args:
        units: all of them, by index.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._follows: dict[tuple[Gather, Gather], Gather] = {}
        self._before: Gather = ("", -1)
        self._last: Gather = ("", -1)
        self._coming: Unit | None = None

    def gathering(self, kind: str, unit: Unit) -> None:
        """Called when a unit's gather has been started.

        Args:
            kind: of the pass.
        """
        if kind == "backward":
            for buffer in unit.buffers:
                buffer.start_fetch_sum()
        if self._coming is not None and self._coming is not unit:
            self.forget()
        self._coming = None
        now = (kind, unit.index)
        self._follows[self._before, self._last] = now
        self._before, self._last = self._last, now
        expected = self._follows.get((self._before, self._last))
        if expected is None:
            return
        following = self._units[expected[1]]
        if not following.gathered and not following.arriving:
            following.start_fetch()
            self._coming = following

    def forget(self) -> None:
        """Gives back what was read ahead: the weights change."""
        if self._coming is not None:
            self._coming.drop_fetched()
            self._coming = None
