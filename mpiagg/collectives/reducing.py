"""Methods that combine data: what their arguments ask for, and which arrays they name."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, device_of
from mpiagg.collectives.asked import Arrays, Asked, check_devices, flat, is_rank
from mpiagg.collectives.buffers import BufferMessage, in_place, read
from mpiagg.collectives.datatypes import number_of, reduction_of
from mpiagg.collectives.mpi_ops import of_the_users
from mpiagg.schedules import Collective
from mpiagg.transport import Channel, channel_of

# -- all-reduce


def allreduce_read(channel: Channel, sendbuf: object, recvbuf: object, op: object) -> Asked | None:
    """Return what an all-reduction asks for, or None if that is for the MPI library alone."""
    del channel
    received = read(recvbuf, writable=True)
    sent = received if in_place(sendbuf) else read(sendbuf, writable=False)
    if sent is None or not sent.matches(received):
        return None
    return _reducing(Collective.ALLREDUCE, (sent.length,), op, sent)


def allreduce_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of an all-reduction, as vectors."""
    del channel
    _, sendbuf, recvbuf, _ = given
    if recvbuf.__class__ is np.ndarray and recvbuf.ndim == 1 and recvbuf.dtype == dtype:
        if sendbuf.__class__ is np.ndarray and sendbuf.ndim == 1 and sendbuf.dtype == dtype:
            return sendbuf, recvbuf
        if in_place(sendbuf):
            return recvbuf, recvbuf
    out = flat(recvbuf, dtype, writable=True)
    return check_devices(out if in_place(sendbuf) else flat(sendbuf, dtype, writable=False), out)


# -- reduce


def reduce_read(channel: Channel, sendbuf: object, recvbuf: object, op: object, root: int) -> Asked | None:
    """Return what a reduction asks for, or None if that is for the MPI library alone."""
    if not is_rank(channel, root):
        return None
    at_root = channel.rank == root
    received = read(recvbuf, writable=True) if at_root else None
    sent = received if at_root and in_place(sendbuf) else read(sendbuf, writable=False)
    if sent is None or (at_root and not sent.matches(received)):
        return None
    return _reducing(Collective.REDUCE, (sent.length,), op, sent, int(root))


def reduce_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of a reduction, as vectors."""
    _, sendbuf, recvbuf, _, root = given
    out = flat(recvbuf, dtype, writable=True) if channel.rank == root else None
    return check_devices(out if in_place(sendbuf) else flat(sendbuf, dtype, writable=False), out)


# -- reduce-scatter


def block_read(channel: Channel, sendbuf: object, recvbuf: object, op: object) -> Asked | None:
    """Return what a reduce-scatter in blocks of one length asks for, or None if that is for the MPI library alone."""
    size = channel.size
    if in_place(sendbuf):
        sent = received = read(recvbuf, writable=True, blocks=size)
    else:
        sent, received = read(sendbuf, writable=False, blocks=size), read(recvbuf, writable=True)
    if sent is None or not sent.matches(received):
        return None
    return _reducing(Collective.REDUCE_SCATTER, (sent.length,) * size, op, sent)


def block_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of a reduce-scatter in blocks of one length, as vectors."""
    _, sendbuf, recvbuf, _ = given
    if in_place(sendbuf):
        x = flat(recvbuf, dtype, writable=True, blocks=channel.size)
        return x, x[: x.size // channel.size]
    return check_devices(flat(sendbuf, dtype, writable=False, blocks=channel.size), flat(recvbuf, dtype, writable=True))


def scatter_read(
    channel: Channel, sendbuf: object, recvbuf: object, recvcounts: Sequence[int] | None, op: object
) -> Asked | None:
    """Return what a reduce-scatter asks for, or None if that is for the MPI library alone."""
    if recvcounts is None:
        return None
    received = read(recvbuf, writable=True)
    sent = received if in_place(sendbuf) else read(sendbuf, writable=False)
    try:
        counts = tuple(index(count) for count in recvcounts)
    except TypeError:
        return None
    if sent is None or received is None or sent.datatype != received.datatype:
        return None
    if len(counts) != channel.size or min(counts) < 0 or sent.length != sum(counts):
        return None
    if sent is not received and received.length != counts[channel.rank]:
        return None
    return _reducing(Collective.REDUCE_SCATTER, counts, op, sent)


def scatter_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of a reduce-scatter, as vectors."""
    _, sendbuf, recvbuf, recvcounts, _ = given
    received = flat(recvbuf, dtype, writable=True)
    x = received if in_place(sendbuf) else flat(sendbuf, dtype, writable=False)
    return check_devices(x, received[: recvcounts[channel.rank]])


def scattered_counts(
    comm: MPI.Intracomm, sendbuf: object, recvbuf: object, recvcounts: Sequence[int] | None
) -> Sequence[int] | None:
    """Return the counts of a reduce-scatter that are given, or else ask all ranks for them, as mpi4py does."""
    if recvcounts is not None or in_place(sendbuf) or not comm:
        return recvcounts
    received = read(recvbuf, writable=True)
    if received is None:
        return None
    channel = channel_of(comm)
    told = channel.gather(received.length.to_bytes(8, "little"), "tell how many elements they get")
    return tuple(int.from_bytes(count, "little") for count in told)


# -- scans


def scan_read(channel: Channel, sendbuf: object, recvbuf: object, op: object) -> Asked | None:
    """Return what a scan asks for, or None if that is for the MPI library alone."""
    asked = allreduce_read(channel, sendbuf, recvbuf, op)
    return None if asked is None else asked._replace(collective=Collective.SCAN)


def exscan_read(channel: Channel, sendbuf: object, recvbuf: object, op: object) -> Asked | None:
    """Return what an exclusive scan asks for, or None if that is for the MPI library alone."""
    asked = allreduce_read(channel, sendbuf, recvbuf, op)
    return None if asked is None else asked._replace(collective=Collective.EXSCAN)


def exscan_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    """Return the input and the output of an exclusive scan, as vectors."""
    x, out = allreduce_arrays(channel, dtype, given)
    return x, None if channel.rank == 0 else out


def _reducing(
    collective: Collective, counts: tuple[int, ...], op: Any, sent: BufferMessage, root: int = 0
) -> Asked | None:
    how = reduction_of(sent.datatype, op)
    number = number_of(sent.datatype)
    if how is None and number is not None and _is_users(op) and device_of(sent.memory) is not HOST:
        return Asked(collective, counts, of_the_users(number), root, op, alone=True)
    if how is None or (how.dtype.kind == "V" and device_of(sent.memory) is not HOST):
        return None
    half = sent.datatype if isinstance(sent.datatype, np.dtype) else None
    return Asked(collective, counts, how, root, op, half, ours=half is not None)


def _is_users(op: object) -> bool:
    return isinstance(op, MPI.Op) and op != MPI.OP_NULL and not op.is_predefined
