"""The price of schedules: closed forms, and the clocks of all ranks at once held to the walk."""

from dataclasses import replace
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import thorough
from walked_prices import finish_times

from mpiagg.errors import ScheduleError
from mpiagg.schedules import (
    TABLE,
    Action,
    Algorithm,
    Cluster,
    Collective,
    Layout,
    Round,
    algorithm,
    algorithms,
    check,
    price,
    receive,
    reduce_from,
    ring,
    schedules,
    send,
)
from mpiagg.schedules.clocks import Clocks
from mpiagg.schedules.cluster import Links
from mpiagg.schedules.model import Noise, Pricing
from mpiagg.schedules.networks import Groups, Torus
from mpiagg.schedules.posts import Irregular, Together, posts_of
from mpiagg.schedules.ranks import others

SERVED = [(name, collective) for name, entry in TABLE.items() for collective in entry.schedules]
CLUSTER = Cluster(alpha=3e-6, beta=1e-9, gamma=2e-10, eager=0)
ROUNDS = Cluster(alpha=1.0, beta=0.0, gamma=0.0, overhead=0, eager=0)
BYTES = Cluster(alpha=0.0, beta=1.0, gamma=0.0, overhead=0, eager=0)
REDUCED = Cluster(alpha=0.0, beta=0.0, gamma=1.0, overhead=0, eager=0)
SIZES = (1, 2, 3, 5, 8, 13, 16)


@pytest.mark.parametrize("n", SIZES)
def test_ring(n):
    nbytes = 12345.0
    expected = 2 * (n - 1) * (CLUSTER.alpha + CLUSTER.beta * nbytes / n) + (n - 1) * CLUSTER.gamma * nbytes / n
    assert price("ring", "allreduce", n, nbytes, CLUSTER) == pytest.approx(expected)


@pytest.mark.parametrize("n", SIZES)
def test_critical_path_in_rounds(n):
    def rounds(name, collective="allreduce"):
        return price(name, collective, n, 1000, ROUNDS)

    depth, floor, ceiling = int(log2(n)), int(log2(n)), ceil(log2(n))
    extra = 2 if floor != ceiling else 0
    assert rounds("ring") == 2 * (n - 1)
    assert rounds("ring", "reduce") == rounds("ring", "broadcast") == (n if n > 1 else 0)
    assert rounds("direct") == (2 if n > 1 else 0)
    assert rounds("circulant") == 2 * ceiling
    assert rounds("recursive_doubling") == floor + extra
    assert rounds("halving_doubling") == 2 * floor + extra
    assert rounds("parameter_server") == (n if n > 1 else 0)
    assert rounds("tree", "broadcast") == depth
    assert rounds("tree", "reduce") <= 2 * depth
    assert rounds("tree") <= 3 * depth


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_bytes_on_the_critical_path_at_powers_of_two(n):
    least = 2 * (n - 1) / n * 1000
    for name in ("ring", "direct", "circulant", "halving_doubling"):
        assert price(name, "allreduce", n, 1000, BYTES) == pytest.approx(least), name
    assert price("recursive_doubling", "allreduce", n, 1000, BYTES) == pytest.approx(log2(n) * 1000)
    assert price("parameter_server", "allreduce", n, 1000, BYTES) == pytest.approx(2 * (n - 1) * 1000)


def test_reduced_bytes():
    assert price("ring", "allreduce", 5, 1000, REDUCED) == pytest.approx(4 / 5 * 1000)
    assert price("parameter_server", "reduce", 5, 1000, REDUCED) == pytest.approx(4 * 1000)
    assert price("tree", "broadcast", 5, 1000, REDUCED) == 0


@pytest.mark.parametrize(("name", "collective"), SERVED)
def test_longer_vectors_cost_more(name, collective):
    for n in SIZES:
        prices = [price(name, collective, n, nbytes, CLUSTER) for nbytes in (0, 1, 100, 10_000, 1e9)]
        assert prices == sorted(prices)
        assert n == 1 or prices[0] < prices[-1]


@pytest.mark.parametrize("collective", [c for c in Collective if c.rooted])
def test_every_root_costs_the_same(collective):
    for name in set(algorithms(collective)) & {"ring", "tree", "parameter_server", "knomial"}:
        prices = {price(name, collective, 6, 600, CLUSTER, root=root) for root in range(6)}
        assert len(prices) == 1


# -- all ranks at once, and the walk


PIPELINES = ("double_tree", "circulant_blocks")
"""Algorithms whose repeated rounds meet others that are repeated less often: these are not taken together."""


def clocks(name, collective, layout, cluster, chunk_bytes=1.0, *, root=0, together=Together.ROUNDS):
    links = Links.between(layout, cluster)
    if together is Together.ROUNDS and (name in PIPELINES or Collective(collective).prefix):
        together = Together.RANKS
    posts = posts_of(algorithm(name), collective, layout, root, together=together)
    try:
        return Clocks(posts, links).run(chunk_bytes, cluster.gamma)
    except Irregular:
        if not cluster.network:
            raise
    # Messages of rounds with other numbers share the links of groups.
    posts = posts_of(algorithm(name), collective, layout, root, together=Together.NOTHING)
    return Clocks(posts, links).run(chunk_bytes, cluster.gamma)


def walked(name, collective, layout, cluster, chunk_bytes=1.0, *, root=0):
    return finish_times(schedules(name, collective, layout, root), chunk_bytes, cluster, layout)


COSTS = st.one_of(st.just(0.0), st.floats(0.01, 10))


@st.composite
def networks(draw):
    """Return one or two levels of groups."""
    nodes, found = 1, []
    for _ in range(draw(st.integers(1, 2))):
        nodes *= draw(st.integers(1, 3))
        found.append(Groups(nodes, draw(st.floats(0.1, 8)), draw(COSTS), paired=draw(st.booleans())))
    return tuple(found)


@st.composite
def settings_of(draw, most=20):
    """Return a layout, its ranks in any order, and a cluster with links of any cost."""
    size = draw(st.integers(1, most))
    even = draw(st.sampled_from([nodes for nodes in range(1, size + 1) if size % nodes == 0]))
    names = draw(
        st.one_of(
            st.just([rank * even // size for rank in range(size)]),
            st.just([rank % even for rank in range(size)]),
            st.lists(st.integers(0, 3), min_size=size, max_size=size),
        )
    )
    layout = Layout.by_name(names)
    within = draw(st.one_of(st.just({}), st.fixed_dictionaries({"node_alpha": COSTS, "node_beta": COSTS})))
    nodes = len(layout.nodes)
    links = draw(st.one_of(st.just(()), st.tuples(*[st.floats(0.01, 10)] * nodes)))
    of_messages = {
        "overhead": draw(COSTS),
        "node_overhead": draw(COSTS),
        "eager": draw(st.sampled_from([0, 5, 50, 1e9])),
    }
    network = draw(st.one_of(st.just(()), networks()))
    return layout, Cluster(draw(COSTS), draw(COSTS), draw(COSTS), links=links, network=network, **of_messages, **within)


@pytest.mark.parametrize(("name", "collective"), SERVED)
@settings(max_examples=8, deadline=None)
@given(setting=settings_of(), chunk_bytes=st.floats(0, 100), data=st.data())
def test_all_ranks_at_once_are_the_walk(name, collective, setting, chunk_bytes, data):
    layout, cluster = setting
    root = data.draw(st.integers(0, layout.size - 1)) if collective.rooted else 0
    arguments = (name, collective, layout, cluster, chunk_bytes)
    expected = pytest.approx(walked(*arguments, root=root), rel=1e-9)
    for together in Together:
        assert clocks(*arguments, root=root, together=together) == expected


@pytest.mark.parametrize("size", [33, *thorough(32, 64)])
@pytest.mark.parametrize(("name", "collective"), SERVED)
def test_all_ranks_at_once_are_the_walk_for_more_ranks(name, collective, size):
    layout = Layout.by_name([rank // 6 if size == 33 else rank % 8 for rank in range(size)])
    links = tuple(1 + (node % 3) for node in range(len(layout.nodes)))
    for cluster in (Cluster(1, 2, 0.5), Cluster(1, 2, 0.5, node_alpha=0.3, node_beta=0.7, links=links)):
        expected = walked(name, collective, layout, cluster)
        assert clocks(name, collective, layout, cluster) == pytest.approx(expected, rel=1e-9)


def entry_of(generator, chunks=None, name="mine"):
    """An algorithm of the tests' own, for all-reductions."""
    return Algorithm(
        name,
        lambda layout: chunks or layout.size,
        {Collective.ALLREDUCE: lambda rank, layout: generator(rank, layout.size)},
        "scratch",
    )


def fewer(rank, size):
    yield from ring.reduce_scatter(rank, size)


def longer(rank, size):
    for a_round in ring.allreduce(rank, size):
        yield Round(*(replace(step, count=2) for step in a_round))


def not_reduced(rank, size):
    yield from ring.allgather(rank, size)
    yield from ring.allgather(rank, size)


def test_ranks_and_rounds_are_taken_together_on_networks():
    """None of what is regular is left to the slow way."""
    layout = Layout.of([2] * 12)
    networks = (Groups(3, 2.0), Groups(6, 4.0)), (Groups(4, 2.0, paired=True),), Torus((4, 3))
    for name, collective in SERVED:
        pipeline = name in PIPELINES or collective.prefix
        together = Together.RANKS if pipeline else Together.ROUNDS
        for network in networks[: 1 if collective.rooted or pipeline else 3]:
            links = Links.between(layout, Cluster(node_alpha=1e-6, node_beta=1e-10, network=network))
            posts = posts_of(algorithm(name), collective, layout, together=together)
            if name == "multi_radix" and network == networks[1]:  # some of its groups are spread unevenly
                with pytest.raises(Irregular):
                    Clocks(posts, links)
            else:
                Clocks(posts, links)


def test_uneven_groups_of_a_dragonfly_are_looked_at_pair_by_pair():
    layout = Layout.of([3, 3, 1, 1])
    cluster = Cluster(0, 1e-9, 0, 1e-6, 1e-11, overhead=0, eager=0, network=(Groups(1, paired=True),))
    for collective in ("allgather", "alltoall"):
        expected = max(walked("direct", Collective(collective), layout, cluster, 100.0))
        pieces = algorithm("direct").pieces(Collective(collective), layout)
        assert price("direct", collective, layout, 100.0 * pieces, cluster) == pytest.approx(expected)


@pytest.mark.parametrize("wrong", [fewer, longer, not_reduced])
def test_a_schedule_that_is_another_is_found_out(monkeypatch, wrong):
    """The comparison sees rounds too few, chunks too many, and a reduction left out."""
    cluster, layout, collective = Cluster(1, 2, 0.5), Layout.of([5]), Collective.ALLREDUCE
    expected = walked("ring", collective, layout, cluster)
    for generator, alike in ((wrong, False), (ring.allreduce, True)):
        monkeypatch.setitem(TABLE, "mine", entry_of(generator))
        assert (clocks("mine", collective, layout, cluster) == pytest.approx(expected, rel=1e-9)) is alike


def unmatched(rank, _):
    yield Round(send(rank + 1), receive(rank - 1))
    yield Round(send(rank + 1))


def stuck(rank, _):
    yield Round(receive(rank - 1))
    yield Round(send(rank + 1))


def other_lengths(rank, _):
    yield Round(send(rank + 1, count=2), receive(rank - 1))


@pytest.mark.parametrize("wrong", [unmatched, stuck, other_lengths])
def test_what_cannot_pass_has_no_price(monkeypatch, wrong):
    monkeypatch.setitem(TABLE, "mine", entry_of(wrong))
    with pytest.raises(ScheduleError, match=r"messages of 'mine' .* do not pass"):
        price("mine", "allreduce", 5, 1, CLUSTER)


def mixed(rank, size):
    """Messages to all others and to one, in one round; and a count of rounds that is another on each rank."""
    yield Round(*(send(peer) for peer in others(rank, size)), *(receive(peer) for peer in others(rank, size)))
    steps = [send(peer) for peer in others(rank, size)] + [reduce_from(peer) for peer in others(rank, size)]
    yield Round(send(rank + 1), receive(rank - 1), *steps)


def pipeline(rank, size):
    """Five chunks, one after the other, from rank to rank."""
    for chunk in range(5):
        if rank > 0:
            yield Round(reduce_from(rank - 1, chunk))
        if rank < size - 1:
            yield Round(send(rank + 1, chunk))


def behind(rank, _):
    """Ranks 0 and 1 send to 2 and 3 again and again, the second of them some rounds later."""
    own, peer = rank // 2, rank ^ 2
    for _ in range(3 * (rank % 2)):
        yield Round(send(peer, own), receive(peer, 1 - own))
    for _ in range(5 - rank % 2):
        yield Round(send(peer)) if own == 0 else Round(receive(peer))


def several(rank, _):
    """Chunks that do not lie together, in one message; one of them is reduced."""
    yield Round(send(1), send(1, 3)) if rank == 0 else Round(receive(0), reduce_from(0, 3))


def gossip(rank, size):
    """Ranks take turns with the first one, and pass on what they have got before it is done."""
    if rank == 0:
        for peer in range(1, size):
            yield Round(send(peer))
    else:
        yield Round(receive(0)) if rank < 2 else Round(receive(0), receive(rank - 1))
        if rank + 1 < size:
            yield Round(send(rank + 1))


@pytest.mark.parametrize(("generator", "sizes"), [
    (mixed, [3, 2]), (mixed, [4, 4]), (pipeline, [1] * 6), (pipeline, [3, 3]), (behind, [2, 2]), (several, [2]),
    (several, [1, 1]), (gossip, [6]), (gossip, [2, 3]),
])  # fmt: skip
def test_schedules_of_other_kinds(monkeypatch, generator, sizes):
    """What is not taken together, or only in part, is priced all the same."""
    monkeypatch.setitem(TABLE, "mine", entry_of(generator, chunks=5))
    layout = Layout.of(sizes)
    for cluster in (Cluster(1, 2, 0.5), Cluster(1, 2, 0.5, node_alpha=0.3, node_beta=0.7)):
        expected = pytest.approx(max(walked("mine", Collective.ALLREDUCE, layout, cluster)), rel=1e-9)
        assert price("mine", "allreduce", layout, 5.0, cluster) == expected


def test_rounds_that_share_links_with_others_are_not_taken_together(monkeypatch):
    monkeypatch.setitem(TABLE, "mine", entry_of(behind, chunks=5))
    layout = Layout.of([2, 2])
    clocks("mine", Collective.ALLREDUCE, layout, Cluster())
    with pytest.raises(Irregular):
        clocks("mine", Collective.ALLREDUCE, layout, Cluster(node_alpha=0.3, node_beta=0.7))


def test_too_many_messages_of_too_many_kinds_are_refused(monkeypatch):
    monkeypatch.setitem(TABLE, "mine", entry_of(mixed))
    monkeypatch.setattr("mpiagg.schedules.posts.MOST_ENDS", 100)
    with pytest.raises(ValueError, match="mine on 8 ranks has too many messages of too many kinds"):
        price("mine", "allreduce", 8, 1, CLUSTER)


@pytest.mark.parametrize(
    ("name", "sizes", "network", "few"),
    [
        ("hierarchical", [4] * 24, (Groups(8, 2.0),), 4),
        *[(name, [1] * 200, (Groups(8, 2.0),), 16) for name in ("pairwise", "hierarchical")],
        ("pairwise", [4] * 48, (Groups(8, 2.0),), 32),
        ("pairwise", [1] * 256, Torus((4, 8, 8)), 16),
    ],
)
def test_some_rounds_stand_for_others_that_differ_in_their_peers(monkeypatch, name, sizes, network, few):
    cluster = Cluster(node_alpha=3e-7, node_beta=2e-11, network=network)
    expected = Pricing(name, "alltoall", Layout.of(sizes), cluster).predict(1e6)
    monkeypatch.setattr("mpiagg.schedules.posts.MOST_ENDS", 280 * few)
    monkeypatch.setattr("mpiagg.schedules.posts.FEW", 1000)
    with pytest.raises(ValueError, match="too many messages"):
        Pricing(name, "alltoall", Layout.of(sizes), cluster)
    monkeypatch.setattr("mpiagg.schedules.posts.FEW", few)
    found = Pricing(name, "alltoall", Layout.of(sizes), cluster).predict(1e6)
    assert found.seconds == pytest.approx(expected.seconds, rel=0.05)
    assert found.seconds != expected.seconds
    assert found.rounds == expected.rounds
    assert found.crossing == pytest.approx(expected.crossing, rel=0.15)


# -- all ranks at once, and the schedules


def messages_of(posts):
    """For each rank and round what it sends and receives: (sends, peer, chunks, reduced), in any order."""
    found = {}
    meeting = posts.meeting
    for post, rank in enumerate(posts.rank.tolist()):
        ends = range(posts.start[post], posts.start[post + 1])
        steps = [(bool(posts.sends[e]), int(posts.peer[e]), int(posts.chunks[e]), int(posts.reduced[e])) for e in ends]
        rounds = [[step] for step in steps] if posts.in_turn[post] else [steps] * int(posts.times[post])
        found.setdefault(rank, []).extend(rounds)
    for post, own, sends, receives, reduces in zip(
        meeting.posts, meeting.sets, meeting.sends, meeting.receives, meeting.reduces, strict=True
    ):
        place = int(post) - int(np.flatnonzero(posts.rank == posts.rank[post])[0])
        peers = [
            (int(posts.rank[other]), int(their_sends), int(their_receives))
            for other, group, their_sends, their_receives in zip(
                meeting.posts, meeting.sets, meeting.sends, meeting.receives, strict=True
            )
            if group == own and other != post and same_round(posts, post, other)
        ]
        steps = [(True, peer, int(sends if sends > 0 else get), 0) for peer, _, get in peers if sends and get]
        counts = [(peer, int(receives if receives > 0 else put)) for peer, put, _ in peers if receives and put]
        steps += [(False, peer, count, count if reduces else 0) for peer, count in counts]
        numbers = posts.number[posts.rank == posts.rank[post]]
        found[int(posts.rank[post])][int(numbers[place])] = steps
    return found


def same_round(posts, one, other):
    """Whether two posts in which ranks meet all others are the first of their ranks, or both the second, ..."""
    place = [sum(posts.rank[post] == posts.rank[p] and post < p for post in posts.meeting.posts) for p in (one, other)]
    return place[0] == place[1]


def messages_of_schedules(programs):
    found = {}
    for rank, program in enumerate(programs):
        rounds = []
        for a_round in program:
            messages = []
            for steps in a_round.messages:
                reduced = sum(step.count for step in steps if step.action in (Action.REDUCE, Action.HOLD, Action.KEEP))
                sends, peer = steps[0].action is Action.SEND, steps[0].peer
                messages.append((sends, peer, sum(step.count for step in steps), reduced))
            if messages:
                rounds.append(sorted(messages))
        if rounds:
            found[rank] = rounds
    return found


SMALL = [Layout.of(sizes) for sizes in ([1], [2], [3], [4], [7], [2, 2], [2, 3, 1])]
LARGER = [Layout.of(sizes) for sizes in ([8], [13], [3, 1], [3, 3, 3], [5, 2, 2])]
SCATTERED = [Layout.by_name(names) for names in ([rank % 3 for rank in range(9)], [0, 1, 1, 0, 2, 1, 0])]


@pytest.mark.parametrize("layouts", [SMALL, *thorough(LARGER + SCATTERED)], ids=["small", "larger"])
@pytest.mark.parametrize(("name", "collective"), SERVED)
def test_runs_for_many_ranks_are_the_schedules_of_each(name, collective, layouts):
    for layout in layouts:
        for root in sorted({0, layout.size // 2, layout.size - 1}) if collective.rooted else [0]:
            expected = messages_of_schedules(schedules(name, collective, layout, root))
            for together in Together:
                posts = posts_of(algorithm(name), collective, layout, root, together=together)
                found = messages_of(posts)
                assert {rank: [sorted(steps) for steps in rounds] for rank, rounds in found.items()} == expected


# -- links


def test_ranks_of_a_node_share_its_link_if_they_do_the_same_at_the_same_time():
    cluster, layout = Cluster(alpha=1, beta=10, gamma=0, node_alpha=0.1, node_beta=1, eager=0), Layout.of([2, 2])
    together = [[Round(send(2))], [Round(send(3))], [Round(receive(0))], [Round(receive(1))]]
    assert finish_times(together, 1, cluster, layout) == [21, 21, 21, 21]
    in_turn = [[Round(send(2))], [Round(send(2))], [Round(receive(0)), Round(receive(1))], []]
    assert finish_times(in_turn, 1, cluster, layout) == [11, 22, 22, 0]
    within = [[Round(send(1), send(2))], [Round(receive(0))], [Round(receive(0))], []]
    assert finish_times(within, 1, cluster, layout) == pytest.approx([11, 1.1, 11, 0])


def test_no_price_is_below_what_the_busiest_link_takes_for_all_its_bytes():
    """Rank 0 sends to rank 2 while rank 1, which starts later, sends to rank 3: both by the link of the first node."""
    cluster = replace(BYTES, node_alpha=0.0, node_beta=0.25)
    assert price("tree", "broadcast", Layout.of([2, 2]), 8, cluster) == 16
    assert price("bine", "broadcast", Layout.of([2, 2]), 8, cluster) == 8 + 8 * 0.25
    assert price("tree", "broadcast", Layout.of([2, 2]), 8, replace(cluster, links=(1.0, 2.0))) == 32


@pytest.mark.parametrize(("name", "collective"), SERVED)
def test_nodes_of_one_rank_are_ranks_with_links_of_their_own(name, collective):
    layout = Layout.of([1] * 7)
    with_nodes = Cluster(1, 2, 3, node_alpha=100, node_beta=100)
    assert price(name, collective, layout, 10, with_nodes) == price(name, collective, layout, 10, Cluster(1, 2, 3))


@pytest.mark.parametrize("n", [2, 5, 300])
def test_a_ring_goes_at_the_pace_of_its_slowest_link(n):
    links = (CLUSTER.beta,) * (n - 1) + (1e-6,)
    slow = Cluster(CLUSTER.alpha, CLUSTER.beta, CLUSTER.gamma, links=links, eager=0)
    expected = 2 * (n - 1) * (CLUSTER.alpha + 1e-6 * 1000 / n) + (n - 1) * CLUSTER.gamma * 1000 / n
    assert price("ring", "allreduce", Layout.of([1] * n), 1000, slow) == pytest.approx(expected)


def test_half_a_node_and_links_of_other_nodes_are_refused():
    with pytest.raises(ValueError, match="node_alpha and node_beta go together"):
        Cluster(node_alpha=1e-6)
    with pytest.raises(ValueError, match="no cost may be negative"):
        Cluster(alpha=-1e-6)
    with pytest.raises(ValueError, match="links of 3 nodes, but the ranks are on 2"):
        price("ring", "allreduce", Layout.of([1, 1]), 1, Cluster(links=(1, 1, 1)))


def test_what_is_unknown_or_does_not_serve_is_refused():
    with pytest.raises(ValueError, match="unknown algorithm 'bees'"):
        price("bees", "allreduce", 2, 1, CLUSTER)
    with pytest.raises(ValueError, match="'tree' does not serve allgather"):
        price("tree", "allgather", 2, 1, CLUSTER)


def test_large_nodes_that_are_not_equally_full():
    cluster = Cluster(1, 2, 0.5, node_alpha=0.3, node_beta=0.7)
    for sizes in ([30, 1], [20, 25, 3]):
        layout = Layout.of(sizes)
        expected = walked("hierarchical", Collective.ALLREDUCE, layout, cluster)
        assert clocks("hierarchical", Collective.ALLREDUCE, layout, cluster) == pytest.approx(expected, rel=1e-9)
    assert price("hierarchical", "allreduce", Layout.of([30_000, 1]), 1, CLUSTER) > 0


# -- very many ranks


@pytest.mark.thorough
def test_65536_ranks():
    n, nbytes = 2**16, 1e8
    wire, reduction = 2 * (n - 1) / n * nbytes * CLUSTER.beta, (n - 1) / n * nbytes * CLUSTER.gamma
    expected = {
        "ring": 2 * (n - 1) * CLUSTER.alpha + wire + reduction,
        "halving_doubling": 32 * CLUSTER.alpha + wire + reduction,
        "circulant": 32 * CLUSTER.alpha + wire + reduction,
        "direct": 2 * CLUSTER.alpha + wire + reduction,
        "recursive_doubling": 16 * (CLUSTER.alpha + nbytes * (CLUSTER.beta + CLUSTER.gamma)),
        "parameter_server": n * CLUSTER.alpha + (n - 1) * nbytes * (2 * CLUSTER.beta + CLUSTER.gamma),
    }
    for name, seconds in expected.items():
        assert price(name, "allreduce", n, nbytes, CLUSTER) == pytest.approx(seconds, rel=1e-8), name


def test_65536_ranks_on_8192_nodes():
    nodes, each, nbytes = 8192, 8, 1e8
    n = nodes * each
    cluster = Cluster(CLUSTER.alpha, CLUSTER.beta, CLUSTER.gamma, node_alpha=1e-7, node_beta=1e-11)
    layout = Layout.by_name([rank // each for rank in range(n)])
    in_node = 2 * (cluster.node_alpha + (each - 1) / each * nbytes * cluster.node_beta)
    across = 2 * (nodes - 1) * (cluster.alpha + nbytes / nodes * cluster.beta)
    expected = in_node + across + (n - 1) / n * nbytes * cluster.gamma
    assert price("hierarchical", "allreduce", layout, nbytes, cluster) == pytest.approx(expected, rel=1e-8)


# -- processors


@pytest.mark.parametrize("n", [2, 5, 300])
def test_a_rank_spends_its_time_on_each_of_several_messages(n):
    cluster = Cluster(alpha=5.0, beta=0.0, gamma=0.0, overhead=0.5, eager=0)
    # Each of the two rounds has n-1 messages out and n-1 in.
    assert price("direct", "allreduce", n, 100, cluster) == pytest.approx(2 * (5 + 2 * (n - 2) * 0.5))
    assert price("ring", "allreduce", n, 100, cluster) == pytest.approx(2 * (n - 1) * 5)


def test_a_link_and_a_rank_work_at_the_same_time():
    programs = [[Round(send(1), send(2), send(3))], *([Round(receive(0))] for _ in range(3))]
    for overhead, expected in ((0.5, 1 + 30), (20, 1 + 40)):
        cluster = Cluster(alpha=1, beta=10, gamma=0, overhead=overhead, eager=0)
        assert max(finish_times(programs, 1, cluster)) == expected
    within = Cluster(1, 10, 0, node_alpha=2, node_beta=0, overhead=50, node_overhead=7, eager=0)
    assert max(finish_times(programs, 1, within)) == 2 + 2 * 7
    # Two messages leave the node, and one stays there.
    assert max(finish_times(programs, 1, within, Layout.of([2, 2]))) == 1 + 50


def test_the_sender_of_a_short_message_does_not_wait():
    cluster = Cluster(alpha=5, beta=1, gamma=0, overhead=2, eager=3)
    late = [
        [Round(send(1)), Round(send(2))],
        [Round(receive(3)), Round(receive(0))],
        [Round(receive(0))],
        [Round(send(1, count=1))],
    ]
    # Rank 0 is done with two short messages after twice 2 + 1; the second arrives 5 + 1 after it is sent.
    assert finish_times(late, 1, cluster) == [6, 8, 9, 3]
    # A message of 3 bytes is not short: both ends wait for one another, and rank 2 for both messages.
    assert finish_times(late, 3, cluster) == [24, 16, 24, 8]


def test_a_parameter_server_receives_short_messages_as_fast_as_it_can():
    """They have all arrived when it takes them, one after the other; for longer ones it waits each time."""
    n, cluster = 300, Cluster(alpha=50.0, beta=0, gamma=0, overhead=2.0, eager=1000)
    assert price("parameter_server", "reduce", n, 1, cluster) == 50 + (n - 2) * 2
    assert price("parameter_server", "reduce", n, 1000, cluster) == (n - 1) * 50


def test_calls_in_a_row():
    """A ring's calls cannot overlap; a root that sends short messages begins the next call at once."""
    cluster = Cluster(alpha=50.0, beta=0, gamma=0, overhead=2.0, eager=1000)
    ring_of_4 = Pricing("ring", "allreduce", Layout.of([4]), cluster)
    assert ring_of_4.in_a_row(4) == pytest.approx(ring_of_4.seconds(4))
    server = Pricing("parameter_server", "broadcast", Layout.of([4]), cluster)
    assert server.in_a_row(4) == pytest.approx(3 * 2)
    assert server.in_a_row(4000) == pytest.approx(50 + 2 * 2)
    with pytest.raises(ValueError, match="at least 2, not 1"):
        server.in_a_row(4, calls=1)


# -- networks

SHIFTED = Cluster(alpha=1, beta=10, gamma=0, overhead=0, eager=0)


def shifted(nodes, by):
    """Each node sends a chunk to the one so many after it."""
    return [[Round(send((node + by) % nodes), receive((node - by) % nodes))] for node in range(nodes)]


@pytest.mark.parametrize(("by", "expected"), [(1, 1 + 3 + 10), (2, 1 + 3 + 20), (4, 1 + 3 + 40)])
def test_what_leaves_a_group_shares_its_links(by, expected):
    """Four nodes of each switch have one link's bandwidth to the others."""
    cluster = replace(SHIFTED, network=(Groups(4, 4.0, 3.0),))
    assert max(finish_times(shifted(16, by), 1, cluster)) == expected
    free = replace(SHIFTED, network=(Groups(4, 1.0, 3.0),))
    assert max(finish_times(shifted(16, by), 1, free)) == 1 + 3 + 10


def test_levels_add_their_latencies_and_the_slowest_counts():
    cluster = replace(SHIFTED, network=(Groups(2, 1.0, 3.0), Groups(8, 4.0, 5.0)))
    assert max(finish_times(shifted(16, 8), 1, cluster)) == 1 + 3 + 5 + 40
    assert max(finish_times(shifted(16, 2), 1, cluster)) == 1 + 3 + 5 + 10
    assert max(finish_times(shifted(4, 2), 1, cluster)) == 1 + 3 + 10


def test_the_links_of_a_group_have_the_bandwidth_of_its_nodes_links():
    """The second group's nodes have links of a tenth; so have its links to the other."""
    cluster = replace(SHIFTED, links=(10, 10, 100, 100), network=(Groups(2),))
    swapped = [[Round(send(rank ^ 2), receive(rank ^ 2))] for rank in range(4)]
    assert finish_times(swapped, 1, cluster, Layout.of([1] * 4)) == [101] * 4
    wider = replace(cluster, network=(Groups(2, 0.5),))
    assert finish_times(swapped, 1, wider, Layout.of([1] * 4)) == [101] * 4


def test_two_groups_of_a_dragonfly_have_links_of_their_own():
    """To one group alone goes twice as much as the links allow, by way of others; to all it goes straight."""
    cluster = replace(SHIFTED, network=(Groups(4, 1.0, paired=True),))
    assert max(finish_times(shifted(20, 4), 1, cluster)) == 1 + 2 * 10
    to_all = [
        [Round(send((node + 4 * (node % 4 + 1)) % 20), receive((node - 4 * (node % 4 + 1)) % 20))] for node in range(20)
    ]
    assert max(finish_times(to_all, 1, cluster)) == 1 + 10
    assert max(finish_times(shifted(8, 4), 1, cluster)) == 1 + 10  # two groups alone


@pytest.mark.parametrize(
    ("sides", "by", "hops", "load"),
    [((8,), 1, 1, 1), ((8,), 3, 3, 3), ((8,), 4, 4, 2), ((4, 4), 4, 1, 1), ((4, 4), 8, 2, 1), ((4, 4), 1, 2, 1)],
)
def test_the_byte_hops_of_a_torus_share_its_links(sides, by, hops, load):
    """To the fourth of a ring of eight half goes either way. In rows of 4, one node in four steps into the next row."""
    cluster = replace(SHIFTED, network=Torus(sides, 2.0))
    nodes = 8 if sides == (8,) else 16
    assert max(finish_times(shifted(nodes, by), 1, cluster)) == pytest.approx(1 + 2 * (hops - 1) + 10 * load)


@pytest.mark.parametrize(
    "network", [Torus((3, 2)), Torus((2, 0, 3)), Torus(()), (Groups(2), Groups(3)), (Groups(0),), (Groups(2, 0.0),)]
)
def test_networks_that_cannot_be_are_refused(network):
    with pytest.raises(ValueError, match=r"nodes, but there are 8|made of groups|a node and an oversub"):
        price("ring", "allreduce", Layout.of([1] * 8), 1, replace(SHIFTED, network=network))


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize(("name", "collective"), SERVED)
def test_all_ranks_at_once_are_the_walk_on_a_torus(name, collective, each):
    """Where ranks start to meet all others at different times, the farthest of these are taken for the last."""
    layout = Layout.of([each] * 12)
    cluster = Cluster(1, 2, 0.5, node_alpha=0.3, node_beta=0.7, overhead=0.2, network=Torus((4, 3), 0.1))
    expected = walked(name, collective, layout, cluster)
    assert clocks(name, collective, layout, cluster, together=Together.NOTHING) == pytest.approx(expected)
    assert max(clocks(name, collective, layout, cluster)) == pytest.approx(max(expected), rel=0.1)


@pytest.mark.parametrize("name", algorithms("allreduce"))
def test_what_crosses_each_level_is_what_messages_say(name):
    layout = Layout.of([2] * 8)
    for network in ((Groups(2), Groups(4)), Torus((4, 2))):
        cluster = Cluster(node_alpha=1e-6, node_beta=1e-10, network=network)
        links = Links.between(layout, cluster)
        expected = np.zeros(1 + len(links.network))
        for rank, program in enumerate(schedules(name, Collective.ALLREDUCE, layout)):
            for step in (step for a_round in program for step in a_round if step.action is Action.SEND):
                ends = np.array([[rank], [step.peer]])
                expected += step.count * np.array(
                    [rank // 2 != step.peer // 2, *(level.crossing(ends)[0] for level in links.network)]
                )
        pricing = Pricing(name, "allreduce", layout, cluster)
        pieces = algorithm(name).pieces(Collective.ALLREDUCE, layout)
        assert pricing.predict(1000).crossing == pytest.approx(tuple(1000 / pieces * expected)), network


# -- chance


def test_jitter_makes_messages_longer_and_equal_seeds_are_equal():
    for name in algorithms("allreduce"):
        pricing = Pricing(name, "allreduce", Layout.of([2] * 4), Cluster(node_alpha=1e-6, node_beta=1e-10))
        quiet, noise = pricing.seconds(1000), Noise(jitter=1e-6)
        found = pricing.sample(1000, noise, range(5))
        assert quiet < min(found)
        assert max(found) < 5 * quiet
        assert len(set(found)) == 5
        assert found == pricing.sample(1000, noise, range(5))
        assert pricing.sample(1000, Noise(), [3]) == [quiet]


def test_the_mean_of_jitter_is_what_it_says():
    pricing = Pricing("tree", "broadcast", Layout.of([2]), Cluster())
    found = np.mean(pricing.sample(1000, Noise(jitter=3e-6), range(2000)))
    assert found - pricing.seconds(1000) == pytest.approx(3e-6, rel=0.1)
    # Of n - 1 messages at once the slowest counts.
    several = Pricing("direct", "allgather", Layout.of([16]), Cluster())
    longest = np.mean(np.max(np.random.default_rng(0).exponential(size=(4000, 16 * 15)), axis=1))
    found = np.mean(several.sample(1000, Noise(jitter=3e-6), range(500)))
    assert found - several.seconds(1000) == pytest.approx(3e-6 * longest, rel=0.05)
    # A root sends one message to each, and each waits for that one.
    root = Pricing("direct", "scatter", Layout.of([16]), Cluster())
    longest = np.mean(np.max(np.random.default_rng(0).exponential(size=(4000, 15)), axis=1))
    found = np.mean(root.sample(1000, Noise(jitter=3e-6), range(500)))
    assert found - root.seconds(1000) == pytest.approx(3e-6 * longest, rel=0.1)


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "parameter_server"])
def test_a_straggler_delays_all(name):
    pricing = Pricing(name, "allreduce", Layout.of([16]), Cluster())
    quiet = pricing.seconds(1000)
    found = pricing.sample(1000, Noise(stragglers=1, delay=1.0), range(8))
    assert 1 < min(found) <= max(found) <= 1 + quiet
    assert pricing.sample(1000, Noise(stragglers=16, delay=1.0), [0]) == [pytest.approx(1 + quiet)]


@pytest.mark.parametrize("noise", [Noise(), Noise(jitter=1e-6)])
@pytest.mark.parametrize("links", [(), (1e-9,) * 36 + (1e-7,)])
def test_rounds_that_are_not_carried_out_take_as_long_as_others(monkeypatch, noise, links):
    """Of a ring's 590 some; short messages let the ranks of a node run ahead of those that wait for another node.

    Where all links are equal, and nothing is left to chance, the ranks come to repeat themselves, and all is exact.
    """
    cluster = Cluster(beta=1e-9, node_alpha=0.3e-6, node_beta=2e-11, links=links)
    pricing = Pricing("ring", "allreduce", Layout.of([8] * 37), cluster)
    for name in ("MOST_ROUNDS", "MOST_NOISY_ROUNDS"):
        monkeypatch.setattr(f"mpiagg.schedules.clocks.{name}", 10**9)
    expected = np.mean(pricing.sample(1000, noise, range(4)))
    for name in ("MOST_ROUNDS", "MOST_NOISY_ROUNDS"):
        monkeypatch.setattr(f"mpiagg.schedules.clocks.{name}", 200)
    found = np.mean(pricing.sample(1000, noise, range(4)))
    assert found == pytest.approx(expected, rel=0.05)
    assert (found == expected) == (noise == Noise() and not links)


# -- what a price is made of


@settings(max_examples=50, deadline=None)
@given(entry=st.sampled_from(SERVED), setting=settings_of(), nbytes=st.floats(0, 1000))
def test_parts_add_up(entry, setting, nbytes):
    layout, cluster = setting
    found = Pricing(*entry, layout, cluster).predict(nbytes)
    assert min(found.latency, found.bandwidth, found.reduction) >= 0
    assert found.latency + found.bandwidth + found.reduction == pytest.approx(found.seconds)
    assert found.seconds == price(*entry, layout, nbytes, cluster)


def test_the_parts_of_a_ring():
    found = Pricing("ring", "allreduce", Layout.of([5]), CLUSTER).predict(1000)
    assert found.rounds == 8
    assert found.latency == pytest.approx(8 * CLUSTER.alpha)
    assert found.bandwidth == pytest.approx(8 * 200 * CLUSTER.beta)
    assert found.reduction == pytest.approx(4 * 200 * CLUSTER.gamma)
    assert found.busiest == 8 * 200


@pytest.mark.parametrize("n", [1, 2, 6, 8, 13])
@pytest.mark.parametrize(("name", "collective"), SERVED)
def test_the_busiest_link_carries_what_the_schedules_say(name, collective, n):
    counts = check(name, collective, n)
    chunk = 1000 / algorithm(name).pieces(collective, n)
    found = Pricing(name, collective, Layout.of([n]), CLUSTER).predict(1000)
    assert found.busiest == pytest.approx(chunk * max(max(count.sent, count.received) for count in counts))


@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 1, 3]])
def test_a_nodes_link_carries_what_leaves_the_node(sizes):
    layout, nodes = Layout.of(sizes), len(sizes)
    cluster = Cluster(node_alpha=1e-6, node_beta=1e-10)
    found = Pricing("hierarchical", "allreduce", layout, cluster).predict(1000)
    assert found.busiest == pytest.approx(2 * (nodes - 1) / nodes * 1000)
    assert Pricing("ring", "allreduce", layout, cluster).predict(1000).busiest == pytest.approx(
        2 * (layout.size - 1) / layout.size * 1000
    )
