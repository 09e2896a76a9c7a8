"""Codecs: how floating-point values travel in fewer bytes.

A codec turns values into an *encoded buffer*, a vector of bytes, and back. ``fp16`` and ``bf16`` round each value to
half precision, to nearest and even. ``u8`` maps the values of a chunk linearly to the whole numbers from 0 to 255;
``u4`` and ``u2`` map each 256 values to those from 0 to 15 and from 0 to 3, and pack two and four of them in a byte.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from mpiagg.arrays.conversions import blocks, convert, round_to_bfloat16, scratch, single, widen_bfloat16
from mpiagg.arrays.reductions import Array, working_dtype

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
        Whether a part of some values encodes to the same part of their encoded buffer, and what was decoded is encoded
        to the same bytes again.
    """

    name: ClassVar[str]
    elementwise: ClassVar[bool]

    @abstractmethod
    def nbytes(self, length: int) -> int:
        """Return how many bytes ``length`` values encode to."""

    @abstractmethod
    def encode(self, values: Array, encoded: Array) -> None:
        """Encode some values.

        Parameters
        ----------
        values : numpy.ndarray
            A vector of float32 or float64.
        encoded : numpy.ndarray
            A vector of ``nbytes(len(values))`` bytes.
        """

    @abstractmethod
    def decode(self, encoded: Array, values: Array) -> None:
        """Write the values of an encoded buffer; the arguments are as for :meth:`encode`."""


class Float16(Codec):
    """IEEE half precision: 11 significant bits, up to 65504; larger values become infinite."""

    name = "fp16"
    elementwise = True

    def nbytes(self, length: int) -> int:
        """Return 2 bytes a value."""
        return 2 * length

    def encode(self, values: Array, encoded: Array) -> None:
        """Round to float16."""
        with np.errstate(over="ignore"):
            convert(encoded.view(np.float16), values)

    def decode(self, encoded: Array, values: Array) -> None:
        """Widen."""
        convert(values, encoded.view(np.float16))


class BFloat16(Codec):
    """The upper half of a float32: 8 significant bits, and its whole range.

    float64 is rounded to float32 first. NaN stays NaN.
    """

    name = "bf16"
    elementwise = True

    def nbytes(self, length: int) -> int:
        """Return 2 bytes a value."""
        return 2 * length

    def encode(self, values: Array, encoded: Array) -> None:
        """Round to bfloat16."""
        round_to_bfloat16(values, encoded.view(np.uint16))

    def decode(self, encoded: Array, values: Array) -> None:
        """Widen."""
        widen_bfloat16(encoded.view(np.uint16), values)


class MinMaxUInt8(Codec):
    """Whole numbers from 0 to 255 between the least and the greatest value of a chunk: Bagua's format.

    With scale = 255 / (max - min + epsilon), upper = rint(max scale) and lower = upper - 255, the code of x is
    rint(x scale), clamped to lower and upper, less lower; it is decoded as (code + lower) / scale. An error is at
    most about half a step of (max - min) / 255. Epsilon is 1e-7 as in Bagua, but never more than a 1024th of the
    range, so that small values have all codes, too. Values above 1e38 are decoded to none outside of their range, which
    could be infinite. A chunk with a NaN or an infinity in it is NaN altogether.

    Values are taken as float32. A chunk has a header of ``HEADER_BYTES``, and its codes are padded to a multiple of 32.
    """

    name = "u8"
    elementwise = False

    def nbytes(self, length: int) -> int:
        """Return a byte a value, padded to a multiple of 32, and a header; nothing for no values."""
        return HEADER_BYTES + -(-length // 32) * 32 if length else 0

    def encode(self, values: Array, encoded: Array) -> None:
        """Write the header and the codes."""
        if not len(values):
            return
        least, greatest = _ends(values)
        header = encoded[:HEADER_BYTES].view(np.float32)
        header[:] = 0
        codes = encoded[HEADER_BYTES:]
        codes[len(values) :] = 0
        if not (math.isfinite(least) and math.isfinite(greatest)):
            header[:2] = np.nan
            codes[:] = 0
            return
        header[:2] = least, greatest
        grid = _grid(least, greatest)
        if grid is None:
            codes[: len(values)] = 255
            return
        grid.encode(values, codes[: len(values)], least)

    def decode(self, encoded: Array, values: Array) -> None:
        """Read the header and the codes."""
        if not len(values):
            return
        least, greatest = map(float, encoded[:8].view(np.float32))
        grid = _grid(least, greatest) if math.isfinite(least) and math.isfinite(greatest) else None
        if grid is None:
            values.fill(least)
            return
        grid.decode(encoded[HEADER_BYTES : HEADER_BYTES + len(values)], values, least, greatest)


class _Grid(NamedTuple):
    """The numbers that a chunk of ``u8`` is mapped by."""

    narrow: bool
    """Whether they are float32; else float64."""
    scale: Any
    lower: Any

    def encode(self, values: Array, codes: Array, least: float) -> None:
        """Write the codes of values, of which we know the least."""
        # A level below the lower one comes from rounding; there is none above the upper.
        clamped = np.rint(type(self.scale)(least) * self.scale) < self.lower
        scale, code = np.array(self.scale), np.array(int(self.lower) % 256, np.uint8)
        whole: Array = scratch.others if self.narrow else scratch.longs
        level, magic = whole.view(scale.dtype), _MAGIC if self.narrow else _MAGIC_OF_DOUBLES
        for block in blocks(len(values)):
            own, last = codes[block], block.stop - block.start
            np.multiply(single(values[block]), scale, level[:last], dtype=level.dtype)
            # The processor rounds the sum as rint does, and the level's last eight bits are then the sum's.
            np.add(level[:last], magic, level[:last])
            if clamped:
                np.maximum(level[:last], self.lower + magic, out=level[:last])
            np.copyto(own, whole[:last], casting="same_kind")
            np.subtract(own, code, own)

    def decode(self, codes: Array, values: Array, least: float, greatest: float) -> None:
        """Write the values of codes; in the wide grid none is outside of the range that was sent."""
        scale, lower = np.array(self.scale), np.array(self.lower)
        between = None if values.dtype == scale.dtype else scratch.singles if self.narrow else scratch.doubles
        for block in blocks(len(values)):
            own = values[block]
            level = own if between is None else between[: len(own)]
            np.copyto(level, codes[block])
            np.add(level, lower, level)
            np.divide(level, scale, level)
            if not self.narrow:  # half a step above the largest number is infinite
                np.clip(level, least, greatest, out=level)
            if between is not None:
                np.copyto(own, level, casting="same_kind")


_MAGIC: Final = np.array(1.5 * 2**23, np.float32)
_MAGIC_OF_DOUBLES: Final = np.array(1.5 * 2**52)


def _ends(values: Array) -> tuple[float, float]:
    """Return the least and the greatest value, as float32; NaN for both if one is NaN."""
    least, greatest = math.inf, -math.inf
    for block in blocks(len(values)):
        low, high = np.minimum.reduce(values[block]), np.maximum.reduce(values[block])
        if low != low:  # noqa: PLR0124 - NaN
            return math.nan, math.nan
        least, greatest = min(least, float(low)), max(greatest, float(high))
    return float(np.float32(least)), float(np.float32(greatest))


def _grid(least: float, greatest: float) -> _Grid | None:
    """Return the grid between two values; None if they are one."""
    span = greatest - least
    if span <= 0:
        return None
    # The levels of values far from zero beside their range, or of very small ones, need more digits than float32 has;
    # those of the largest need a wider range.
    far = max(abs(least), abs(greatest))
    narrow = span > 1e-30 and far < 1e38 and far / span < 2**14
    dtype = np.float32 if narrow else np.float64
    scale = dtype(255) / (dtype(span) + dtype(min(EPSILON, span / 1024)))
    lower = np.rint(dtype(greatest) * scale) - dtype(255)
    return _Grid(narrow, scale, lower)


GROUP: Final = 256
"""How many values of ``u4`` and ``u2`` share a least and a greatest value; :data:`BLOCK` is a multiple of it."""

ENDS_BYTES: Final = 8
"""What is sent of each group before the codes: its least and its greatest value, as float32."""


class PackedMinMax(Codec):
    """Whole numbers of a few bits between the least and the greatest value of each 256 values, packed into bytes.

    With N = 2^bits - 1 and step = (greatest - least) / N, in float64, the code of x is rint((x - least) N / (greatest -
    least)), and it is decoded as least + code step. So an error is at most half a step; groups of one value or of two
    are exact; and zero is not, if a group has values of both signs. A group with a NaN or an infinity in it is NaN
    altogether.

    Values are taken as float32. An encoded buffer is the ends of all groups, 8 bytes each, and then the codes, the
    first in the lowest bits of a byte, with zeros up to a multiple of 8 bytes. The groups of a chunk begin where it
    begins, so no two chunks share a byte.

    Rounding to so few levels loses much: let :class:`mpiagg.ErrorFeedback` make good for it, or a method that does so.
    """

    elementwise = False
    bits: ClassVar[int]

    def __init__(self) -> None:
        self.per_byte = 8 // self.bits
        self.most = 2**self.bits - 1

    def nbytes(self, length: int) -> int:
        """Return 4.25 or 2.25 bits a value: the ends of each begun group and the codes, rounded up to 8 bytes."""
        return ENDS_BYTES * -(-length // GROUP) + -(-length // (8 * self.per_byte)) * 8

    def encode(self, values: Array, encoded: Array) -> None:
        """Write the ends and the codes."""
        ends, codes = self._parts(encoded, len(values))
        codes[-(-len(values) // self.per_byte) :] = 0
        for block in blocks(len(values)):
            own = values[block]
            groups = slice(block.start // GROUP, -(-block.stop // GROUP))
            self._encode(own, ends[groups], codes[block.start // self.per_byte : -(-block.stop // self.per_byte)])

    def _encode(self, values: Array, ends: Array, codes: Array) -> None:
        length, groups = len(values), len(ends)
        padded = scratch.doubles[: groups * GROUP]
        np.copyto(padded[:length], single(values))
        padded[length:] = padded[length - 1]
        level = padded.reshape(groups, GROUP)
        least, greatest = np.minimum.reduce(level, axis=1) + 0.0, np.maximum.reduce(level, axis=1) + 0.0  # not -0.0
        spoiled = ~(np.isfinite(least) & np.isfinite(greatest))
        least[spoiled] = greatest[spoiled] = np.nan
        np.copyto(ends.T, (least, greatest), casting="same_kind")
        span = greatest - least
        scale = np.divide(self.most, span, out=np.zeros_like(span), where=span > 0)
        np.subtract(level, least[:, None], level)
        np.multiply(level, scale[:, None], level)
        level[spoiled] = 0
        np.rint(padded, padded)
        whole = scratch.others.view(np.uint8)[: groups * GROUP]
        np.copyto(whole, padded, casting="unsafe")
        whole[length:] = 0
        lanes = whole.reshape(-1, self.per_byte)[: len(codes)].T
        np.copyto(codes, lanes[0])
        for lane in range(1, self.per_byte):
            np.left_shift(lanes[lane], np.uint8(lane * self.bits), lanes[lane])
            np.bitwise_or(codes, lanes[lane], codes)

    def decode(self, encoded: Array, values: Array) -> None:
        """Read the ends and the codes."""
        ends, codes = self._parts(encoded, len(values))
        for block in blocks(len(values)):
            groups = slice(block.start // GROUP, -(-block.stop // GROUP))
            packed = codes[block.start // self.per_byte : -(-block.stop // self.per_byte)]
            self._decode(ends[groups], packed, values[block])

    def _decode(self, ends: Array, codes: Array, values: Array) -> None:
        length, groups = len(values), len(ends)
        padded = scratch.doubles[: groups * GROUP]
        whole = scratch.others.view(np.uint8)[: groups * GROUP]
        lanes = whole.reshape(-1, self.per_byte)[: len(codes)].T
        for lane in range(self.per_byte):
            np.right_shift(codes, np.uint8(lane * self.bits), lanes[lane])
            np.bitwise_and(lanes[lane], np.uint8(self.most), lanes[lane])
        np.copyto(padded, whole)
        level = padded.reshape(groups, GROUP)
        least, greatest = ends.T.astype(np.float64)
        np.multiply(level, ((greatest - least) / self.most)[:, None], level)
        np.add(level, least[:, None], level)
        np.copyto(values, padded[:length], casting="same_kind")

    @staticmethod
    def _parts(encoded: Array, length: int) -> tuple[Array, Array]:
        """Return the ends of an encoded buffer, a row a group, and all after them."""
        cut = ENDS_BYTES * -(-length // GROUP)
        return encoded[:cut].view(np.float32).reshape(-1, 2), encoded[cut:]


class MinMaxUInt4(PackedMinMax):
    """Whole numbers from 0 to 15: 4.25 bits a value."""

    name = "u4"
    bits = 4


class MinMaxUInt2(PackedMinMax):
    """Whole numbers from 0 to 3: 2.25 bits a value."""

    name = "u2"
    bits = 2


CODECS: Final[dict[str, Codec]] = {
    codec.name: codec for codec in (Float16(), BFloat16(), MinMaxUInt8(), MinMaxUInt4(), MinMaxUInt2())
}

EXACT: Final = "exact"
"""The wire that loses nothing, for sums whose bits do not depend on the order: see :mod:`mpiagg.arrays.exact`."""

WIRES: Final = (*CODECS, EXACT)
"""What ``wire=`` takes beside None."""


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


def codec_of(wire: str | None) -> Codec | None:
    """Return the codec of a wire; None for values that travel as they are, and for ``"exact"``.

    Raises
    ------
    ValueError
        If there is no such wire; the message lists the known ones.
    """
    if wire is not None and not (isinstance(wire, str) and wire in WIRES):
        raise ValueError(f"unknown wire {wire!r}; known: {', '.join(WIRES)}, or None")
    return None if wire is None else CODECS.get(wire)


def check_wire_op(wire: str | None, op: str) -> None:
    """Raise ValueError if a wire is not for an operator."""
    if wire == EXACT and op not in ("sum", "avg"):
        raise ValueError(f"wire {wire!r} is for sums and averages, not for op {op!r}")


def check_wire_dtype(wire: str | None, dtype: np.dtype[Any]) -> None:
    """Raise TypeError if values of ``dtype`` are combined in a dtype that no codec takes, or no exact sum."""
    if wire is None:
        return
    working = working_dtype(dtype)
    if working.kind != "f":
        raise TypeError(f"wire {wire!r} is for real floating-point numbers, not for {dtype}")
    if wire == EXACT and working.itemsize > 8:
        raise TypeError(f"wire {wire!r} is for float64 and shorter numbers, not for {dtype}")
