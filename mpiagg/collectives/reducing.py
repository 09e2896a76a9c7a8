"""Methods that combine data: what their arguments ask for."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, device_of
from mpiagg.collectives.asked import Asked, rank_of
from mpiagg.collectives.buffers import ArgumentSpan, BufferMessage, in_place, read
from mpiagg.collectives.datatypes import number_of, reduction_of
from mpiagg.collectives.mpi_ops import of_the_users
from mpiagg.schedules import Collective
from mpiagg.transport import Channel


def allreduce(channel: Channel, given: tuple[Any, ...]) -> Asked | None:
    """Return what an all-reduction asks for, or None if that is for the MPI library alone."""
    del channel
    _, sendbuf, recvbuf, op = given
    received = read(recvbuf, 2, writable=True)
    sent = received if in_place(sendbuf) else read(sendbuf, 1, writable=False)
    if sent is None or received is None or not sent.matches(received):
        return None
    return _reducing(Collective.ALLREDUCE, (sent.length,), op, sent, received.part)


def reduce(channel: Channel, given: tuple[Any, ...]) -> Asked | None:
    """Return what a reduction asks for, or None if that is for the MPI library alone."""
    _, sendbuf, recvbuf, op, given_root = given
    root = rank_of(channel, given_root)
    if root is None:
        return None
    at_root = channel.rank == root
    received = read(recvbuf, 2, writable=True) if at_root else None
    sent = received if at_root and in_place(sendbuf) else read(sendbuf, 1, writable=False)
    if sent is None or (at_root and not sent.matches(received)):
        return None
    out = None if received is None else received.part
    return _reducing(Collective.REDUCE, (sent.length,), op, sent, out, root)


def reduce_scatter_block(channel: Channel, given: tuple[Any, ...]) -> Asked | None:
    """Return what a reduce-scatter in blocks of one length asks for, or None if that is for the MPI library alone."""
    _, sendbuf, recvbuf, op = given
    size = channel.size
    if in_place(sendbuf):
        sent = received = read(recvbuf, 2, writable=True, blocks=size)
    else:
        sent, received = read(sendbuf, 1, writable=False, blocks=size), read(recvbuf, 2, writable=True)
    if sent is None or received is None or not sent.matches(received):
        return None
    out = received.part.within(0, sent.memory.size // size)
    return _reducing(Collective.REDUCE_SCATTER, (sent.length,) * size, op, sent, out)


def reduce_scatter(channel: Channel, given: tuple[Any, ...]) -> Asked | None:
    """Return what a reduce-scatter asks for, or None if that is for the MPI library alone."""
    _, sendbuf, recvbuf, recvcounts, op = given
    if recvcounts is None:
        return None
    received = read(recvbuf, 2, writable=True)
    sent = received if in_place(sendbuf) else read(sendbuf, 1, writable=False)
    try:
        counts = tuple(index(count) for count in recvcounts)
    except TypeError:
        return None
    if sent is None or received is None or sent.datatype != received.datatype:
        return None
    if len(counts) != channel.size or min(counts) < 0 or sent.length != sum(counts):
        return None
    own = counts[channel.rank]
    if sent is not received and received.length != own:
        return None
    out = received.part.within(0, own * (sent.memory.size // max(1, sent.length)))
    asked = _reducing(Collective.REDUCE_SCATTER, counts, op, sent, out)
    return None if asked is None else asked._replace(counted=True)


def scattered_counts(
    comm: MPI.Intracomm, sendbuf: object, recvbuf: object, recvcounts: Sequence[int] | None
) -> Sequence[int] | None:
    """Return the counts of a reduce-scatter that are given, or else ask all ranks for them, as mpi4py does.

    None is for what not all ranks can read: mpi4py then asks.
    """
    if recvcounts is not None or in_place(sendbuf) or not comm:
        return recvcounts
    received = read(recvbuf, writable=True)
    told = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([-1 if received is None else received.length]), told)
    counts: list[int] = told.tolist()
    return None if min(counts) < 0 else counts


def scan(channel: Channel, given: tuple[Any, ...]) -> Asked | None:
    """Return what a scan asks for, or None if that is for the MPI library alone."""
    asked = allreduce(channel, given)
    return None if asked is None else asked._replace(collective=Collective.SCAN)


def exscan(channel: Channel, given: tuple[Any, ...]) -> Asked | None:
    """Return what an exclusive scan asks for, or None if that is for the MPI library alone."""
    asked = allreduce(channel, given)
    if asked is None:
        return None
    return asked._replace(collective=Collective.EXSCAN, out=asked.out if channel.rank else None)


def _reducing(  # noqa: PLR0917 - what a reduction has
    collective: Collective,
    counts: tuple[int, ...],
    op: Any,
    sent: BufferMessage,
    out: ArgumentSpan | None,
    root: int = 0,
) -> Asked | None:
    how = reduction_of(sent.datatype, op)
    number = number_of(sent.datatype)
    on_host = device_of(sent.memory) is HOST
    if how is None and number is not None and _is_users(op) and not on_host:
        return Asked(collective, counts, of_the_users(number), root, op, alone=True, x=sent.part, out=out)
    if how is None or (how.dtype.kind == "V" and not on_host):
        return None
    half = sent.datatype if isinstance(sent.datatype, np.dtype) else None
    return Asked(collective, counts, how, root, op, half, ours=half is not None, x=sent.part, out=out)


def _is_users(op: object) -> bool:
    return isinstance(op, MPI.Op) and op != MPI.OP_NULL and not op.is_predefined
