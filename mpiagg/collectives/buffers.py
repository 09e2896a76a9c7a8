"""What mpi4py calls a buffer specification, read as a flat view of the user's memory.

``x``, ``[x, type]``, ``[x, count]``, ``[x, count, type]``, ``[x, (count, displacement), type]`` and
``[x, count, displacement, type]``, where x is a buffer or a DLPack object, and type an ``MPI.Datatype`` or a string.
Whatever is not understood here, and whatever is wrong, is None: mpi4py then takes it, or refuses it in its own words.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from itertools import accumulate
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Array, device_of
from mpiagg.collectives.datatypes import Datatype, extent_of, half_of, half_or_itself
from mpiagg.plans.operation import even_counts

REFUSED: Final = (AttributeError, BufferError, OverflowError, RuntimeError, TypeError, ValueError)
"""What is raised for things that are no buffer specification; RuntimeError by NumPy 2.0, for memory of a device."""

_CAPSULE_POINTER: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_DLPACK_DTYPE: Final = ctypes.sizeof(ctypes.c_void_p) + 12
"""Where a ``DLTensor`` has the type of its elements: after a pointer, the device's two numbers, and that of axes."""

_DLPACK_KINDS: Final = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


class ArgumentSpan(NamedTuple):
    """Where a vector lies: in which of a method's arguments, and from which byte to which in that one's memory."""

    place: int
    start: int
    stop: int

    def within(self, start: int, stop: int) -> ArgumentSpan:
        """Return a part of this one."""
        return ArgumentSpan(self.place, self.start + start, self.start + stop)


class ArgumentVector:
    """How one of a method's arguments becomes a vector in the user's memory.

    Parameters
    ----------
    part : ArgumentSpan
        Where it lies.
    given : tuple
        The communicator and the arguments: these, or any that have the same key.
    dtype : numpy.dtype
    writable : bool
        Whether it is written to.
    """

    __slots__ = ("_array", "_as_it_is", "_dtype", "_listed", "_place", "_span", "_turned", "_writable")

    def __init__(self, part: ArgumentSpan, given: tuple[Any, ...], dtype: np.dtype[Any], *, writable: bool) -> None:
        self._place, self._writable, self._dtype = part.place, writable, dtype
        argument = given[part.place]
        self._listed = isinstance(argument, list | tuple)
        thing = argument[0] if self._listed else argument
        # An array that is taken as it is, or by another dtype, and perhaps from an element to another.
        self._array = thing.__class__ is np.ndarray and not thing.nbytes % dtype.itemsize
        self._turned = self._array and not thing.flags.c_contiguous
        span = slice(part.start // dtype.itemsize, part.stop // dtype.itemsize) if self._array else slice(*part[1:])
        self._span = None if self._array and part[1:] == (0, thing.nbytes) else span
        plain = self._array and not self._listed and not self._turned
        self._as_it_is = plain and self._span is None and thing.dtype == dtype

    def __call__(self, given: tuple[Any, ...]) -> Array:
        """Return the vector of arguments."""
        thing = given[self._place]
        if self._as_it_is and thing.ndim == 1:
            return thing  # type: ignore[no-any-return]  # an array
        if self._listed:
            thing = thing[0]
        span, dtype = self._span, self._dtype
        if not self._array:
            return memory_of(thing, writable=self._writable)[span].view(dtype)
        if self._turned:
            thing = thing.T
        if thing.ndim != 1:
            thing = thing.reshape(-1)
        if thing.dtype is not dtype and thing.dtype != dtype:
            thing = thing.view(dtype)
        return thing if span is None else thing[span]  # type: ignore[no-any-return]  # an array


class BufferMessage(NamedTuple):
    """A buffer specification that was understood.

    Attributes
    ----------
    memory : numpy.ndarray
        The bytes that it names, one-dimensional, in the user's own memory, which may be a device's.
    datatype : MPI.Datatype or numpy.dtype
        A predefined datatype, or the dtype of half precision.
    length : int
        How many elements each block has.
    part : ArgumentSpan
        Where the memory is found again.
    """

    memory: Array
    datatype: Datatype
    length: int
    part: ArgumentSpan

    def matches(self, other: BufferMessage | None) -> bool:
        """Whether both have the same datatype and length, as reductions want it."""
        return other is not None and self.datatype == other.datatype and self.length == other.length


def in_place(specification: object) -> bool:
    """Whether that stands for the other buffer of a call: ``MPI.IN_PLACE``, for which mpi4py takes None, too."""
    return specification is None or specification is MPI.IN_PLACE


def read(specification: object, place: int = 0, *, writable: bool, blocks: int = 1) -> BufferMessage | None:
    """Return what a buffer specification names, or None if that is for mpi4py to say.

    Parameters
    ----------
    specification : object
        As the methods of an mpi4py communicator take it.
    place : int
        Which of a method's arguments it is.
    writable : bool
        Whether something is to be received in it.
    blocks : int
        How many blocks it has, one after another; its count is that of one block.
    """
    try:
        return _read(specification, place, writable=writable, blocks=blocks)
    except REFUSED:
        return None


def _read(specification: object, place: int, *, writable: bool, blocks: int) -> BufferMessage | None:
    thing, count, displacement, kind = parts(specification)
    datatype = (half_of(thing) if kind is None else None) or half_or_itself(datatype_of(thing, kind))
    extent = extent_of(datatype)
    if extent is None:
        return None
    memory = memory_of(thing, writable=writable)
    start = index(displacement or 0) * extent
    if count is None:
        count, rest = divmod(memory.size - start, extent * blocks)
        if rest:
            return None
    stop = start + index(count) * extent * blocks
    if not 0 <= start <= stop <= memory.size:
        return None
    return BufferMessage(memory[start:stop], datatype, index(count), ArgumentSpan(place, start, stop))


def read_blocks(
    specification: object, place: int, size: int, *, writable: bool
) -> tuple[BufferMessage, tuple[int, ...]] | None:
    """Return what a buffer specification with a block for each rank names, and the bytes of each block.

    ``[x, counts]``, ``[x, counts, type]``, ``[x, (counts, displacements)]``, ``[x, (counts, displacements), type]`` and
    ``[x, counts, displacements, type]`` with blocks that lie one after the other; ``x`` and ``[x, type]``, which is cut
    evenly; None for all else.
    """
    try:
        thing, counts, displacements, kind = block_parts(specification)
        lengths = lengths_of(counts, size)
        if lengths is not None and (len(lengths) != size or min(lengths) < 0):
            return None
        kinds = [] if kind is None else [kind]
        message = _read([thing, lengths and sum(lengths), *kinds], place, writable=writable, blocks=1)
        if message is None:
            return None
        lengths = even_counts(message.length, size) if lengths is None else lengths
        if displacements is not None and starts_of(displacements, size) != [0, *accumulate(lengths[:-1])]:
            return None
    except REFUSED:
        return None
    extent = message.memory.size // max(1, message.length)
    return message, tuple(length * extent for length in lengths)


def block_parts(specification: Any) -> tuple[Any, Any, Any, Any]:
    """Return the buffer, counts, displacements and datatype; None for those that are not given."""
    thing, *more = specification if isinstance(specification, list | tuple) else (specification,)
    kind = more.pop() if more and isinstance(more[-1], MPI.Datatype | str) else None
    counts, displacements = (*more, None, None)[:2]
    if isinstance(counts, tuple) and len(more) == 1:  # as mpi4py has it, in a tuple alone
        counts, displacements = counts
    return thing, counts, displacements, kind


def lengths_of(counts: Any, size: int) -> Sequence[int] | None:
    """Return the elements of each block: a number is for all of them; None where there is none."""
    if counts is None:
        return None
    return [int(counts)] * size if isinstance(counts, int | np.integer) else [*map(index, counts)]


def starts_of(displacements: Any, size: int) -> list[int]:
    """Return where each block begins: a number is how far each is from the last."""
    if isinstance(displacements, int | np.integer):
        return [place * int(displacements) for place in range(size)]
    return [*map(index, displacements)]


def parts(specification: object) -> tuple[Any, Any, Any, Any]:
    """Return the buffer, count, displacement and datatype; None for those that are not given."""
    given = specification if isinstance(specification, list | tuple) else (specification, None)
    match given:
        case [thing, MPI.Datatype() | str() as kind]:
            return thing, None, None, kind
        case [thing, [count, displacement]]:
            return thing, count, displacement, None
        case [thing, count]:
            return thing, count, None, None
        case [thing, [count, displacement], kind]:
            return thing, count, displacement, kind
        case [thing, count, kind]:
            return thing, count, None, kind
        case [thing, count, displacement, kind]:
            return thing, count, displacement, kind
    raise ValueError("not a buffer specification")


def datatype_of(thing: Any, kind: MPI.Datatype | str | None) -> MPI.Datatype:
    """Return the datatype that is given, or else that of a buffer's elements."""
    if isinstance(kind, MPI.Datatype):
        return kind
    return MPI.Datatype.fromcode(_format(thing) if kind is None else kind)


def _format(thing: Any) -> str:
    """Return the type of a buffer's elements, in the letters of the buffer protocol."""
    if _on_device(thing):
        return str(thing.dtype.char)
    try:
        code = memoryview(thing).format
    except TypeError:  # no such buffer: it speaks DLPack, or nothing that we know
        code = _dlpack_code(thing)
    return code.lstrip("@<" if sys.byteorder == "little" else "@>")


def _dlpack_code(thing: Any) -> str:
    """Return the type of a DLPack object's elements, by NumPy's letter; ``np.from_dlpack`` refuses long doubles."""
    capsule = thing.__dlpack__()  # which has the tensor
    tensor = _CAPSULE_POINTER(capsule, b"dltensor")
    kind, bits, lanes = struct.unpack("BBH", ctypes.string_at(tensor + _DLPACK_DTYPE, 4))
    if kind not in _DLPACK_KINDS or lanes != 1:
        raise ValueError("elements that NumPy has no type for")
    return np.dtype(f"{_DLPACK_KINDS[kind]}{bits // 8}").char


def memory_of(thing: Any, *, writable: bool) -> Array:
    """Return the bytes of a buffer, in the order in which they lie."""
    if thing is None or thing is MPI.BOTTOM:
        return np.empty(0, np.uint8)
    if isinstance(thing, np.ndarray):
        thing = np.asarray(thing)
        if writable and not thing.flags.writeable:
            raise BufferError("not writable")
    elif not _on_device(thing):
        # Slicing refuses memory that the processor cannot reach.
        view: Any = MPI.buffer.frombuffer(_by_rows(thing), readonly=not writable)[:]
        return np.frombuffer(view, np.uint8)
    if not thing.flags.c_contiguous:
        thing = thing.T
        if not thing.flags.c_contiguous:
            raise BufferError("not contiguous")
    return thing.reshape(-1).view(np.uint8)  # type: ignore[no-any-return]  # an array, perhaps of a device's


def _by_rows(thing: Any) -> Any:
    """Return a buffer, turned round if its elements lie by columns: mpi4py's buffers are of those by rows alone."""
    try:
        view = memoryview(thing)
    except TypeError:  # it speaks DLPack
        return thing
    return thing if view.c_contiguous else np.asarray(view).T


def _on_device(thing: object) -> bool:
    return not isinstance(thing, np.ndarray) and device_of(thing) is not HOST
