"""The collective methods of a communicator: what each takes, and the operation that it asks for.

A method's arguments are read into an operation where we can carry it out; where we cannot, it is for the MPI library as
it came: operators of the user's, derived datatypes, memory of devices that we do not know, and arguments that are
wrong. Buffers on two devices are a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Array, Form, Reduction, device_of
from mpiagg.collectives import keys
from mpiagg.collectives.buffers import Message, read
from mpiagg.collectives.datatypes import is_mpis, reduction_of
from mpiagg.plans.choices import Case, Memory, pick, takes_native
from mpiagg.plans.operation import Operation
from mpiagg.schedules import Collective
from mpiagg.transport import Channel, channel_of

Arrays = tuple[Array | None, Array | None]

_BYTES: Final = Reduction(np.bitwise_or, np.dtype(np.uint8), "bor")
"""How bytes travel that are only moved."""


class Asked(NamedTuple):
    """What a method's arguments ask for.

    Attributes
    ----------
    collective : Collective
    counts : tuple of int
        As an operation has them.
    reduction : Reduction
    root : int
    op : MPI.Op
        The operator, for the MPI library's own collective.
    half : numpy.dtype or None
        The dtype of arrays of half precision that are reduced, in another.
    ours : bool
        Whether it is not for the MPI library, which has no such numbers, or combines them in half precision.
    """

    collective: Collective
    counts: tuple[int, ...]
    reduction: Reduction
    root: int = 0
    op: MPI.Op = MPI.SUM
    half: np.dtype[Any] | None = None
    ours: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the arrays."""
        return self.reduction.dtype if self.half is None else self.half

    def operation(
        self, channel: Channel, memory: Memory = Memory.TOGETHER, *, arrays: Arrays, at_once: bool = True
    ) -> Operation:
        """Return the operation, by the algorithm that the tables choose for it, to be run at once or planned."""
        x, out = arrays
        device = device_of(x if out is None else out)
        nbytes = sum(self.counts) * self.reduction.dtype.itemsize
        native = takes_native(self.collective, self.reduction, nbytes, minima=True, at_once=at_once)
        native = native and not (channel.reproducible or self.ours)
        case = Case(self.collective, nbytes, channel.layout, memory, channel.library if native else None)
        choice = pick("auto", None, case, device=device)
        form = None if self.half is None else Form(self.half, (sum(self.counts),), device)
        return Operation(
            self.collective, channel.rank, channel.layout, self.root, self.counts, self.reduction, choice, self.op, form
        )


class Method(NamedTuple):
    """A collective method of mpi4py's communicators, in its three forms.

    Attributes
    ----------
    name : str
        The collective.
    now, start, init : callable
        mpi4py's own methods: the blocking, the nonblocking and the persistent one.
    key : callable
        Returns what the choice depends on of the arguments; raises TypeError or AttributeError for what cannot be kept.
    exact : callable
        Returns all that a call depends on that is not given to the MPI library as it is.
    read : callable
        Returns what the arguments ask for, or None if that is for the MPI library alone.
    arrays : callable
        Returns the input and the output of a call that has been read, as vectors of a dtype.
    """

    name: str
    now: Callable[..., object]
    start: Callable[..., MPI.Request]
    init: Callable[..., MPI.Prequest]
    key: Callable[..., Hashable]
    exact: Callable[..., Hashable]
    read: Callable[..., Asked | None]
    arrays: Callable[..., Arrays]


# -- vectors


def _flat(buffer: Any, dtype: np.dtype[Any], *, writable: bool, blocks: int = 1) -> Array:
    """Return a buffer specification that can be read, as a vector in the user's memory."""
    if buffer.__class__ is np.ndarray and buffer.flags.c_contiguous:
        vector: Array = buffer if buffer.ndim == 1 else buffer.reshape(-1)
        return vector if vector.dtype == dtype else vector.view(dtype)
    message = read(buffer, writable=writable, blocks=blocks)
    assert message is not None
    return message.memory.view(dtype)


def _check_devices(x: Array | None, out: Array | None) -> Arrays:
    """Return the arrays; raise TypeError if they are on two devices."""
    if x.__class__ is np.ndarray is out.__class__:
        return x, out
    if x is not None and out is not None and device_of(x) is not device_of(out):
        if not out.size:  # None, with a count of 0
            return x, None
        here, there = device_of(x).name, device_of(out).name
        raise TypeError(f"the buffers of a call are on one device, not on {here} and {there}")
    return x, out


# -- broadcast


def _bcast_read(channel: Channel, buf: object, root: int) -> Asked | None:
    if not _is_rank(channel, root):
        return None
    at_root = channel.rank == root
    message = read(buf, writable=True) or (read(buf, writable=False) if at_root else None)
    if message is None:
        return None
    return Asked(Collective.BROADCAST, (message.memory.size,), _BYTES, int(root), ours=not is_mpis(message.datatype))


def _bcast_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    _, buf, root = given
    at_root = channel.rank == root
    plain = buf.__class__ is np.ndarray and buf.flags.c_contiguous
    if at_root and not (buf.flags.writeable if plain else read(buf, writable=True) is not None):
        return _flat(buf, dtype, writable=False), None
    vector = _flat(buf, dtype, writable=True)
    return (vector if at_root else None), vector


# -- all-gather


def _allgather_read(channel: Channel, sendbuf: object, recvbuf: object) -> Asked | None:
    received = read(recvbuf, writable=True, blocks=channel.size)
    if received is None:
        return None
    length = received.memory.size // channel.size
    if sendbuf is not MPI.IN_PLACE:
        sent = read(sendbuf, writable=False)
        if sent is None or sent.memory.size != length:
            return None
    return Asked(Collective.ALLGATHER, (length,) * channel.size, _BYTES, ours=not is_mpis(received.datatype))


def _allgather_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    _, sendbuf, recvbuf = given
    out = _flat(recvbuf, dtype, writable=True, blocks=channel.size)
    if sendbuf is not MPI.IN_PLACE:
        return _check_devices(_flat(sendbuf, dtype, writable=False), out)
    length = out.size // channel.size
    return out[channel.rank * length : (channel.rank + 1) * length], out


# -- all-reduce


def _allreduce_read(channel: Channel, sendbuf: object, recvbuf: object, op: object) -> Asked | None:
    del channel
    received = read(recvbuf, writable=True)
    sent = received if sendbuf is MPI.IN_PLACE else read(sendbuf, writable=False)
    if sent is None or not sent.matches(received):
        return None
    return _reducing(Collective.ALLREDUCE, (sent.length,), op, sent)


def _allreduce_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    del channel
    _, sendbuf, recvbuf, _ = given
    if recvbuf.__class__ is np.ndarray and recvbuf.ndim == 1 and recvbuf.dtype == dtype:
        if sendbuf is MPI.IN_PLACE:
            return recvbuf, recvbuf
        if sendbuf.__class__ is np.ndarray and sendbuf.ndim == 1 and sendbuf.dtype == dtype:
            return sendbuf, recvbuf
    out = _flat(recvbuf, dtype, writable=True)
    return _check_devices(out if sendbuf is MPI.IN_PLACE else _flat(sendbuf, dtype, writable=False), out)


# -- reduce


def _reduce_read(channel: Channel, sendbuf: object, recvbuf: object, op: object, root: int) -> Asked | None:
    if not _is_rank(channel, root):
        return None
    at_root = channel.rank == root
    received = read(recvbuf, writable=True) if at_root else None
    sent = received if at_root and sendbuf is MPI.IN_PLACE else read(sendbuf, writable=False)
    if sent is None or (at_root and not sent.matches(received)):
        return None
    return _reducing(Collective.REDUCE, (sent.length,), op, sent, int(root))


def _reduce_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    _, sendbuf, recvbuf, _, root = given
    out = _flat(recvbuf, dtype, writable=True) if channel.rank == root else None
    return _check_devices(out if sendbuf is MPI.IN_PLACE else _flat(sendbuf, dtype, writable=False), out)


# -- reduce-scatter


def _block_read(channel: Channel, sendbuf: object, recvbuf: object, op: object) -> Asked | None:
    size = channel.size
    if sendbuf is MPI.IN_PLACE:
        sent = received = read(recvbuf, writable=True, blocks=size)
    else:
        sent, received = read(sendbuf, writable=False, blocks=size), read(recvbuf, writable=True)
    if sent is None or not sent.matches(received):
        return None
    return _reducing(Collective.REDUCE_SCATTER, (sent.length,) * size, op, sent)


def _block_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    _, sendbuf, recvbuf, _ = given
    if sendbuf is MPI.IN_PLACE:
        x = _flat(recvbuf, dtype, writable=True, blocks=channel.size)
        return x, x[: x.size // channel.size]
    return _check_devices(
        _flat(sendbuf, dtype, writable=False, blocks=channel.size), _flat(recvbuf, dtype, writable=True)
    )


def _scatter_read(
    channel: Channel, sendbuf: object, recvbuf: object, recvcounts: Sequence[int] | None, op: object
) -> Asked | None:
    if recvcounts is None:
        return None
    received = read(recvbuf, writable=True)
    sent = received if sendbuf is MPI.IN_PLACE else read(sendbuf, writable=False)
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


def _scatter_arrays(channel: Channel, dtype: np.dtype[Any], given: tuple[Any, ...]) -> Arrays:
    _, sendbuf, recvbuf, recvcounts, _ = given
    received = _flat(recvbuf, dtype, writable=True)
    x = received if sendbuf is MPI.IN_PLACE else _flat(sendbuf, dtype, writable=False)
    return _check_devices(x, received[: recvcounts[channel.rank]])


def scattered_counts(
    comm: MPI.Intracomm, sendbuf: object, recvbuf: object, recvcounts: Sequence[int] | None
) -> Sequence[int] | None:
    """Return the counts of a reduce-scatter that are given, or else ask all ranks for them, as mpi4py does."""
    if recvcounts is not None or sendbuf is MPI.IN_PLACE or not comm:
        return recvcounts
    received = read(recvbuf, writable=True)
    if received is None:
        return None
    channel = channel_of(comm)
    told = channel.gather(received.length.to_bytes(8, "little"), "tell how many elements they get")
    return tuple(int.from_bytes(count, "little") for count in told)


# -- all of them


def _reducing(collective: Collective, counts: tuple[int, ...], op: Any, sent: Message, root: int = 0) -> Asked | None:
    how = reduction_of(sent.datatype, op)
    if how is None or (how.dtype.kind == "V" and device_of(sent.memory) is not HOST):
        return None
    half = sent.datatype if isinstance(sent.datatype, np.dtype) else None
    return Asked(collective, counts, how, root, op, half, ours=half is not None)


def _is_rank(channel: Channel, root: object) -> bool:
    return isinstance(root, int | np.integer) and 0 <= int(root) < channel.size


_COMM = MPI.Intracomm

BCAST: Final = Method(
    "broadcast",
    _COMM.Bcast,
    _COMM.Ibcast,
    _COMM.Bcast_init,
    keys.bcast,
    keys.exact(keys.bcast),
    _bcast_read,
    _bcast_arrays,
)
ALLGATHER: Final = Method(
    "allgather",
    _COMM.Allgather,
    _COMM.Iallgather,
    _COMM.Allgather_init,
    keys.allgather,
    keys.exact(keys.allgather),
    _allgather_read,
    _allgather_arrays,
)
ALLREDUCE: Final = Method(
    "allreduce",
    _COMM.Allreduce,
    _COMM.Iallreduce,
    _COMM.Allreduce_init,
    keys.allreduce,
    keys.allreduce,
    _allreduce_read,
    _allreduce_arrays,
)
REDUCE: Final = Method(
    "reduce",
    _COMM.Reduce,
    _COMM.Ireduce,
    _COMM.Reduce_init,
    keys.reduce,
    keys.exact(keys.reduce),
    _reduce_read,
    _reduce_arrays,
)
REDUCE_SCATTER_BLOCK: Final = Method(
    "reduce_scatter",
    _COMM.Reduce_scatter_block,
    _COMM.Ireduce_scatter_block,
    _COMM.Reduce_scatter_block_init,
    keys.block,
    keys.exact(keys.block),
    _block_read,
    _block_arrays,
)
REDUCE_SCATTER: Final = Method(
    "reduce_scatter",
    _COMM.Reduce_scatter,
    _COMM.Ireduce_scatter,
    _COMM.Reduce_scatter_init,
    keys.scatter,
    keys.exact(keys.scatter),
    _scatter_read,
    _scatter_arrays,
)
