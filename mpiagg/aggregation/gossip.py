"""Gossip as schedules: who averages with whom, in which round.

Nodes are tuples of ranks that share a machine, and the first rank of a node is its leader. In a round, the leaders of
paired nodes add up the weights of all their ranks, and every rank gets the mean of both nodes. Where every rank is
a node of its own, that is the mean of two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from mpiagg.schedules import Action, Collective, Round, algorithm, finish, reduce_from, send

Nodes = tuple[tuple[int, ...], ...]
PeerSelection = Literal["shift_one", "all"]


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


def gossip(rank: int, nodes: Nodes, step: int, peer_selection: PeerSelection) -> tuple[list[Round], int]:
    """Return the rounds of ``rank`` in a communication, for a buffer of one chunk, and what its sums are divided by.

    The operands of a sum between nodes stand in the order of the ranks, so both sides get the same bits.
    """
    own = next(number for number, node in enumerate(nodes) if rank in node)
    node, leaders = nodes[own], [node[0] for node in nodes]
    rounds, divisor = [], len(node)
    if peer_selection == "all":
        between, divisor = _among(leaders, Collective.ALLREDUCE, rank), sum(map(len, nodes))
    elif (peer := shift_one(own, len(nodes), step)) != own:
        between = [Round(send(leaders[peer]), reduce_from(leaders[peer], received_first=leaders[peer] < rank))]
        divisor += len(nodes[peer])
    else:
        between = []
    rounds += _among(node, Collective.REDUCE, rank)
    if rank == node[0]:
        rounds += between
        rounds += [Round(finish())] if divisor > 1 else []
    rounds += _among(node, Collective.BROADCAST, rank)
    return rounds, divisor


def in_pieces(rounds: Sequence[Round], pieces: int) -> Iterator[Round]:
    """Yield the rounds for each piece of a buffer, one piece after the other: scratch is a piece then, not all."""
    for piece in range(pieces):
        for a_round in rounds:
            yield Round(*(replace(step, chunk=piece) for step in a_round))


def _among(ranks: Sequence[int], collective: Collective, rank: int) -> list[Round]:
    """Return the rounds of ``rank`` in a collective of some ranks, without the last division."""
    if rank not in ranks:
        return []
    name = "recursive_doubling" if collective is Collective.ALLREDUCE else "tree"
    rounds = algorithm(name).schedule(collective, ranks.index(rank), len(ranks))
    renamed = (
        Round(*(replace(step, peer=ranks[step.peer]) for step in a_round if step.action is not Action.FINISH))
        for a_round in rounds
    )
    return [a_round for a_round in renamed if a_round]
