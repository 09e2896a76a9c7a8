"""Conversions between float32 and half precision: the bits of NumPy's own, in half the time or less.

Vectors of some length are left to torch or ml_dtypes, where one of them is imported (:mod:`libraries`). Without them
NumPy would convert float16 value by value. Here every step is an operation on a block of values, which NumPy does many
values at a time. What lies between the steps stays in the cache, in scratch memory that each thread allocates once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import numpy as np

from mpiagg.arrays.libraries import converted
from mpiagg.arrays.reductions import Array

BLOCK: Final = 2**15
"""How many values are converted at once."""

SHORT: Final = 2**13
"""Vectors shorter than this are left to NumPy's float16: for them the steps cost more than the values."""


class Scratch(threading.local):
    """Scratch for what lies between the steps; each thread has its own, since plans run in the background, too.

    Attributes
    ----------
    words, others : numpy.ndarray
        Two blocks of uint32.
    singles : numpy.ndarray
        ``words`` as float32.
    longs : numpy.ndarray
        A block of uint64.
    doubles : numpy.ndarray
        ``longs`` as float64.
    """

    def __init__(self) -> None:
        self.words: Array
        self.others: Array
        self.words, self.others = np.empty((2, BLOCK), np.uint32)
        self.singles = self.words.view(np.float32)
        self.longs = np.empty(BLOCK, np.uint64)
        self.doubles = self.longs.view(np.float64)


scratch: Final = Scratch()

_PAIRS: Final = frozenset(["fe", "ef", "Ef"])
"""The letters of dtypes between which there are conversions here; ml_dtypes widens its bfloat16 as fast as any."""


def blocks(length: int, block: int = BLOCK) -> Iterator[slice]:
    """Yield the ranges of the blocks of a vector."""
    for start in range(0, length, block):
        yield slice(start, min(start + block, length))


def convert(target: Array, source: Array) -> None:
    """Write an array's values in the dtype of another, as ``np.copyto(target, source, casting="unsafe")`` does.

    Parameters
    ----------
    target, source : numpy.ndarray
        Of any dtypes and layouts. They share no memory, unless they are of one dtype.
    """
    # By their letters, which cost less than to compare dtypes: e is float16, E bfloat16, f float32.
    letters = target.dtype.char + source.dtype.char if target.size >= SHORT else ""
    alike = letters in _PAIRS and _plain(target) and _plain(source) and target.shape == source.shape
    if alike and letters in ("fe", "ef"):
        (widen_float16 if letters == "fe" else round_to_float16)(source.reshape(-1), target.reshape(-1))
    elif not (alike and converted(source.reshape(-1), target.reshape(-1), "bfloat16")):
        target[...] = source  # in a quarter of the time of np.copyto


def _plain(array: Array) -> bool:
    # NumPy's matrices have no view of one dimension.
    return array.flags.c_contiguous and array.dtype.isnative and not isinstance(array, np.matrix)


def single(block: Array) -> Array:
    """Return a block of float32 as it is, and one of float64 rounded, in ``scratch.singles``."""
    if block.dtype == np.float32:
        return block
    rounded = scratch.singles[: len(block)]
    np.copyto(rounded, block, casting="same_kind")
    return rounded


def _word(bits: int) -> Array:
    # An array, since a number would be made one in every call.
    return np.array(bits, np.uint32)


_ONE, _THIRTEEN, _SIXTEEN = _word(1), _word(13), _word(16)
_SIGN, _MAGNITUDE, _EXPONENT = _word(0x80000000), _word(0x7FFFFFFF), _word(0x7F800000)


# -- float16


_OVERFLOW: Final = int(np.array(65520, np.float32).view(np.uint32))
_LEAST_NORMAL: Final = np.full(BLOCK, 2.0**-14, np.float32).view(np.uint32)  # a vector: maximum is slow with numbers
_TO_MAGIC: Final = _word((13 << 23) + 2048)
_FOLD: Final = _word(2**16 + 2**3)
_SIGN_OF_HALF: Final = _word(0x8FFFFFFF)
_REBIAS: Final = np.array(2.0**112, np.float32)
_SUBNORMAL: Final = 5e-324


def round_to_float16(singles: Array, halves: Array) -> None:
    """Round a vector of float32 to float16: to nearest and even, to infinity above 65504 with NumPy's warning."""
    if converted(singles, halves, "float16"):
        return
    for block in blocks(len(singles)):
        _round_block(singles[block], halves[block])


def _round_block(singles: Array, halves: Array) -> None:
    """Round a block.

    A half between 2^e and 2^(e+1) has the unit 2^(e-10), and a subnormal one that of e = -14. So has a float32 between
    2^(e+13) and 2^(e+14): when 2^(e+13) is added to a magnitude, the processor rounds to that unit, and the
    last bits of the sum count units. To them the exponent is added, ten bits to the left; 2048 makes that of the sum,
    without the bits above 15, that of the half.
    """
    length = len(singles)
    bits, magnitude, total = singles.view(np.uint32), scratch.words[:length], scratch.others[:length]
    np.bitwise_and(bits, _MAGNITUDE, magnitude)
    if np.maximum.reduce(magnitude) >= _OVERFLOW:
        np.copyto(halves, singles, casting="same_kind")  # infinity, NaN, and what NumPy warns of
        return
    np.maximum(magnitude, _LEAST_NORMAL[:length], out=total)
    np.bitwise_and(total, _EXPONENT, total)
    np.add(total, _TO_MAGIC, total)
    np.add(magnitude.view(np.float32), total.view(np.float32), total.view(np.float32))
    # The upper half of the product is the lower half of the sum, and the sum from its 13th bit on.
    np.multiply(total, _FOLD, total)
    np.bitwise_and(bits, _SIGN, magnitude)
    np.bitwise_or(total, magnitude, total)
    np.right_shift(total, _SIXTEEN, total)
    np.copyto(halves.view(np.uint16), total, casting="same_kind")


def widen_float16(halves: Array, singles: Array) -> None:
    """Write a vector of float16 as float32."""
    if _SUBNORMAL + _SUBNORMAL == 0:  # Somebody has told the processor to take subnormal numbers for zero.
        np.copyto(singles, halves)
        return
    if converted(halves, singles, "float16"):
        return
    for block in blocks(len(halves)):
        _widen_block(halves[block], singles[block])


def _widen_block(halves: Array, singles: Array) -> None:
    """Widen a block: with its bits in a float32's places, a half is too small by 2^112, be it subnormal or not."""
    signed, unsigned = halves.view(np.int16), halves.view(np.uint16)
    if np.maximum.reduce(signed) >= 0x7C00 or np.maximum.reduce(unsigned) >= 0xFC00:
        np.copyto(singles, halves)  # infinity and NaN
        return
    bits = singles.view(np.uint32)
    np.copyto(singles.view(np.int32), signed)
    np.left_shift(bits, _THIRTEEN, bits)
    np.bitwise_and(bits, _SIGN_OF_HALF, bits)
    np.multiply(singles, _REBIAS, singles)


# -- bfloat16, as vectors of uint16, for NumPy has no such dtype

_JUST_BELOW_HALF: Final = _word(0x7FFF)
_QUIET: Final = _word(0x40)


def round_to_bfloat16(values: Array, halves: Array) -> None:
    """Round a vector of float32 to bfloat16, to nearest and even; one of float64 is rounded to float32 first."""
    if converted(values, halves, "bfloat16"):
        return
    for block in blocks(len(values)):
        _round_block_to_bfloat16(single(values[block]), halves[block])


def _round_block_to_bfloat16(singles: Array, halves: Array) -> None:
    """Round a block: add to the bits half of what is cut off, less one where that makes a tie even.

    A NaN keeps its upper half with the quiet bit set, since its lower half may be all it has.
    """
    bits, rounded = singles.view(np.uint32), scratch.others[: len(singles)]
    np.right_shift(bits, _SIXTEEN, rounded)
    np.bitwise_and(rounded, _ONE, rounded)
    np.add(rounded, _JUST_BELOW_HALF, rounded)
    np.add(rounded, bits, rounded)
    np.right_shift(rounded, _SIXTEEN, rounded)
    np.copyto(halves, rounded, casting="same_kind")
    if np.isnan(np.maximum.reduce(singles)):
        np.copyto(halves, (bits >> _SIXTEEN) | _QUIET, where=np.isnan(singles), casting="same_kind")


def widen_bfloat16(halves: Array, values: Array) -> None:
    """Write a vector of bfloat16 as float32 or float64."""
    if converted(halves, values, "bfloat16"):
        return
    in_place = values.dtype == np.float32
    for block in blocks(len(values)):
        own = values[block]
        wide = own if in_place else scratch.singles[: len(own)]
        bits = wide.view(np.uint32)
        np.copyto(bits, halves[block])
        np.left_shift(bits, _SIXTEEN, bits)
        if not in_place:
            np.copyto(own, wide)
