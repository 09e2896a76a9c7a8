"""Hierarchical: reduce within the nodes, all-reduce across them, and share the result within the nodes.

With N nodes of L ranks (n = N L), B bytes and chunks of B/n:

==============  =====================  ============================================
collective      rounds                 bytes sent by a rank
==============  =====================  ============================================
allreduce       2 + 2(N-1)             2 (L-1)/L B within the node, 2 (N-1)/n B across
==============  =====================  ============================================

Every rank of a node reduces its part of the node's vectors (``direct``), all-reduces that part with the ranks of
the same place on the other nodes (``ring``), and hands it to its node. So a node sends 2 (N-1)/N B over its link, where
a flat ring sends 2 (n-1)/n B, and all its ranks send at once. Scratch: L-1 parts of B/L.

Nodes that are not equally full have a leader each: the node reduces to it, the leaders all-reduce, and each shares
what it has. Then a rank sends 2 B within the node at most, and its leader 2 (N-1)/N B across.

Source: the two-level all-reduce of any MPI library; for all ranks at once across nodes, Bayatpour et al., Scalable
reduction collectives with data partitioning-based multi-leader design, SC 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import index

from mpiagg.schedules import direct, ring
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.steps import Action, Parts, Round, within


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
    yield from _unfinished(within(direct.reduce_scatter(place, width), in_node, width, parts))
    yield from within(ring.allreduce(node, nodes), lambda other: layout.rank_at(other, place), nodes, part)
    yield from within(direct.allgather(place, width), in_node, width, parts)


def allreduce_by_leaders(rank: int, layout: Layout) -> Iterator[Round]:
    """Reduce in the node to its first rank, all-reduce among these, broadcast in the node."""
    node, place, nodes = layout.node_of(rank), layout.place_of(rank), len(layout.nodes)
    width = index(layout.width(node))
    parts, in_node = _parts(layout, width), partial(layout.rank_at, node)
    yield from _unfinished(within(direct.reduce(place, width), in_node, width, parts))
    if place == 0:
        leaders = _parts(layout, nodes)
        yield from within(ring.allreduce(node, nodes), lambda other: layout.rank_at(other, 0), nodes, leaders)
    yield from within(direct.broadcast(place, width), in_node, width, parts)


def _parts(layout: Layout, number: int) -> Parts:
    """Cut all chunks into as many parts."""
    return Parts(0, chunks(layout), number)


def _unfinished(rounds: Iterator[Round]) -> Iterator[Round]:
    """Leave out what comes last: there are other nodes."""
    for a_round in rounds:
        yield Round(*(step for step in a_round if step.action is not Action.FINISH))
