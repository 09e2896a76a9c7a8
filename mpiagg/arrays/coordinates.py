"""How ascending coordinates travel in few bits."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np

from mpiagg.arrays.devices import Device
from mpiagg.arrays.reductions import Array

INDEX: Final = np.dtype(np.int64)
"""What coordinates are on a rank."""


class Coordinates:
    """Write ``count`` ascending coordinates of a vector of some length in at most 2 + log2(length / count) bits each.

    The lowest l = floor(log2(length / count)) bits of each coordinate travel as they are. Of what is above them, the
    i-th coordinate sets bit (coordinate >> l) + i in a row of bits that were zero: so the j-th bit that is set says
    what is above in the j-th coordinate, less j. Where few of many are chosen, no code could take 0.6 bits a coordinate
    less.

    The bits of a message are those lowest bits, all of the lowest place first, and then the row. Where the last byte
    has room it has zeros.

    Parameters
    ----------
    device : Device
        Where coordinates and messages lie.
    count, length : int
        How many coordinates a message has, and of how many they are chosen.

    Attributes
    ----------
    nbytes : int
        The length of a message.

    Notes
    -----
    Sources: R. M. Fano, "On the number of bits required to implement an associative memory", MIT Project MAC, 1971;
    P. Elias, "Efficient storage and retrieval by content and address of static files", Journal of the ACM 21, 1974.
    """

    def __init__(self, device: Device, count: int, length: int) -> None:
        self._device, self._count = device, count
        self._low = (length // count).bit_length() - 1 if count else 0
        self._cut = self._low * count
        self._end = self._cut + (count + (length >> self._low) if count else 0)
        self.nbytes = -(-self._end // 8)

    def encode(self, coordinates: Array, encoded: Array) -> None:
        """Write coordinates as a vector of ``nbytes`` bytes."""
        bits = self._device.empty(8 * self.nbytes, np.bool_)
        bits[self._cut :] = False
        for place, row in enumerate(bits[: self._cut].reshape(self._low, self._count)):
            np.not_equal(coordinates & (1 << place), 0, out=row)
        bits[self._cut + (coordinates >> self._low) + self._order] = True
        encoded[...] = np.packbits(bits)

    def decode(self, encoded: Array) -> Array:
        """Return the coordinates that were written.

        Raises
        ------
        ValueError
            If there are not so many in it.
        """
        bits = np.unpackbits(encoded)[: self._end].view(np.bool_)  # in which NumPy counts faster
        high = np.flatnonzero(bits[self._cut :])
        if len(high) != self._count:
            raise ValueError(f"{len(high)} coordinates, not {self._count}")
        coordinates: Array = (high - self._order) << self._low
        for place, row in enumerate(bits[: self._cut].reshape(self._low, self._count)):
            coordinates |= row.astype(INDEX) << place
        return coordinates

    @cached_property
    def _order(self) -> Array:
        return self._device.from_host(np.arange(self._count, dtype=INDEX))
