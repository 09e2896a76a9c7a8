"""Recursive multiplying: in round i, groups of k ranks at distance k^i exchange whole sums.

With n ranks, B bytes and m = k^L the largest power of k up to n:

==============  ====================  ============================  ============================
collective      rounds                messages of a rank            bytes sent by a rank
==============  ====================  ============================  ============================
allreduce       L                     (k-1) L                       (k-1) L B
n not k^L       2 more                ceil(n/m)-1 more at most      ceil(n/m)-1 B more at most
==============  ====================  ============================  ============================

Recursive doubling with a larger radix: fewer rounds, more messages at once. It is the choice for short vectors where
messages to several ranks overlap. Each group adds up in rank order, so all ranks compute the same expression.
Scratch: k-1 vectors.

Source: Wilkins et al., Generalized collective algorithms for the exascale era, CLUSTER 2023.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.powers import on_a_power, powers_below
from mpiagg.schedules.ranks import Ranks
from mpiagg.schedules.steps import Generator, Parts, Round, finish, fold, reduce_from, send, within


def allreduce(radix: int) -> Generator:
    """Return the all-reduce of some radix."""

    def multiply(rank: int, size: int) -> Iterator[Round]:
        for distance in powers_below(size, radix):
            place = rank // distance % radix
            yield from _in_group(rank - place * distance, place, distance, radix)
        yield Round(finish())

    return on_a_power(multiply, chunks=lambda size: 1, radix=radix)  # noqa: ARG005 - the vector stays whole


def _in_group(first: int, place: int, distance: int, radix: int) -> Iterator[Round]:
    """Exchange sums with the ranks ``first``, ``first + distance``, ..., and add up all of them, in rank order."""
    others = [place + turn for turn in range(1, radix)]
    # In a run for many ranks, those before a rank and those after it are alike.
    sums = map(reduce_from, others) if isinstance(place, Ranks) else fold(place, radix)
    exchange = Round(*map(send, others), *sums)
    return within(iter([exchange]), lambda other: first + other * distance, radix, Parts(0, 1, 1))
