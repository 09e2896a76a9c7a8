"""One shot: every rank sends its whole vector to all, and reduces all of them by itself.

With n ranks and B bytes:

==============  ==========  ============  =======================
collective      rounds      messages      bytes sent by a rank
==============  ==========  ============  =======================
allreduce       1           n-1           (n-1) B
reduce          1           1, the root 0 B, the root 0
==============  ==========  ============  =======================

One round, the fewest there can be, for the most bytes: the choice for very short vectors, and for few ranks.
Scratch: n-1 vectors. The sum is the left fold in rank order, ((x_0 + x_1) + x_2) + ..., on every rank; the same
as that of ``direct``. With another root it starts there.

Source: "one-shot" all-reduce, as it is called among GPUs; an all-to-all broadcast and a reduction of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.ranks import others
from mpiagg.schedules.steps import Round, finish, fold, send


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Send our vector to every rank, and add up all of them, in rank order."""
    yield Round(*(send(peer) for peer in others(rank, size)), *fold(rank, size))
    yield Round(finish())


def reduce(rank: int, size: int) -> Iterator[Round]:
    """Send our vector to the root, which adds up all of them, in rank order."""
    if rank > 0:
        yield Round(send(0))
    else:
        yield Round(*fold(0, size))
        yield Round(finish())
