"""Recursive halving and doubling (Rabenseifner): halve the vector and the distance, then double them again.

With n ranks, B bytes, m the largest power of two up to n and chunks of B/m:

==============  ====================  ====================  ==================================
collective      rounds                messages of a rank    bytes sent by a rank
==============  ====================  ====================  ==================================
allreduce       2 log2 m              2 log2 m              2 (m-1)/m B
n not 2^k       2 more                1 more in a pair      (2 (m-1)/m + 1) B at most
==============  ====================  ====================  ==================================

The ring's bytes in a logarithmic number of rounds, at powers of two. Scratch: half a vector, and a whole one on
the ranks that stand for a pair.

Source: Rabenseifner, Optimization of collective reduction operations, ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.powers_of_two import largest_power_of_two, paired
from mpiagg.schedules.steps import Round, finish, receive, reduce_from, send


def halve_and_double(rank: int, size: int) -> Iterator[Round]:
    """Each round splits the ranks, and the chunks they share, between the two sides of one bit."""
    width = size // 2
    while width >= 1:
        peer = rank ^ width
        ours, theirs = rank // width * width, peer // width * width
        yield Round(
            send(peer, chunk=theirs, count=width),
            reduce_from(peer, chunk=ours, count=width, received_first=peer < rank),
        )
        width //= 2
    yield Round(finish(chunk=rank))
    width = 1
    while width < size:
        peer = rank ^ width
        ours, theirs = rank // width * width, peer // width * width
        yield Round(send(peer, chunk=ours, count=width), receive(peer, chunk=theirs, count=width))
        width *= 2


allreduce = paired(halve_and_double, chunks=largest_power_of_two)
