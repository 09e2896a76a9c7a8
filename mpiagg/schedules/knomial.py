"""The k-nomial tree: a rank's parent is itself with the last digit that is not 0 in base k set to 0.

With n ranks, B bytes and L = ceil(log_k n):

==============  ==========  ======================  ==================================
collective      rounds      messages of a rank      bytes sent by a rank
==============  ==========  ======================  ==================================
reduce          L           1, the root 0           B, the root 0
broadcast       L           (k-1) L at most         (k-1) L B at most
allreduce       2L          (k-1) L + 1 at most     ((k-1) L + 1) B at most
==============  ==========  ======================  ==================================

With k = 2 it is the binomial tree, in which a rank that has the vector hands it on in every round. A larger k makes the
tree flatter. The choice for short vectors with a root. Sums are in rank order. Scratch: k-1 vectors.

Source: the binomial tree of any MPI library; for other k Wilkins et al., Generalized collective algorithms for the
exascale era, CLUSTER 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpiagg.schedules.powers import powers_below
from mpiagg.schedules.steps import Collective, Generator, Round, finish, receive, reduce_from, send


def generators(radix: int) -> Mapping[Collective, Generator]:
    """Return the collectives on the tree of some radix."""

    def reduce(rank: int, size: int) -> Iterator[Round]:
        for distance in powers_below(size, radix):
            if rank % (distance * radix) != 0:
                yield Round(send(rank - rank % (distance * radix)))
                return
            yield Round(*(reduce_from(child, received_first=False) for child in children(rank, size, distance)))
        yield Round(finish())

    def broadcast(rank: int, size: int) -> Iterator[Round]:
        for distance in reversed(powers_below(size, radix)):
            if rank % (distance * radix) == 0:
                yield Round(*(send(child) for child in children(rank, size, distance)))
            elif rank % distance == 0:
                yield Round(receive(rank - rank % (distance * radix)))

    def allreduce(rank: int, size: int) -> Iterator[Round]:
        yield from reduce(rank, size)
        yield from broadcast(rank, size)

    def children(rank: int, size: int, distance: int) -> list[int]:
        return [child for digit in range(1, radix) if (child := rank + digit * distance) < size]

    return {Collective.ALLREDUCE: allreduce, Collective.REDUCE: reduce, Collective.BROADCAST: broadcast}
