"""Who owns parameters that are kept whole, and how what is sent for them is cut: no tensors, no ranks."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from shardlight.strategies.engine.layout import FlatLayout
from shardlight.strategies.engine.owners import Move, assign, element_cost, holders, orthogonal_cost, rounds


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 5), st.data())
def test_no_rank_has_more_than_one_update_above_the_mean(costs, world, data):
    loads = data.draw(st.lists(st.integers(0, 50), min_size=world, max_size=world))
    held = [data.draw(st.lists(st.integers(0, 9), min_size=world, max_size=world)) for _ in costs]
    owners = assign(costs, held, loads)
    after = list(loads)
    for cost, owner in zip(costs, owners, strict=True):
        after[owner] += cost
    mean = sum(after) / world
    assert max(after) <= max(max(loads), mean + max(costs, default=0))
    assert owners == assign(costs, held, loads)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_largest_load_is_within_four_thirds_of_the_best(costs, world):
    def largest(owners):
        return max(sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(world))

    best = min(map(largest, product(range(world), repeat=len(costs))))
    nothing = [[0] * world for _ in costs]
    assert largest(assign(costs, nothing, [0] * world)) <= (4 / 3 - 1 / (3 * world)) * best + 1e-9


def test_of_ranks_with_the_same_to_do_the_one_that_holds_most_owns():
    assert assign([5, 5, 5], [[0, 9], [9, 0], [1, 2]], [0, 0]) == [1, 0, 1]
    assert assign([1], [[9, 0]], [3, 0]) == [1], "balance comes first"


def test_costs_are_those_of_the_arithmetic():
    assert orthogonal_cost((3, 5)) == 45 and orthogonal_cost((7,)) == 7 and orthogonal_cost((0, 4)) == 0
    assert element_cost((3, 5)) == 15 and element_cost(()) == 1


SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8)


@given(SHAPES, st.integers(1, 5), st.sampled_from([1, 16, 64]))
def test_holders_are_the_pieces_of_all_ranks(shapes, world, multiple):
    layout = FlatLayout.pack([(str(i), s) for i, s in enumerate(shapes)], world, multiple)
    want = {}
    for rank in range(world):
        for piece in layout.pieces(rank):
            want.setdefault(piece.slot, []).append((rank, piece.start, piece.stop))
    assert {slot: held for slot in range(len(shapes)) if (held := holders(layout, slot))} == want


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200), st.sampled_from([2, 4, 8, 16])), max_size=12),
    st.sampled_from([16, 48, 160, 4096]),
)
def test_rounds_send_every_element_once_in_bounded_pieces(parts, limit):
    moves = [Move(i, "gradient", owner, 4, 3, 3 + n, width) for i, (owner, n, width) in enumerate(parts)]
    cut = rounds(moves, limit)
    for moves_of_round in cut:
        for owner in range(4):
            assert sum(m.nbytes for m in moves_of_round if m.owner == owner) <= limit
    sent = sorted((m.number, e) for r in cut for m in r for e in range(m.start, m.stop))
    assert sent == [(m.number, e) for m in moves for e in range(m.start, m.stop)]
    # Nobody waits: an owner has something in every round up to its last.
    for owner in range(4):
        takes_part = [any(m.owner == owner for m in r) for r in cut]
        assert takes_part == sorted(takes_part, reverse=True)
