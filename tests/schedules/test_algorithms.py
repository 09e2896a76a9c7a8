"""Every algorithm of the table is right for every number of ranks, and costs what its docstring says."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache

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
    algorithms,
    check,
    comparable,
    hold,
    keep_from,
    prove,
    receive,
    schedules,
    send,
    take,
)
from mpiagg.schedules.multi_radix import factors_of

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
        if place % 2 == 1:
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


@cache
def swing_steps(n):
    """The steps of Swing for an even n: whom each rank meets, and the chunks that it hands on, by trying all ways."""
    distances = [(1 - (-2) ** (step + 1)) // 3 for step in range(ceil_log2(n))]
    meets = [[(rank + (-distance if rank % 2 else distance)) % n for rank in range(n)] for distance in distances]
    after = [[{rank} for rank in range(n)]]  # where each rank can bring a chunk in the steps that are left
    for met in reversed(meets):
        after.insert(0, [after[0][rank] | after[0][met[rank]] for rank in range(n)])
    last = [
        [max((step for step in range(len(meets)) if chunk in after[step + 1][meets[step][rank]]), default=None)
         for chunk in range(n)] for rank in range(n)
    ]  # fmt: skip
    return [
        (met, [{chunk for chunk in range(n) if chunk != rank and last[rank][chunk] == step} for rank in range(n)])
        for step, met in enumerate(meets)
    ]


def swing_reduce_scatter(place, n):
    even = max(1, n - n % 2)
    more = 1 if n > even else 0
    if place == even:
        return Count(1, n - 1, n - 1, n - 1, n - 1, n - 1)
    steps = swing_steps(even)
    sent = [len(leaves[place]) for _, leaves in steps]
    received = [len(leaves[met[place]]) for met, leaves in steps]
    busy = sum(bool(a + b) for a, b in zip(sent, received, strict=True))
    messages = sum(map(bool, sent)) + more
    return Count(busy + more, messages, n - 1, n - 1, n - 1, max([*received, more]))


def swing_allgather(place, n):
    even = max(1, n - n % 2)
    if place == even:
        return Count(1, n - 1, n - 1, n - 1, 0, 0)
    found = swing_reduce_scatter(place, n)
    received = sum(bool(leaves[met[place]]) for met, leaves in swing_steps(even)) + (n > even)
    return replace(found, messages=received, reduced=0, scratch=0)


def bine_reduce(place, n):
    even = max(1, n - n % 2)
    if place == even:
        return Count(1, 1, 1, 0, 0, 0)
    below = sum(0 in leaves[met[place]] for met, leaves in swing_steps(even)) + (n > even and place == 0)
    above = int(place > 0)
    return Count(below + above, above, above, below, below, min(1, below))


def bine_broadcast(place, n):
    found = bine_reduce(place, n)
    return Count(found.rounds, found.received, found.received, found.sent, 0, 0)


def knomial_children(place, n, radix=4):
    """How many ranks hang below a rank at each distance."""
    found, distance = [], 1
    while distance < n and place % (distance * radix) == 0:
        found.append(sum(place + digit * distance < n for digit in range(1, radix)))
        distance *= radix
    return [children for children in found if children]


def knomial_reduce(place, n):
    below, above = knomial_children(place, n), int(place > 0)
    return Count(len(below) + above, above, above, sum(below), sum(below), max(below, default=0))


def knomial_broadcast(place, n):
    below, above = knomial_children(place, n), int(place > 0)
    return Count(len(below) + above, sum(below), sum(below), above, 0, 0)


def multiplying(place, n, radix=4):
    m = 1
    while m * radix <= n:
        m *= radix
    groups = [len(range(n)[start::m]) for start in range(m)]  # as equal as may be, the wider ones first
    first = 0
    for width in groups:
        if place < first + width:
            break
        first += width
    if place > first:
        return Count(2, 1, 1, 1, 0, 0)
    rounds = round(np.log(m) / np.log(radix))
    inner, others = rounds * (radix - 1), width - 1
    scratch = max(others, radix - 1 if rounds else 0)
    more = 2 if others else 0
    return Count(rounds + more, inner + others, inner + others, inner + others, inner + others, scratch)


@cache
def levels(n, wanted=4):
    """The factors of n, the nearest level first: each the largest up to the one wanted, and a prime one alone."""
    found = []
    while n > 1:
        fits = [factor for factor in range(2, wanted + 1) if n % factor == 0]
        found.append(fits[-1] if fits else n)
        n //= found[-1]
    return found


def radix_allgather(place, n):
    del place
    factors = levels(n)
    return Count(len(factors), sum(factors) - len(factors), n - 1, n - 1, 0, 0)


def radix_reduce_scatter(place, n):
    scratch = n - n // levels(n)[0] if n > 1 else 0
    return replace(radix_allgather(place, n), reduced=n - 1, scratch=scratch)


@cache
def in_order(start, stop, parent, depth=1):
    """The (parent, depth) of the places of a tree from left to right, each branch with as few levels as can be."""
    if start == stop:
        return {}
    top = start - 1 + (1 << log2(stop - start))
    return {
        top: (parent, depth),
        **in_order(start, top, top, depth + 1),
        **in_order(top + 1, stop, top, depth + 1),
    }


def two_trees(n):
    """For each rank its (parent, children, depth) in two trees."""
    found = []
    for second in (False, True):
        if not second:
            ranks = list(range(n))
        else:
            ranks = [n - 1 - place for place in range(n)] if n % 2 == 0 else [(place + 1) % n for place in range(n)]
        tree = {0: (None, 0), **in_order(1, n, 0)}
        found.append(
            {
                ranks[place]: (
                    None if parent is None else ranks[parent],
                    [ranks[below] for below, (above, _) in tree.items() if above == place],
                    depth,
                )
                for place, (parent, depth) in tree.items()
            }
        )
    return found


def below_a_root(n):
    """The same for two trees of all ranks but 0, which is above them."""
    if n == 1:
        return [{0: (None, [], 0)}] * 2
    found = []
    for tree in two_trees(n - 1):
        higher = {
            rank + 1: (0 if parent is None else parent + 1, [child + 1 for child in children], depth + 1)
            for rank, (parent, children, depth) in tree.items()
        }
        (top,) = [rank for rank, (parent, *_) in higher.items() if parent == 0]
        found.append({0: (None, [top], 0), **higher})
    return found


def in_trees(trees_of, up, down, blocks=16):
    """What two pipelined trees cost: who sends to whom at which time, counted."""

    def formula(place, n):
        sends, receives, arriving = set(), set(), defaultdict(int)
        sent = received = 0
        for tree in trees_of(n):
            parent, children, depth = tree[place]
            for block in range(blocks):
                if up and parent is not None:
                    sends.add((block - depth, parent))
                    sent += 1
                for child in children if up else ():
                    receives.add((block - depth - 1, child))
                    arriving[block - depth - 1] += 1
                if down and parent is not None:
                    receives.add((block + depth - 1, parent))
                    received += 1
                for child in children if down else ():
                    sends.add((block + depth, child))
                    sent += 1
        reduced = sum(arriving.values())
        rounds = len({time for time, _ in sends | receives})
        return Count(rounds, len(sends), sent, received + reduced, reduced, max(arriving.values(), default=0))

    return formula


@cache
def blocks_counts(n, blocks=32):
    """On a circulant graph every rank but the root takes each block once; the rest is left to the check."""
    found = check("circulant_blocks", "broadcast", n)
    rounds = blocks - 1 + ceil_log2(n) if n > 1 else 0
    assert max(count.rounds for count in found) == rounds
    assert [count.received for count in found] == [0] + [blocks] * (n - 1)
    assert sum(count.sent for count in found) == blocks * (n - 1)
    assert found[0].sent <= rounds
    return found


def blocks_broadcast(place, n):
    return blocks_counts(n)[place]


def blocks_reduce(place, n):
    found = blocks_broadcast(place, n)
    return Count(found.rounds, found.received, found.received, found.sent, found.sent, min(1, found.sent))


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


def one_shot_reduce(place, n):
    return Count(1, 1, 1, 0, 0, 0) if place else Count(min(1, n - 1), 0, 0, n - 1, n - 1, n - 1)


def hierarchical_on_one_node(place, n):
    return both(direct_reduce_scatter, direct_allgather)(place, n)


def moved_to_root(place, n):
    return Count(1, 1, 1, 0, 0, 0) if place else Count(min(1, n - 1), 0, 0, n - 1, 0, 0)


def moved_from_root(place, n):
    return Count(1, 0, 0, 1, 0, 0) if place else Count(min(1, n - 1), n - 1, n - 1, 0, 0, 0)


def knomial_family(place, n, radix=4):
    """How many ranks hang below a rank, itself with them: those whose low digits lead to it."""

    def parent(rank):
        distance = 1
        while rank % (distance * radix) == 0:
            distance *= radix
        return rank - rank % (distance * radix)

    found = 0
    for rank in range(n):
        above = rank
        while above not in (0, place):
            above = parent(above)
        found += above == place
    return found


def knomial_gather(place, n):
    found, family = knomial_reduce(place, n), knomial_family(place, n)
    return replace(found, sent=family if place else 0, received=family - 1, reduced=0, scratch=0)


def knomial_scatter(place, n):
    found, family = knomial_broadcast(place, n), knomial_family(place, n)
    return replace(found, sent=family - 1, received=family if place else 0)


def pairwise_alltoall(place, n):
    del place
    return Count(n - 1, n - 1, n - 1, n - 1, 0, 0)


def bruck_alltoall(place, n):
    del place
    hops = sum(distance.bit_count() for distance in range(n))
    return Count(ceil_log2(n), ceil_log2(n), hops, hops, 0, 0)


def chain(place, n):
    before, after = int(place > 0), int(place + 1 < n)
    return Count(before + after, after, after, before, before, before)


def doubling_scan(place, n):
    distances = [1 << power for power in range(ceil_log2(n))]
    sent, received = sum(place + d < n for d in distances), sum(place >= d for d in distances)
    rounds = sum(place + d < n or place >= d for d in distances)
    return Count(rounds, sent, sent, received, received, min(1, received))


def chain_that_keeps(place, n):
    before, after = int(place > 0), int(place + 1 < n)
    return Count(before + after, after, after, before, before and after, before and after)


def doubling_that_keeps(place, n):
    scan = doubling_scan(place, n)
    if place + 1 < n:
        return replace(scan, scratch=min(2, scan.received))
    reduced = max(0, scan.received - 1)  # the last rank's own is in no result
    return replace(scan, reduced=reduced, scratch=min(1, reduced))


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
    ("swing", "reduce_scatter"): swing_reduce_scatter,
    ("swing", "allgather"): swing_allgather,
    ("swing", "allreduce"): both(swing_reduce_scatter, swing_allgather),
    ("bine", "reduce"): bine_reduce,
    ("bine", "broadcast"): bine_broadcast,
    ("bine", "allreduce"): both(bine_reduce, bine_broadcast),
    ("knomial", "reduce"): knomial_reduce,
    ("knomial", "broadcast"): knomial_broadcast,
    ("knomial", "allreduce"): both(knomial_reduce, knomial_broadcast),
    ("recursive_multiplying", "allreduce"): multiplying,
    ("multi_radix", "reduce_scatter"): radix_reduce_scatter,
    ("multi_radix", "allgather"): radix_allgather,
    ("multi_radix", "allreduce"): both(radix_reduce_scatter, radix_allgather),
    ("double_tree", "allreduce"): in_trees(two_trees, up=True, down=True),
    ("double_tree", "reduce"): in_trees(below_a_root, up=True, down=False),
    ("double_tree", "broadcast"): in_trees(below_a_root, up=False, down=True),
    ("circulant_blocks", "broadcast"): blocks_broadcast,
    ("circulant_blocks", "reduce"): blocks_reduce,
    ("direct", "reduce_scatter"): direct_reduce_scatter,
    ("direct", "allgather"): direct_allgather,
    ("direct", "allreduce"): both(direct_reduce_scatter, direct_allgather),
    ("direct", "reduce"): direct_reduce,
    ("direct", "broadcast"): direct_broadcast,
    ("one_shot", "allreduce"): one_shot_allreduce,
    ("one_shot", "reduce"): one_shot_reduce,
    ("hierarchical", "allreduce"): hierarchical_on_one_node,
    ("hierarchical", "alltoall"): direct_allgather,
    ("hierarchical_bruck", "alltoall"): direct_allgather,
    ("direct", "alltoall"): direct_allgather,
    ("direct", "gather"): moved_to_root,
    ("direct", "scatter"): moved_from_root,
    ("knomial", "gather"): knomial_gather,
    ("knomial", "scatter"): knomial_scatter,
    ("pairwise", "alltoall"): pairwise_alltoall,
    ("bruck", "alltoall"): bruck_alltoall,
    ("ring", "scan"): chain,
    ("ring", "exscan"): chain_that_keeps,
    ("recursive_doubling", "scan"): doubling_scan,
    ("recursive_doubling", "exscan"): doubling_that_keeps,
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
@pytest.mark.parametrize("n", [100, 256, 1000, 1024])
def test_right_and_as_cheap_as_documented_for_large_n(name, collective, n):
    check_and_count(name, collective, n, root=n // 3 if collective.rooted else 0)


def test_every_served_collective_has_a_formula():
    assert {(name, collective.value) for name, collective in SERVED} == set(FORMULAS)


@pytest.mark.parametrize("collective", Collective)
def test_every_collective_is_served(collective):
    assert algorithms(collective)


def test_shared_memory_is_another_way_for_the_same_schedules():
    assert schedules("shared", Collective.ALLREDUCE, 5) == schedules("direct", Collective.ALLREDUCE, 5)
    assert set(TABLE["shared"].schedules) == set(TABLE["direct"].schedules)
    assert set(Collective) - set(TABLE["direct"].schedules) == {Collective.SCAN, Collective.EXSCAN}


@pytest.mark.parametrize("n", [5, 16, 17, *thorough(64)])
@pytest.mark.parametrize("radix", [3, 4, 16])
def test_bruck_of_any_radix_sends_a_chunk_once_for_each_digit_of_its_way(n, radix):
    def digits(number):
        return 0 if number == 0 else digits(number // radix) + (number % radix > 0)

    for found in check(f"bruck-{radix}", "alltoall", n):
        assert found.sent == sum(map(digits, range(n)))


@settings(max_examples=200)
@given(n=st.integers(1, 5000), wanted=st.lists(st.integers(2, 100), min_size=1, max_size=8))
def test_the_factors_of_the_ranks_are_as_near_to_those_wanted_as_divisors_can_be(n, wanted):
    factors = factors_of(n, wanted)
    assert np.prod(factors, dtype=int) == n
    assert all(factor > 1 for factor in factors)
    left, found = n, iter([*factors, 1])
    factor = next(found)
    for most in wanted[:-1] or wanted * len(factors[:-1]):
        if factor <= most and left % factor == 0 and any(left % other == 0 for other in range(2, most + 1)):
            assert not any(left % other == 0 for other in range(factor + 1, most + 1))
            left, factor = left // factor, next(found)
        else:
            assert not any(left % other == 0 for other in range(2, most + 1))
    assert factor == left  # the last level takes what is left


@pytest.mark.parametrize(
    ("n", "wanted", "factors"),
    [
        (1, [4], []),
        (7, [4], [7]),
        (64, [4], [4, 4, 4]),
        (24, [4], [4, 3, 2]),
        (35, [4], [35]),
        (64, [4, 2, 8], [4, 2, 8]),
        (96, [4, 2, 8], [4, 2, 12]),
        (6, [4, 2, 8], [3, 2]),
        (8, [2, 64], [2, 4]),
    ],
)
def test_factors_by_hand(n, wanted, factors):
    assert factors_of(n, wanted) == factors


@pytest.mark.parametrize("n", [1, 6, 7, 12, 30, *thorough(64, 100)])
@pytest.mark.parametrize("name", ["multi_radix-2", "multi_radix-3x2", "multi_radix-2x3x4", "multi_radix-64"])
@pytest.mark.parametrize("collective", TABLE["multi_radix"].schedules)
def test_any_factors_move_the_fewest_bytes(n, name, collective):
    factors = factors_of(n, [int(number) for number in name.rpartition("-")[2].split("x")])
    twice = 2 if collective is Collective.ALLREDUCE else 1
    for found in check(name, collective, n, rounded=True):
        assert found.rounds == twice * len(factors)
        assert found.messages == twice * sum(factor - 1 for factor in factors)
        assert found.sent == found.received == twice * (n - 1)


@pytest.mark.parametrize("n", [2, 6, 7, 12, 30])
def test_every_chunk_of_multi_radix_is_the_same_sum(n):
    """So it makes no difference where a vector is cut."""
    values = [2.0 ** (50 * (rank % 3)) * (-1) ** rank + rank for rank in range(n)]  # whose sums depend on the order
    for name in ("multi_radix", "multi_radix-2", "multi_radix-2x3x4"):
        results = simulate([np.full(2 * n, value) for value in values], algorithm=name)
        assert len({value for result in results for value in result.tolist()}) == 1


@pytest.mark.parametrize("n", [2, 8, 16, 32])
def test_factors_of_two_are_halving_and_doubling(n):
    assert schedules("multi_radix-2", Collective.ALLREDUCE, n) == schedules("halving_doubling", Collective.ALLREDUCE, n)
    assert schedules(f"multi_radix-{n}", Collective.ALLREDUCE, n) == schedules("direct", Collective.ALLREDUCE, n)


@pytest.mark.parametrize("n", [2, 6, 7, 12, 16, *thorough(60, 64)])
@pytest.mark.parametrize(
    ("name", "collective"), [(e.name, c) for e in TABLE.values() if e.in_step for c in e.schedules]
)
def test_what_is_in_step_has_as_many_rounds_on_all_ranks_and_changes_nothing_that_it_sends(name, collective, n):
    programs = schedules(name, collective, n)
    assert len({sum(bool(a_round.messages) for a_round in program) for program in programs}) == 1
    for a_round in (a_round for program in programs for a_round in program):
        sent, changed = (
            {chunk for step in a_round if (step.action is Action.SEND) is way for chunk in chunks_of(step)}
            for way in (True, False)
        )
        assert not sent & changed


def chunks_of(step):
    return range(step.chunk, step.chunk + step.count)


@pytest.mark.parametrize("sizes", [[2, 2], [4, 4, 4], [3, 1, 2, 2], [1, 5], [2] * 8])
def test_two_nodes_exchange_one_message_in_an_all_to_all(sizes):
    layout = Layout.of(sizes)
    check("hierarchical", "alltoall", layout)
    found = defaultdict(int)
    for rank, program in enumerate(schedules("hierarchical", Collective.ALLTOALL, layout)):
        for a_round in program:
            for steps in a_round.messages:
                ends = layout.node_of(rank), layout.node_of(steps[0].peer)
                if steps[0].action is Action.SEND and ends[0] != ends[1]:
                    found[ends] += 1
                    assert sum(step.count for step in steps) == sizes[ends[0]] * sizes[ends[1]]
    assert found == {(one, other): 1 for one in range(len(sizes)) for other in range(len(sizes)) if one != other}


@pytest.mark.parametrize("radix", [2, 3])
@pytest.mark.parametrize(
    "layout", [*map(Layout.of, ([2, 2], [3] * 8, [3, 1, 2, 2], [1, 5], [2] * 9)), Layout(((0, 2), (1, 3)))]
)
def test_the_first_ranks_of_nodes_exchange_as_bruck_says(layout, radix):
    name, nodes = f"hierarchical_bruck-{radix}", len(layout.nodes)
    check(name, "alltoall", layout)
    found, wanted = (Counter(), Counter())
    for rank, program in enumerate(schedules(name, Collective.ALLTOALL, layout)):
        for steps in (steps for a_round in program for steps in a_round.messages):
            ends = layout.node_of(rank), layout.node_of(steps[0].peer)
            if steps[0].action is Action.SEND and ends[0] != ends[1]:
                assert (layout.place_of(rank), layout.place_of(steps[0].peer)) == (0, 0)
                found[ends] += 1
    for node, program in enumerate(schedules(f"bruck-{radix}", Collective.ALLTOALL, nodes)):
        for steps in (steps for a_round in program for steps in a_round.messages):
            wanted[node, steps[0].peer] += steps[0].action is Action.SEND
    assert found == +wanted


def test_algorithms_that_go_by_nodes_are_compared_where_there_are_nodes():
    for sizes, several in ([4], False), ([1] * 4, False), ([2, 2], True), ([1, 3], True):
        names = comparable(Collective.ALLTOALL, Layout.of(sizes))
        assert ({"hierarchical", "hierarchical_bruck"} <= set(names)) is several
        assert {"bruck", "pairwise", "direct"} <= set(names)


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


def crossing(name, collective, n, group):
    """The share of the chunks that ranks send which leaves a group of ranks that follow one another."""
    sent = [
        (step.count, rank // group != step.peer // group)
        for rank, program in enumerate(schedules(name, collective, n))
        for a_round in program
        for step in a_round
        if step.action is Action.SEND
    ]
    return sum(count for count, leaves in sent if leaves) / sum(count for count, _ in sent)


@pytest.mark.parametrize("group", [16, 32])
def test_long_messages_go_to_near_ranks(group):
    near = [("halving_doubling", Collective.ALLREDUCE), ("pat", Collective.REDUCE_SCATTER)]
    assert crossing(*near[0], 256, group) == pytest.approx((256 - group) / (group * 255))
    for name, collective in [*near, ("swing", Collective.REDUCE_SCATTER), ("pat", Collective.ALLGATHER)]:
        assert crossing(name, collective, 256, group) < 0.2
    assert crossing("pat", Collective.REDUCE_SCATTER, 250, group) < 0.2
    assert crossing("circulant", Collective.REDUCE_SCATTER, 256, group) > 0.85


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 13])
def test_halving_doubling_has_the_bits_of_recursive_doubling(n):
    vectors = np.random.default_rng(n).standard_normal((n, 40)).astype(np.float32)
    one, other = (simulate(vectors, algorithm=name) for name in ("halving_doubling", "recursive_doubling"))
    assert one[0].tobytes() == other[0].tobytes()


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


def test_what_is_taken_must_have_been_kept():
    programs = [[Round(send(1))], [Round(receive(0)), Round(take())]]
    with pytest.raises(ScheduleError, match="rank 1 in round 1 takes chunk 0, which it has not kept"):
        prove(programs, Collective.EXSCAN, 1)


def test_chunks_are_kept_one_by_one():
    programs = [[Round(send(1, 0, 2))], [Round(replace(keep_from(0), count=2))]]
    with pytest.raises(ScheduleError, match="rank 1 in round 0 keeps or takes several chunks in one step"):
        prove(programs, Collective.SCAN, 2)
