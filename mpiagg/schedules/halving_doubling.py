"""Recursive halving and doubling (Rabenseifner): halve the vector and double the distance, then go back.

With n ranks, B bytes, m the largest power of two up to n and chunks of B/m:

==============  ====================  ====================  ==================================
collective      rounds                messages of a rank    bytes sent by a rank
==============  ====================  ====================  ==================================
allreduce       2 log2 m              2 log2 m              2 (m-1)/m B
n not 2^k       2 more                1 more in a pair      (2 (m-1)/m + 1) B at most
==============  ====================  ====================  ==================================

The ring's bytes in a logarithmic number of rounds, at powers of two. The longest messages go to the nearest ranks: of g
ranks that follow one another, only 2 (m-g)/(gm) B a rank leave the group. Sums are those of recursive doubling, bit for
bit. Scratch: half a vector, and a whole one on the ranks that stand for a pair.

Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.powers import largest_power, on_a_power
from mpiagg.schedules.steps import Round, finish, receive, reduce_from, send


def halve_and_double(rank: int, size: int) -> Iterator[Round]:
    """Each round splits the chunks that two ranks share between them; the way back puts them together again."""
    start, width, distance = 0, size, 1
    splits: list[tuple[int, int, int, int]] = []
    while width > 1:
        width //= 2
        upper = rank // distance % 2
        splits.append((rank ^ distance, start + upper * width, start + (1 - upper) * width, width))
        start, distance = start + upper * width, 2 * distance
    for peer, ours, theirs, width in splits:
        yield Round(
            send(peer, chunk=theirs, count=width),
            reduce_from(peer, chunk=ours, count=width, received_first=peer < rank),
        )
    yield Round(finish(chunk=start))
    for peer, ours, theirs, width in reversed(splits):
        yield Round(send(peer, chunk=ours, count=width), receive(peer, chunk=theirs, count=width))


allreduce = on_a_power(halve_and_double, chunks=largest_power)
