"""What a call of a communicator's method depends on, by which it is found again.

Each function takes the communicator and the arguments of the method of its name, as one tuple, and raises TypeError or
AttributeError for what cannot be kept. Of an array it is the dtype, the size and the flags, which tell its layout,
whether it can be written to, and whether it owns its memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import numpy as np
from mpi4py import MPI

_IN_PLACE: Final = MPI.IN_PLACE


def _pair(sendbuf: Any, recvbuf: Any) -> Hashable:
    """Return what a call depends on of two buffers; of arrays at once, since the call itself takes little longer."""
    if sendbuf.__class__ is np.ndarray:
        sent = sendbuf.flags.num
        if recvbuf.__class__ is np.ndarray:
            return sendbuf.dtype, sendbuf.size, sent, recvbuf.dtype, recvbuf.size, recvbuf.flags.num
        if recvbuf is None:
            return sendbuf.dtype, sendbuf.size, sent, None
    elif sendbuf is _IN_PLACE and recvbuf.__class__ is np.ndarray:
        return recvbuf.dtype, recvbuf.size, recvbuf.flags.num
    return _form(sendbuf), _form(recvbuf)


def bcast(given: tuple[Any, ...]) -> Hashable:
    """Return what a broadcast depends on."""
    _, buf, root = given
    if buf.__class__ is np.ndarray:
        return "Bcast", buf.dtype, buf.size, buf.flags.num, root, root.__class__
    return "Bcast", _form(buf), root, root.__class__


def allgather(given: tuple[Any, ...]) -> Hashable:
    """Return what an all-gather depends on."""
    return "Allgather", _pair(given[1], given[2])


def allreduce(given: tuple[Any, ...]) -> Hashable:
    """Return what an all-reduction depends on."""
    _, sendbuf, recvbuf, op = given
    return "Allreduce", op.handle, _pair(sendbuf, recvbuf)


def reduce(given: tuple[Any, ...]) -> Hashable:
    """Return what a reduction to one rank depends on."""
    _, sendbuf, recvbuf, op, root = given
    return "Reduce", op.handle, root, root.__class__, _pair(sendbuf, recvbuf)


def block(given: tuple[Any, ...]) -> Hashable:
    """Return what a reduce-scatter in blocks of one length depends on."""
    _, sendbuf, recvbuf, op = given
    return "Reduce_scatter_block", op.handle, _pair(sendbuf, recvbuf)


def scatter(given: tuple[Any, ...]) -> Hashable:
    """Return what a reduce-scatter depends on."""
    _, sendbuf, recvbuf, recvcounts, op = given
    return "Reduce_scatter", op.handle, tuple(recvcounts), _pair(sendbuf, recvbuf)


def _form(buffer: Any) -> Any:
    """Return what a call depends on of a buffer specification."""
    kind = buffer.__class__
    if kind is np.ndarray:
        return buffer.dtype, buffer.size, buffer.flags.num
    if kind is list or kind is tuple:
        if buffer[0].__class__ is not np.ndarray:
            raise TypeError
        return (kind, *map(_part, buffer))
    if buffer is None or buffer is _IN_PLACE:
        return kind
    if isinstance(buffer, np.ndarray):
        return kind, buffer.dtype, buffer.size, buffer.flags.num
    with memoryview(buffer) as view:
        return kind, view.format, view.nbytes, view.readonly, view.c_contiguous, view.contiguous


def _part(part: Any) -> tuple[Any, ...]:
    """Return what a call depends on of a part of a buffer specification."""
    kind = part.__class__
    if kind is np.ndarray:
        return part.dtype, part.size, part.flags.num
    if kind is list or kind is tuple:
        return tuple([_part(inner) for inner in part])
    return (kind, part.handle) if isinstance(part, MPI.Datatype) else (kind, part)
