"""The peer tables, mixing matrices and schedules of gossip, for all ranks in one process, in exact numbers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiagg.aggregation.gossip import (
    MixingRow,
    exponential,
    gossip,
    in_pieces,
    metropolis,
    neighbor_row,
    one_peer_exponential,
    ring,
    shift_one,
)
from mpiagg.schedules import Action, Collective, Message, Round, count, prove, reduce_from, send, walk

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
SELECTIONS = ["shift_one", "one_peer_exponential", "all"]


def flat(size):
    return tuple((rank,) for rank in range(size))


def table(size, step):
    return [shift_one(member, size, step) for member in range(size)]


def rounds_of(phase, rank):
    """The rounds that stand for a phase: who sends to whom."""
    if not isinstance(phase, MixingRow):
        return phase
    return (Round(*map(send, phase.targets), *(reduce_from(peer) for peer, _ in phase.weights if peer != rank)),)


def run(programs, values):
    """Execute the phases of all ranks on one number each."""
    size = len(programs)
    held, arrived = list(values), {}
    steps = [
        [(phase, a_round) for phase in programs[rank] for a_round in rounds_of(phase, rank)] for rank in range(size)
    ]
    for event in walk([[a_round for _, a_round in program] for program in steps]):
        if isinstance(event, Message):
            arrived[event.target, event.source] = held[event.source]
            continue
        rank, phase = event.rank, steps[event.rank][event.round][0]
        taken = {rank: held[rank]}
        for step in event.steps:
            if step.action is Action.FINISH:
                held[rank] = held[rank] / size
            elif step.action is Action.RECEIVE:
                held[rank] = arrived[rank, step.peer]
            elif step.action is Action.REDUCE and isinstance(phase, MixingRow):
                taken[step.peer] = arrived[rank, step.peer]
            elif step.action is Action.REDUCE:
                received = arrived[rank, step.peer]
                pair = (received, held[rank]) if step.received_first else (held[rank], received)
                held[rank] = pair[0] + pair[1]
        if isinstance(phase, MixingRow):
            held[rank] = sum(weight * taken[peer] for peer, weight in phase.weights)
    return held


def communicate(nodes, step, values, peer_selection="shift_one"):
    programs = [gossip(rank, nodes, step, peer_selection) for rank in range(sum(map(len, nodes)))]
    return run(programs, values)


def matrix(rows):
    """Return the mixing matrix of rows, in exact numbers."""
    mixing = np.full((len(rows), len(rows)), Fraction(0))
    for rank, row in enumerate(rows):
        for peer, weight in row.weights:
            mixing[rank, peer] = weight
    return mixing


def doubly_stochastic(mixing):
    sums = {*mixing.sum(axis=0), *mixing.sum(axis=1)}
    return sums == {1} and bool((mixing >= 0).all())


def distance(values):
    """The consensus distance, in exact numbers."""
    mean = sum(values) / Fraction(len(values))
    return sum((value - mean) ** 2 for value in values)


def steps_of(size, step):
    return [one_peer_exponential(member, size, step) for member in range(size)]


# -- tables


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


@pytest.mark.parametrize(
    ("size", "distances"), [(1, [0]), (2, [1]), (3, [1, 2]), (5, [1, 2, 4]), (8, [1, 2, 4]), (9, [1, 2, 4, 8])]
)
def test_exponential_distances(size, distances):
    for step in range(3 * len(distances)):
        far = distances[step % len(distances)]
        assert steps_of(size, step) == [((rank - far) % size, (rank + far) % size) for rank in range(size)]


def test_common_graphs():
    assert [ring(0, 1), ring(1, 2), ring(0, 5), ring(4, 5)] == [[], [0], [1, 4], [0, 3]]
    assert [exponential(0, 1), exponential(0, 2), exponential(1, 3)] == [[], [1], [0, 2]]
    assert exponential(0, 8) == [1, 2, 4, 6, 7]
    assert exponential(3, 16) == [1, 2, 4, 5, 7, 11, 15]


# -- mixing matrices


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("peer_selection", ["shift_one", "one_peer_exponential"])
def test_the_mean_is_kept_and_ranks_come_together(size, peer_selection):
    values = [Fraction(rank * rank) for rank in range(size)]
    mean = sum(values) / size
    spread = max(values) - min(values)
    for step in range(2 * (size if size % 2 else size // 2)):
        rows = [phase for rank in range(size) for phase in gossip(rank, flat(size), step, peer_selection)]
        assert doubly_stochastic(matrix(rows))
        after = communicate(flat(size), step, values, peer_selection)
        assert sum(after) == mean * size
        assert distance(after) <= distance(values)
        values = after
    assert max(values) - min(values) <= spread / 2


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_powers_of_two_agree_after_their_logarithm(size, first):
    values = [Fraction(7 * rank * rank % 23) for rank in range(size)]
    mean, steps = sum(values) / size, size.bit_length() - 1
    for step in range(first, first + steps):
        assert size == 1 or set(values) != {mean}
        values = communicate(flat(size), step, values, "one_peer_exponential")
    assert set(values) == {mean}


@pytest.mark.parametrize(("size", "expected"), [(2, 0), (4, 0), (6, 0.25), (8, 0.354), (16, 0.575)])
def test_how_much_of_a_difference_a_period_leaves(size, expected):
    product = np.eye(size)
    for step in range(size // 2):
        product = (np.eye(size) + np.eye(size)[table(size, step)]) / 2 @ product
    assert np.linalg.svd(product)[1][1] == pytest.approx(expected, abs=5e-4)


@st.composite
def graphs(draw):
    """Return the neighbors of every rank, as any graph may have them."""
    size = draw(st.integers(1, 9))
    pairs = [(one, other) for other in range(size) for one in range(other)]
    edges = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    both = edges | {(other, one) for one, other in edges}
    return [sorted(other for one, other in both if one == rank) for rank in range(size)]


@given(graphs(), st.lists(st.integers(-9, 9), min_size=9, max_size=9))
def test_metropolis_weights_keep_the_mean_on_any_graph(graph, numbers):
    size = len(graph)
    rows = [neighbor_row(rank, metropolis(rank, graph)) for rank in range(size)]
    mixing = matrix(rows)
    assert doubly_stochastic(mixing)
    assert (mixing == mixing.T).all()
    for rank, row in enumerate(rows):
        assert row.targets == tuple(graph[rank])
        assert [peer for peer, _ in row.weights] == sorted([rank, *graph[rank]])
    values = [Fraction(number) for number in numbers[:size]]
    after = run([(row,) for row in rows], values)
    assert after == list(mixing @ np.array(values))
    assert sum(after) == sum(values)
    assert distance(after) <= distance(values)


def test_metropolis_weights_of_a_star_and_a_ring():
    star = [[1, 2, 3], [0], [0], [0]]
    assert dict(neighbor_row(0, metropolis(0, star)).weights) == dict.fromkeys(range(4), Fraction(1, 4))
    assert dict(neighbor_row(1, metropolis(1, star)).weights) == {0: Fraction(1, 4), 1: Fraction(3, 4)}
    circle = [ring(rank, 5) for rank in range(5)]
    assert dict(neighbor_row(2, metropolis(2, circle)).weights) == dict.fromkeys([1, 2, 3], Fraction(1, 3))
    # The plain mean of oneself and one's neighbors would not keep the mean of the star.
    plain = np.array(
        [[Fraction(1, 4)] * 4, *([Fraction(1, 2) if rank in (0, own) else 0 for rank in range(4)] for own in (1, 2, 3))]
    )
    assert not doubly_stochastic(plain)


def test_who_gives_everything_away_takes_nothing_of_its_own():
    assert neighbor_row(1, {0: Fraction(1)}) == MixingRow((0,), ((0, Fraction(1)),))
    assert neighbor_row(1, {}) == MixingRow((), ((1, Fraction(1)),))


# -- nodes


@pytest.mark.parametrize("nodes", NODES)
def test_pairs_of_nodes_get_their_mean(nodes):
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
def test_nodes_give_half_of_what_the_smallest_has(nodes):
    size = sum(map(len, nodes))
    values = [Fraction(3 * rank + rank % 2) for rank in range(size)]
    smallest = min(map(len, nodes))
    for step in range(5):
        means = [sum(values[rank] for rank in node) / len(node) for node in nodes]
        after = communicate(nodes, step, values, "one_peer_exponential")
        for own, node in enumerate(nodes):
            source, _ = one_peer_exponential(own, len(nodes), step)
            wanted = means[own] + Fraction(smallest, 2 * len(node)) * (means[source] - means[own])
            assert {after[rank] for rank in node} == {wanted}
        assert sum(after) == sum(values)
        assert distance(after) <= distance(values)
        values = after


def test_equal_nodes_that_are_a_power_of_two_agree_after_their_logarithm():
    values = [Fraction(rank * rank) for rank in range(8)]
    for step in range(2):
        values = communicate(((0, 1), (2, 3), (4, 5), (6, 7)), step, values, "one_peer_exponential")
    assert set(values) == {Fraction(140, 8)}


@pytest.mark.parametrize("nodes", NODES)
def test_all_is_an_allreduce(nodes):
    size = sum(map(len, nodes))
    for pieces in (1, 2, 5):
        if size > 1:
            prove([schedule(rank, nodes, 0, "all", pieces) for rank in range(size)], Collective.ALLREDUCE, pieces)
    values = [Fraction(rank * rank) for rank in range(size)]
    assert set(communicate(nodes, 0, values, "all")) == {sum(values) / size}


@pytest.mark.parametrize("peer_selection", SELECTIONS)
def test_one_node_gets_its_mean(peer_selection):
    values = [Fraction(number) for number in (5, 1, 9)]
    assert communicate(((0, 1, 2),), 3, values, peer_selection) == [5, 5, 5]


# -- schedules


def schedule(rank, nodes, step, peer_selection, pieces=1):
    """Return all rounds of a rank, phase after phase, as they are bound."""
    phases = gossip(rank, nodes, step, peer_selection)
    return [a_round for phase in phases for a_round in in_pieces(rounds_of(phase, rank), pieces)]


@pytest.mark.parametrize("size", range(1, 65))
def test_nobody_waits_for_ever(size):
    for graph in ([ring(rank, size) for rank in range(size)], [exponential(rank, size) for rank in range(size)]):
        rows = [neighbor_row(rank, metropolis(rank, graph)) for rank in range(size)]
        list(walk([rounds_of(row, rank) for rank, row in enumerate(rows)]))
    for step in range((size - 1).bit_length()):
        for peer_selection in ("shift_one", "one_peer_exponential"):
            list(walk([schedule(rank, flat(size), step, peer_selection) for rank in range(size)]))


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("peer_selection", SELECTIONS)
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_pieces_are_exchanged_one_after_the_other(nodes, peer_selection, pieces):
    size = sum(map(len, nodes))
    for step in range(3):
        programs = [schedule(rank, nodes, step, peer_selection, pieces) for rank in range(size)]
        list(walk(programs))
        for rank in range(size):
            whole, cut = count(schedule(rank, nodes, step, peer_selection)), count(programs[rank])
            assert (cut.sent, cut.received) == (whole.sent * pieces, whole.received * pieces)
            assert cut.scratch == whole.scratch


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_sends_to_one_and_receives_from_one(size):
    for peer_selection in ("shift_one", "one_peer_exponential"):
        for step in range(size):
            for rank in range(size):
                (row,) = gossip(rank, flat(size), step, peer_selection)
                assert len(row.targets) == len(row.weights) - 1 <= 1
                assert len({weight for _, weight in row.weights}) == 1
