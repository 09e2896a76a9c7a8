"""Gossip as data: who sends to whom, and how much of what arrives each rank takes.

A communication multiplies the weights of all ranks by a mixing matrix W: x_i <- sum_j W_ij x_j. A :class:`MixingRow` is
what that means for one rank. W is doubly stochastic: no entry is negative, rows and columns add up to one. So
the mean over all ranks is kept, and their distance from it never grows (Boyd, Ghosh, Prabhakar and Shah, "Randomized
gossip algorithms", IEEE Transactions on Information Theory 2006).

Nodes are tuples of ranks that share a machine, and the first rank of a node is its leader. With nodes, the leaders mix
the sums over their nodes, and every rank gets what its leader has then. Where every rank is a node of
its own, only the mixing is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from mpiagg.schedules import Action, Collective, Round, algorithm, finish

Nodes = tuple[tuple[int, ...], ...]
PeerSelection = Literal["shift_one", "one_peer_exponential", "all"]


@dataclass(frozen=True)
class MixingRow:
    """What one rank does in a mixing: it sends its vector, and replaces it by a weighted sum.

    Attributes
    ----------
    targets : tuple of int
        The ranks that it sends to.
    weights : tuple of (int, Fraction)
        For each rank whose vector it takes, in the order of the ranks, how much of it. Its own is among them.
    """

    targets: tuple[int, ...]
    weights: tuple[tuple[int, Fraction], ...]


Rounds = tuple[Round, ...]
Phase = MixingRow | Rounds
"""A part of a communication: a row of a mixing matrix, or rounds of a collective on a buffer of one chunk."""


# -- who meets whom


def shift_one(member: int, size: int, step: int) -> int:
    """Return with whom ``member`` of ``size`` averages in communication ``step``; itself if it is idle.

    The peers are pairs: the peer of a peer is the member itself. For an even size they are always of
    different halves, and come round after size/2 steps. For an odd size one member is idle in each step; after ``size``
    steps each has been so once, and has met every other.
    """
    if size % 2:
        return (step - member) % size
    half = size // 2
    if member < half:
        return (step + member) % half + half
    return (member - half - step) % half


def one_peer_exponential(member: int, size: int, step: int) -> tuple[int, int]:
    """Return from whom ``member`` of ``size`` receives in communication ``step``, and to whom it sends.

    They are 2**(step mod L) below it and above it, modulo ``size``, for L = ceil(log2 size). If the size is a power of
    two, L steps in a row leave all members with the mean of all.
    """
    distance = 2 ** (step % max(1, (size - 1).bit_length()))
    return (member - distance) % size, (member + distance) % size


def ring(rank: int, size: int) -> list[int]:
    """Return the neighbors of a rank in a ring."""
    return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})


def exponential(rank: int, size: int) -> list[int]:
    """Return the neighbors of a rank in the graph of all distances that are powers of two, about 2 log2 size."""
    distances = [2**power for power in range(size.bit_length())]
    return sorted({(rank + way * distance) % size for distance in distances for way in (-1, 1)} - {rank})


# -- how much of whom


def metropolis(rank: int, graph: Sequence[Sequence[int]]) -> dict[int, Fraction]:
    """Return the Metropolis weights of a rank's neighbors; ``graph`` holds the neighbors of every rank.

    W_ij = 1 / (1 + max(deg_i, deg_j)): any graph gives a symmetric matrix that is doubly stochastic (Xiao, Boyd and
    Kim, "Distributed average consensus with least-mean-square deviation", JPDC 2007).
    """
    return {peer: Fraction(1, 1 + max(len(graph[rank]), len(graph[peer]))) for peer in graph[rank]}


def neighbor_row(rank: int, weights: Mapping[int, Fraction]) -> MixingRow:
    """Return the row of a rank that exchanges with its neighbors, and keeps of its own what their weights leave."""
    row = {**weights, rank: max(1 - sum(weights.values(), Fraction(0)), Fraction(0))}
    return MixingRow(tuple(weights), tuple(sorted((peer, weight) for peer, weight in row.items() if weight)))


def node_row(own: int, nodes: Nodes, step: int, peer_selection: PeerSelection) -> MixingRow:
    """Return the row of the leader of a node, for leaders that hold the sums over their nodes.

    Every node takes so many ranks' worth of another node's mean, and gives as much of its own away: as many
    as makes a pair equal, or half of the smallest node where they are no pairs. So all ranks count alike,
    and the mean over them is kept, also where nodes differ in size.
    """
    if peer_selection == "shift_one":
        source = target = shift_one(own, len(nodes), step)
        worth = Fraction(len(nodes[own]) * len(nodes[source]), len(nodes[own]) + len(nodes[source]))
    else:
        source, target = one_peer_exponential(own, len(nodes), step)
        worth = Fraction(min(map(len, nodes)), 2)
    leader, size = nodes[own][0], len(nodes[own])
    if source == own:
        return MixingRow((), ((leader, Fraction(1, size)),))
    weights = {leader: (size - worth) / size**2, nodes[source][0]: worth / (size * len(nodes[source]))}
    return MixingRow((nodes[target][0],), tuple(sorted(weights.items())))


# -- what a rank does


def gossip(rank: int, nodes: Nodes, step: int, peer_selection: PeerSelection) -> tuple[Phase, ...]:
    """Return what ``rank`` does in communication ``step``, one phase after the other."""
    own = next(number for number, node in enumerate(nodes) if rank in node)
    node = nodes[own]
    between: Phase = ()
    if rank == node[0]:
        if peer_selection == "all":
            between = (*among([each[0] for each in nodes], Collective.ALLREDUCE, rank), Round(finish()))
        else:
            between = node_row(own, nodes, step, peer_selection)
    phases = (among(node, Collective.REDUCE, rank), between, among(node, Collective.BROADCAST, rank))
    return tuple(phase for phase in phases if phase)


def in_pieces(rounds: Rounds, pieces: int) -> Iterator[Round]:
    """Yield the rounds for each piece of a buffer, one piece after the other: scratch is a piece then, not all."""
    for piece in range(pieces):
        for a_round in rounds:
            yield Round(*(replace(step, chunk=piece) for step in a_round))


def among(ranks: Sequence[int], collective: Collective, rank: int) -> Rounds:
    """Return the rounds of ``rank`` in a collective of some ranks that it is one of, without the last division."""
    name = "recursive_doubling" if collective is Collective.ALLREDUCE else "tree"
    rounds = algorithm(name).schedule(collective, ranks.index(rank), len(ranks))
    renamed = (
        Round(*(replace(step, peer=ranks[step.peer]) for step in a_round if step.action is not Action.FINISH))
        for a_round in rounds
    )
    return tuple(a_round for a_round in renamed if a_round)
