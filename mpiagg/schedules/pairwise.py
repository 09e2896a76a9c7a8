"""Pairwise exchange: in round i, every rank sends to the rank i after it and receives from the rank i before it.

With n ranks, and B bytes that each rank has for all of them, in chunks of B/n:

==============  ==========  =======================  ====================================
collective      rounds      messages sent by a rank  bytes sent by a rank
==============  ==========  =======================  ====================================
alltoall        n-1         n-1                      (n-1)/n B
==============  ==========  =======================  ====================================

Each chunk goes straight to its rank, and each rank sends one message at a time: the choice for long chunks. No scratch.

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH,
Int. J. High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiagg.schedules.steps import Round, receive, send


def alltoall(rank: int, size: int) -> Iterator[Round]:
    """Round i: send to rank+i, and receive from rank-i."""
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        yield Round(send(target, chunk=target * size + rank), receive(source, chunk=rank * size + source))
