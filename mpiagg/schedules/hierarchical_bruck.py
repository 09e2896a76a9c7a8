"""Hierarchical Bruck: an all-to-all within the nodes, and Bruck's among their leaders.

With N nodes of L ranks (n = N L), B bytes that each rank has for all of them, and D = ceil(log_k N):

==============  =================  ======================  ============================================
collective      rounds             messages between nodes  bytes sent by a leader
==============  =================  ======================  ============================================
alltoall        2 + (k-1) D        (k-1) D of each node    (L-1) B in its node, L D B across, at most
==============  =================  ======================  ============================================

The first rank of a node is its leader: it brings together what the others have for other nodes, and hands out what has
come from there. The leaders exchange as in ``bruck``, with all chunks from one node to another in place of a chunk. So
fewer messages cross than in ``hierarchical``, where every two nodes exchange one: the choice for the shortest chunks
where there are many more nodes than ranks on each. Ranks that are no leaders send (n-1)/n B.
Scratch: the chunks that a rank forwards, each in a place of its own.

Source: Bruck's all-to-all (see ``bruck``) among nodes, as in Fan et al., Configurable non-uniform all-to-all
algorithms, arXiv:2411.02581.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpiagg.schedules import bruck
from mpiagg.schedules.hierarchical import NodeExchange, by_leaders
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.steps import Round, Step, settled


def alltoall(radix: int) -> Callable[[int, Layout], Iterator[Round]]:
    """Return the all-to-all of a radix."""

    def alltoall(rank: int, layout: Layout) -> Iterator[Round]:
        node, place = NodeExchange(layout, layout.node_of(rank), leaders=1), layout.place_of(rank)
        yield from by_leaders(place, node, among_leaders(node) if place == 0 else iter(()))

    def among_leaders(node: NodeExchange) -> Iterator[Round]:
        """Carry out Bruck's all-to-all of the nodes; a chunk of it is all that goes from one to another."""
        nodes = len(node.layout.nodes)
        for a_round in bruck.alltoall(radix)(node.number, nodes):
            yield Round(
                *(
                    Step(step.action, node.layout.rank_at(step.peer, 0), *block)
                    for whole in a_round
                    for step in settled(whole, nodes, nodes * nodes)
                    for block in sent(node, step)
                )
            )

    def sent(node: NodeExchange, step: Step) -> Iterator[tuple[int, int]]:
        """Yield the chunks between ranks that a step's chunks between nodes are."""
        nodes = len(node.layout.nodes)
        source, target = step.chunk % nodes - node.number, step.chunk // nodes - node.number
        yield from node.between(source, target, step.count)

    return alltoall
