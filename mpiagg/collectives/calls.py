"""From the arguments of a communicator's collective to the operation that they ask for.

Each function takes what the method of its name takes, and returns None where the call is for the MPI library: for
operators of the user's, derived datatypes, memory of devices that we do not know, and arguments that are wrong. Buffers
on two devices are a TypeError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Array, Reduction, device_of, writeable
from mpiagg.collectives.buffers import Message, read
from mpiagg.collectives.datatypes import reduction_of
from mpiagg.plans.choices import Case, Memory, pick
from mpiagg.plans.operation import Operation
from mpiagg.plans.operations import prepare, run
from mpiagg.plans.plan import Plan
from mpiagg.schedules import Collective
from mpiagg.transport import CHECK, Channel, channel_of

_BYTES: Final = Reduction(np.bitwise_or, np.dtype(np.uint8), "bor")
"""How bytes travel. The operator is for barriers, which reduce a byte that nobody reads."""


class Call(NamedTuple):
    """A collective call that we carry out ourselves."""

    channel: Channel
    operation: Operation
    x: Array | None
    out: Array | None

    def run(self) -> None:
        """Carry it out."""
        if CHECK:
            self.channel.agree(self.operation.in_words)
        with np.errstate(all="ignore"):  # MPI does not warn
            run(self.channel, self.operation, self.x, self.out)

    def plan(self, memory: Memory) -> Plan[Array | None]:
        """Return a plan that carries it out; all ranks ask for theirs in the same order.

        Ranks that share memory wait for one another to set it up.
        """
        operation = self.operation
        if memory is Memory.NONE:
            case = Case(operation.collective, operation.nbytes, operation.layout, memory)
            device = device_of(self.x if self.out is None else self.out)
            operation = replace(operation, choice=pick("auto", None, case, device=device))
        tag = self.channel.tags.in_turn(operation.choice.lanes, operation.signature)
        return prepare(self.channel, operation, self.x, self.out, tag, memory=memory)


def barrier(comm: MPI.Intracomm) -> Call | None:
    """Return the barrier: an all-reduction of a byte."""
    return _call(comm, Collective.ALLREDUCE, (1,), _BYTES)


def bcast(comm: MPI.Intracomm, buf: object, root: int) -> Call | None:
    """Return the broadcast of ``buf``, as bytes."""
    if not _has_rank(comm, root):
        return None
    at_root = comm.rank == root
    message = read(buf, writable=True) or (read(buf, writable=False) if at_root else None)
    if message is None:
        return None
    memory = message.memory
    out = memory if writeable(memory) else None
    return _call(comm, Collective.BROADCAST, (memory.size,), _BYTES, x=memory if at_root else None, out=out, root=root)


def allgather(comm: MPI.Intracomm, sendbuf: object, recvbuf: object) -> Call | None:
    """Return the all-gather from ``sendbuf`` to ``recvbuf``, as bytes."""
    if not comm:
        return None
    size, rank = comm.size, comm.rank
    received = read(recvbuf, writable=True, blocks=size)
    if received is None:
        return None
    length = received.memory.size // size
    if sendbuf is MPI.IN_PLACE:
        x = received.memory[rank * length : (rank + 1) * length]
    else:
        sent = read(sendbuf, writable=False)
        if sent is None or sent.memory.size != length:
            return None
        x = sent.memory
    return _call(comm, Collective.ALLGATHER, (length,) * size, _BYTES, x=x, out=received.memory)


def allreduce(comm: MPI.Intracomm, sendbuf: object, recvbuf: object, op: object) -> Call | None:
    """Return the all-reduction from ``sendbuf`` to ``recvbuf``."""
    received = read(recvbuf, writable=True)
    sent = received if sendbuf is MPI.IN_PLACE else read(sendbuf, writable=False)
    if sent is None or not sent.matches(received):
        return None
    return _reducing(comm, Collective.ALLREDUCE, (sent.length,), op, sent=sent, received=received)


def reduce(comm: MPI.Intracomm, sendbuf: object, recvbuf: object, op: object, root: int) -> Call | None:
    """Return the reduction from ``sendbuf`` to the root's ``recvbuf``."""
    if not _has_rank(comm, root):
        return None
    at_root = comm.rank == root
    received = read(recvbuf, writable=True) if at_root else None
    sent = received if at_root and sendbuf is MPI.IN_PLACE else read(sendbuf, writable=False)
    if sent is None or (at_root and not sent.matches(received)):
        return None
    return _reducing(comm, Collective.REDUCE, (sent.length,), op, sent=sent, received=received, root=root)


def reduce_scatter_block(comm: MPI.Intracomm, sendbuf: object, recvbuf: object, op: object) -> Call | None:
    """Return the reduce-scatter into blocks of the same length."""
    if not comm:
        return None
    size = comm.size
    if sendbuf is MPI.IN_PLACE:
        sent = received = read(recvbuf, writable=True, blocks=size)
    else:
        sent, received = read(sendbuf, writable=False, blocks=size), read(recvbuf, writable=True)
    if sent is None or not sent.matches(received):
        return None
    return _reducing(comm, Collective.REDUCE_SCATTER, (sent.length,) * size, op, sent=sent, received=received)


def recvcounts(
    comm: MPI.Intracomm, sendbuf: object, recvbuf: object, recvcounts: Sequence[int] | None
) -> Sequence[int] | None:
    """Return the counts that are given, or else ask all ranks for them, as mpi4py does."""
    received = read(recvbuf, writable=True)
    if not comm or recvcounts is not None or sendbuf is MPI.IN_PLACE or received is None:
        return recvcounts
    counts = np.empty(comm.size, np.int64)
    channel = channel_of(comm)
    with channel.failures.told():
        channel.comm.Allgather(np.array([received.length]), counts)
    return tuple(counts.tolist())


def reduce_scatter(
    comm: MPI.Intracomm, sendbuf: object, recvbuf: object, recvcounts: Sequence[int] | None, op: object
) -> Call | None:
    """Return the reduce-scatter into blocks of the lengths in ``recvcounts``."""
    if not comm or recvcounts is None:
        return None
    received = read(recvbuf, writable=True)
    sent = received if sendbuf is MPI.IN_PLACE else read(sendbuf, writable=False)
    try:
        counts = tuple(index(count) for count in recvcounts)
    except TypeError:
        return None
    if sent is None or received is None or sent.datatype != received.datatype:
        return None
    if len(counts) != comm.size or min(counts) < 0 or sent.length != sum(counts):
        return None
    if sent is not received and received.length != counts[comm.rank]:
        return None
    return _reducing(comm, Collective.REDUCE_SCATTER, counts, op, sent=sent, received=received)


def _reducing(
    comm: MPI.Intracomm,
    collective: Collective,
    counts: tuple[int, ...],
    op: object,
    *,
    sent: Message,
    received: Message | None,
    root: int = 0,
) -> Call | None:
    how = reduction_of(sent.datatype, op)
    if how is None or (how.dtype.kind == "V" and device_of(sent.memory) is not HOST):
        return None
    out = None if received is None else received.memory.view(how.dtype)
    if out is not None and collective is Collective.REDUCE_SCATTER:
        out = out[: counts[comm.rank]]
    return _call(comm, collective, counts, how, x=sent.memory.view(how.dtype), out=out, root=root)


def _call(
    comm: MPI.Intracomm,
    collective: Collective,
    counts: tuple[int, ...],
    how: Reduction,
    *,
    x: Array | None = None,
    out: Array | None = None,
    root: int = 0,
) -> Call | None:
    if not comm:
        return None
    channel = channel_of(comm)
    device = device_of(x if out is None else out)
    if x is not None and out is not None and device_of(x) is not device:
        if not out.size:  # None, with a count of 0
            return _call(comm, collective, counts, how, x=x, root=root)
        raise TypeError(f"the buffers of a call are on one device, not on {device_of(x).name} and {device.name}")
    choice = pick("auto", None, Case(collective, sum(counts) * how.dtype.itemsize, channel.layout), device=device)
    operation = Operation(collective, channel.rank, channel.layout, root, counts, how, choice, MPI.SUM)
    return Call(channel, operation, x, out)


def _has_rank(comm: MPI.Intracomm, root: object) -> bool:
    return bool(comm) and isinstance(root, int | np.integer) and 0 <= int(root) < comm.size
