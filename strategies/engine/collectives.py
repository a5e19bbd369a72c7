"""The few collectives that the engine needs, over torch.distributed, with counters and named faults."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from shardlight.ops.sums import real_view, sum_in_rank_order
from shardlight.strategies.errors import CollectiveError
from torch import Tensor


def newest(module: Any, *names: str) -> Callable[..., Any]:
    """Returns the first function of these names that `module` has: newest name first.

    Raises: AttributeError: it has none of them.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"torch {torch.__version__} has none of {', '.join(names)} in {module.__name__}")


# torch 2.13 renamed all_gather_into_tensor and warns about the old name; 2.11 has only the old one.
all_gather_flat = newest(dist, "all_gather_single", "all_gather_into_tensor")


_in_use: "WeakSet[Collectives]" = WeakSet()


def let_go_of_groups() -> None:
    """Drops every reference to a process group, so that destroying the groups ends their threads."""
    for collectives in _in_use:
        collectives.group = None


@dataclass(frozen=True)
class EngineGroups:
    """The process groups of an engine. Unset: state is sharded over all ranks, and nothing is replicated."""

    world: dist.ProcessGroup | None
    shard: dist.ProcessGroup | None = None
    replicate: dist.ProcessGroup | None = None


class Collectives:
    """Collectives over one process group; with one rank each is the identity and nothing is sent.

    `bytes_sent` counts what this rank has to send to others by the algorithm used, `calls` counts calls by name. Small
    control messages (agreements, statistics) are counted as well.

    Args:
        group: None: one process.
        together: counts there, and not apart.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | str = "cpu",
        together: "Collectives | None" = None,
    ) -> None:
        self.group = group
        _in_use.add(self)
        self.device = torch.device(device)
        self.rank: int = dist.get_rank(group) if group is not None else 0
        self.world_size: int = dist.get_world_size(group) if group is not None else 1
        self._counts: Counter[str] = Counter() if together is None else together._counts
        self.calls: Counter[str] = Counter() if together is None else together.calls

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return self._counts["bytes"]

    def all_gather(self, full: Tensor, shard: Tensor, caller: str) -> None:
        """Fills `full` with the shards of all ranks in rank order.

        Args:
            full: (world_size * n,). May contain `shard` as this rank's slice.
            shard: (n,), same dtype.
            caller: named in a fault's message.
        Raises: CollectiveError: a peer was lost or did not arrive in time.
        Cost: (world_size - 1) / world_size * full.nbytes sent per rank.
        Example: two ranks holding [1] and [2]: both get [1, 2].
        """
        if self.world_size == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return
        self._count("all_gather", shard.nbytes * (self.world_size - 1))
        with self._named(caller):
            all_gather_flat(real_view(full), real_view(shard), group=self.group)

    def reduce_scatter(self, full: Tensor, out: Tensor, caller: str) -> None:
        """Writes this rank's slice of the sum of `full` over all ranks into `out`; sums are taken in rank order.

        An all-to-all and a local sum: gloo's own reduce-scatter sends the bytes of an all-reduce, and the order of
        summation is fixed this way.

        Args:
            full: (world_size * n,).
            out: (n,), same dtype; may be this rank's slice of `full`.
        Raises: CollectiveError: a peer was lost or did not arrive in time.
        Cost: (world_size - 1) / world_size * full.nbytes sent per rank.
        Example: two ranks holding [0, 0, 2, 2] and [2, 2, 4, 4]: rank 0 gets [2, 2], rank 1 gets [6, 6].
        """
        if self.world_size == 1:
            if full.data_ptr() != out.data_ptr():
                out.copy_(full)
            return
        self._count("reduce_scatter", full.nbytes // self.world_size * (self.world_size - 1))
        received = torch.empty_like(full)
        with self._named(caller):
            dist.all_to_all_single(real_view(received), real_view(full), group=self.group)
        sum_in_rank_order(received.view(self.world_size, -1), out)

    def all_reduce(self, tensor: Tensor, caller: str) -> None:
        """Overwrites (n,) `tensor` with its sum over all ranks, taken in rank order.

        Raises: CollectiveError: a peer was lost or did not arrive in time.
        Cost: 2 (world_size - 1) / world_size * tensor.nbytes sent per rank.
        Example: two ranks holding [1, 2] and [3, 4]: both get [4, 6].
        """
        if self.world_size == 1:
            return
        part = -(-tensor.numel() // self.world_size)
        padded = tensor.new_zeros(part * self.world_size)
        padded[: tensor.numel()] = tensor
        own = padded[part * self.rank : part * (self.rank + 1)]
        self.reduce_scatter(padded, own, caller)
        self.all_gather(padded, own, caller)
        tensor.copy_(padded[: tensor.numel()])

    def gather_small(self, values: Tensor, caller: str) -> Tensor:
        """Returns the (world_size, n) rows that the ranks hold, for small control values (n equal on all ranks)."""
        if self.world_size == 1:
            return values.unsqueeze(0)
        self._count("gather_small", values.nbytes * (self.world_size - 1))
        rows = values.new_empty(self.world_size * values.numel())
        with self._named(caller):
            all_gather_flat(rows, values, group=self.group)
        return rows.view(self.world_size, -1)

    def gather_objects(self, value: Any, caller: str) -> list[Any]:
        """Returns what each rank holds; for plain data in faults and manifests, off the hot path."""
        if self.world_size == 1:
            return [value]
        everyone: list[Any] = [None] * self.world_size
        self.calls["gather_objects"] += 1
        with self._named(caller):
            dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def broadcast(self, tensor: Tensor, caller: str) -> None:
        """Overwrites `tensor` with rank 0's on every rank. Cost: counted as one copy sent by rank 0."""
        if self.world_size == 1 or tensor.numel() == 0:
            return
        self._count("broadcast", tensor.nbytes if self.rank == 0 else 0)
        with self._named(caller):
            plain = tensor.view(torch.uint8) if tensor.dtype == torch.bool else real_view(tensor)
            dist.broadcast(plain, group=self.group, group_src=0)

    def _count(self, name: str, nbytes: int) -> None:
        self.calls[name] += 1
        self._counts["bytes"] += nbytes

    @contextmanager
    def _named(self, caller: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.world_size}: '{caller}' failed: a peer was lost or did not arrive in time "
                f"({str(error).splitlines()[0]}). Look at the other ranks' output for the cause."
            ) from error


class Ranks:
    """The collectives of an engine: over all ranks, those that share one set of shards, and those that hold the same.

    With hybrid sharding (Zhang et al. 2022, MiCS, arXiv 2205.00119) a shard group has all shards of the model, and
    gradients of shards are added up over the replicate groups; else there is one shard group, and no replica.
    """

    def __init__(self, groups: EngineGroups, device: torch.device | str = "cpu") -> None:
        self.world = Collectives(groups.world, device)
        self.shard = self.world if groups.shard is None else Collectives(groups.shard, device, self.world)
        self.replicate = Collectives(groups.replicate, device, self.world)
