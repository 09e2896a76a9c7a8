"""Circulant graphs (Traeff): ceil(log2 n) rounds and the fewest bytes, for every n alike.

With n ranks, B bytes, L = ceil(log2 n) and chunks of B/n:

==============  ==========  ==========  =======================
collective      rounds      messages    bytes sent by a rank
==============  ==========  ==========  =======================
reduce_scatter  L           L           (n-1)/n B
allgather       L           L           (n-1)/n B
allreduce       2L          2L          2 (n-1)/n B
==============  ==========  ==========  =======================

The chunks of a message lie together, but for those that run past the last one to the first. Half of the bytes pass
between the ranks that are farthest from one another: where these are on other nodes, PAT moves fewer. Scratch: half a
vector.

Source: Traeff, Optimal, non-pipelined reduce-scatter and allreduce algorithms, arXiv:2410.14234.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.steps import Round, finish, receive, reduce_from, send


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Each round hands away the farther half of the chunks that this rank still gathers."""
    for wide, narrow in halvings(size):
        yield Round(
            send(rank + narrow, chunk=rank + narrow, count=wide - narrow),
            reduce_from(rank - narrow, chunk=rank, count=wide - narrow),
        )
    yield Round(finish(chunk=rank))


def allgather(rank: int, size: int) -> Iterator[Round]:
    """Take the rounds of the reduce-scatter backwards."""
    for wide, narrow in reversed(list(halvings(size))):
        yield Round(
            send(rank - narrow, chunk=rank, count=wide - narrow),
            receive(rank + narrow, chunk=rank + narrow, count=wide - narrow),
        )


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather."""
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)


def halvings(size: int) -> Iterator[tuple[int, int]]:
    """Yield (wide, narrow) with narrow = ceil(wide / 2), from wide = size down to narrow = 1."""
    wide = size
    while wide > 1:
        narrow = (wide + 1) // 2
        yield wide, narrow
        wide = narrow
