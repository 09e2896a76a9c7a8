"""PAT, parallel aggregated trees (Jeaugey): a binomial tree for each chunk, all of them at once, the short way last.

With n ranks, B bytes, L = ceil(log2 n) and chunks of B/n:

==============  ==========  ==========  ==================================
collective      rounds      messages    bytes sent by a rank
==============  ==========  ==========  ==================================
reduce_scatter  L           L           (n-1)/n B
allgather       L           L           (n-1)/n B
allreduce       2L          2L          2 (n-1)/n B
==============  ==========  ==========  ==================================

For every n alike. Between ranks at distance d some 1/(2d) of the bytes pass: half of them between neighbours, where
the circulant algorithm moves half of them between the farthest. A rank's chunks in a message do not lie together; where
they are short they are copied into one piece. Scratch: half a vector.

Source: Jeaugey, PAT: a new algorithm for all-gather and reduce-scatter operations at scale, arXiv:2506.20252.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.powers import powers_below
from mpiagg.schedules.steps import Round, finish, receive, reduce_from, send


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """Take the rounds of the all-gather backwards: each chunk's tree ends at its rank."""
    for distance in powers_below(size):
        yield Round(
            *(send(rank - distance, chunk=rank - distance - offset) for offset in offsets(distance, size)),
            *(
                reduce_from(rank + distance, chunk=rank - offset, received_first=False)
                for offset in offsets(distance, size)
            ),
        )
    yield Round(finish(chunk=rank))


def allgather(rank: int, size: int) -> Iterator[Round]:
    """Each round hands the chunks of every second rank that has some to the rank between it and the next."""
    for distance in reversed(powers_below(size)):
        yield Round(
            *(send(rank + distance, chunk=rank - offset) for offset in offsets(distance, size)),
            *(receive(rank - distance, chunk=rank - distance - offset) for offset in offsets(distance, size)),
        )


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather."""
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)


def offsets(distance: int, size: int) -> range:
    """Return how far before a rank the chunks belong that it hands on over a distance."""
    return range(0, size - distance, 2 * distance)
