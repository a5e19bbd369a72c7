"""Data loaders under sharding: every sample counted once, ranks in lockstep, and a position to resume from."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from shardlight.strategies.errors import StrategyError
from shardlight.strategies.random_state import EpochRandomness
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

Agree = Callable[[bool], list[bool]]


def count_every_sample_once(loader: Any, stage: RunningStage, world_size: int, rank: int) -> Any:
    """Replaces the sampler that Lightning put into an evaluation loader, which repeats samples to even out the ranks.

    Raises: StrategyError: fewer samples than ranks, so that some rank would have nothing to do.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or type(sampler) is not DistributedSampler:
        return loader
    total = len(sampler.dataset)
    if 0 < total < world_size:
        raise StrategyError(
            f"the {stage.dataloader_prefix} set has {total} samples for {world_size} ranks: every rank needs at least "
            "one. Evaluate with fewer devices."
        )
    each_once = UnrepeatedDistributedSampler(
        sampler.dataset, num_replicas=world_size, rank=rank, shuffle=sampler.shuffle, seed=sampler.seed
    )
    return _update_dataloader(loader, each_once, stage)


class LockstepLoader:
    """A training loader that ends on all ranks together, and that can go on from a position.

    Attributes of the loader inside (sampler, dataset, ...) are this loader's too.

    Args:
        loader: this rank's loader.
        agree: None, or tells before each batch which ranks have one, given whether this rank has. Needed when their
            numbers of batches differ or are unknown; training then stops at the shortest.
        randomness: what a resumed epoch's order is drawn from.
    """

    def __init__(self, loader: Any, agree: Agree | None, randomness: EpochRandomness) -> None:
        self.loader = loader
        self._agree = agree
        self._randomness = randomness
        self._position = 0
        self._resume_at = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning gives a loader the function that seeds its workers by rank after it was wrapped.
        super().__setattr__(name, value) if name == "loader" or name[0] == "_" else setattr(self.loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        skip, self._resume_at = self._resume_at, 0
        self._randomness.begin_epoch(half_done=skip > 0)
        batches = _without_first(self.loader, skip)
        self._randomness.go_on()
        self._position = skip
        while True:
            batch, more = _next(batches)
            if self._agree is not None:
                more = self._all_have(more)
            if not more:
                self._position = 0
                return
            self._position += 1
            yield batch

    def _all_have(self, more: bool) -> bool:
        assert self._agree is not None
        have = self._agree(more)
        if any(have) and not all(have):
            ended = [r for r, h in enumerate(have) if not h]
            rank_zero_warn(
                f"the training data of rank {', '.join(map(str, ended))} ended after {self._position} batches while "
                "other ranks have more: the epoch ends here on all ranks (at the shortest)."
            )
        return all(have)

    def state_dict(self) -> dict[str, int]:
        """Returns how many batches of this epoch training has had; 0 when the epoch is over."""
        # Without a length Lightning reads one batch ahead, to know which is the last.
        return {"position": max(0, self._position - 1)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the next iteration start after that many batches."""
        self._resume_at = int(state["position"])


class SizedLockstepLoader(LockstepLoader):
    """A LockstepLoader whose number of batches is known, the same on all ranks."""

    def __init__(self, loader: Any, agree: Agree | None, randomness: EpochRandomness, length: int) -> None:
        super().__init__(loader, agree, randomness)
        self._length = length

    def state_dict(self) -> dict[str, int]:
        """Returns how many batches of this epoch training has had; 0 when the epoch is over."""
        return {"position": self._position if self._position < self._length else 0}

    def __len__(self) -> int:
        return self._length


class _Rest(BatchSampler):
    """What is left of an iteration over batches of indices."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches

    def __len__(self) -> int:
        raise TypeError("the number of batches that are left is not known")


def _without_first(loader: Any, skip: int) -> Iterator[Any]:
    """Returns an iterator over the batches after the first `skip`, drawn from the same random numbers."""
    by_index = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
    if not skip or not by_index or loader.batch_sampler is None:
        batches = iter(loader)
        for _ in range(skip):
            next(batches, None)
        return batches
    # Only the indices of what is skipped are drawn, not its data. A DataLoader draws a seed for its workers first.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    indices = iter(loader.batch_sampler)
    for _ in range(skip):
        next(indices, None)
    rest = DataLoader(
        loader.dataset,
        batch_sampler=_Rest(indices),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
    return iter(rest)


def _next(batches: Iterator[Any]) -> tuple[Any, bool]:
    try:
        return next(batches), True
    except StopIteration:
        return None, False
