"""The parameter server: rank 0 receives every vector, reduces them in rank order, and sends the result back.

With n ranks and B bytes:

==============  ===============  ====================  ==================================
collective      rounds           messages              bytes sent by a rank
==============  ===============  ====================  ==================================
reduce          n-1 at the root  1, the root 0         B, the root 0
broadcast       1                the root n-1          the root (n-1) B
allreduce       n at the root    1, the root n-1       B, the root (n-1) B
==============  ===============  ====================  ==================================

Everything passes through one rank: the baseline, and the way in which a central owner of the
parameters works. Scratch: one vector on the root. The sum is the left fold ((x_0 + x_1) + x_2) + ...; with another
root it starts there: x_root + x_(root+1) + ..., ranks modulo n.

Source: Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014, with one server.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.steps import Round, finish, receive, reduce_from, send


def reduce(rank: int, size: int) -> Iterator[Round]:
    """Everyone sends to the root, which adds in rank order."""
    if rank > 0:
        yield Round(send(0))
        return
    for worker in range(1, size):
        yield Round(reduce_from(worker, received_first=False))
    yield Round(finish())


def broadcast(rank: int, size: int) -> Iterator[Round]:
    """Send from the root to everyone."""
    if rank == 0:
        yield Round(*(send(worker) for worker in range(1, size)))
    else:
        yield Round(receive(0))


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast from it."""
    yield from reduce(rank, size)
    yield from broadcast(rank, size)
