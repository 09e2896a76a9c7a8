"""Buffers that a rank describes by derived datatypes, or whose blocks lie apart, copied to vectors and back.

What a collective moves, each rank may describe in its own way: one sends a column of a matrix, which others receive as
a vector. They do not know of it. So where they run one of our algorithms, which move bytes that lie one after another,
the rank that describes its data otherwise takes part with a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from operator import index
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Array, device_of
from mpiagg.collectives.buffers import (
    REFUSED,
    block_parts,
    datatype_of,
    in_place,
    lengths_of,
    memory_of,
    parts,
    read,
    read_blocks,
    starts_of,
)
from mpiagg.collectives.datatypes import extent_of
from mpiagg.common.once import once
from mpiagg.plans.operation import even_counts
from mpiagg.plans.program import Program, in_turn
from mpiagg.transport import Channel


class Buffer(Enum):
    """What a buffer specification of a method describes."""

    ONE = "a block"
    EACH = "a block for each rank, all of one length"
    COUNTED = "a block for each rank, each of its own length"


class Elements(NamedTuple):
    """Elements of a buffer, and where they lie in a vector.

    Attributes
    ----------
    place : int
        Which of a method's arguments has the buffer.
    length, start : int
        How many elements there are, and where the first is, counted from the buffer's.
    datatype : MPI.Datatype
    copy : list
        The buffer specification of the same numbers in the vector.
    """

    place: int
    length: int
    start: int
    datatype: MPI.Datatype
    copy: list[Any]


class Packed(NamedTuple):
    """Vectors in the place of those arguments of a method that are described otherwise, and what is copied.

    Attributes
    ----------
    vectors : dict of int to list
        The buffer specifications that take an argument's place.
    before, after : list of Elements
        What is copied before the method, and after it.
    """

    vectors: dict[int, list[Any]]
    before: list[Elements]
    after: list[Elements]

    @property
    def nbytes(self) -> int:
        """The memory of the vectors."""
        return sum(vector.nbytes for vector, *_ in self.vectors.values())

    def given(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with the vectors among them."""
        return tuple(self.vectors.get(place, argument) for place, argument in enumerate(given))

    def load(self, given: tuple[Any, ...]) -> None:
        """Copy what is sent to the vectors."""
        with _ALONE:
            for place, count, start, datatype, copy in self.before:
                _itself().Sendrecv([given[place][0], count, start, datatype], 0, 0, copy, 0, 0)

    def store(self, given: tuple[Any, ...]) -> None:
        """Copy what has been received out of the vectors."""
        with _ALONE:
            for place, count, start, datatype, copy in self.after:
                _itself().Sendrecv(copy, 0, 0, [given[place][0], count, start, datatype], 0, 0)

    def around(self, program: Program, given: tuple[Any, ...]) -> Program:
        """Return a program on the vectors with the copies before and after it."""
        last = Program((), (self.free,), self.nbytes)
        return in_turn(partial(self.load, given), program, partial(self.store, given), last)

    def free(self) -> None:
        """Give back the duplicates of the datatypes: users may free theirs while this lasts."""
        for datatype in {id(piece.datatype): piece.datatype for piece in (*self.before, *self.after)}.values():
            if not datatype.is_predefined:
                datatype.Free()


def packed(channel: Channel, buffers: Sequence[Buffer], given: tuple[Any, ...]) -> Packed | None:
    """Return vectors for those arguments of a method that cannot be read; None if that is for mpi4py.

    Parameters
    ----------
    channel : Channel
    buffers : sequence of Buffer
        What the arguments after the communicator are; after them there may be a root.
    given : tuple
        The communicator and the arguments.
    """
    found = Packed({}, [], [])
    at_root = len(given) <= len(buffers) + 1 or channel.rank == given[len(buffers) + 1]
    last = len(buffers)
    for place, buffer in enumerate(buffers, 1):
        specification = given[place]
        if in_place(specification) or (buffer is not Buffer.ONE and not at_root):
            continue
        received = place == last and not (at_root and last == 1)  # a broadcast has one buffer
        sent = not received or (at_root and in_place(given[1]))  # elsewhere None is no buffer
        if _is_read(specification, buffer, channel.size, writable=received):
            continue
        pieces = _pieces(place, specification, buffer, channel.size, writable=received)
        if pieces is None:
            found.free()
            return None
        lengths = [piece.copy[1] for piece in pieces]
        taken = lengths if buffer is Buffer.COUNTED else lengths[0] // (channel.size if buffer is Buffer.EACH else 1)
        vector, _, _, unit = pieces[0].copy
        found.vectors[place] = [vector, taken, unit]
        found.before.extend(pieces if sent else [])
        found.after.extend(pieces if received else [])
    return found


def _is_read(specification: object, buffer: Buffer, size: int, *, writable: bool) -> bool:
    """Return whether a buffer specification can be used as it is."""
    if buffer is Buffer.COUNTED:
        return read_blocks(specification, 0, size, writable=writable) is not None
    return read(specification, writable=writable, blocks=size if buffer is Buffer.EACH else 1) is not None


def _pieces(place: int, specification: Any, buffer: Buffer, size: int, *, writable: bool) -> list[Elements] | None:
    """Return the pieces of what a buffer specification describes, each with its place in a vector.

    None is for what is wrong, lies on a device, or consists of numbers of several kinds.
    """
    try:
        thing, counts, starts, datatype = _runs(specification, buffer, size)
        unit = _unit(datatype)
        if unit is None or device_of(thing) is not HOST or (unit == datatype and buffer is not Buffer.COUNTED):
            return None
        whole = memory_of(thing, writable=writable).nbytes
        if not all(_inside(datatype, start, count, whole) for start, count in zip(starts, counts, strict=True)):
            return None
        many = datatype.size // unit.size
        if unit != datatype and any(counts):
            _try(thing, next(start for start, count in zip(starts, counts, strict=True) if count), datatype)
    except (*REFUSED, ZeroDivisionError):  # of datatypes without any numbers
        return None
    if unit != datatype:
        datatype = datatype.Dup()
    places = [0, *accumulate(count * many for count in counts)]
    vector: Array = np.empty(places[-1] * unit.extent, np.uint8)
    # An empty block may lie anywhere, also outside of the buffer.
    inside = [start if count else 0 for count, start in zip(counts, starts, strict=True)]
    return [
        Elements(place, count, start, datatype, [vector, end - begin, begin, unit])
        for count, start, (begin, end) in zip(counts, inside, pairwise(places), strict=True)
    ]


def _try(thing: Any, start: int, datatype: MPI.Datatype) -> None:
    """Copy an element of a buffer, so that a datatype that was not committed is refused before anything is sent."""
    with _ALONE:
        _itself().Sendrecv([thing, 1, start, datatype], 0, 0, [np.empty(datatype.size, np.uint8), MPI.BYTE], 0, 0)


def _runs(specification: Any, buffer: Buffer, size: int) -> tuple[Any, Sequence[int], Sequence[int], MPI.Datatype]:
    """Return a buffer, the runs of elements in it, by their lengths and starts, and their datatype."""
    if buffer is Buffer.COUNTED:
        thing, counts, displacements, kind = block_parts(specification)
        datatype = datatype_of(thing, kind)
        lengths = lengths_of(counts, size)
        if lengths is None:
            lengths = even_counts(memoryview(thing).nbytes // datatype.extent, size)
        if len(lengths) != size:
            raise ValueError("a block for each rank")
        starts = [0, *accumulate(lengths[:-1])] if displacements is None else starts_of(displacements, size)
        return thing, lengths, starts, datatype
    thing, count, displacement, kind = parts(specification)
    datatype, blocks, start = datatype_of(thing, kind), size if buffer is Buffer.EACH else 1, index(displacement or 0)
    if count is None:
        count, rest = divmod(memoryview(thing).nbytes - start * datatype.extent, datatype.extent * blocks)
        if rest:
            raise ValueError("no whole number of elements")
    return thing, [index(count) * blocks], [start], datatype


def _unit(datatype: MPI.Datatype) -> MPI.Datatype | None:
    """Return the predefined datatype of all numbers in a datatype; None if there are several."""
    if extent_of(datatype) is not None:
        return datatype
    if datatype.is_predefined:
        return None
    *_, inner = datatype.Get_contents()
    units = [_unit(each) for each in inner]
    for each in inner:
        if not each.is_predefined:
            each.Free()
    return units[0] if units and all(unit == units[0] for unit in units) else None


def _inside(datatype: MPI.Datatype, start: int, count: int, nbytes: int) -> bool:
    """Return whether so many elements from a start on are within so many bytes."""
    below, span = datatype.Get_true_extent()
    first = start * datatype.extent + below
    return count == 0 or (count > 0 and first >= 0 and first + (count - 1) * datatype.extent + span <= nbytes)


_ALONE: Final = Lock()
"""Held by the thread that copies, or another might receive what it has sent."""


@once
def _itself() -> MPI.Intracomm:
    """Return a communicator on which no messages of others are."""
    return MPI.COMM_SELF.Dup()
