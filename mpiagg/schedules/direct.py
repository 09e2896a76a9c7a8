"""Direct: every rank receives its part of every vector at once, reduces it, and sends it to all.

With n ranks, B bytes and chunks of B/n:

==============  ==========  ===================  =======================
collective      rounds      messages             bytes sent by a rank
==============  ==========  ===================  =======================
reduce_scatter  1           n-1                  (n-1)/n B
allgather       1           n-1                  (n-1)/n B
allreduce       2           2(n-1)               2 (n-1)/n B
reduce          2           n, the root n-1      B, the root (n-1)/n B
broadcast       2           n-2, the root 2n-2   (n-2)/n B, the root 2 (n-1)/n B
gather          1           1, the root 0        B/n, the root 0
scatter         1           0, the root n-1      0, the root (n-1)/n B
alltoall        1           n-1                  (n-1)/n B
==============  ==========  ===================  =======================

The fewest rounds with the fewest bytes, paid for with many messages at once: the choice for few ranks and fast
links. Scratch: n-1 chunks. Every chunk is the same left fold, in rank order: ((x_0 + x_1) + x_2) + ... With
another root it starts there.

Source: the "spread" reduce-scatter and all-gather of any MPI library; "two-shot" among GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.ranks import others
from mpiagg.schedules.steps import Round, finish, fold, from_root, receive, send, to_root


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Hand every rank its chunk, and add up the ones that arrive with our own, in rank order."""
    yield Round(*(send(peer, chunk=peer) for peer in others(rank, size)), *fold(rank, size, chunk=rank))
    yield Round(finish(chunk=rank))


def allgather(rank: int, size: int) -> Iterator[Round]:
    """Hand our chunk to every rank."""
    yield Round(
        *(send(peer, chunk=rank) for peer in others(rank, size)),
        *(receive(peer, chunk=peer) for peer in others(rank, size)),
    )


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather."""
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)


def reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then every rank hands its chunk to the root."""
    yield from reduce_scatter(rank, size)
    yield to_root(rank, size)


def gather(rank: int, size: int) -> Iterator[Round]:
    """Hand our chunk to the root."""
    yield to_root(rank, size)


def scatter(rank: int, size: int) -> Iterator[Round]:
    """Take our chunk from the root."""
    yield from_root(rank, size)


def alltoall(rank: int, size: int) -> Iterator[Round]:
    """Hand every rank what we have for it."""
    yield Round(
        *(send(peer, chunk=peer % size * size + rank) for peer in others(rank, size)),
        *(receive(peer, chunk=rank * size + peer % size) for peer in others(rank, size)),
    )


def broadcast(rank: int, size: int) -> Iterator[Round]:
    """Hand every rank its chunk of the root's vector; each hands it on to the others."""
    yield from_root(rank, size)
    yield Round(
        *(send(peer, chunk=rank) for peer in others(rank, size, first=1)),
        *(receive(peer, chunk=peer) for peer in others(rank, size) if rank > 0),
    )
