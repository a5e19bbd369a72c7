"""Ranks agree on the next collective before they enter it, so that control flow that differs by rank cannot hang.

[Note: agreement] A gather or reduction inside forward or backward happens when a rank reaches it, and with sparse
experts, early exits or uneven data the ranks do not reach the same ones. So before each, all ranks exchange one
integer: what they need next. Every need that some rank has is then served by all, in one fixed order, and a rank that
has nothing left to do at a meeting point keeps serving until all have arrived there. Ranks that meet at different
points (one saves a checkpoint, another starts a step) learn it from the same exchange and raise an error that names
both, instead of waiting for each other.
"""

import zlib
from collections.abc import Callable

import torch
from shardlight.strategies.engine.collectives import Collectives
from shardlight.strategies.errors import CollectiveError

_MEET = 1 << 40
"""Codes at or above this are meeting points; below are needs (collectives to be served)."""


class Agreement:
    """The exchange described in [Note: agreement].

    Args:
        serve: called with a need's code on every rank in the same order, and whether the need is this rank's own; runs
            that collective.
    """

    def __init__(self, collectives: Collectives, serve: Callable[[int, bool], None]) -> None:
        self.collectives = collectives
        self._serve = serve

    def need(self, code: int, name: str) -> None:
        """Returns when the collective `code` has been served by all ranks.

        Raises: CollectiveError: a peer was lost.
        """
        if self.collectives.world_size == 1:
            self._serve(code, True)
            return
        while True:
            codes = self._exchange(code, name)
            needs = sorted({c for c in codes if c < _MEET})
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
        mine = _MEET + zlib.crc32(point.encode())
        while True:
            try:
                codes = self._exchange(mine, point)
            except CollectiveError as error:
                if "different points" in str(error):
                    raise
                hint = "If no rank died: every rank has to make this call (do not put it under `if rank == 0`)."
                raise CollectiveError(f"{error} {hint}") from None
            needs = sorted({c for c in codes if c < _MEET})
            if not needs and len(set(codes)) == 1:
                return
            if len({c for c in codes if c >= _MEET}) > 1:
                self._refuse(point)
            for c in needs:
                self._serve(c, False)

    def _exchange(self, code: int, name: str) -> list[int]:
        row = torch.tensor([code], dtype=torch.int64, device=self.collectives.device)
        codes = self.collectives.gather_small(row, name).flatten().tolist()
        # A rank in `need` sees here that others stand at two different points, and must take part in the refusal.
        if code < _MEET and len({c for c in codes if c >= _MEET}) > 1:
            self._refuse(name)
        return codes

    def _refuse(self, point: str) -> None:
        points = self.collectives.gather_objects(point, point)
        where = "; ".join(f"rank {rank} is at '{p}'" for rank, p in enumerate(points))
        raise CollectiveError(
            f"the ranks are at different points: {where}. Each of these is collective: call it on all ranks, in the "
            "same order (do not put it under `if rank == 0`)."
        )
