"""Hierarchical: reduce within the nodes, all-reduce across them, and share the result within the nodes.

With N nodes of L ranks (n = N L), B bytes and chunks of B/n:

==============  =====================  =======================================================
collective      rounds                 bytes sent by a rank
==============  =====================  =======================================================
allreduce       2 + 2(N-1)             2 (L-1)/L B within the node, 2 (N-1)/n B across
alltoall        2 + ceil((N-1)/L)      2 (L-1)/L B within, ceil((N-1)/L) L/N B across at most
==============  =====================  =======================================================

Every rank of a node reduces its part of the node's vectors (``direct``), all-reduces that part with the ranks of
the same place on the other nodes (``ring``), and hands it to its node. So a node sends 2 (N-1)/N B over its link, where
a flat ring sends 2 (n-1)/n B, and all its ranks send at once. Scratch: L-1 parts of B/L.

Nodes that are not equally full have a leader each: the node reduces to it, the leaders all-reduce, and each shares
what it has. Then a rank sends 2 B within the node at most, and its leader 2 (N-1)/N B across.

In an all-to-all every two nodes exchange one message of L^2 chunks in each direction: the ranks of a node are leaders,
each for every L-th of the other nodes, which bring what their node has for it together first and hand out what has come
last. Where the chunks are short, that saves latencies: n-L messages of a rank across nodes become (N-1)/L.

Source: the two-level all-reduce of any MPI library; for all ranks at once across nodes, Bayatpour et al., Scalable
reduction collectives with data partitioning-based multi-leader design, SC 2017; for the all-to-all with several
leaders, arXiv:2601.17606.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import index
from typing import NamedTuple

from mpiagg.schedules import direct, ring
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.ranks import Ranks
from mpiagg.schedules.steps import Parts, Round, Step, receive, send, unfinished, within


def chunks(layout: Layout) -> int:
    """Return how many chunks there are: enough for a part a rank on each node, and in each part one a node."""
    return len(layout.nodes) * layout.widest


def owned(rank: int, layout: Layout) -> range:
    """Return the chunks of a rank's part of its node's vectors."""
    place, parts = layout.place_of(rank), _parts(layout, layout.width(layout.node_of(rank)))
    return range(parts.cut(place), parts.cut(place + 1))


def allreduce(rank: int, layout: Layout) -> Iterator[Round]:
    """Reduce-scatter in the node, all-reduce across nodes by all local ranks at once, all-gather in the node."""
    if not layout.even:
        yield from allreduce_by_leaders(rank, layout)
        return
    node, place, nodes, width = layout.node_of(rank), layout.place_of(rank), len(layout.nodes), layout.widest
    parts, in_node = _parts(layout, width), partial(layout.rank_at, node)
    part = Parts(parts.cut(place), nodes, nodes)
    yield from unfinished(within(direct.reduce_scatter(place, width), in_node, width, parts))
    yield from within(ring.allreduce(node, nodes), lambda other: layout.rank_at(other, place), nodes, part)
    yield from within(direct.allgather(place, width), in_node, width, parts)


def allreduce_by_leaders(rank: int, layout: Layout) -> Iterator[Round]:
    """Reduce in the node to its first rank, all-reduce among these, broadcast in the node."""
    node, place, nodes = layout.node_of(rank), layout.place_of(rank), len(layout.nodes)
    width = index(layout.width(node))
    parts, in_node = _parts(layout, width), partial(layout.rank_at, node)
    yield from unfinished(within(direct.reduce(place, width), in_node, width, parts))
    if place == 0:
        leaders = _parts(layout, nodes)
        yield from within(ring.allreduce(node, nodes), lambda other: layout.rank_at(other, 0), nodes, leaders)
    yield from within(direct.broadcast(place, width), in_node, width, parts)


def alltoall(rank: int, layout: Layout) -> Iterator[Round]:
    """Exchange one message with every other node: each rank of a node does so with its share of the nodes."""
    node, place = NodeExchange(layout, layout.node_of(rank), layout.narrowest), layout.place_of(rank)
    yield from by_leaders(place, node, _with_each_node(place, node))


def by_leaders(place: int, node: NodeExchange, across: Iterator[Round]) -> Iterator[Round]:
    """Bring together in the node what goes to each other node, exchange with the nodes, hand out in the node."""
    here, place = node.ranks(), index(place)

    def exchange(sent: Callable[[int, int], Iterator[tuple[int, int]]]) -> Iterator[Step]:
        """Send the others of the node what ``sent(source, target)`` says, by their places, and receive what is ours."""
        for far in range(1, len(here)):
            to, source = (place + far) % len(here), (place - far) % len(here)
            yield from (send(here[to], *block) for block in sent(place, to))
            yield from (receive(here[source], *block) for block in sent(source, place))

    yield Round(*exchange(node.to_leader))
    yield from across
    yield Round(*exchange(node.from_leader))


def _with_each_node(place: int, node: NodeExchange) -> Iterator[Round]:
    """Exchange with the nodes that a rank is the leader for, one after the other."""
    for far in node.led(index(place)):
        to, source = node.ranks(far)[place], node.ranks(-far)[place]
        yield Round(
            *(send(to, *block) for block in node.between(0, far)),
            *(receive(source, *block) for block in node.between(-far, 0)),
        )


class NodeExchange(NamedTuple):
    """A node in an all-to-all, some of whose ranks are leaders: each for some of the other nodes.

    Chunks that lie together are told by the first, and how many there are.
    """

    layout: Layout
    number: int
    leaders: int

    def ranks(self, far: int = 0) -> list[int]:
        """Return the ranks of a node that is so far after this one."""
        other = (self.number + far) % len(self.layout.nodes)
        return [self.layout.rank_at(other, place) for place in range(index(self.layout.width(other)))]

    def led(self, place: int) -> range:
        """Return how far the nodes are that a rank at a place is the leader for: in both directions."""
        return range(place or self.leaders, len(self.layout.nodes), self.leaders) if place < self.leaders else range(0)

    def between(self, source: int, target: int, count: int = 1) -> Iterator[tuple[int, int]]:
        """Yield the chunks that go from ``count`` nodes to another; a node is said by how far after this one it is."""
        if self._counts_alone:
            yield 0, count * self.layout.widest**2
            return
        for rank in self.ranks(target):
            yield from self._from_nodes(source, count, rank)

    def to_leader(self, source: int, leader: int) -> Iterator[tuple[int, int]]:
        """Yield the chunks that go from one place to another, or by way of it."""
        mine, size = self.layout.rank_at(self.number, source), self.layout.size
        if self._counts_alone:
            yield 0, 1 + len(self.led(leader)) * self.layout.widest
            return
        yield self.layout.rank_at(self.number, leader) * size + mine, 1
        yield from ((target * size + mine, 1) for far in self.led(leader) for target in self.ranks(far))

    def from_leader(self, leader: int, target: int) -> Iterator[tuple[int, int]]:
        """Yield the chunks for one place that have come to another from other nodes."""
        led = self.led(leader)
        if self._counts_alone and led:
            yield 0, len(led) * self.layout.widest
            return
        for far in led:
            yield from self._from_nodes(-far, 1, self.layout.rank_at(self.number, target))

    @property
    def _counts_alone(self) -> bool:
        """Whether it makes no difference which chunks they are, as to a price of many ranks at once."""
        return isinstance(self.number, Ranks) and self.layout.even

    def _from_nodes(self, far: int, count: int, target: int) -> Iterator[tuple[int, int]]:
        """Yield the chunks that go from nodes to a rank: in one block, if they lie together."""
        layout, row = self.layout, target * self.layout.size
        if layout.in_order and layout.even:
            yield row + layout.rank_at((self.number + far) % len(layout.nodes), 0), count * layout.widest
        else:
            yield from ((row + rank, 1) for node in range(count) for rank in self.ranks(far + node))


def _parts(layout: Layout, number: int) -> Parts:
    """Cut all chunks into as many parts."""
    return Parts(0, chunks(layout), number)
