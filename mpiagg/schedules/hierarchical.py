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

from mpiagg.schedules import direct, ring
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.steps import Action, Round, within


def chunks(layout: Layout) -> int:
    """Return how many chunks there are: enough for a part a rank on each node, and in each part one a node."""
    return len(layout.nodes) * layout.widest


def owned(rank: int, layout: Layout) -> range:
    """Return the chunks of a rank's part of its node's vectors."""
    node = layout.nodes[layout.node_of(rank)]
    parts, place = _parts(layout, len(node)), node.index(rank)
    return range(parts[place], parts[place + 1])


def allreduce(rank: int, layout: Layout) -> Iterator[Round]:
    """Reduce-scatter in the node, all-reduce across nodes by all local ranks at once, all-gather in the node."""
    if not layout.even:
        yield from allreduce_by_leaders(rank, layout)
        return
    node = layout.nodes[layout.node_of(rank)]
    place, parts = node.index(rank), _parts(layout, len(node))
    across = [ranks[place] for ranks in layout.nodes]
    yield from _unfinished(within(direct.reduce_scatter(place, len(node)), node, parts))
    part = range(parts[place], parts[place + 1] + 1)
    yield from within(ring.allreduce(layout.node_of(rank), len(across)), across, part)
    yield from within(direct.allgather(place, len(node)), node, parts)


def allreduce_by_leaders(rank: int, layout: Layout) -> Iterator[Round]:
    """Reduce in the node to its first rank, all-reduce among these, broadcast in the node."""
    node = layout.nodes[layout.node_of(rank)]
    place, parts = node.index(rank), _parts(layout, len(node))
    leaders = [ranks[0] for ranks in layout.nodes]
    yield from _unfinished(within(direct.reduce(place, len(node)), node, parts))
    if place == 0:
        yield from within(ring.allreduce(layout.node_of(rank), len(leaders)), leaders, _parts(layout, len(leaders)))
    yield from within(direct.broadcast(place, len(node)), node, parts)


def _parts(layout: Layout, number: int) -> list[int]:
    """Cut all chunks into as many parts."""
    return [part * chunks(layout) // number for part in range(number + 1)]


def _unfinished(rounds: Iterator[Round]) -> Iterator[Round]:
    """Leave out what comes last: there are other nodes."""
    for a_round in rounds:
        yield Round(*(step for step in a_round if step.action is not Action.FINISH))
