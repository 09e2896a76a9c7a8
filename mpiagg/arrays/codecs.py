"""Codecs: how floating-point values travel in fewer bytes.

A codec turns values into an *image*, a vector of bytes, and back. ``fp16`` and ``bf16`` round each value to
half precision, to nearest and even. ``u8`` maps the values of a chunk linearly to the whole numbers from 0 to 255.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mpiagg.arrays.reductions import Array, working_dtype

BLOCK: Final = 2**15
"""How many values are converted at once: what lies between stays in the cache."""

HEADER_BYTES: Final = 32
"""Before the codes of ``u8``: the minimum as float32 at byte 0, the maximum at byte 4, and zeros."""

EPSILON: Final = 1e-7
"""What Bagua's format adds to the range of a chunk, so that it is never zero."""


class Codec(ABC):
    """A way to write floating-point values in fewer bytes.

    Attributes
    ----------
    name : str
        What ``wire=`` takes.
    elementwise : bool
        Whether the image of a part of some values is the same part of their image, and what was decoded is encoded
        to the same bytes again.
    """

    name: ClassVar[str]
    elementwise: ClassVar[bool]

    @abstractmethod
    def nbytes(self, length: int) -> int:
        """Return how long the image of ``length`` values is."""

    @abstractmethod
    def encode(self, values: Array, image: Array) -> None:
        """Write the image of some values.

        Parameters
        ----------
        values : numpy.ndarray
            A vector of float32 or float64.
        image : numpy.ndarray
            A vector of ``nbytes(len(values))`` bytes.
        """

    @abstractmethod
    def decode(self, image: Array, values: Array) -> None:
        """Write the values of an image; the arguments are as for :meth:`encode`."""


class Float16(Codec):
    """IEEE half precision: 11 significant bits, up to 65504; larger values become infinite."""

    name = "fp16"
    elementwise = True

    def nbytes(self, length: int) -> int:
        """Return 2 bytes a value."""
        return 2 * length

    def encode(self, values: Array, image: Array) -> None:
        """Round to float16."""
        with np.errstate(over="ignore"):
            np.copyto(image.view(np.float16), values, casting="same_kind")

    def decode(self, image: Array, values: Array) -> None:
        """Widen."""
        np.copyto(values, image.view(np.float16))


class BFloat16(Codec):
    """The upper half of a float32: 8 significant bits, and its whole range.

    NumPy has no such dtype. float64 is rounded to float32 first. Rounding is an addition to the bits: half of what is
    cut off, less one where that makes a tie even. A NaN keeps its upper half with the quiet bit set, since its lower
    half may be all it has.
    """

    name = "bf16"
    elementwise = True

    def nbytes(self, length: int) -> int:
        """Return 2 bytes a value."""
        return 2 * length

    def encode(self, values: Array, image: Array) -> None:
        """Round to bfloat16."""
        halves = image.view(np.uint16)
        for block in _blocks(len(values)):
            single = values[block].astype(np.float32, copy=False)
            bits = single.view(np.uint32)
            upper = bits >> np.uint32(16)
            rounded = bits + ((upper & np.uint32(1)) + np.uint32(0x7FFF))
            rounded >>= np.uint32(16)
            upper |= np.uint32(0x40)
            np.copyto(rounded, upper, where=np.isnan(single))
            np.copyto(halves[block], rounded, casting="unsafe")

    def decode(self, image: Array, values: Array) -> None:
        """Widen."""
        halves = image.view(np.uint16)
        for block in _blocks(len(values)):
            wide = halves[block].astype(np.uint32)
            wide <<= np.uint32(16)
            np.copyto(values[block], wide.view(np.float32))


class MinMaxUInt8(Codec):
    """Whole numbers from 0 to 255 between the least and the greatest value of a chunk: Bagua's format.

    With scale = 255 / (max - min + epsilon), upper = rint(max scale) and lower = upper - 255, the code of x is
    rint(x scale), clamped to lower and upper, less lower; it is decoded as (code + lower) / scale. An error is at
    most about half a step of (max - min) / 255. Epsilon is 1e-7 as in Bagua, but never more than a 1024th of the
    range, so that small values have all codes, too. A chunk with a NaN or an infinity in it is NaN altogether.

    Values are taken as float32. A chunk has a header of ``HEADER_BYTES``, and its codes are padded to a multiple of 32.
    """

    name = "u8"
    elementwise = False

    def nbytes(self, length: int) -> int:
        """Return a byte a value, padded to a multiple of 32, and a header; nothing for no values."""
        return HEADER_BYTES + -(-length // 32) * 32 if length else 0

    def encode(self, values: Array, image: Array) -> None:
        """Write the header and the codes."""
        if not len(values):
            return
        least, greatest = np.float32(values.min()), np.float32(values.max())
        header = image[:HEADER_BYTES].view(np.float32)
        header[:] = 0
        codes = image[HEADER_BYTES:]
        codes[len(values) :] = 0
        if not (np.isfinite(least) and np.isfinite(greatest)):
            header[:2] = np.nan
            codes[:] = 0
            return
        header[:2] = least, greatest
        grid = _grid(float(least), float(greatest))
        if grid is None:
            codes[: len(values)] = 255
            return
        for block in _blocks(len(values)):
            level = values[block].astype(np.float32).astype(grid.dtype, copy=False)
            level *= grid.scale
            np.rint(level, out=level)
            np.clip(level, grid.upper - 255, grid.upper, out=level)
            level -= grid.upper - 255
            np.copyto(codes[: len(values)][block], level, casting="unsafe")

    def decode(self, image: Array, values: Array) -> None:
        """Read the header and the codes."""
        if not len(values):
            return
        least, greatest = map(float, image[:8].view(np.float32))
        grid = _grid(least, greatest) if math.isfinite(least) and math.isfinite(greatest) else None
        if grid is None:
            values.fill(least)
            return
        codes = image[HEADER_BYTES:]
        for block in _blocks(len(values)):
            level = codes[: len(values)][block].astype(grid.dtype)
            level += grid.upper - 255
            level /= grid.scale
            np.copyto(values[block], level, casting="same_kind")


class _Grid(NamedTuple):
    """The numbers that a chunk of ``u8`` is mapped by, and the dtype that they need."""

    scale: Any
    upper: Any
    dtype: npt.DTypeLike


def _grid(least: float, greatest: float) -> _Grid | None:
    """Return the grid between two values; None if they are one."""
    span = greatest - least
    if span <= 0:
        return None
    # The levels of values far from zero beside their range, or of very small ones, need more digits than float32 has.
    narrow = 1e-30 < span < 1e38 and max(abs(least), abs(greatest)) / span < 2**14
    dtype = np.float32 if narrow else np.float64
    scale = 255 / (dtype(span) + dtype(min(EPSILON, span / 1024)))
    return _Grid(scale, np.rint(dtype(greatest) * scale), dtype)


def _blocks(length: int) -> Iterator[slice]:
    for start in range(0, length, BLOCK):
        yield slice(start, min(start + BLOCK, length))


CODECS: Final[dict[str, Codec]] = {codec.name: codec for codec in (Float16(), BFloat16(), MinMaxUInt8())}


def codec(name: str) -> Codec:
    """Return the codec of that name.

    Raises
    ------
    ValueError
        If there is none; the message lists the known names.
    """
    if not isinstance(name, str) or name not in CODECS:
        raise ValueError(f"unknown wire {name!r}; known: {', '.join(CODECS)}, or None")
    return CODECS[name]


def check_wire_dtype(wire: str | None, dtype: np.dtype[Any]) -> None:
    """Raise TypeError if values of ``dtype`` are combined in a dtype that no codec takes."""
    if wire is not None and working_dtype(dtype).kind != "f":
        raise TypeError(f"wire {wire!r} is for real floating-point numbers, not for {dtype}")
