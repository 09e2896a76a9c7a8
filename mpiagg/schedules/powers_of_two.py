"""How an algorithm that wants a power of two serves any number of ranks.

Let m be the largest power of two up to n, and e = n - m. The first 2e ranks pair up: the even one of a pair hands
its vector to the odd one and waits for the result. The m ranks that are left run the algorithm.
It costs two more rounds; a rank of a pair sends B bytes more. A power of two pays nothing.

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH,
Int. J. High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from mpiagg.schedules.ranks import where
from mpiagg.schedules.steps import Generator, Round, receive, reduce_from, send


def largest_power_of_two(size: int) -> int:
    """Return the largest power of two that is not above ``size``."""
    return 1 << (size.bit_length() - 1)


def paired(algorithm: Generator, chunks: Callable[[int], int]) -> Generator:
    """Make an all-reduce for any number of ranks of one for a power of two, which cuts ``chunks(size)`` chunks."""

    def allreduce(rank: int, size: int) -> Iterator[Round]:
        inner = largest_power_of_two(size)
        pairs, whole = size - inner, chunks(size)
        if rank < 2 * pairs and rank % 2 == 0:
            yield Round(send(rank + 1, count=whole))
            yield Round(receive(rank + 1, count=whole))
            return
        if rank < 2 * pairs:
            yield Round(reduce_from(rank - 1, count=whole))
        place = rank // 2 if rank < 2 * pairs else rank - pairs
        for steps in algorithm(place, inner):
            yield Round(*(replace(step, peer=_rank(step.peer, pairs)) for step in steps))
        if rank < 2 * pairs:
            yield Round(send(rank - 1, count=whole))

    return allreduce


def _rank(place: int, pairs: int) -> int:
    """Return the rank that stands at ``place`` among the ranks that run the algorithm."""
    return where(place < pairs, 2 * place + 1, place + pairs)
