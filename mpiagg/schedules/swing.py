"""Swing: neighbours swing to and fro, at distances 1, -1, 3, -5, 11, ... that grow more slowly than powers of two.

In step s an even rank r meets the rank r + d, and an odd one r - d, with d = (1 - (-2)^(s+1)) / 3. With n ranks,
B bytes, L = ceil(log2 n) and chunks of B/n:

==============  ==========  ======================  ==================================
collective      rounds      messages of a rank      bytes sent by a rank
==============  ==========  ======================  ==================================
reduce_scatter  L           L                       (n-1)/n B
allgather       L           L                       (n-1)/n B
allreduce       2L          2L                      2 (n-1)/n B
n is odd        1 more*     1 more, the last n-1    the same
==============  ==========  ======================  ==================================

(* At most; an all-reduce has twice as many more.) A chunk leaves a rank once: in the last step in which the rank that
takes it can still bring it to its owner. So no contribution counts twice where n is no power of two and ways overlap.
Where n is odd the last rank exchanges chunks with each of the others. The chunks of a message do not lie together.
Scratch: half a vector, and n-1 chunks on the last rank where n is odd.

Source: De Sensi, Bonato, Saam and Hoefler, Swing: short-cutting rings for higher bandwidth allreduce, NSDI 2024,
arXiv:2401.09356.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

import numpy as np

from mpiagg.schedules.ranks import Numbers
from mpiagg.schedules.steps import Parts, Round, finish, fold, receive, reduce_from, send, within


def reduce_scatter(rank: int, size: int) -> Iterator[Round]:
    """In each step hand on the chunks that cannot be handed on later."""
    last, even = size - 1, even_part(size)
    if size > even and rank == last:
        yield Round(*(send(peer, chunk=peer) for peer in range(last)), *fold(last, size, chunk=last))
    elif size > even:
        yield Round(send(last, chunk=last), reduce_from(last, chunk=rank, received_first=False))
    if rank < even:
        yield from within(_towards_owners(rank, even), lambda other: other, even, Parts(0, even, even))
    yield Round(finish(chunk=rank))


def allgather(rank: int, size: int) -> Iterator[Round]:
    """Take the rounds of the reduce-scatter backwards."""
    last, even = size - 1, even_part(size)
    if rank < even:
        yield from within(_from_owners(rank, even), lambda other: other, even, Parts(0, even, even))
    if size > even and rank == last:
        peers = range(last)
        yield Round(*(send(peer, chunk=last) for peer in peers), *(receive(peer, chunk=peer) for peer in peers))
    elif size > even:
        yield Round(send(last, chunk=rank), receive(last, chunk=last))


def allreduce(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter, then all-gather."""
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)


def _towards_owners(rank: int, size: int) -> Iterator[Round]:
    odd = rank % 2 == 1
    for step in range(steps(size)):
        peer = meets(rank, step)
        yield Round(
            *(send(peer, rank + offset, count) for offset, count in leaving(size, step, odd=odd)),
            *(reduce_from(peer, peer + offset, count) for offset, count in leaving(size, step, odd=not odd)),
        )


def _from_owners(rank: int, size: int) -> Iterator[Round]:
    odd = rank % 2 == 1
    for step in reversed(range(steps(size))):
        peer = meets(rank, step)
        yield Round(
            *(send(peer, peer + offset, count) for offset, count in leaving(size, step, odd=not odd)),
            *(receive(peer, rank + offset, count) for offset, count in leaving(size, step, odd=odd)),
        )


def even_part(size: int) -> int:
    """Return how many ranks meet in steps: all, or all but the last."""
    return max(1, size - size % 2)


def steps(size: int) -> int:
    """Return how many steps there are."""
    return (size - 1).bit_length()


def distance(step: int) -> int:
    """Return how far after an even rank stands the one that it meets."""
    return int((1 - (-2) ** (step + 1)) // 3)


def meets(rank: int, step: int) -> int:
    """Return the rank that a rank meets in a step, not yet taken modulo the number of ranks."""
    return rank - distance(step) if rank % 2 == 1 else rank + distance(step)


@lru_cache(maxsize=16)
def departures(size: int) -> tuple[Numbers, Numbers]:
    """Return in which step an even rank, and an odd one, hands on the chunk of the rank so far after it; -1 is never.

    It is the last step after which the chunk can still come to its owner, from the rank that is met in it.
    """
    reached = [np.zeros(size, np.bool_), np.zeros(size, np.bool_)]  # by the steps that are left
    found = np.full(size, -1), np.full(size, -1)
    for owned in reached:
        owned[0] = True
    for step in reversed(range(steps(size))):
        by_way_of = [np.roll(reached[1], distance(step)), np.roll(reached[0], -distance(step))]
        for leaves, here, there in zip(found, reached, by_way_of, strict=True):
            leaves[there & ~here & (leaves < 0)] = step
        reached = [here | there for here, there in zip(reached, by_way_of, strict=True)]
    return found


def leaving(size: int, step: int, *, odd: bool) -> list[tuple[int, int]]:
    """Return the chunks that a rank hands on in a step: how far after it each run of them starts, and its length."""
    where_from = np.flatnonzero(departures(size)[bool(odd)] == step).tolist()
    runs = [[offset for _, offset in run] for _, run in groupby(enumerate(where_from), lambda pair: pair[1] - pair[0])]
    return [(run[0], len(run)) for run in runs]
