"""Collectives over memory that the ranks of a host share: right to the bit, in any order of waiting, with any fault."""

import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailedError, run_ranks
from loops import check_equal, plain, sharded
from models import TinyGPT, token_batch, token_loss
from shardlight.ops import host_collectives
from shardlight.ops.built import why_not_shared
from shardlight.ops.host_collectives import HostError, HostGroup
from shardlight.ops.host_memory import arena
from shardlight.ops.sums import sum_in_rank_order
from shardlight.strategies.engine import host_ranks
from shardlight.strategies.engine.host_ranks import connect

pytestmark = pytest.mark.skipif(
    why_not_shared() is not None, reason=f"the compiled library is not used: {why_not_shared()}"
)

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def joined() -> HostGroup:
    found = connect(dist.group.WORLD, "auto")
    assert not isinstance(found, str), found
    return found.local


def values(seed: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    return torch.randint(0, 100, (n,), generator=generator).to(dtype)


def special(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a 16-bit type; of wider ones what is special."""
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    info, inf = torch.finfo(dtype), float("inf")
    some = [0.0, -0.0, inf, -inf, float("nan"), info.max, info.tiny, info.tiny / 8, 1.0, -1.0]
    return torch.tensor([a for a in some for _ in some], dtype=dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, but for which NaN it is."""
    nan = torch.isnan(a)
    return bool((nan == torch.isnan(b)).all()) and a[~nan].tolist() == b[~nan].tolist()


def sums(rank, world_size):
    group = joined()

    def check(parts, out_dtype, add):
        n = parts[0].numel() // world_size
        start = values(7, n, out_dtype)
        want = sum_in_rank_order([p.view(world_size, n)[rank].clone() for p in parts], start.clone(), add)
        out = start.clone()
        group.reduce_scatter(parts[rank], out, add)
        assert same(out, want), (parts[0].dtype, out_dtype, add, n, (out != want).nonzero()[:5])

    pairs = [(d, d) for d in FLOATS + INTEGERS] + [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
    pairs += [(torch.float32, torch.float64), (torch.float64, torch.float32), (torch.bfloat16, torch.float64)]
    for dtype, out_dtype in pairs:
        for n in (0, 1, 5, 2047, 2049, 200_001):
            parts = [values(r, n * world_size, dtype) for r in range(world_size)]
            for add in (False, True):
                check(parts, out_dtype, add)
    for dtype in FLOATS:
        first = special(dtype)
        others = [first.roll(r * 12345 % first.numel()) for r in range(world_size)]
        check([o.repeat(world_size) for o in others], dtype, False)
    # In place: the result is this rank's row of what it gives.
    parts = [values(r, 3000 * world_size, torch.float32) for r in range(world_size)]
    want = sum_in_rank_order([p.view(world_size, -1)[rank].clone() for p in parts], torch.empty(3000))
    own = parts[rank].view(world_size, -1)[rank]
    group.reduce_scatter(parts[rank], own)
    assert torch.equal(own, want)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_equal_pytorchs_in_rank_order_to_the_bit(world_size):
    run_ranks(sums, world_size)


def many(rank, world_size, count):
    """Random collectives, some of them under way at a time, with ranks that are late now and then."""
    same_everywhere, own = random.Random(world_size), random.Random(rank)
    host_collectives.READ_FROM_BYTES = 10_000
    group, memory, under_way = joined(), arena(), []

    def placed(tensor):
        """On memory of its own or where the others can read it; not alike on all ranks."""
        taken = memory.take(tensor.numel(), tensor.dtype) if own.random() < 0.5 else None
        return tensor if taken is None else taken.copy_(tensor)

    def finish(left):
        while len(under_way) > left:
            number, check = under_way.pop(0)
            group.wait(number)
            check()

    def start(case):
        kind = same_everywhere.choice(["gather", "sum", "all to all", "broadcast", "all reduce", "barrier"])
        dtype = same_everywhere.choice(FLOATS + INTEGERS)
        n = same_everywhere.choice([0, 1, 3, 17, 1000, 20_000] if case % 40 else [100_000, 3_000_000])
        ranks = range(world_size)
        if kind == "gather":
            want, full = (
                torch.cat([values(case + r, n, dtype) for r in ranks]),
                torch.empty(n * world_size, dtype=dtype),
            )
            number = group.start_all_gather(full, placed(values(case + rank, n, dtype)))
            return number, lambda: check_same(full, want)
        if kind == "sum":
            parts = [placed(values(case + r, n * world_size, dtype)) for r in ranks]
            out = torch.empty(n, dtype=dtype)
            want = sum_in_rank_order([p.view(world_size, n)[rank].clone() for p in parts], torch.empty(n, dtype=dtype))
            return group.start_reduce_scatter(parts[rank], out), lambda: check_same(out, want)
        if kind == "all to all":
            sizes = [[same_everywhere.randint(0, n) for _ in ranks] for _ in ranks]
            want = [values(case + r * 9 + rank, sizes[r][rank], dtype) for r in ranks]
            into = [torch.empty_like(w) for w in want]
            parts = [placed(values(case + rank * 9 + r, sizes[rank][r], dtype)) for r in ranks]
            number = group.start_all_to_all(into, parts)
            return number, lambda: [check_same(i, w) for i, w in zip(into, want, strict=True)]
        if kind == "broadcast":
            source = same_everywhere.randrange(world_size)
            tensor, want = placed(values(case + rank, n + 1, dtype)), values(case + source, n + 1, dtype)
            return group.start_broadcast(tensor, source), lambda: check_same(tensor, want)
        if kind == "all reduce":
            parts = [placed(values(case + r, n + 1, dtype)) for r in ranks]
            want = sum_in_rank_order([p.clone() for p in parts], torch.empty(n + 1, dtype=dtype))
            group.all_reduce(parts[rank])
            check_same(parts[rank], want)
        else:
            group.barrier()
        return None

    def check_same(found, want):
        assert same(found, want), (rank, found.dtype, found.numel())

    for case in range(count):
        if own.random() < 0.05:
            time.sleep(own.random() * 0.003)
        started = start(case)
        if started is not None:
            under_way.append(started)
        finish(own.randrange(4))
    finish(0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_collectives_with_late_ranks(world_size):
    run_ranks(many, world_size, timeout_s=120, count=250 if world_size < 4 else 100)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ten_thousand_random_collectives(world_size):
    run_ranks(many, world_size, timeout_s=900, count=10_000)


def kept_until_read(rank, world_size):
    """A sender that is done may change what it sent; until then it is what others read."""
    group, memory, n = joined(), arena(), 2 << 20
    own = memory.take(n, torch.float32)
    full = torch.empty(n * world_size)
    for turn in range(5):
        own.fill_(10 * turn + rank)
        number = group.start_all_gather(full, own)
        if rank == turn % world_size:
            time.sleep(0.05)
        group.wait(number)
        own.fill_(-1)
        assert full.view(world_size, n).mean(1).tolist() == [10.0 * turn + r for r in range(world_size)]
        assert full.view(world_size, n).std(1).max() == 0
    # A part of an arena, in place, and what lies only partly in it.
    parts = memory.take(n * world_size, torch.float32).fill_(rank + 1)
    row = parts.view(world_size, n)[rank]
    group.reduce_scatter(parts, row)
    assert float(row.mean()) == world_size * (world_size + 1) / 2
    others = [r for r in range(world_size) if r != rank]
    assert all(float(parts.view(world_size, n)[r].mean()) == rank + 1 for r in others)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_lies_in_an_arena_is_read_there_and_kept_until_all_have(world_size):
    run_ranks(kept_until_read, world_size)


def without_arenas(rank, world_size):
    real, process = host_ranks.arena, os.getpid()
    host_ranks.arena = lambda: None if rank == 1 and os.getpid() == process else real()
    group = joined()
    full = torch.empty(3_000_000 * world_size)
    group.wait(group.start_all_gather(full, real().take(3_000_000, torch.float32).fill_(rank)))
    assert full.view(world_size, -1).mean(1).tolist() == list(range(world_size))


def test_where_a_rank_has_no_arena_all_go_through_rings():
    run_ranks(without_arenas, 3)


def busy_elsewhere(rank, world_size):
    """More than fits into a ring is under way on a rank whose program waits for something else."""
    group, n = joined(), 8 << 20
    full, own = torch.empty(n * world_size), torch.full((n,), rank + 1.0)
    if rank == 0:
        number = group.start_all_gather(full, own)
        dist.barrier()
        group.wait(number)
    else:
        group.wait(group.start_all_gather(full, own))
        dist.barrier()
    assert [float(v) for v in full.view(world_size, n).mean(1)] == [r + 1.0 for r in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_waits_for_something_else_holds_nobody_up(world_size):
    run_ranks(busy_elsewhere, world_size)


def late(rank, world_size):
    group = joined()
    group.limit_s = 1.0
    group.barrier()
    if rank == 1:
        time.sleep(3)
    else:
        with pytest.raises(HostError, match=r"rank 1 \(process \d+\) did not arrive within 1 s"):
            group.barrier()
        with pytest.raises(HostError, match="another collective"):
            group.barrier()


def test_a_rank_that_does_not_arrive_is_named():
    run_ranks(late, 3)


def differ(rank, world_size):
    group = joined()
    start = time.monotonic()
    with pytest.raises(HostError, match="takes part in another collective, or with another size"):
        if rank == 0:
            group.wait(group.start_broadcast(torch.zeros(3)))
            group.barrier()
        else:
            full = torch.zeros(4 * world_size)
            group.wait(group.start_all_gather(full, torch.zeros(4)))
    assert time.monotonic() - start < 5


def test_ranks_that_do_different_things_get_an_error():
    run_ranks(differ, 2)


def killed(rank, world_size, at):
    group = joined()
    shared = "memfd:shardlight" in Path("/proc/self/maps").read_text()
    assert shared and not [name for name in os.listdir("/dev/shm") if "shardlight" in name]
    for case in range(1000):
        if rank == 1 and case == at:
            os.kill(os.getpid(), signal.SIGKILL)
        full = torch.zeros(300_000 * world_size)
        group.wait(group.start_all_gather(full, torch.zeros(300_000)))


def test_a_rank_that_is_killed_is_named_at_once_and_leaves_nothing():
    before = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"rank 1 \(process \d+\) has ended"):
        run_ranks(killed, 3, at=random.randrange(100))
    assert time.monotonic() - before < 20
    assert not [name for name in os.listdir("/dev/shm") if "shardlight" in name]


def not_built(rank, world_size):
    host_ranks.why_not_shared = lambda: "it was not built" if rank == 1 else None
    assert connect(dist.group.WORLD, "auto") == "the compiled library is not used (rank 1: it was not built)"
    host_ranks.why_not_shared = lambda: None
    host_ranks.create_segment = lambda size: (_ for _ in ()).throw(OSError(12, "no memory"))
    assert connect(dist.group.WORLD, "auto").startswith("memory could not be shared (rank 0")
    assert connect(dist.group.WORLD, "gloo") == "collectives: gloo is set"


def test_where_memory_is_not_shared_all_ranks_know_why():
    run_ranks(not_built, 2)


def uneven(rank, world_size):
    os.environ["SHARDLIGHT_HOST"] = "a" if rank < 2 else "b"
    assert str(connect(dist.group.WORLD, "auto")).startswith("hosts have unequal numbers of ranks")


def test_unequal_hosts_are_told_from_ranks_that_are_alone():
    run_ranks(uneven, 3)


def trained(rank, world_size, hosts):
    os.environ["SHARDLIGHT_HOST"] = f"host {rank * hosts // world_size}"

    def losses(model, batch, step, rank):
        return [token_loss(model, batch)]

    def batch(step, rank):
        return token_batch(100 * step + rank, 4, torch.float64)

    want = plain(TinyGPT, losses, world_size, steps=3, batch=batch)
    for plan in ("ddp", "zero1", "zero2", "zero3"):
        ways = [
            sharded(TinyGPT, losses, plan, rank, world_size, steps=3, batch=batch, collectives=transport)
            for transport in ("auto", "gloo")
        ]
        for found in ways:
            check_equal(found, want, plan)
        if hosts == 1:
            for a, b in pairwise(ways):
                assert all(torch.equal(x, y) for x, y in zip(a.weights.values(), b.weights.values(), strict=True)), plan


@pytest.mark.parametrize(("world_size", "hosts"), [(2, 1), (3, 1), (4, 2)])
def test_training_gives_the_same_bits_whatever_moves_the_data(world_size, hosts):
    run_ranks(trained, world_size, hosts=hosts)
