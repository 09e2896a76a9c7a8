"""How an algorithm that wants a power of k serves any number of ranks.

Let m be the largest power of k up to n. The ranks fall into m groups of ranks that follow one another, as equal as may
be: of each the others hand their vectors to the first one and wait for the result. The m first ones run the algorithm.
It costs two more rounds; a first rank sends B bytes more to each of its group. A power of k pays nothing.

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH,
Int. J. High Perform. Comput. Appl. 19 (2005), for k = 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import index

from mpiagg.schedules.ranks import where
from mpiagg.schedules.steps import Generator, Round, receive, reduce_from, send


def largest_power(size: int, radix: int = 2) -> int:
    """Return the largest power of ``radix`` that is not above ``size``."""
    return powers_below(size + 1, radix)[-1]


def powers_below(size: int, radix: int = 2) -> list[int]:
    """Return the powers of ``radix`` below ``size``, from 1 on."""
    power, found = 1, list[int]()
    while power < size:
        found.append(power)
        power *= radix
    return found


def on_a_power(algorithm: Generator, chunks: Callable[[int], int], radix: int = 2) -> Generator:
    """Make an all-reduce for any number of ranks of one for a power of ``radix``, with ``chunks(size)`` chunks."""

    def allreduce(rank: int, size: int) -> Iterator[Round]:
        inner, whole = largest_power(size, radix), chunks(size)
        width, wider = divmod(size, inner)  # so many groups are wider than the others, by one rank

        def first(group: int) -> int:
            return group * width + where(group < wider, group, wider)

        in_wider = rank < wider * (width + 1)
        group = where(in_wider, rank // (width + 1), (rank - wider) // width)
        if rank > first(group):
            yield Round(send(first(group), count=whole))
            yield Round(receive(first(group), count=whole))
            return
        others = range(1, index(where(in_wider, width + 1, width)))
        yield Round(*(reduce_from(rank + place, count=whole, received_first=False) for place in others))
        for steps in algorithm(group, inner):
            yield Round(*(replace(step, peer=first(step.peer)) for step in steps))
        yield Round(*(send(rank + place, count=whole) for place in others))

    return allreduce
