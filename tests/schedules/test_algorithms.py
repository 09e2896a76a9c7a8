"""Every algorithm of the table is right for every number of ranks, and costs what its docstring says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import thorough

from mpiagg import simulate
from mpiagg.errors import ScheduleError
from mpiagg.schedules import (
    TABLE,
    Action,
    Collective,
    Count,
    Layout,
    Round,
    check,
    hold,
    prove,
    receive,
    schedules,
    send,
)

SERVED = [
    (name, collective)
    for name, entry in TABLE.items()
    for collective in entry.schedules
    if name != "shared"  # its schedules are those of "direct"
]


def log2(n):
    """The binary logarithm of the largest power of two up to n."""
    return n.bit_length() - 1


def ceil_log2(n):
    return (n - 1).bit_length()


def ring_reduce_scatter(place, n):
    del place
    return Count(n - 1, n - 1, n - 1, n - 1, n - 1, min(1, n - 1))


def ring_allgather(place, n):
    del place
    return Count(n - 1, n - 1, n - 1, n - 1, 0, 0)


def ring_allreduce(place, n):
    del place
    steps = 2 * (n - 1)
    return Count(steps, steps, steps, steps, n - 1, min(1, n - 1))


def ring_reduce(place, n):
    sent = n - 1 if place == 0 else n
    received = 2 * (n - 1) if place == 0 else n - 1
    return Count(n if n > 1 else 0, sent, sent, received, n - 1, min(1, n - 1))


def ring_broadcast(place, n):
    sent = 2 * (n - 1) if place == 0 else n - 1
    received = n - 1 if place == 0 else n
    return Count(n if n > 1 else 0, sent, sent, received, 0, 0)


def tree_children(place, n):
    return sum(child < n for child in (2 * place + 1, 2 * place + 2))


def tree_reduce(place, n):
    below, above = tree_children(place, n), int(place > 0)
    return Count(below + above, above, above, below, below, min(1, below))


def tree_broadcast(place, n):
    below, above = tree_children(place, n), int(place > 0)
    return Count(above + min(1, below), below, below, above, 0, 0)


def server_reduce(place, n):
    if place:
        return Count(1, 1, 1, 0, 0, 0)
    return Count(n - 1, 0, 0, n - 1, n - 1, min(1, n - 1))


def server_broadcast(place, n):
    return Count(1, 0, 0, 1, 0, 0) if place else Count(min(1, n - 1), n - 1, n - 1, 0, 0, 0)


def added(a, b):
    sums = [getattr(a, f) + getattr(b, f) for f in ("rounds", "messages", "sent", "received", "reduced")]
    return Count(*sums, max(a.scratch, b.scratch))


def both(reduce, broadcast):
    """The count of one collective after the other."""

    def formula(place, n):
        return added(reduce(place, n), broadcast(place, n))

    return formula


def paired(inner):
    """What an algorithm for a power of two costs on any number of ranks; chunks are those of the inner one."""

    def formula(place, n):
        m = 1 << log2(n)
        whole, core = inner(m)
        if place >= 2 * (n - m):
            return core
        if place % 2 == 0:
            return Count(2, 1, whole, whole, 0, 0)
        return Count(
            core.rounds + 2,
            core.messages + 1,
            core.sent + whole,
            core.received + whole,
            core.reduced + whole,
            whole,
        )

    return formula


def doubling(m):
    rounds = log2(m)
    return 1, Count(rounds, rounds, rounds, rounds, rounds, min(1, rounds))


def halving_doubling(m):
    return m, Count(2 * log2(m), 2 * log2(m), 2 * (m - 1), 2 * (m - 1), m - 1, m // 2)


def logarithmic_reduce_scatter(place, n):
    del place
    return Count(ceil_log2(n), ceil_log2(n), n - 1, n - 1, n - 1, n // 2)


def logarithmic_allgather(place, n):
    del place
    return Count(ceil_log2(n), ceil_log2(n), n - 1, n - 1, 0, 0)


def direct_reduce_scatter(place, n):
    del place
    return Count(min(1, n - 1), n - 1, n - 1, n - 1, n - 1, n - 1)


def direct_allgather(place, n):
    del place
    return Count(min(1, n - 1), n - 1, n - 1, n - 1, 0, 0)


def direct_reduce(place, n):
    part = direct_reduce_scatter(place, n)
    handed = Count(0, 0, 0, n - 1, 0, 0) if place == 0 else Count(0, 1, 1, 0, 0, 0)
    return added(part, replace(handed, rounds=min(1, n - 1)))


def direct_broadcast(place, n):
    if n == 1:
        return Count(0, 0, 0, 0, 0, 0)
    sent = 2 * (n - 1) if place == 0 else n - 2
    return Count(2, sent, sent, 0 if place == 0 else n, 0, 0)


def one_shot_allreduce(place, n):
    del place
    return Count(min(1, n - 1), n - 1, n - 1, n - 1, n - 1, n - 1)


def hierarchical_on_one_node(place, n):
    return both(direct_reduce_scatter, direct_allgather)(place, n)


FORMULAS = {
    ("ring", "reduce_scatter"): ring_reduce_scatter,
    ("ring", "allgather"): ring_allgather,
    ("ring", "allreduce"): ring_allreduce,
    ("ring", "reduce"): ring_reduce,
    ("ring", "broadcast"): ring_broadcast,
    ("tree", "reduce"): tree_reduce,
    ("tree", "broadcast"): tree_broadcast,
    ("tree", "allreduce"): both(tree_reduce, tree_broadcast),
    ("parameter_server", "reduce"): server_reduce,
    ("parameter_server", "broadcast"): server_broadcast,
    ("parameter_server", "allreduce"): both(server_reduce, server_broadcast),
    ("recursive_doubling", "allreduce"): paired(doubling),
    ("halving_doubling", "allreduce"): paired(halving_doubling),
    ("circulant", "reduce_scatter"): logarithmic_reduce_scatter,
    ("circulant", "allgather"): logarithmic_allgather,
    ("circulant", "allreduce"): both(logarithmic_reduce_scatter, logarithmic_allgather),
    ("pat", "reduce_scatter"): logarithmic_reduce_scatter,
    ("pat", "allgather"): logarithmic_allgather,
    ("pat", "allreduce"): both(logarithmic_reduce_scatter, logarithmic_allgather),
    ("direct", "reduce_scatter"): direct_reduce_scatter,
    ("direct", "allgather"): direct_allgather,
    ("direct", "allreduce"): both(direct_reduce_scatter, direct_allgather),
    ("direct", "reduce"): direct_reduce,
    ("direct", "broadcast"): direct_broadcast,
    ("one_shot", "allreduce"): one_shot_allreduce,
    ("hierarchical", "allreduce"): hierarchical_on_one_node,
}
"""What the docstrings of the algorithms say, in chunks; ``place`` is the rank as counted from the root."""


def check_and_count(name, collective, n, root=0):
    formula = FORMULAS[name, collective.value]
    counts = check(name, collective, n, root)
    assert counts == [formula((rank - root) % n, n) for rank in range(n)], (n, root)


@pytest.mark.parametrize("most", [12, *thorough(64)])
@pytest.mark.parametrize(("name", "collective"), SERVED)
def test_right_and_as_cheap_as_documented_for_every_n(name, collective, most):
    for n in range(1, most + 1):
        for root in sorted({0, n // 2, n - 1}) if collective.rooted else [0]:
            check_and_count(name, collective, n, root)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "collective"), SERVED)
@pytest.mark.parametrize("n", [256, 1000, 1024])
def test_right_and_as_cheap_as_documented_for_large_n(name, collective, n):
    check_and_count(name, collective, n, root=n // 3 if collective.rooted else 0)


def test_every_served_collective_has_a_formula():
    assert {(name, collective.value) for name, collective in SERVED} == set(FORMULAS)


@pytest.mark.parametrize("collective", Collective)
def test_every_collective_is_served_by_the_ring(collective):
    assert collective in TABLE["ring"].schedules


def test_shared_memory_is_another_way_for_the_same_schedules():
    assert schedules("shared", Collective.ALLREDUCE, 5) == schedules("direct", Collective.ALLREDUCE, 5)
    assert set(TABLE["shared"].schedules) == set(TABLE["direct"].schedules) == set(Collective)


def test_one_shot_and_direct_compute_the_same_fold():
    # In one chunk they must end with equal expressions; so in all, since direct's chunks do not mix.
    for n in range(1, 9):
        vectors = [10.0 ** (5 * rank) * np.float32(1.1) * np.ones(1, np.float32) for rank in range(n)]
        one_shot, direct = (simulate(vectors, algorithm=name) for name in ("one_shot", "direct"))
        assert [x.tobytes() for x in one_shot] == [x.tobytes() for x in direct]
        total = vectors[0]
        for x in vectors[1:]:
            total = total + x
        assert one_shot[0].tobytes() == total.tobytes()


EVEN = [(2, 2), (4, 1), (1, 4), (3, 2), (2, 5), (5, 3)]
UNEVEN = [[1, 2], [3, 1], [2, 3, 1], [1, 1, 4], [5, 2, 2], [7, 3]]


@pytest.mark.parametrize(("nodes", "ranks"), EVEN)
def test_hierarchical_on_even_nodes(nodes, ranks):
    layout = Layout.of([ranks] * nodes)
    counts = check("hierarchical", "allreduce", layout)
    node, ring = both(direct_reduce_scatter, direct_allgather)(0, ranks), ring_allreduce(0, nodes)
    for found in counts:
        assert found.rounds == node.rounds + ring.rounds
        assert found.messages == node.messages + ring.messages
        assert found.sent == nodes * node.sent + ring.sent
        assert found.scratch <= nodes * max(1, ranks - 1)


@pytest.mark.parametrize("sizes", UNEVEN)
def test_hierarchical_on_uneven_nodes_has_leaders(sizes):
    layout = Layout.of(sizes)
    check("hierarchical", "allreduce", layout, rounded=True)
    leaders = {ranks[0] for ranks in layout.nodes}
    for rank, program in enumerate(schedules("hierarchical", Collective.ALLREDUCE, layout)):
        peers = {step.peer for a_round in program for steps in a_round.messages for step in steps}
        across = {peer for peer in peers if layout.node_of(peer) != layout.node_of(rank)}
        assert across <= leaders if rank in leaders else not across


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(max_examples=60)
def test_hierarchical_on_any_nodes(sizes):
    check("hierarchical", "allreduce", Layout.of(sizes))


@given(st.permutations(range(6)))
@settings(max_examples=30)
def test_hierarchical_on_ranks_in_any_order(ranks):
    layout = Layout.by_name([rank % 3 for rank in ranks])
    check("hierarchical", "allreduce", layout)
    # What crosses between nodes is no more than a ring of the nodes sends.
    crossing = [
        sum(
            step.count
            for a_round in program
            for step in a_round
            if step.action is Action.SEND and layout.node_of(step.peer) != layout.node_of(rank)
        )
        for rank, program in enumerate(schedules("hierarchical", Collective.ALLREDUCE, layout))
    ]
    assert crossing == [2 * (3 - 1)] * 6


def test_what_is_held_aside_and_never_reduced_is_refused():
    programs = [[Round(send(1)), Round(receive(1))], [Round(hold(0)), Round(send(0))]]
    with pytest.raises(ScheduleError, match="rank 1 in round 0 holds chunk 0 aside and does not reduce it"):
        prove(programs, Collective.ALLREDUCE, 1)
