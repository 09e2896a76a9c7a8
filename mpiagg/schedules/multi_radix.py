"""Multi-radix: the ranks are factored, with a factor for each level of the machine, and a level is a round.

With n = f_1 f_2 ... f_L ranks, B bytes, P = (f_1 - 1) + ... + (f_L - 1) and chunks of B/n:

==============  ==========  ==========  =======================
collective      rounds      messages    bytes sent by a rank
==============  ==========  ==========  =======================
reduce_scatter  L           P           (n-1)/n B
allgather       L           P           (n-1)/n B
allreduce       2L          2P          2 (n-1)/n B
==============  ==========  ==========  =======================

At level i, groups of f_i ranks at distance f_1 ... f_(i-1) share the span of chunks that they hold among them: each
receives its part of it from the others, and adds up in rank order. The way back puts the parts together again. The
nearest ranks come first, with the longest messages: at level i a rank sends (f_i - 1) / (f_1 ... f_i) B. It is
``direct`` with one level, and halving and doubling with factors of 2.

The factors are made of those that are wanted: at each level the largest divisor of what is left of n that is not above
the one wanted, if that is not 1. The last level takes what is left; so a prime number of ranks is one level.
``multi_radix-4`` wants 4 at every level, and ``multi_radix-4x2x8`` 4 ranks that share a cache, 2 such caches in a
socket, and 8 sockets.

On one node a round is a barrier, and what is received is read from mailboxes. In registered memory, an all-reduce and
an all-gather read from where the others have it; there a rank waits for those alone that it exchanges with.

Every chunk is the same sum, whichever collective it is. In a reduce-scatter and an all-gather, where a rank's chunk has
its number, the chunks of a message do not lie together. Scratch: (f_1 - 1)/f_1 of a vector.

Source: Jocksch et al., A compilation-based approach to performant reduction and redistribution collective
communication algorithms, Int. J. High Perform. Comput. Appl. (2025), for memory that the ranks of a node share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple

import numpy as np

from mpiagg.schedules import direct
from mpiagg.schedules.ranks import Ranks
from mpiagg.schedules.steps import Collective, Generator, Parts, Round, finish, unfinished, within


def generators(wanted: Sequence[int]) -> Mapping[Collective, Generator]:
    """Return the generators for the factors that are wanted; one alone is wanted at every level."""

    def share_out(rank: int, size: int) -> Iterator[Round]:
        own = 0
        for level in _levels(rank, factors_of(size, wanted)):
            yield from unfinished(level.carry_out(direct.reduce_scatter))
            own = level.parts.cut(level.place)
        yield Round(finish(chunk=own))

    def put_together(rank: int, size: int) -> Iterator[Round]:
        for level in reversed(list(_levels(rank, factors_of(size, wanted)))):
            yield from level.carry_out(direct.allgather)

    def allreduce(rank: int, size: int) -> Iterator[Round]:
        """Reduce-scatter, then all-gather."""
        yield from share_out(rank, size)
        yield from put_together(rank, size)

    def by_owner(generator: Generator) -> Generator:
        """Give each chunk the number of the rank that has it where spans are of one chunk."""

        def numbered(rank: int, size: int) -> Iterator[Round]:
            if isinstance(rank, Ranks):  # which chunks they are makes no difference to a price
                yield from generator(rank, size)
                return
            # In a span the chunks of ranks with the same place at the first level come together, and so on.
            owners = np.arange(size).reshape(factors_of(size, wanted)[::-1]).T.ravel().tolist()
            for a_round in generator(rank, size):
                chunks = range(a_round[0].count)  # as many in each step; of each chunk, the steps of a fold in a row
                yield Round(
                    *(replace(step, chunk=owners[step.chunk + each], count=1) for each in chunks for step in a_round)
                )

        return numbered

    return {
        Collective.ALLREDUCE: allreduce,
        Collective.ALLGATHER: by_owner(put_together),
        Collective.REDUCE_SCATTER: by_owner(share_out),
    }


def factors_of(size: int, wanted: Sequence[int]) -> list[int]:
    """Return the factors of a number of ranks, the nearest level first, by those that are wanted."""
    found: list[int] = []
    left = size
    for most in wanted[:-1] or repeat(wanted[0], size.bit_length()):
        factor = max(divisor for divisor in range(1, most + 1) if left % divisor == 0)
        found += [factor] if factor > 1 else []
        left //= factor
    return [*found, left] if left > 1 else found


class _Level(NamedTuple):
    """A rank's group at a level: it has a place there, and the group's ranks share the chunks in ``parts``."""

    first: int
    distance: int
    place: int
    parts: Parts

    def carry_out(self, schedule: Generator) -> Iterator[Round]:
        """Carry a schedule out in the group."""
        size = self.parts.number
        return within(schedule(self.place, size), lambda place: self.first + place * self.distance, size, self.parts)


def _levels(rank: int, factors: Sequence[int]) -> Iterator[_Level]:
    """Yield the levels of a rank; at each the span is the part of the one before."""
    distance, start, chunks = 1, 0, math.prod(factors)
    for factor in factors:
        place, parts = rank // distance % factor, Parts(start, chunks, factor)
        yield _Level(rank - place * distance, distance, place, parts)
        distance, start, chunks = distance * factor, parts.cut(place), chunks // factor
