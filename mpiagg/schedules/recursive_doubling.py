"""Recursive doubling: in round k, exchange whole sums with the rank whose number differs in bit k.

With n ranks, B bytes and m the largest power of two up to n:

==============  ====================  ====================  ==================================
collective      rounds                messages of a rank    bytes sent by a rank
==============  ====================  ====================  ==================================
allreduce       log2 m                log2 m                log2(m) B
n not 2^k       2 more                1 more in a pair      (log2(m) + 1) B at most
scan            ceil(log2 n)          ceil(log2 n) at most  ceil(log2 n) B at most
exscan          ceil(log2 n)          ceil(log2 n) at most  ceil(log2 n) B at most
==============  ====================  ====================  ==================================

The fewest rounds there are: the choice for short vectors. Scratch: one vector, two in an exclusive scan, where
a rank reduces what arrives twice while it passes its sum on.
The lower rank's sum always stands on the left, so all ranks compute the same expression. In a scan, a rank has the sum
of 2^k ranks, up to itself, after round k.

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH,
Int. J. High Perform. Comput. Appl. 19 (2005). The scan: Hillis and Steele, Data parallel algorithms, Commun. ACM 29
(1986).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.powers import on_a_power, powers_below
from mpiagg.schedules.steps import Round, finish, keep_from, receive, reduce_from, send, take


def exchange(rank: int, size: int) -> Iterator[Round]:
    """Round k: after it, 2^(k+1) neighbouring ranks share one sum."""
    for distance in powers_below(size):
        peer = rank ^ distance
        yield Round(send(peer), reduce_from(peer, received_first=peer < rank))
    yield Round(finish())


allreduce = on_a_power(exchange, chunks=lambda size: 1)  # noqa: ARG005 - the vector stays whole


def scan(rank: int, size: int) -> Iterator[Round]:
    """Round k: pass our sum on to the rank 2^k after us, and put that of the rank 2^k before us in front of ours."""
    for distance in powers_below(size):
        sent = [send(rank + distance)] if rank + distance < size else []
        received = [reduce_from(rank - distance)] if rank >= distance else []
        yield Round(*sent, *received)


def exscan(rank: int, size: int) -> Iterator[Round]:
    """Do as in a scan while our sum is passed on, and keep the sum of what has come; then go on with that alone."""
    kept = False
    for distance in powers_below(size):
        sends, receives = rank + distance < size, rank >= distance
        if sends:
            yield Round(send(rank + distance), *([keep_from(rank - distance)] if receives else []))
            kept = receives or kept
        elif receives and distance == 1:
            yield Round(receive(rank - distance))
        elif receives:
            yield Round(*([take()] if kept else []), reduce_from(rank - distance))
            kept = False
    if kept:
        yield Round(take())
