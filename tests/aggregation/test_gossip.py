"""The peer tables, and the schedules of a gossip communication, for all ranks in one process."""

from fractions import Fraction

import numpy as np
import pytest

from mpiagg.aggregation.gossip import gossip, in_pieces, shift_one
from mpiagg.schedules import Action, Collective, Message, count, prove, walk

SIZES = range(1, 34)
NODES = [
    ((0,),),
    ((0, 1, 2),),
    ((0,), (1,)),
    ((0, 1), (2,)),
    ((0, 1), (2, 3)),
    ((0, 2, 4), (1, 3)),
    ((0,), (1, 2, 3), (4, 5)),
    ((0, 1), (2, 3), (4, 5), (6, 7)),
    ((0, 1, 2, 3, 4), (5,), (6, 7), (8,)),
]


def flat(size):
    return tuple((rank,) for rank in range(size))


def table(size, step):
    return [shift_one(member, size, step) for member in range(size)]


def run(schedules, divisors, values):
    """Execute the schedules of all ranks on one number each."""
    held, arrived = list(values), {}
    for event in walk(schedules):
        if isinstance(event, Message):
            arrived[event.target, event.slot] = held[event.source]
            continue
        for slot, step in enumerate(event.steps):
            if step.action is Action.FINISH:
                held[event.rank] = held[event.rank] / divisors[event.rank]
            elif step.action is Action.RECEIVE:
                held[event.rank] = arrived.pop((event.rank, slot))
            elif step.action is Action.REDUCE:
                received = arrived.pop((event.rank, slot))
                pair = (received, held[event.rank]) if step.received_first else (held[event.rank], received)
                held[event.rank] = pair[0] + pair[1]
    return held


def communicate(nodes, step, values, peer_selection="shift_one"):
    ranks = range(sum(map(len, nodes)))
    programs, divisors = zip(*(gossip(rank, nodes, step, peer_selection) for rank in ranks), strict=True)
    return run(programs, divisors, values)


@pytest.mark.parametrize(
    ("size", "step", "peers"),
    [
        (2, 0, [1, 0]),
        (4, 0, [2, 3, 0, 1]),
        (4, 1, [3, 2, 1, 0]),
        (6, 0, [3, 4, 5, 0, 1, 2]),
        (6, 1, [4, 5, 3, 2, 0, 1]),
        (6, 2, [5, 3, 4, 1, 2, 0]),
        (8, 0, [4, 5, 6, 7, 0, 1, 2, 3]),
        (8, 1, [5, 6, 7, 4, 3, 0, 1, 2]),
        (8, 2, [6, 7, 4, 5, 2, 3, 0, 1]),
        (8, 3, [7, 4, 5, 6, 1, 2, 3, 0]),
        (1, 5, [0]),
        (3, 0, [0, 2, 1]),
        (3, 1, [1, 0, 2]),
        (3, 2, [2, 1, 0]),
        (5, 3, [3, 2, 1, 0, 4]),
    ],
)
def test_golden_peers(size, step, peers):
    assert table(size, step) == peers


@pytest.mark.parametrize("size", SIZES)
def test_the_peer_of_a_peer_is_oneself(size):
    for step in range(2 * size + 1):
        peers = table(size, step)
        assert sorted(peers) == list(range(size))
        assert [peers[peer] for peer in peers] == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_who_is_idle_and_who_meets_whom(size):
    period = size if size % 2 else size // 2
    met = [{shift_one(member, size, step) for step in range(period)} for member in range(size)]
    for step in range(period):
        idle = [member for member, peer in enumerate(table(size, step)) if peer == member]
        assert len(idle) == size % 2
        assert table(size, step + period) == table(size, step)
    half = size // 2
    for member in range(size):
        others = range(size) if size % 2 else (range(half, size) if member < half else range(half))
        assert met[member] == set(others)


@pytest.mark.parametrize("size", SIZES)
def test_the_mean_is_kept_and_ranks_come_together(size):
    values = [Fraction(rank * rank) for rank in range(size)]
    mean = sum(values) / size
    spread = max(values) - min(values)
    period = size if size % 2 else size // 2
    for step in range(2 * period):
        values = communicate(flat(size), step, values)
        assert sum(values) == mean * size
    assert max(values) - min(values) <= spread / 2
    if size in (1, 2, 4):
        assert set(values) == {mean}


@pytest.mark.parametrize(("size", "expected"), [(2, 0), (4, 0), (6, 0.25), (8, 0.354), (16, 0.575)])
def test_how_much_of_a_difference_a_period_leaves(size, expected):
    product = np.eye(size)
    for step in range(size // 2):
        product = (np.eye(size) + np.eye(size)[table(size, step)]) / 2 @ product
    assert np.linalg.svd(product)[1][1] == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("nodes", NODES)
def test_nodes_weigh_what_they_have_ranks(nodes):
    size = sum(map(len, nodes))
    values = [Fraction(3 * rank + rank % 2) for rank in range(size)]
    for step in range(5):
        after = communicate(nodes, step, values)
        for own, node in enumerate(nodes):
            peer = shift_one(own, len(nodes), step)
            both = [values[rank] for rank in {*node, *nodes[peer]}]
            assert {after[rank] for rank in node} == {sum(both) / len(both)}
        assert sum(after) == sum(values)
        values = after


@pytest.mark.parametrize("nodes", NODES)
def test_all_is_an_allreduce(nodes):
    size = sum(map(len, nodes))
    prove([gossip(rank, nodes, 0, "all")[0] for rank in range(size)], Collective.ALLREDUCE, 1) if size > 1 else None
    values = [Fraction(rank * rank) for rank in range(size)]
    assert set(communicate(nodes, 0, values, "all")) == {sum(values) / size}


class Expression(str):
    """A value that remembers how it was computed."""

    __slots__ = ()

    def __add__(self, other):
        return Expression(f"({self} + {other})")

    def __truediv__(self, other):
        return Expression(f"{self} / {other}")


@pytest.mark.parametrize("size", SIZES)
def test_both_of_a_pair_compute_the_same_expression(size):
    for step in range(size):
        after = communicate(flat(size), step, [Expression(f"x{rank}") for rank in range(size)])
        for rank, peer in enumerate(table(size, step)):
            pair = f"(x{min(rank, peer)} + x{max(rank, peer)}) / 2"
            assert after[rank] == (f"x{rank}" if peer == rank else pair)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_pieces_are_exchanged_one_after_the_other(nodes, pieces):
    size = sum(map(len, nodes))
    for rank in range(size):
        rounds = gossip(rank, nodes, 1, "shift_one")[0]
        whole, cut = count(rounds), count(list(in_pieces(rounds, pieces)))
        assert (cut.sent, cut.received, cut.scratch) == (whole.sent * pieces, whole.received * pieces, whole.scratch)
    programs = [list(in_pieces(gossip(rank, nodes, 1, "all")[0], pieces)) for rank in range(size)]
    if size > 1:
        prove(programs, Collective.ALLREDUCE, pieces)
