"""Which samples training has had, in which order: a running digest, so that two runs can be compared exactly."""

import hashlib
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any


class ReadLog:
    """The samples that one training loader gave to one rank, since the start of training.

    What workers have fetched ahead, and a batch that training is still at, do not count. The digest is a chain: the
    SHA-256 of the digest before and the indices of a batch (int64, little-endian), starting from no bytes.
    """

    def __init__(self) -> None:
        self.epoch = 0
        """Number of the epoch of the last batch."""
        self._batches = 0
        self._samples = 0
        self._digest: str | None = ""
        """Hexadecimal; None: of some batch the indices are not known."""
        self._asked: deque[Any] = deque()
        """Indices that were drawn for batches that are not here yet."""
        self._read: deque[Any] = deque()
        """Indices of batches that training may not have had yet; None: not known."""

    @property
    def begun(self) -> bool:
        """Training has had some batch."""
        return self._batches > 0

    def begin(self, epoch: int, held: int) -> None:
        """Called when an iteration over the data begins; `held`: batches that were read, but never trained on."""
        for _ in range(min(held, len(self._read))):
            self._read.pop()
        self._settle(0)
        self._asked.clear()
        self.epoch = epoch

    def asked(self, indices: Any) -> None:
        """Called with the indices of each batch, in order, before it is fetched."""
        self._asked.append(indices)

    def read(self) -> None:
        """Called when the next batch is here."""
        self._read.append(self._asked.popleft() if self._asked else None)
        # At most one batch is read ahead and one is in training.
        self._settle(2)

    def skip(self) -> None:
        """Called for a batch that is passed over, since it was trained on before."""
        if self._asked:
            self._asked.popleft()

    def _settle(self, held: int) -> None:
        while len(self._read) > held:
            self._batches += 1
            indices = self._read.popleft()
            if indices is None or self._digest is None:
                self._digest = None
                continue
            indices = indices if isinstance(indices, list) else [indices]
            self._samples += len(indices)
            try:
                data = array("q", indices).tobytes()
            except (TypeError, OverflowError):  # a sampler may give anything that the data set takes
                data = repr(indices).encode()
            self._digest = hashlib.sha256(bytes.fromhex(self._digest) + data).hexdigest()

    def state(self, held: int) -> dict[str, Any]:
        """Returns {"epoch", "batches", "samples", "digest"}; the last two are None where indices are not known.

        Args:
            held: how many of the batches that were read last training has not had.
        """
        self._settle(held)
        samples = None if self._digest is None else self._samples
        return {"epoch": self.epoch, "batches": self._batches, "samples": samples, "digest": self._digest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self.epoch, self._batches = int(state["epoch"]), int(state["batches"])
        self._samples, self._digest = int(state["samples"] or 0), state["digest"]
        self._asked.clear()
        self._read.clear()
