"""Ranks agree on the next collective before they enter it, so that control flow that differs by rank cannot hang.

[Note: agreement] A gather or reduction inside forward or backward happens when a rank reaches it, and with sparse
experts, early exits or uneven data the ranks do not reach the same ones. So before each, all ranks exchange one
integer: what they need next. Every need that some rank has is then served by all, in one fixed order, and a rank that
has nothing left to do at a meeting point keeps serving until all have arrived there. Ranks that meet at different
points (one saves a checkpoint, another starts a step) learn it from the same exchange and raise an error that names
both, instead of waiting for each other. A pass that is like the last ones is agreed on as a whole: see
[Note: recorded order], recorded_order.py.
"""

import zlib

import torch
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.engine.needs import Server, is_gather, is_reduction
from shardlight.strategies.engine.recorded_order import RecordedOrder, ahead, digest
from shardlight.strategies.errors import CollectiveError

_MEET = 1 << 40
"""Codes at or above this are meeting points; below are needs (collectives to be served)."""
PREFETCH_BYTES = 1 << 20
"""One gather is started ahead of its use, or as many small ones as this holds."""


class Agreement:
    """The exchange described in [Note: agreement].

    Args:
        server: runs the collectives; those that all ranks need are started on every rank in one order.
    """

    def __init__(self, collectives: Collectives, server: Server) -> None:
        self.collectives = collectives
        self._server = server
        self._recorded = RecordedOrder()
        self._order: list[int] = []
        """What all ranks have agreed to start, and have not asked for; `_next` is the first that was not started."""
        self._next = 0
        self._arriving: list[int] = []
        """Gathers that were started ahead of their use."""
        self._reducing: int | None = None
        """The reduction that was started last, if it is not over."""

    def begin_pass(self, kind: str) -> None:
        """Says that what is needed from here on is another forward or backward than what was needed so far."""
        if self.collectives.world_size > 1:
            self._leave_order()
            self._recorded.begin(kind)

    def need(self, code: int, name: str) -> None:
        """Returns when the collective `code` has been served by all ranks; a reduction may still be under way.

        Raises: CollectiveError: a peer was lost.
        """
        if self.collectives.world_size == 1:
            self._server.start(code)
            self._server.finish(code, True)
            return
        self._recorded.note(code)
        if self._order and self._follow(code):
            return
        expected = self._recorded.expected()
        while True:
            rows = self._exchange(code, digest(expected), name)
            if expected and all(row == rows[0] for row in rows):
                self._order, self._next = ahead(expected[1:]), 0
                self._serve(code, True)
                self._prefetch()
                return
            needs = sorted({c for c, _ in rows if c < _MEET})
            for c in needs:
                self._serve(c, c == code)
            if code in needs:
                return

    def meet(self, point: str) -> None:
        """Returns when every rank is at the meeting point `point`; serves the needs of others until then.

        Raises: CollectiveError: the ranks are at different meeting points, or a peer was lost.
        """
        if self.collectives.world_size == 1:
            return
        self.begin_pass(point)
        mine = _MEET + zlib.crc32(point.encode())
        while True:
            try:
                codes = [c for c, _ in self._exchange(mine, 0, point)]
            except CollectiveError as error:
                if "different points" in str(error):
                    raise
                hint = "If no rank died: every rank has to make this call (do not put it under `if rank == 0`)."
                raise CollectiveError(f"{error} {hint}") from None
            needs = sorted({c for c in codes if c < _MEET})
            if not needs and len(set(codes)) == 1:
                self.settle()
                return
            if len({c for c in codes if c >= _MEET}) > 1:
                self._refuse(point)
            for c in needs:
                self._serve(c, False)

    def settle(self) -> None:
        """Returns when the reductions that this rank has started are over."""
        if self._reducing is not None:
            code, self._reducing = self._reducing, None
            self._server.finish(code, True)

    def _serve(self, code: int, own: bool) -> None:
        if is_reduction(code):
            # Nobody waits for it: it is under way while the next unit computes.
            self.settle()
            self._server.start(code)
            self._reducing = code
        else:
            self._server.start(code)
            self._server.finish(code, own)

    # --- along the recorded order

    def _follow(self, code: int) -> bool:
        """Serves a need along the agreed order; returns False if it is not in it."""
        if code in self._arriving:
            self._arriving.remove(code)
            self._server.finish(code, True)
            self._prefetch()
            return True
        try:
            place = self._order.index(code, self._next)
        except ValueError:
            self._leave_order()
            return False
        while self._next < place:
            if not self._start_ahead():
                self._next += 1
                self._serve(self._order[self._next - 1], False)
        self._next += 1
        self._serve(code, True)
        if is_gather(code):
            self._prefetch()
        return True

    def _prefetch(self) -> None:
        while self._start_ahead():
            pass

    def _start_ahead(self) -> bool:
        """Starts what is next in the order, if that is a gather and there is room for it."""
        if self._next == len(self._order) or not is_gather(self._order[self._next]):
            return False
        code = self._order[self._next]
        arriving = sum(map(self._server.size, self._arriving))
        if arriving and arriving + self._server.size(code) > PREFETCH_BYTES:
            return False
        if not self._server.can_prefetch(code):
            return False
        self._next += 1
        self._server.start(code)
        self._arriving.append(code)
        return True

    def _leave_order(self) -> None:
        """Serves what this rank has agreed to and does not need."""
        for code in self._arriving:
            self._server.finish(code, False)
        self._arriving.clear()
        left, self._order = self._order[self._next :], []
        self._next = 0
        for code in left:
            self._serve(code, False)

    def _exchange(self, code: int, expected: int, name: str) -> list[tuple[int, int]]:
        row = torch.tensor([code, expected], dtype=torch.int64, device=self.collectives.device)
        rows = [(c, e) for c, e in self.collectives.gather_small(row, name).tolist()]
        # A rank in `need` sees here that others stand at two different points, and must take part in the refusal.
        if code < _MEET and len({c for c, _ in rows if c >= _MEET}) > 1:
            self._refuse(name)
        return rows

    def _refuse(self, point: str) -> None:
        points = self.collectives.gather_objects(point, point)
        where = "; ".join(f"rank {rank} is at '{p}'" for rank, p in enumerate(points))
        raise CollectiveError(
            f"the ranks are at different points: {where}. Each of these is collective: call it on all ranks, in the "
            "same order (do not put it under `if rank == 0`)."
        )
