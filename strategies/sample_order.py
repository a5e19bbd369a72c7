"""The order of an epoch's samples over all ranks, as plain data: drawn again, and dealt over any number of ranks."""

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

Order = Mapping[str, Any]
"""Plain data that says which sample comes when: `sampler`, `length` of the dataset and what the sampler draws from."""


def order_of(loader: Any, ranks: int, rank: int) -> dict[str, Any] | None:
    """Describes the order that the loader's sampler is about to draw; None: it is not one of those known here.

    Known are a DistributedSampler over these ranks, and in one process a RandomSampler or SequentialSampler.
    """
    if not _by_plain_batches(loader):
        return None
    sampler = _own(loader.sampler)
    if type(sampler) is DistributedSampler:
        if (sampler.num_replicas, sampler.rank) != (ranks, rank):
            return None
        order = {"sampler": "distributed", "length": len(sampler.dataset), "shuffle": bool(sampler.shuffle)}
        return order | {"seed": int(sampler.seed), "epoch": int(sampler.epoch), "drop_last": bool(sampler.drop_last)}
    if ranks > 1:
        return None
    if type(sampler) is SequentialSampler:
        return {"sampler": "sequential", "length": len(sampler.data_source)}
    if type(sampler) is not RandomSampler:
        return None
    order = {"sampler": "random", "length": len(sampler.data_source), "samples": int(sampler.num_samples)}
    order["replacement"] = sampler.replacement
    if sampler.generator is not None:
        state = sampler.generator.get_state().numpy().tobytes()
        return order | {"generator": base64.b64encode(state).decode()}
    ahead = torch.Generator()
    ahead.set_state(torch.get_rng_state())
    return order | {"seed": int(torch.empty((), dtype=torch.int64).random_(generator=ahead))}


def _by_plain_batches(loader: Any) -> bool:
    """Whether batches are consecutive indices of `loader.sampler`, and arrive in that order."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = _own(loader.batch_sampler)
    plain = batches is None or (type(batches) is BatchSampler and batches.sampler is _own(loader.sampler))
    return plain and (loader.num_workers == 0 or getattr(loader, "in_order", True))


def _own(sampler: Any) -> Any:
    # Workers ask for their first batches while the loader still has the one that watches.
    return sampler._sampler if isinstance(sampler, Watched) else sampler


def order_size(order: Order) -> int:
    """Returns how many samples the order has."""
    return int(order["samples"] if order["sampler"] == "random" else order["length"])


def draw(order: Order) -> Tensor:
    """Returns the order's indices, (order_size,) int64, before a DistributedSampler repeats or drops some."""
    length = int(order["length"])
    if order["sampler"] == "random":
        generator = torch.Generator()
        if "generator" in order:
            state = np.frombuffer(base64.b64decode(order["generator"]), dtype=np.uint8)
            generator.set_state(torch.from_numpy(state.copy()))
        else:
            generator.manual_seed(int(order["seed"]))
        again = RandomSampler(range(length), bool(order["replacement"]), int(order["samples"]), generator)
        return torch.tensor(list(again), dtype=torch.int64)
    if order["sampler"] == "distributed" and order["shuffle"]:
        generator = torch.Generator().manual_seed(int(order["seed"]) + int(order["epoch"]))
        return torch.randperm(length, generator=generator)
    return torch.arange(length)


class Deal:
    """How what is left of an order goes to ranks: sample k of it to rank k modulo ranks, as DistributedSampler does.

    At the end samples from the order's start are repeated until every rank has as many, or (`drop_uneven`) what does
    not go round is dropped; with `drop_last` so is a last batch that is not full. If dropping left nothing, one full
    batch is made by repeating, since every epoch ends with a batch.

    Example: 0..6 after position 3, two ranks: rank 0 has 3, 5; rank 1 has 4, 6. On three ranks: 3, 6 and 4, 0 and 5, 1.
    """

    def __init__(
        self, order: Order, start: int, ranks: int, batch_size: int, drop_uneven: bool = False, drop_last: bool = False
    ) -> None:
        left = order_size(order) - start
        each = left // ranks if drop_uneven and left >= ranks else math.ceil(left / ranks)
        self.order, self.start, self.ranks = order, start, ranks
        self.repeated_to_fill = drop_last and each < batch_size
        """Without repeats there would be no batch."""
        self.each = batch_size if self.repeated_to_fill else each
        """Samples of each rank."""
        self.batches = self.each // batch_size if drop_last else math.ceil(self.each / batch_size)
        """Batches of each rank."""

    def indices(self, rank: int) -> list[int]:
        """Returns the samples of `rank`, `each` of them."""
        order, total = draw(self.order), self.each * self.ranks
        left = order[self.start :]
        if total > len(left):
            missing = total - len(left)
            left = torch.cat([left, order.repeat(math.ceil(missing / len(order)))[:missing]])
        return left[:total][rank :: self.ranks].tolist()


class Watched:
    """Stands for a loader's sampler, of batches or of single samples, while its iterator is made; sees all it gives.

    Args:
        sampler: what gives the indices.
        starting: called when the first is about to be drawn.
        given: called with what was given; workers ask for it ahead of the batch.
    """

    def __init__(self, sampler: Any, starting: Callable[[], None], given: Callable[[Any], None]) -> None:
        self._sampler, self._starting, self._given = sampler, starting, given

    def __iter__(self) -> Iterator[Any]:
        self._starting()
        for indices in self._sampler:
            self._given(indices)
            yield indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)


def watched_iterator(loader: Any, starting: Callable[[], None], given: Callable[[Any], None]) -> Iterator[Any]:
    """Returns `iter(loader)`, whose indices are seen where it is a DataLoader with samplers."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        starting()
        return iter(loader)
    # A DataLoader refuses another sampler after it was made. Its iterator keeps the one it was made with.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    own = vars(loader)[name]
    vars(loader)[name] = Watched(own, starting, given)
    try:
        return iter(loader)
    finally:
        vars(loader)[name] = own
