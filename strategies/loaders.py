"""Data loaders under sharding: every sample counted once, ranks in lockstep, and a position to resume from."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from shardlight.strategies.data_position import DataPosition
from shardlight.strategies.errors import CheckpointError, StrategyError
from shardlight.strategies.notices import notify
from shardlight.strategies.random_state import Generators, random_state, set_random_state
from shardlight.strategies.read_log import ReadLog
from shardlight.strategies.sample_order import Deal, Order, order_of, watched_iterator
from torch import Tensor
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

    The position is one in samples of the epoch's order over all ranks, where that order is known (`order_of`): other
    ranks, or another batch size, go on with what is left of it. Else it is a number of batches of each rank.

    Attributes of the loader inside (sampler, dataset, ...) are this loader's too.

    Args:
        loader: this rank's loader.
        agree: None, or tells before each batch which ranks have one, given whether this rank has. Needed when their
            numbers of batches differ or are unknown; training then stops at the shortest.
        position: where training is.
        length: number of batches of an epoch, the same on all ranks; None: not known.
    """

    def __init__(self, loader: Any, agree: Agree | None, position: DataPosition, length: int | None = None) -> None:
        self.loader = loader
        self._agree = agree
        self._position = position
        self._length = length
        self._order: Order | None = None
        """Of the running iteration."""
        self._start = 0
        """Samples of the order that all ranks had before this iteration."""
        self._read = 0
        """Batches that this iteration gave, or passed over at its start."""
        self._batches = length
        """Batches of this iteration."""
        self._ended = True
        self._resume: Mapping[str, Any] | None = None
        """The state to go on from, until the data is begun."""
        self._generators_at_start: list[Tensor] = []
        self._before_workers: tuple[Tensor, list[Tensor]] | None = None
        self._before_reads: deque[dict[str, Any]] = deque(maxlen=2)
        """Random state before the batches were read that may be in training or ahead; not needed with workers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning gives a loader the function that seeds its workers by rank after it was wrapped, and takes away the
        # iterator with the workers when a fit ends.
        own = name == "loader" or (name[0] == "_" and name != "_iterator")
        super().__setattr__(name, value) if own else setattr(self.loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        position = self._position
        if position.loops.before_data:
            return
        state, self._resume = self._resume, None
        log, saved = position.log(self), position.saved_generators(self)
        # A batch that was read ahead is read again, with the random numbers that it was read with.
        ahead = saved.get("ahead")
        half_done = state is not None or ahead is not None
        log.begin(position.epoch, self.held)
        position.randomness.begin_epoch(position.number(self), half_done)
        generators = Generators(self.loader)
        generators.set_state(saved.get("epoch_start" if half_done else "now", []))
        self._generators_at_start = generators.state()
        self._before_reads.clear()
        self._order, self._start, self._read, self._batches, self._ended = None, 0, 0, self._length, False
        if state is None:
            self._before_workers = self._state_before_workers(log)
            batches = watched_iterator(self.loader, self._note_order, self._note_asked)
        elif "order" in state:
            batches = self._rest_of_order(state)
        else:
            batches = self._rest_after(int(state["batches"]))
        if half_done:
            generators.set_state(saved.get("now", []))
        if ahead is None:
            position.randomness.go_on()
        else:
            set_random_state(ahead)
        while True:
            if position.reads_ahead and not getattr(self.loader, "num_workers", 0):
                self._before_reads.append(random_state())
            batch, more = _next(batches)
            if self._agree is not None:
                more = self._all_have(more)
            position.randomness.go_on()
            if not more:
                self._ended = True
                if self._before_reads:
                    self._before_reads.pop()
                return
            log.read()
            self._read += 1
            yield batch

    def _state_before_workers(self, log: ReadLog) -> tuple[Tensor, list[Tensor]] | None:
        # Workers that persist are started anew after a resume, with a seed that is drawn before the order is. A run
        # that never stopped has drawn none.
        persist = getattr(self.loader, "persistent_workers", False) and self.loader._iterator is None
        return (torch.get_rng_state(), Generators(self.loader).state()) if persist and log.begun else None

    def _note_order(self) -> None:
        if self._before_workers is not None:
            torch.set_rng_state(self._before_workers[0])
            Generators(self.loader).set_state(self._before_workers[1])
            self._before_workers = None
        self._order = order_of(self.loader, self._position.ranks, self._position.rank)

    def _note_asked(self, indices: Any) -> None:
        self._position.log(self).asked(indices)

    def _rest_of_order(self, state: Mapping[str, Any]) -> Iterator[Any]:
        deal = self._deal(state)
        self._order, self._start, self._batches = deal.order, deal.start, deal.batches
        rest = _update_dataloader(self.loader, deal.indices(self._position.rank), RunningStage.TRAINING)
        rest.worker_init_fn = self.loader.worker_init_fn
        return watched_iterator(rest, _nothing, self._note_asked)

    def _rest_after(self, skip: int) -> Iterator[Any]:
        self._read = skip
        loader = self.loader
        if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or not loader.batch_sampler:
            batches = iter(loader)
            for _ in range(skip):
                next(batches, None)
            return batches
        # Only the indices of what is skipped are drawn, not its data. A DataLoader draws a seed for its workers first.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        indices = iter(loader.batch_sampler)
        for _ in range(skip):
            next(indices, None)
        return watched_iterator(_with_batches(loader, indices), _nothing, self._note_asked)

    def _all_have(self, more: bool) -> bool:
        assert self._agree is not None
        have = self._agree(more)
        if any(have) and not all(have):
            ended = [r for r, h in enumerate(have) if not h]
            notify(
                f"the training data of rank {', '.join(map(str, ended))} ended after {self._read} batches while "
                "other ranks have more: the epoch ends here on all ranks (at the shortest)."
            )
        return all(have)

    # --- checkpoints

    @property
    def held(self) -> int:
        """How many of the batches that were given last training has not had."""
        return self._position.held(self._ended)

    def generators(self) -> dict[str, Any]:
        """Returns, for a checkpoint of this rank, the states of the generators that the loader was given.

        `ahead`: those of the process, where batches were read that training has not had.
        """
        states = {"now": Generators(self.loader).state(), "epoch_start": self._generators_at_start}
        held = self.held
        return states | ({"ahead": self._before_reads[-held]} if 0 < held <= len(self._before_reads) else {})

    def state_dict(self) -> dict[str, Any]:
        """Returns how many samples of this epoch training has had on all ranks together, and of which order.

        Plain data: `samples` (0 when the epoch is over), `ranks`, `batch_size` of each, `open_window` (micro-batches
        of an accumulation window that are in), and `order` (see `order_of`) or else `batches` of each rank and the
        `length` of the data set.
        """
        if self._resume is not None:
            return dict(self._resume)
        ranks, size = self._position.ranks, self._batch_size
        read = max(0, self._read - self.held)
        samples = self._start + read * ranks * size
        if not samples or self._position.epoch_is_over or (self._batches is not None and read >= self._batches):
            return {"samples": 0}
        state = {"samples": samples, "ranks": ranks, "batch_size": size, "open_window": self._position.open_window}
        if self._order is not None:
            return state | {"order": dict(self._order)}
        return state | {"batches": read, "length": self._dataset_length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on where the state was saved, also on other ranks or with other batches.

        Raises: CheckpointError: the data set has become shorter, so that samples of the rest are gone.
        """
        if not state["samples"]:
            return
        ranks, size = self._position.ranks, self._batch_size
        batches = state["samples"] // (ranks * size)
        same = (state["ranks"], state["batch_size"]) == (ranks, size)
        known = order_of(self.loader, ranks, self._position.rank) is not None
        if known and "order" in state:
            self._check_length(state["order"])
            rest = self._deal(state)
            if rest.repeated_to_fill:
                notify(
                    f"{self._name}: what is left of the epoch is less than one batch for each of {ranks} ranks: it is "
                    "filled up with samples that the epoch has had before, since drop_last would leave none."
                )
            left = rest.batches
        else:
            length = state["order"]["length"] if "order" in state else state["length"]
            if length != self._dataset_length:
                notify(
                    f"{self._name} has {self._dataset_length} samples and had {length} when the checkpoint was saved "
                    f"in the middle of an epoch: each rank passes over its first {batches} batches, whatever they hold."
                )
            if not same or "order" in state:
                why = "its ranks did not share one" if known else self._why_unknown
                notify(
                    f"{self._name}: of the half-done epoch {state['samples']} samples were read in batches of "
                    f"{state['batch_size']} on each of {state['ranks']} ranks; on {ranks}, with batches of {size}, "
                    f"each rank passes over its first {batches} batches. The order is not known to shardlight ({why}): "
                    "until the epoch ends some samples may come twice and others not at all."
                )
                state = {k: v for k, v in state.items() if k != "order"}
                state |= {"batches": batches, "length": self._dataset_length}
            left = None if self._length is None or same else max(1, self._length - batches)
        self._resume = state
        if left is not None and self._length is not None:
            open_window = state["open_window"] * state["ranks"] * state["batch_size"] / (ranks * size)
            self._position.fit_rest(self, self._length, left, open_window)

    def _deal(self, state: Mapping[str, Any]) -> Deal:
        drop_uneven = bool(getattr(self.loader.sampler, "drop_last", False))
        drop_last = bool(self.loader.drop_last)
        return Deal(state["order"], state["samples"], self._position.ranks, self._batch_size, drop_uneven, drop_last)

    def _check_length(self, order: Order) -> None:
        before, now = int(order["length"]), self._dataset_length
        assert now is not None
        if now < before:
            raise CheckpointError(
                f"{self._name} has {now} samples and had {before} when the checkpoint was saved in the middle of an "
                "epoch: samples that are left of the epoch are gone. Use the data as it was, or resume from a "
                "checkpoint of an epoch's end."
            )
        if now > before:
            notify(
                f"{self._name} has {now} samples and had {before} when the checkpoint was saved in the middle of an "
                "epoch: that epoch ends with the samples it began with, the new ones come from the next epoch on."
            )

    @property
    def _batch_size(self) -> int:
        """Samples of a batch of one rank; 1 where that is not known."""
        batched = getattr(self.loader, "batch_sampler", None) is not None or self._iterable
        size = getattr(self.loader, "batch_size", None) if batched else None
        return size if isinstance(size, int) else 1

    @property
    def _dataset_length(self) -> int | None:
        return None if self._iterable else sized_len(getattr(self.loader, "dataset", None))

    @property
    def _iterable(self) -> bool:
        return isinstance(getattr(self.loader, "dataset", None), IterableDataset)

    @property
    def _name(self) -> str:
        dataset = getattr(self.loader, "dataset", None)
        of = "" if dataset is None else f" of {type(dataset).__name__}"
        return f"the training data ({type(self.loader).__name__}{of})"

    @property
    def _why_unknown(self) -> str:
        if not isinstance(self.loader, DataLoader):
            return "it is not a DataLoader"
        if self._iterable:
            return "the data set is iterable"
        if self.loader.batch_sampler is not None and type(self.loader.batch_sampler) is not BatchSampler:
            return f"batches come from a {type(self.loader.batch_sampler).__name__}"
        if self._position.ranks > 1 and type(self.loader.sampler) is not DistributedSampler:
            return f"a {type(self.loader.sampler).__name__} on each rank is not dealt over the ranks"
        return f"samples come from a {type(self.loader.sampler).__name__}, or out of order"


class SizedLockstepLoader(LockstepLoader):
    """A LockstepLoader whose number of batches is known, the same on all ranks."""

    def __len__(self) -> int:
        assert self._length is not None
        return self._length


class _Rest(BatchSampler):
    """What is left of an iteration over batches of indices."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches

    def __len__(self) -> int:
        raise TypeError("the number of batches that are left is not known")


def _with_batches(loader: DataLoader, batches: Iterator[list[int]]) -> DataLoader:
    return DataLoader(
        loader.dataset,
        batch_sampler=_Rest(batches),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )


def _nothing() -> None:
    """The order of what is left is known before its iterator is made."""


def _next(batches: Iterator[Any]) -> tuple[Any, bool]:
    try:
        return next(batches), True
    except StopIteration:
        return None, False


def has_length(loader: Any) -> bool:
    """Whether a loader knows how many batches it has."""
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
