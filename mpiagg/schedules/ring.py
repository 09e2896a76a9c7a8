"""The ring: every rank only ever sends to its right neighbour and receives from its left one.

With n ranks, B bytes and chunks of B/n:

==============  ==========  =======================  ====================================
collective      rounds      messages sent by a rank  bytes sent by a rank
==============  ==========  =======================  ====================================
reduce_scatter  n-1         n-1                      (n-1)/n B
allgather       n-1         n-1                      (n-1)/n B
allreduce       2(n-1)      2(n-1)                   2 (n-1)/n B
reduce          n           n, the root n-1          B, the root (n-1)/n B
broadcast       n           n-1, the root 2(n-1)     (n-1)/n B, the root 2 (n-1)/n B
scan            n-1         1, the last rank 0       B, the last rank 0
exscan          n-1         1, the last rank 0       B, the last rank 0
==============  ==========  =======================  ====================================

(In one round of ``reduce`` and ``broadcast`` the root exchanges n-1 messages, with every other rank.)
No algorithm moves fewer bytes for an all-reduce, and each message is small: the choice for long vectors.
Scratch: one chunk. Chunk c of an all-reduce is the left fold x_c + x_(c+1) + ... + x_(c+n-1), ranks modulo n.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
J. Parallel Distrib. Comput. 69 (2009). Reduce and broadcast: van de Geijn's scatter and gather with a ring.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.steps import Round, finish, from_root, keep_from, receive, reduce_from, send, take, to_root


def reduce_scatter(rank: int, size: int, ends: int = 0) -> Iterator[Round]:
    """Round s: pass a partial sum on and add our share to the one that arrives; end with chunk rank+ends."""
    last = rank + ends
    for s in range(1, size):
        yield Round(send(rank + 1, chunk=last - s), reduce_from(rank - 1, chunk=last - s - 1))
    yield Round(finish(chunk=last))


def allgather(rank: int, size: int, starts: int = 0) -> Iterator[Round]:
    """Round s: pass on the chunk that arrived in the round before; start with chunk rank+starts."""
    first = rank + starts
    for s in range(size - 1):
        yield Round(send(rank + 1, chunk=first - s), receive(rank - 1, chunk=first - s - 1))


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather. Chunk c sets out at rank c, so its sum ends at rank c-1."""
    yield from reduce_scatter(rank, size, ends=1)
    yield from allgather(rank, size, starts=1)


def reduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then every rank hands its chunk to the root."""
    yield from reduce_scatter(rank, size)
    yield to_root(rank, size)


def scan(rank: int, size: int) -> Iterator[Round]:
    """Add our vector to the sum of all before us, and pass that on: with many lanes, a pipeline."""
    if rank > 0:
        yield Round(reduce_from(rank - 1))
    if rank + 1 < size:
        yield Round(send(rank + 1))


def exscan(rank: int, size: int) -> Iterator[Round]:
    """Keep the sum of all before us, and pass it on with our vector added: with many lanes, a pipeline."""
    if rank + 1 == size and rank > 0:
        yield Round(receive(rank - 1))
        return
    if rank > 0:
        yield Round(keep_from(rank - 1))
    if rank + 1 < size:
        yield Round(send(rank + 1), *([take()] if rank > 0 else []))


def broadcast(rank: int, size: int) -> Iterator[Round]:
    """Hand every rank its chunk from the root, then all-gather."""
    yield from_root(rank, size)
    yield from allgather(rank, size)
