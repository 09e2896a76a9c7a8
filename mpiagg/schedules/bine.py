"""Bine trees (binomial negabinary): binomial trees whose ranks are nearer to one another.

The tree is the way that the root's chunk takes in Swing's all-gather: in step s, from the last to the first, the ranks
that have the vector hand it on over a distance of (1 - (-2)^(s+1)) / 3. With n ranks, B bytes and L = ceil(log2 n):

==============  ==========  ======================  ==================================
collective      rounds      messages of a rank      bytes sent by a rank
==============  ==========  ======================  ==================================
reduce          L           1, the root 0           B, the root 0
broadcast       L           L at most               L B at most
allreduce       2L          L + 1 at most           (L + 1) B at most
n is odd        1 more*     1 more of the root*     B more of the root*
==============  ==========  ======================  ==================================

(* At most, and messages and bytes only where the root sends; an all-reduce has twice as many more rounds.) As many
messages as a binomial tree has, over two thirds of its distances: fewer of them leave a group of neighbouring ranks.
Where n is odd the last rank hangs below the root. Scratch: one vector.

Source: De Sensi et al., Bine trees: enhancing collective operations by optimizing communication locality, SC 2025,
arXiv:2508.17311.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from mpiagg.schedules.ranks import RankTable
from mpiagg.schedules.steps import Parts, Round, finish, receive, reduce_from, send, within
from mpiagg.schedules.swing import departures, even_part, meets, steps


def reduce(rank: int, size: int) -> Iterator[Round]:
    """In each step take in what others hand on; hand on the sum when there is nobody left to take in."""
    last, even = size - 1, even_part(size)
    if size > even:
        if rank == last:
            yield Round(send(0))
            return
        if rank == 0:
            yield Round(reduce_from(last, received_first=False))
    yield from within(_towards_root(rank, even), lambda other: other, even, Parts(0, 1, 1))
    if rank == 0:
        yield Round(finish())


def broadcast(rank: int, size: int) -> Iterator[Round]:
    """Take the rounds of the reduction backwards."""
    last, even = size - 1, even_part(size)
    if rank < even:
        yield from within(_from_root(rank, even), lambda other: other, even, Parts(0, 1, 1))
    if size > even:
        if rank == last:
            yield Round(receive(0))
        if rank == 0:
            yield Round(send(last))


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast from it."""
    yield from reduce(rank, size)
    yield from broadcast(rank, size)


def _towards_root(rank: int, size: int) -> Iterator[Round]:
    for step in range(steps(size)):
        if departs(size)[rank] == step:
            yield Round(send(meets(rank, step)))
            return
        if departs(size)[meets(rank, step) % size] == step:
            yield Round(reduce_from(meets(rank, step)))


def _from_root(rank: int, size: int) -> Iterator[Round]:
    for step in reversed(range(steps(size))):
        if departs(size)[rank] == step:
            yield Round(receive(meets(rank, step)))
        elif departs(size)[meets(rank, step) % size] == step:
            yield Round(send(meets(rank, step)))


@lru_cache(maxsize=16)
def departs(size: int) -> RankTable:
    """Return in which step each rank hands its sum on towards rank 0, which never does: as many as there are steps."""
    found = [int(departures(size)[rank % 2][-rank % size]) for rank in range(size)]
    return RankTable([steps(size), *found[1:]])
