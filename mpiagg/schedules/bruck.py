"""Bruck's all-to-all: a chunk travels the digits of its distance in base k, one after the other.

With n ranks, B bytes that each rank has for all of them, and L = ceil(log_k n):

==============  ===============  =======================  ================================================
collective      rounds           messages sent by a rank  bytes sent by a rank
==============  ===============  =======================  ================================================
alltoall        (k-1) L at most  (k-1) L at most          (k-1)/k L B where n is a power of k; L B at most
==============  ===============  =======================  ================================================

The fewest messages with k = 2: the choice for short chunks. A larger k sends fewer bytes in more messages. A chunk for
the rank d after its source has come the lower digits of d on its way when it is sent by the next. Scratch: the chunks
that a rank forwards, each in a place of its own. For ``alltoallv`` the lengths of the chunks go first, by the same
rounds; Fan et al. call that TuNA.

Source: Bruck et al., Efficient algorithms for all-to-all communications in multiport message-passing systems,
IEEE Trans. Parallel Distrib. Syst. 8 (1997); for other k Fan et al., Optimizing the Bruck algorithm, HPDC 2022; for
other lengths Fan et al., Configurable non-uniform all-to-all algorithms, arXiv:2411.02581.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.powers import powers_below
from mpiagg.schedules.steps import Generator, Round, blocks, receive, send


def alltoall(radix: int) -> Generator:
    """Return the all-to-all of a radix."""

    def alltoall(rank: int, size: int) -> Iterator[Round]:
        for power in powers_below(size, radix):
            for digit in range(1, radix):
                way = digit * power
                if way < size:
                    yield Round(
                        *(send(rank + way, *block) for block in forwarded(rank, way, size, power)),
                        *(receive(rank - way, *block) for block in forwarded(rank - way, way, size, power)),
                    )

    def forwarded(rank: int, way: int, size: int, power: int) -> Iterator[tuple[int, int]]:
        """Yield the chunks at a rank whose next digit sends them a way: by target, those of all sources behind it."""
        for distance in range(way, size, power * radix):
            count = min(power, size - distance)
            yield from blocks(rank - count + 1, rank + distance, count, size)

    return alltoall
