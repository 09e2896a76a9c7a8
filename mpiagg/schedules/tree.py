"""The binary tree: rank 0 is the top, and below rank r hang the ranks 2r+1 and 2r+2.

With n ranks, B bytes and depth D = floor(log2 n):

==============  ==========================  ===================  ==================================
collective      rounds on the longest way   messages of a rank   bytes sent by a rank
==============  ==========================  ===================  ==================================
reduce          2D at most                  1, the root 0        B, the root 0
broadcast       D                           2 at most            a B for each child, 2B at most
allreduce       3D at most                  3 at most            3B at most
==============  ==========================  ===================  ==================================

(An inner rank takes its children one after the other when it reduces, since they share its scratch.)
Few rounds, but whole vectors: the choice for short ones, or, cut into many lanes, for a pipeline.
Scratch: one vector on the ranks that have children.

Source: any textbook; the numbering of the ranks is that of a binary heap.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.steps import Round, finish, receive, reduce_from, send


def reduce(rank: int, size: int) -> Iterator[Round]:
    """Add up what the children send, then hand it to the parent."""
    for child in children(rank, size):
        yield Round(reduce_from(child, received_first=False))
    if rank > 0:
        yield Round(send(parent(rank)))
    else:
        yield Round(finish())


def broadcast(rank: int, size: int) -> Iterator[Round]:
    """Take the vector from the parent, then hand it to the children."""
    if rank > 0:
        yield Round(receive(parent(rank)))
    yield Round(*(send(child) for child in children(rank, size)))


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast from it."""
    yield from reduce(rank, size)
    yield from broadcast(rank, size)


def parent(rank: int) -> int:
    """Return the rank above ``rank``."""
    return (rank - 1) // 2


def children(rank: int, size: int) -> list[int]:
    """Return the ranks below ``rank``."""
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
