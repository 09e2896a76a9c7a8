"""Sums whose bits do not depend on the order in which values are added: in fixed point, with a scale for each element.

All ranks first agree on the largest exponent that an element has on any of them. Each rank then rounds its own value to
a multiple of one power of two, which depends on that exponent and on the number of ranks alone. These multiples, and
all sums of them, are whole numbers of at most 53 bits, which float64 holds: no addition rounds, so the order is no
matter. What rounds comes after: the sum is divided, if it is an average, and brought to the vector's dtype.

The rounding to a grid, by adding a large number and subtracting it again, is that of Demmel and Nguyen, "Parallel
reproducible summation", IEEE Transactions on Computers 64 (2015), with the exponents of all ranks in place of bins.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Final

import numpy as np

from mpiagg.arrays.conversions import blocks
from mpiagg.arrays.devices import Accelerator
from mpiagg.arrays.reductions import Array
from mpiagg.arrays.where import device_of

BLOCK: Final = 2**14
"""How many elements are worked on at once, so that what lies between two steps stays in the cache."""

BLOCK_OF_DEVICE: Final = 2**22
"""The same on a device, where each step is a kernel."""

_ONE: Final = 1 << 52
"""One in the exponent of a float64's bits."""

_HALF: Final = 1 << 51
"""One half in its significand: what is added to a value has a power of two on each side that is far enough away."""

_SCALED: Final = 64
"""Values of float64 are multiplied by 2**64, and the larger half of them by 2**-64, so that no sum leaves its range."""


class ExactSum:
    """The part of one rank in sums of vectors of a length, one at a time.

    Vectors are one-dimensional and contiguous.

    Parameters
    ----------
    vector : array of float32 or float64
        Of the length and dtype, and on the device, that the others have.
    size : int
        How many ranks there are.
    words : array of float64, optional
        Room for ``words_of(vector)`` numbers.

    Attributes
    ----------
    exponents : array of uint8 or uint16
        Those of the elements, with IEEE's bias. All ranks take the largest of each before they come to :meth:`split`.
    words : array of float64
        What all ranks add, by any additions in any order, before they come to :meth:`total`.
    """

    def __init__(self, vector: Array, size: int, words: Array | None = None) -> None:
        device = device_of(vector)
        self._double = vector.dtype.itemsize == 8
        self.exponents = device.empty(vector.size, np.uint16 if self._double else np.uint8)
        self.words = device.empty(self.words_of(vector), np.float64) if words is None else words
        self._block = min(vector.size, BLOCK_OF_DEVICE if isinstance(device, Accelerator) else BLOCK)
        self._bits = device.empty(self._block, np.int64)
        self._more = device.empty(self._block if self._double else 0, np.int64)
        self._nan = device.empty(self._block, np.bool_)
        # A value is less than 2**53 parts of the grid, and the sum of all ranks' at most that.
        self._room = max(0, (size - 1).bit_length() - 2)

    def of(self, vector: Array) -> ExactSum:
        """Return the same for a vector that is shorter, in the same memory."""
        part = copy.copy(self)
        part.exponents, part.words = self.exponents[: vector.size], self.words[: self.words_of(vector)]
        return part

    @staticmethod
    def words_of(vector: Array) -> int:
        """Return how many words the values of a vector are split into: one each for float32, two for float64."""
        return vector.size * vector.dtype.itemsize // 4

    @property
    def nbytes(self) -> int:
        """The memory that belongs to it."""
        return sum(each.nbytes for each in (self.exponents, self.words, self._bits, self._more, self._nan))

    def find_exponents(self, vector: Array) -> None:
        """Write the exponents of this rank's values."""
        values = vector.view(np.uint64 if self._double else np.uint32)
        for block, bits, _ in self._blocks():
            if self._double:
                np.right_shift(values[block], 52, out=bits.view(np.uint64))
                np.bitwise_and(bits, 0x7FF, out=bits)
                np.copyto(self.exponents[block], bits, casting="unsafe")
            else:
                found = bits.view(np.uint32)[: bits.size]
                np.right_shift(values[block], 23, out=found)
                np.copyto(self.exponents[block], found, casting="unsafe")  # without the sign, the ninth bit

    def split(self, vector: Array) -> None:
        """Write this rank's words: its values, rounded to the grids that the exponents say."""
        # What is infinite has no rest, and what is too small beside others is nothing: neither is a fault.
        with np.errstate(invalid="ignore", under="ignore"):
            self._split(vector)

    def _split(self, vector: Array) -> None:
        for block, bits, high in self._blocks():
            grid = bits.view(np.float64)
            if not self._double:
                np.copyto(bits, self.exponents[block])
                np.left_shift(bits, 52, out=bits)
                np.add(bits, (1023 - 127 + 2 + self._room) * _ONE + _HALF, out=bits)
                np.copyto(high, vector[block])
                _round(high, grid, high)
                continue
            low, exponents = self._low(block), self._more[: bits.size]
            self._scale(block, bits, _SCALED)
            np.multiply(vector[block], grid, out=low)
            np.copyto(exponents, self.exponents[block])
            np.left_shift(exponents, 52, out=exponents)
            np.add(bits, exponents, out=bits)  # modulo 2**64
            np.add(bits, (2 + self._room - 1023) * _ONE + _HALF, out=bits)
            _round(low, grid, high)
            np.subtract(low, high, out=low)
            np.multiply(grid, 2.0 ** (self._room - 52), out=grid)
            _round(low, grid, low)

    def total(self, vector: Array, divisor: float | None) -> None:
        """Write the sum that the words are now, divided, to a vector."""
        with np.errstate(under="ignore"):
            self._total(vector, divisor)

    def _total(self, vector: Array, divisor: float | None) -> None:
        for block, bits, total in self._blocks():
            nan = self._nan[: bits.size]
            if self._double:
                low = self._low(block)
                np.isnan(low, out=nan)
                np.copyto(low, 0, where=nan)  # the first word says what it is
                np.add(total, low, out=total)
            if divisor is not None:
                np.divide(total, divisor, out=total)
            if self._double:
                self._scale(block, bits, -_SCALED)
                np.multiply(total, bits.view(np.float64), out=total)
            np.isnan(total, out=nan)
            np.copyto(total, np.nan, where=nan)  # of two that are added, it depends on the order which one stays
            np.copyto(vector[block], total, casting="same_kind")

    def _blocks(self) -> Iterator[tuple[slice, Array, Array]]:
        """Yield the ranges of the blocks, with room for 64 bits an element, and their first words."""
        for part in blocks(self.exponents.size, max(1, self._block)):
            yield part, self._bits[: part.stop - part.start], self.words[part]

    def _low(self, block: slice) -> Array:
        """Return the second words of a block."""
        return self.words[block.start + self.exponents.size : block.stop + self.exponents.size]

    def _scale(self, block: slice, bits: Array, power: int) -> None:
        """Write the bits of 2**power for the lower half of all exponents, and of 2**-power for the upper."""
        np.copyto(bits, self.exponents[block])
        np.right_shift(bits, 10, out=bits)
        np.multiply(bits, -2 * power * _ONE, out=bits)
        np.add(bits, (1023 + power) * _ONE, out=bits)


def _round(values: Array, grid: Array, out: Array) -> None:
    """Round values to multiples of the last bit of 1.5 * 2**k, which the grid says, where they are at most 2**(k-1)."""
    np.add(values, grid, out=out)
    np.subtract(out, grid, out=out)
