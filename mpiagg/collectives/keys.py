"""What a call of a communicator's method depends on, by which it is found again.

Each function takes the communicator and the arguments of the method of its name, as one tuple, and raises one of
``NO_KEY`` for what cannot be kept. Of an array it is the dtype and the size, by which algorithms are chosen, and
the flags, which tell its layout, whether it can be written to, and whether it owns its memory; of a root also whether
it is an integer. Collectives of blocks whose lengths only some ranks know are the MPI library's, which is given the
arrays as they are and looks at the rest: for them :func:`of_blocks` has the dtypes alone, if every library knows those.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from mpiagg.collectives.datatypes import identity
from mpiagg.plans.native import KNOWN_TO_MPI

NO_KEY: Final = (AttributeError, BufferError, IndexError, TypeError, ValueError)
"""What is raised for arguments that have no key."""

_IN_PLACE: Final = MPI.IN_PLACE


def bcast(given: tuple[Any, ...]) -> Hashable:
    """Return what a broadcast depends on."""
    _, buf, root = given
    if buf.__class__ is np.ndarray:
        return "Bcast", buf.dtype, buf.size, buf.flags.num, root, root.__class__
    return "Bcast", _form(buf), root, root.__class__


def of_two(name: str) -> Callable[[tuple[Any, ...]], Hashable]:
    """Return the key of a collective that is given two buffers."""

    def key(given: tuple[Any, ...]) -> Hashable:
        _, sendbuf, recvbuf = given
        if sendbuf.__class__ is np.ndarray is recvbuf.__class__:
            sent = sendbuf.dtype, sendbuf.size, sendbuf.flags.num
            return name, sent, recvbuf.dtype, recvbuf.size, recvbuf.flags.num
        return name, _form(sendbuf), _form(recvbuf)

    return key


def rooted(name: str) -> Callable[[tuple[Any, ...]], Hashable]:
    """Return the key of a gather or a scatter, in which only the root may have both buffers."""

    def key(given: tuple[Any, ...]) -> Hashable:
        _, sendbuf, recvbuf, root = given
        return name, root, root.__class__, _form(sendbuf), _form(recvbuf)

    return key


def of_blocks(name: str) -> Callable[[tuple[Any, ...]], Hashable]:
    """Return the key of a collective whose blocks have lengths of their own, on which no choice depends."""

    def key(given: tuple[Any, ...]) -> Hashable:
        return name, _kind(given[1]), _kind(given[2]), given[3:], given[-1].__class__  # there may be a root

    return key


def reduce(given: tuple[Any, ...]) -> Hashable:
    """Return what a reduction to one rank depends on."""
    _, sendbuf, recvbuf, op, root = given
    if sendbuf.__class__ is np.ndarray and (recvbuf is None or recvbuf.__class__ is np.ndarray):
        received = recvbuf if recvbuf is None else (recvbuf.dtype, recvbuf.size, recvbuf.flags.num)
        return "Reduce", op.handle, root, root.__class__, sendbuf.dtype, sendbuf.size, sendbuf.flags.num, received
    return "Reduce", op.handle, root, root.__class__, _form(sendbuf), _form(recvbuf)


def with_op(name: str) -> Callable[[tuple[Any, ...]], Hashable]:
    """Return the key of a reduction that is given two buffers, and an operator."""

    def key(given: tuple[Any, ...]) -> Hashable:
        _, sendbuf, recvbuf, op = given
        if recvbuf.__class__ is np.ndarray:
            if sendbuf is _IN_PLACE:
                return name, op.handle, recvbuf.dtype, recvbuf.size, recvbuf.flags.num
            if sendbuf.__class__ is np.ndarray:
                sent = sendbuf.dtype, sendbuf.size, sendbuf.flags.num
                return name, op.handle, sent, recvbuf.dtype, recvbuf.size, recvbuf.flags.num
        return name, op.handle, _form(sendbuf), _form(recvbuf)

    return key


def scatter(given: tuple[Any, ...]) -> Hashable:
    """Return what a reduce-scatter depends on."""
    _, sendbuf, recvbuf, recvcounts, op = given
    return "Reduce_scatter", op.handle, _number(recvcounts), _form(sendbuf), _form(recvbuf)


def _kind(buffer: Any) -> Any:
    """Return the dtype of a buffer specification with blocks; all that there is of one that not every library knows.

    Of a datatype it is the handle: whatever has it, the MPI library is given the call as it came.
    """
    kind = buffer.__class__
    if kind is np.ndarray:
        if buffer.dtype.char in KNOWN_TO_MPI:
            return buffer.dtype
    elif buffer is None:
        return kind
    elif kind is list or kind is tuple:
        thing, last = buffer[0], buffer[-1]
        if thing.__class__ is np.ndarray and thing.dtype.char in KNOWN_TO_MPI:
            code = last.handle if isinstance(last, MPI.Datatype) else last if last.__class__ is str else None
            return thing.dtype, code
    return _form(buffer)


def _form(buffer: Any) -> Any:
    """Return what a call depends on of a buffer specification."""
    kind = buffer.__class__
    if kind is np.ndarray:
        return buffer.dtype, buffer.size, buffer.flags.num
    if kind is list or kind is tuple:
        thing = buffer[0]
        if thing.__class__ is not np.ndarray:
            raise TypeError
        return (kind, thing.dtype, thing.size, thing.flags.num, *map(_number, buffer[1:]))
    if buffer is None or buffer is _IN_PLACE:
        return kind
    if isinstance(buffer, np.ndarray):
        return kind, buffer.dtype, buffer.size, buffer.flags.num
    with memoryview(buffer) as view:
        return kind, view.format, view.nbytes, view.readonly, view.c_contiguous, view.contiguous


def _number(part: Any) -> Any:
    """Return the counts, displacements or datatype of a buffer specification; of arrays of them the values."""
    kind = part.__class__
    if kind is int:
        return part
    if kind is list or kind is tuple:
        if part and part[0].__class__ is int:
            return (kind, *part, *map(type, part))  # as most have it, in half the time
        return (kind, *map(_number, part))
    if isinstance(part, MPI.Datatype):
        return kind, identity(part)
    if isinstance(part, np.ndarray | array):
        return kind, _number(part.tolist())
    return kind, part
