"""Ranks that need different collectives, or none, never hang; ranks at different points learn it at once."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from shardlight.ops.built import why_not_shared
from shardlight.strategies.engine.agreement import Agreement
from shardlight.strategies.engine.collectives import Collectives, all_gather_flat, newest
from shardlight.strategies.errors import CollectiveError


class Log:
    """A server that notes what is started, and checks that what is started is finished."""

    def __init__(self):
        self.started, self.open, self.for_others = [], [], 0

    def start(self, code):
        self.started.append(code)
        self.open.append(code)

    def finish(self, code, own):
        self.open.remove(code)
        self.for_others += not own

    def can_prefetch(self, code):
        return code not in self.open

    def size(self, code):
        return 1 << 20


def random_needs(rank, world_size, rounds):
    collectives, log = Collectives(dist.group.WORLD), Log()
    agreement, served = Agreement(collectives, log), log.started
    g = torch.Generator().manual_seed(rank)
    for number in range(rounds):
        for _ in range(int(torch.randint(4, (1,), generator=g))):
            code = int(torch.randint(6, (1,), generator=g))
            agreement.need(code, f"need {code}")
            assert code in served
        agreement.meet(f"round {number}")
        assert not log.open
    return served


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_ranks_serve_the_same_needs_in_the_same_order(world_size):
    served = run_ranks(random_needs, world_size, rounds=20)
    assert len(served[0]) > 10 and all(s == served[0] for s in served)


FORWARD, BACKWARD = [0, 4, 8], [8, 9, 4, 5, 1]  # gathers of units 0, 1, 2; reductions of 2, 1, 0


def passes(rank, world_size):
    collectives, log = Collectives(dist.group.WORLD), Log()
    agreement, exchanges, started = Agreement(collectives, log), [], []
    for step in range(12):
        before, at = collectives.calls["gather_small"], len(log.started)
        for kind, codes in (("forward", FORWARD), ("backward", BACKWARD)):
            agreement.begin_pass(kind)
            for code in codes:
                # In some steps rank 0 leaves a unit out, needs another order, or something that it never needed before.
                if rank == 0 and step == 6 and kind == "forward" and code == 4:
                    continue
                if rank == 0 and step == 8:
                    code = {4: 8, 8: 4}.get(code, code)
                if rank == 0 and step == 10 and code == 4:
                    agreement.need(12, "gather 3")
                agreement.need(code, f"need {code}")
                assert code in log.started[at:]
                assert code % 4 or code not in log.open, "a gather that is needed is over"
        agreement.meet("end")
        assert not log.open
        exchanges.append(collectives.calls["gather_small"] - before)
        started.append(log.started[at:])
    return exchanges, started


@pytest.mark.parametrize("world_size", [2, 3])
def test_passes_that_run_alike_are_agreed_on_as_a_whole_and_others_end_without_a_hang(world_size):
    results = run_ranks(passes, world_size)
    exchanges, started = results[0]
    assert all(s == started for _, s in results), "every rank starts the same collectives in the same order"
    assert exchanges[0] == len(FORWARD) + len(BACKWARD) + 1 and started[0] == FORWARD + BACKWARD
    # Gathers of backward come before the reduction that they do not wait for.
    assert exchanges[5] == 3 and started[5] == [*FORWARD, 8, 4, 9, 5, 1]
    # What was agreed on is served, used or not; and rank 0 does not expect its usual backward after an unusual forward.
    assert started[6] == [*FORWARD, *BACKWARD] and exchanges[6] == 1 + len(BACKWARD) + 1
    assert 12 in started[10]
    assert results[1][0][11] == exchanges[11]


def different_points(rank, world_size):
    agreement = Agreement(Collectives(dist.group.WORLD), Log())
    agreement.meet("start")
    with pytest.raises(CollectiveError, match="rank 0 is at 'save'; rank 1 is at 'step'; rank 2 is at 'gather x'"):
        if rank < 2:
            agreement.meet("save" if rank == 0 else "step")
        else:
            agreement.need(4, "gather x")


def test_ranks_at_different_points_get_an_error_that_names_them():
    run_ranks(different_points, 3)


def moves(rank, world_size, dtype, transport="auto", hosts=1):
    os.environ["SHARDLIGHT_HOST"] = f"host {rank * hosts // world_size}"
    collectives = Collectives(dist.group.WORLD, transport=transport)
    shared = transport == "auto" and world_size > hosts and why_not_shared() is None
    assert (collectives.why_not_shared is None) == shared
    n = 3
    shard = torch.full((n,), rank + 1, dtype=dtype)
    full = torch.zeros(n * world_size, dtype=dtype)
    collectives.all_gather(full, shard, "test")
    assert full.tolist() == [r + 1 for r in range(world_size) for _ in range(n)]
    # In place, as the engine does it: the shard is this rank's slice of the full buffer.
    grads = torch.arange(n * world_size).to(dtype) * (rank + 1)
    own = grads[rank * n : (rank + 1) * n]
    collectives.reduce_scatter(grads, own, "test")
    total = sum(r + 1 for r in range(world_size))
    assert own.tolist() == [i * total for i in range(rank * n, (rank + 1) * n)]
    empty = torch.zeros(0, dtype=dtype)
    collectives.all_gather(empty, empty, "test")
    collectives.reduce_scatter(empty, empty, "test")
    size = full.element_size() * n * (world_size - 1)
    assert collectives.bytes_sent == 2 * size, (collectives.bytes_sent, size)
    flag = torch.tensor([rank == 0], dtype=torch.bool)
    collectives.broadcast(flag, "test")
    assert flag.item()
    assert collectives.gather_objects(rank, "test") == list(range(world_size))
    rows = collectives.gather_small(torch.tensor([float(rank)]), "test")
    assert rows.flatten().tolist() == list(range(world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives_move_and_count(world_size):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        run_ranks(moves, world_size, dtype=dtype)
    run_ranks(moves, world_size, dtype=torch.float32, transport="gloo")


@pytest.mark.parametrize("hosts", [2, 4])
def test_collectives_of_ranks_on_several_hosts(hosts):
    for dtype in (torch.float32, torch.bfloat16):
        run_ranks(moves, 4, dtype=dtype, hosts=hosts)


def test_the_newest_name_of_a_function_is_used():
    both, old = SimpleNamespace(new="n", old="o", __name__="m"), SimpleNamespace(old="o", __name__="m")
    assert newest(both, "new", "old") == "n" and newest(old, "new", "old") == "o"
    with pytest.raises(AttributeError, match="has none of new, other in m"):
        newest(old, "new", "other")
    assert all_gather_flat is newest(dist, "all_gather_single", "all_gather_into_tensor")


def peer_dies(rank, world_size, transport):
    agreement = Agreement(Collectives(dist.group.WORLD, transport=transport), Log())
    if rank == 1:
        return
    with pytest.raises(CollectiveError, match="rank 0 of 2: 'step' failed: a peer was lost or did not arrive in time"):
        agreement.meet("step")


def test_a_lost_peer_is_an_error_that_names_the_caller():
    for transport in ("auto", "gloo"):
        run_ranks(peer_dies, 2, transport=transport)
