"""The k-nomial tree: a rank's parent is itself with the last digit that is not 0 in base k set to 0.

With n ranks, B bytes and L = ceil(log_k n):

==============  ==========  ======================  ==================================
collective      rounds      messages of a rank      bytes sent by a rank
==============  ==========  ======================  ==================================
reduce          L           1, the root 0           B, the root 0
broadcast       L           (k-1) L at most         (k-1) L B at most
allreduce       2L          (k-1) L + 1 at most     ((k-1) L + 1) B at most
gather          L           1, the root 0           k^(L-1)/n B at most, the root 0
scatter         L           (k-1) L at most         (n-1)/n B at most
==============  ==========  ======================  ==================================

With k = 2 it is the binomial tree, in which a rank that has the vector hands it on in every round. A larger k makes the
tree flatter. The choice for short vectors with a root. Sums are in rank order. Scratch: k-1 vectors. In a
gather, what is below a rank in the tree are ranks that follow one another.

Source: the binomial tree of any MPI library; for other k Wilkins et al., Generalized collective algorithms for the
exascale era, CLUSTER 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from mpiagg.schedules.powers import powers_below
from mpiagg.schedules.ranks import where
from mpiagg.schedules.steps import Collective, Generator, Round, finish, receive, reduce_from, send


def reduce(radix: int, rank: int, size: int) -> Iterator[Round]:
    """Add up what the children of each level send, then hand it to the parent."""
    for distance in powers_below(size, radix):
        if rank % (distance * radix) != 0:
            yield Round(send(parent(radix, rank, distance)))
            return
        yield Round(*(reduce_from(child, received_first=False) for child in children(radix, rank, size, distance)))
    yield Round(finish())


def broadcast(radix: int, rank: int, size: int) -> Iterator[Round]:
    """Take the vector from the parent, then hand it to the children of each level."""
    for distance in reversed(powers_below(size, radix)):
        if rank % (distance * radix) == 0:
            yield Round(*(send(child) for child in children(radix, rank, size, distance)))
        elif rank % distance == 0:
            yield Round(receive(parent(radix, rank, distance)))


def allreduce(radix: int, rank: int, size: int) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast from it."""
    yield from reduce(radix, rank, size)
    yield from broadcast(radix, rank, size)


def gather(radix: int, rank: int, size: int) -> Iterator[Round]:
    """Take the chunks of all below the children of each level, then hand them with ours to the parent."""
    for distance in powers_below(size, radix):
        if rank % (distance * radix) != 0:
            yield Round(send(parent(radix, rank, distance), chunk=rank, count=below(rank, size, distance)))
            return
        found = children(radix, rank, size, distance)
        yield Round(*(receive(child, chunk=child, count=below(child, size, distance)) for child in found))


def scatter(radix: int, rank: int, size: int) -> Iterator[Round]:
    """Take the chunks of all below us from the parent, then hand theirs to the children of each level."""
    for distance in reversed(powers_below(size, radix)):
        if rank % (distance * radix) == 0:
            found = children(radix, rank, size, distance)
            yield Round(*(send(child, chunk=child, count=below(child, size, distance)) for child in found))
        elif rank % distance == 0:
            yield Round(receive(parent(radix, rank, distance), chunk=rank, count=below(rank, size, distance)))


def generators(radix: int) -> Mapping[Collective, Generator]:
    """Return the collectives on the tree of some radix."""
    return {
        Collective.ALLREDUCE: partial(allreduce, radix),
        Collective.REDUCE: partial(reduce, radix),
        Collective.BROADCAST: partial(broadcast, radix),
        Collective.GATHER: partial(gather, radix),
        Collective.SCATTER: partial(scatter, radix),
    }


def parent(radix: int, rank: int, distance: int) -> int:
    """Return the rank above ``rank``, on the level of a distance."""
    return rank - rank % (distance * radix)


def children(radix: int, rank: int, size: int, distance: int) -> list[int]:
    """Return the ranks below ``rank``, on the level of a distance."""
    return [child for digit in range(1, radix) if (child := rank + digit * distance) < size]


def below(rank: int, size: int, distance: int) -> int:
    """Return how many ranks a rank on the level of a distance stands for: itself, and all below it."""
    return where(size - rank < distance, size - rank, distance)
