"""Direct: every rank receives its part of every vector at once, reduces it, and sends it to all.

With n ranks, B bytes and chunks of B/n:

==============  ==========  ============  =======================
collective      rounds      messages      bytes sent by a rank
==============  ==========  ============  =======================
reduce_scatter  1           n-1           (n-1)/n B
allgather       1           n-1           (n-1)/n B
allreduce       2           2(n-1)        2 (n-1)/n B
==============  ==========  ============  =======================

The fewest rounds with the fewest bytes, paid for with many messages at once: the choice for few ranks and fast
links. Scratch: n-1 chunks. Chunk c is the same left fold as the ring's: x_c + x_(c+1) + ..., ranks modulo n.

Source: the "spread" reduce-scatter and all-gather of any MPI library.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.steps import Round, finish, receive, reduce_from, send


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Hand every rank its chunk, and add up the ones that arrive, in rank order from our own on."""
    others = [rank + distance for distance in range(1, size)]
    yield Round(
        *(send(peer, chunk=peer) for peer in others),
        *(reduce_from(peer, chunk=rank, received_first=False) for peer in others),
    )
    yield Round(finish(chunk=rank))


def allgather(rank: int, size: int) -> Iterator[Round]:
    """Hand our chunk to every rank."""
    others = [rank + distance for distance in range(1, size)]
    yield Round(
        *(send(peer, chunk=rank) for peer in others),
        *(receive(peer, chunk=peer) for peer in others),
    )


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather."""
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)
