"""The few collectives that the engine needs, with counters and named faults; what moves the data is chosen here alone.

Ranks of one host share memory, see [Note: hosts]; everything else goes over torch.distributed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from shardlight.ops.sums import real_view, sum_in_rank_order
from shardlight.strategies.engine.choices import Transport
from shardlight.strategies.engine.host_ranks import HostRanks, connect
from shardlight.strategies.engine.pages import Pages
from shardlight.strategies.engine.ranges import SHARED, begin, end
from shardlight.strategies.errors import CollectiveError
from torch import Tensor
from torch.autograd import profiler


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
        collectives.close()


PIECE_BYTES = 8 << 20
"""What arrives at a time in a reduction on CPU; two of these are under way."""


class Transfer:
    """A collective that is under way.

    Args:
        steps: starts it up to its `yield`, and ends it behind.
        caller: what it is called in traces, see [Note: ranges].
    """

    def __init__(self, steps: Iterator[None], caller: str) -> None:
        self._steps = steps
        self._caller = caller
        with self._range("start"):
            next(steps)

    def wait(self) -> None:
        """Returns when it is done on this rank. Raises: CollectiveError: a peer was lost or did not arrive in time."""
        with self._range("wait"):
            for _ in self._steps:
                raise AssertionError("a transfer has one yield")

    @contextmanager
    def _range(self, phase: str) -> Iterator[None]:
        opened = begin(f"{self._caller} ({phase})") if profiler._is_profiler_enabled else None
        try:
            yield
        finally:
            if opened is not None:
                end(opened)


class Message:
    """A tensor on its way to or from one other rank; it is kept until then."""

    def __init__(self, collectives: "Collectives", work: Any, tensor: Tensor, caller: str) -> None:
        self._collectives = collectives
        self._work = work
        self._tensor = tensor
        self._caller = caller

    def wait(self) -> None:
        """Returns when it has arrived. Raises: CollectiveError: the peer was lost or did not send in time."""
        self._collectives._wait([self._work], self._caller)


class Collectives:
    """Collectives over one process group; with one rank each is the identity and nothing is sent.

    `bytes_sent` counts what this rank has to send to others by the algorithm used, `calls` counts calls by name. Small
    control messages (agreements, statistics) are counted as well.

    Args:
        group: None: one process.
        together: counts there, and not apart.
        transport: what moves data on CPU; equal on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | str = "cpu",
        together: "Collectives | None" = None,
        transport: Transport = "auto",
    ) -> None:
        self.group = group
        _in_use.add(self)
        self.device = torch.device(device)
        self.rank: int = dist.get_rank(group) if group is not None else 0
        self.world_size: int = dist.get_world_size(group) if group is not None else 1
        self._counts: Counter[str] = Counter() if together is None else together._counts
        self.calls: Counter[str] = Counter() if together is None else together.calls
        self._direct: bool = self.device.type == "cpu"
        """Large tensors go straight from rank to rank."""
        self.why_not_shared: str | None = "one process"
        """Why no memory is shared with other ranks; None: it is."""
        self._host: HostRanks | None = None
        if group is not None and self.world_size > 1:
            found = connect(group, transport) if self._direct else "ranks are not on CPU"
            self.why_not_shared, self._host = (found, None) if isinstance(found, str) else (None, found)
        self._local = self._host.local if self._host is not None and self._host.hosts == 1 else None
        """Where all ranks are on one host: what joins them."""
        self._peers: list[int] = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        self.pages: Pages = Pages(self.device, self._host is not None) if together is None else together.pages

    @property
    def waited_s(self) -> float:
        """How long this rank has been in waits for collectives through shared memory, with the copying done there."""
        return 0.0 if self._host is None else self._host.local.waited_s

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return self._counts["bytes"]

    def all_gather(self, full: Tensor, shard: Tensor, caller: str) -> None:
        """Fills `full` with the shards of all ranks in rank order; see start_all_gather."""
        self.start_all_gather(full, shard, caller).wait()

    def start_all_gather(self, full: Tensor, shard: Tensor, caller: str) -> "Transfer":
        """Starts to fill `full` with the shards of all ranks in rank order.

        On CPU every rank sends its shard straight to every other, which takes less time than gloo's own all-gather.

        Args:
            full: (world_size * n,). May contain `shard` as this rank's slice. Not to be used before `wait`.
            shard: (n,), same dtype; not to be changed before `wait`.
            caller: named in a fault's message.
        Raises: CollectiveError: here or in `wait`: a peer was lost or did not arrive in time.
        Cost: (world_size - 1) / world_size * full.nbytes sent per rank.
        Example: two ranks holding [1] and [2]: both get [1, 2].
        """
        return Transfer(self._all_gather(real_view(full), real_view(shard), caller), caller)

    def _all_gather(self, full: Tensor, shard: Tensor, caller: str) -> Iterator[None]:
        parts = self._rows(full)
        own = parts[self.rank]
        if self.world_size == 1 or not shard.numel():
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
            yield
            return
        self._count("all_gather", shard.nbytes * (self.world_size - 1))
        if self._local is not None:
            with self._named(caller):
                number = self._local.start_all_gather(full, shard)
                yield
                self._local.wait(number)
            return
        if self._host is not None:
            yield from self._all_gather_hosts(self._host, parts, shard, caller)
            return
        with self._named(caller):
            if self._direct:
                works = self._swap([(peer, parts[peer], shard) for peer in self._peers])
                if own.data_ptr() != shard.data_ptr():
                    own.copy_(shard)
            else:
                works = [all_gather_flat(full, shard, group=self.group, async_op=True)]
        yield
        self._wait(works, caller)

    def _all_gather_hosts(self, host: HostRanks, parts: Tensor, shard: Tensor, caller: str) -> Iterator[None]:
        """Each shard goes to one rank of every other host, and from there to the others of that host."""
        with self._named(caller):
            works = self._swap([(peer, parts[peer], shard) for peer in host.others_at_place])
            if parts[self.rank].data_ptr() != shard.data_ptr():
                parts[self.rank].copy_(shard)
        yield
        self._wait(works, caller)
        with self._named(caller):
            for rows in parts.unflatten(0, (host.hosts, -1)).unbind():
                number = host.local.start_all_gather(rows.view(-1), rows[host.place])
            host.local.wait(number)

    def reduce_scatter(self, full: Tensor, out: Tensor, caller: str, add: bool = False) -> None:
        """Writes this rank's slice of the sum of `full` over all ranks into `out`; see start_reduce_scatter."""
        self.start_reduce_scatter(full, out, caller, add).wait()

    def start_reduce_scatter(self, full: Tensor, out: Tensor, caller: str, add: bool = False) -> "Transfer":
        """Starts to write this rank's slice of the sum of `full` over all ranks into `out`; summed in rank order.

        Slices are sent straight from rank to rank and added up where they arrive: gloo's own reduce-scatter sends the
        bytes of an all-reduce, and the order of summation is fixed this way. They come in pieces, so that what is
        received takes a bounded piece of memory whatever the size of `full`.

        Args:
            full: (world_size * n,); not to be changed before `wait`.
            out: (n,); may be this rank's slice of `full`. 16-bit parts are added in fp32.
            add: the sum is added to what `out` holds.
        Raises: CollectiveError: here or in `wait`: a peer was lost or did not arrive in time.
        Cost: (world_size - 1) / world_size * full.nbytes sent per rank.
        Example: two ranks holding [0, 0, 2, 2] and [2, 2, 4, 4]: rank 0 gets [2, 2], rank 1 gets [6, 6].
        """
        return Transfer(self._reduce_scatter(real_view(full), real_view(out), caller, add), caller)

    def _reduce_scatter(self, full: Tensor, out: Tensor, caller: str, add: bool) -> Iterator[None]:
        parts = list(self._rows(full))
        if self.world_size == 1 or not out.numel():
            if self.world_size == 1 and (add or out.data_ptr() != full.data_ptr()):
                sum_in_rank_order(parts, out, add)
            yield
            return
        self._count("reduce_scatter", parts[0].nbytes * (self.world_size - 1))
        if self._host is not None:
            with self._named(caller):
                yield from self._reduce_on_host(self._host, full, out, add)
            return
        if self._direct:
            yield from self._reduce_pieces(parts, out, caller, add)
            return
        received = torch.empty_like(full)
        with self._named(caller):
            work = dist.all_to_all_single(received, full, group=self.group, async_op=True)
        yield
        self._wait([work], caller)
        sum_in_rank_order(list(self._rows(received)), out, add)

    def _reduce_on_host(self, host: HostRanks, full: Tensor, out: Tensor, add: bool) -> Iterator[None]:
        if host.hosts == 1:
            number = host.local.start_reduce_scatter(full, out, add)
            yield
            if number is None:
                host.local.reduce_scatter(full, out, add)
            else:
                host.local.wait(number)
            return
        # Sums of a host's ranks for the rank at this place of each host; what is added up later is not rounded before.
        wide = torch.float32 if full.dtype in (torch.bfloat16, torch.float16) else full.dtype
        sums = self.pages.take(host.hosts * out.numel(), wide)
        rows = full.view(host.hosts, -1)
        numbers = [host.local.start_reduce_scatter(r, s) for r, s in zip(rows, sums.view(host.hosts, -1), strict=True)]
        yield
        host.local.wait(max(n for n in numbers if n is not None))
        received = self.pages.take(sums.numel(), wide)
        there, here = sums.view(host.hosts, -1), received.view(host.hosts, -1)
        others = [(peer, peer // host.local.world_size) for peer in host.others_at_place]
        for work in self._swap([(peer, here[h], there[h]) for peer, h in others]):
            work.wait()
        sum_in_rank_order([there[h] if h == host.host else here[h] for h in range(host.hosts)], out, add)
        self.pages.give(sums)
        self.pages.give(received)

    def _reduce_pieces(self, parts: list[Tensor], out: Tensor, caller: str, add: bool) -> Iterator[None]:
        numel = parts[0].numel()
        length = max(1, min(numel, PIECE_BYTES // (parts[0].element_size() * len(self._peers))))
        pieces = [slice(first, min(first + length, numel)) for first in range(0, numel, length)]
        # Two sets of pieces take turns: one arrives while the other is added up.
        staging = self.pages.take(min(2, len(pieces)) * len(self._peers) * length, parts[0].dtype)
        landings = staging.view(-1, len(self._peers), length)

        def receive(number: int) -> tuple[list[Tensor], list[Any]]:
            piece = pieces[number]
            landing = [row[: piece.stop - piece.start] for row in landings[number % len(landings)]]
            rows = zip(self._peers, landing, strict=True)
            return landing, self._swap([(peer, row, parts[peer][piece]) for peer, row in rows])

        with self._named(caller):
            under_way = [receive(number) for number in range(len(landings))]
        yield
        for number, piece in enumerate(pieces):
            landing, works = under_way[number % len(landings)]
            self._wait(works, caller)
            arrived = dict(zip(self._peers, landing, strict=True))
            arrived[self.rank] = parts[self.rank][piece]
            sum_in_rank_order([arrived[rank] for rank in range(self.world_size)], out[piece], add)
            if number + len(landings) < len(pieces):
                with self._named(caller):
                    under_way[number % len(landings)] = receive(number + len(landings))
        self.pages.give(staging)

    def _rows(self, flat: Tensor) -> Tensor:
        """Returns (world_size, n) of a flat tensor, which may be empty."""
        return flat.view(self.world_size, flat.numel() // self.world_size)

    def _swap(self, exchanges: list[tuple[int, Tensor, Tensor]]) -> list[Any]:
        """Starts to receive from, and send to, each peer. Args: exchanges: (peer, to receive into, to send)."""
        group = self.group
        assert group is not None
        works = [group.recv([into], peer, 0) for peer, into, _ in exchanges]
        works += [group.send([out], peer, 0) for peer, _, out in exchanges]
        return works

    def _wait(self, works: list[Any], caller: str) -> None:
        with self._named(caller):
            for work in works:
                work.wait()

    def all_reduce(self, tensor: Tensor, caller: str) -> None:
        """Overwrites (n,) `tensor` with its sum over all ranks, taken in rank order.

        Raises: CollectiveError: a peer was lost or did not arrive in time.
        Cost: 2 (world_size - 1) / world_size * tensor.nbytes sent per rank.
        Example: two ranks holding [1, 2] and [3, 4]: both get [4, 6].
        """
        if self.world_size == 1:
            return
        if self._local is not None and tensor.is_contiguous() and not tensor.is_complex():
            part = -(-tensor.numel() // self.world_size)
            for name in ("reduce_scatter", "all_gather"):
                self._count(name, part * tensor.element_size() * (self.world_size - 1))
            with self._named(caller):
                self._local.all_reduce(tensor)
            return
        part = -(-tensor.numel() // self.world_size)
        padded = tensor.new_zeros(part * self.world_size)
        padded[: tensor.numel()] = tensor
        own = padded[part * self.rank : part * (self.rank + 1)]
        self.reduce_scatter(padded, own, caller)
        self.all_gather(padded, own, caller)
        tensor.copy_(padded[: tensor.numel()])

    def start_send(self, tensor: Tensor, peer: int, tag: int, caller: str) -> "Message":
        """Starts to send a contiguous tensor to one rank of the group, which receives it with the same tag."""
        self._count("send", tensor.nbytes)
        return self._message("send", tensor, peer, tag, caller)

    def start_receive(self, into: Tensor, peer: int, tag: int, caller: str) -> "Message":
        """Starts to receive what `peer` sends with the same tag, and of the same size, into a contiguous tensor."""
        return self._message("recv", into, peer, tag, caller)

    def _message(self, kind: str, tensor: Tensor, peer: int, tag: int, caller: str) -> "Message":
        group = self.group
        assert group is not None
        plain = real_view(tensor) if tensor.dtype != torch.bool else tensor.view(torch.uint8)
        with self._named(caller):
            return Message(self, getattr(group, kind)([plain], peer, tag), plain, caller)

    def all_to_all(self, into: Sequence[Tensor], parts: Sequence[Tensor], caller: str) -> None:
        """Sends parts[r] to each rank r, and fills into[r] with what r sent to this rank; sizes differ as they like.

        Args:
            into: by rank, (n_r,) contiguous and of one dtype; may be empty. Both ends know how much is sent.
            parts: by rank, likewise.
        Raises: CollectiveError: a peer was lost or did not arrive in time.
        Cost: the bytes of all `parts` but this rank's own.
        Example: rank 0 sends [[], [1, 2]] and rank 1 sends [[3], []]: rank 0 gets [[], [3]], rank 1 gets [[1, 2], []].
        """
        into[self.rank].copy_(parts[self.rank])
        if self.world_size == 1:
            return
        self._count("all_to_all", sum(p.nbytes for r, p in enumerate(parts) if r != self.rank))
        opened = begin(caller) if profiler._is_profiler_enabled else None
        with self._named(caller):
            if self._direct:
                self._all_to_all(self._host, into, parts)
            else:
                dist.all_to_all(list(into), list(parts), group=self.group)
        if opened is not None:
            end(opened)

    def _all_to_all(self, host: HostRanks | None, into: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        first, size = (0, 0) if host is None else (host.host * host.local.world_size, host.local.world_size)
        group, others = self.group, [r for r in self._peers if not first <= r < first + size]
        assert group is not None
        works = [group.recv([into[r]], r, 0) for r in others if into[r].numel()]
        works += [group.send([parts[r]], r, 0) for r in others if parts[r].numel()]
        if host is not None:
            mates = slice(first, first + size)
            host.local.wait(host.local.start_all_to_all(into[mates], parts[mates]))
        for work in works:
            work.wait()

    def gather_small(self, values: Tensor, caller: str) -> Tensor:
        """Returns the (world_size, n) rows that the ranks hold, for small control values (n equal on all ranks)."""
        if self.world_size == 1:
            return values.unsqueeze(0)
        self._count("gather_small", values.nbytes * (self.world_size - 1))
        opened = begin(f"agree on {caller}") if profiler._is_profiler_enabled else None
        rows = values.new_empty(self.world_size * values.numel())
        with self._named(caller):
            if self._local is not None:
                self._local.wait(self._local.start_all_gather(rows, values.contiguous()))
            elif self._direct:
                # One round in gloo, where its all-gather goes around the ranks.
                dist.all_to_all_single(rows, values.repeat(self.world_size), group=self.group)
            else:
                all_gather_flat(rows, values, group=self.group)
        if opened is not None:
            end(opened)
        return self._rows(rows)

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
            if self._local is not None and tensor.is_contiguous():
                self._local.wait(self._local.start_broadcast(tensor))
                return
            plain = tensor.view(torch.uint8) if tensor.dtype == torch.bool else real_view(tensor)
            dist.broadcast(plain, group=self.group, group_src=0)

    def close(self) -> None:
        """Lets go of the group and of shared memory."""
        self.group = None
        if self._host is not None:
            self._host.local.close()
        self._host = self._local = None

    def _count(self, name: str, nbytes: int) -> None:
        self.calls[name] += 1
        self._counts["bytes"] += nbytes
        if self._local is not None and profiler._is_profiler_enabled:
            # In the place of what torch.distributed would show in a trace.
            end(begin(f"{SHARED}{name}"))

    @contextmanager
    def _named(self, caller: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.world_size}: '{caller}' failed: a peer was lost or did not arrive in time "
                f"({str(error).splitlines()[0]}). Look at the other ranks' output for the cause."
            ) from error
