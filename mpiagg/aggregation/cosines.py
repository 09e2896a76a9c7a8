"""Cosine transforms of tensors, chunk by chunk: what is smooth in a chunk is in few coefficients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from mpiagg.arrays import Array, Device


class Region(NamedTuple):
    """Chunks of one shape, which tile a part of a matrix.

    Attributes
    ----------
    start : int
        Where their coefficients start in the vector: those of a chunk lie one after the other.
    rows, columns : slice
        Which part of the matrix.
    down, across : int
        How many chunks there are.
    height, width : int
        Of each.
    """

    start: int
    rows: slice
    columns: slice
    down: int
    across: int
    height: int
    width: int

    @property
    def chunks(self) -> int:
        """How many there are."""
        return self.down * self.across

    @property
    def length(self) -> int:
        """How many coefficients a chunk has."""
        return self.height * self.width


@cache
def cosines(length: int) -> Array:
    """Return the matrix of the orthonormal cosine transform (DCT-II) of so many values, in float64."""
    waves, places = np.arange(length)[:, None], np.arange(length)[None, :]
    matrix: Array = np.sqrt(2 / length) * np.cos(np.pi * (2 * places + 1) * waves / (2 * length))
    matrix[0] /= np.sqrt(2)
    return matrix


class CosineTransform:
    """The transform of tensors that lie in a vector one after the other, into a vector of coefficients, and back.

    A tensor is a matrix with its first dimension for rows; one of fewer than two dimensions is a row. It is cut into
    squares of ``side`` from its first element on; at its edges they are smaller.

    Parameters
    ----------
    shapes : sequence of tuple of int
        The tensors'.
    side : int
        How long the sides of a chunk are.
    dtype : numpy.dtype
        In which it is computed.
    device : Device
        Where the vectors lie.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], side: int, dtype: np.dtype[np.generic], device: Device
    ) -> None:
        self._matrices: list[tuple[int, int, int, list[Region]]] = []
        start = 0
        for shape in shapes:
            rows = shape[0] if len(shape) > 1 else 1
            columns = math.prod(shape[1:] if len(shape) > 1 else shape)
            if rows * columns:
                self._matrices.append((start, rows, columns, list(_regions(start, rows, columns, side))))
            start += rows * columns
        sizes = {size for region in self.regions for size in (region.height, region.width)}
        self._cosines = {size: device.from_host(cosines(size).astype(dtype)) for size in sizes}

    @property
    def regions(self) -> list[Region]:
        """All chunks, in the order of their coefficients."""
        return [region for *_, regions in self._matrices for region in regions]

    def forward(self, values: Array, coefficients: Array) -> None:
        """Write the coefficients of values."""
        for tiles, places, left, right in self._parts(values, coefficients):
            places[...] = left @ tiles @ right.T

    def back(self, coefficients: Array, values: Array) -> None:
        """Write the values of coefficients."""
        for tiles, places, left, right in self._parts(values, coefficients):
            tiles[...] = left.T @ places @ right

    def _parts(self, values: Array, coefficients: Array) -> Iterator[tuple[Array, Array, Array, Array]]:
        """Yield the tiles of each region and their coefficients, chunk by chunk, and the matrices between them."""
        for start, rows, columns, regions in self._matrices:
            matrix = values[start : start + rows * columns].reshape(rows, columns)
            for region in regions:
                _, _, _, down, across, height, width = region
                part = matrix[region.rows, region.columns]
                # To split axes is a view of what lies apart, too.
                tiles = part.reshape(down, height, across, width).swapaxes(1, 2)
                own = coefficients[region.start : region.start + region.chunks * region.length]
                yield tiles, own.reshape(down, across, height, width), self._cosines[height], self._cosines[width]


def _regions(start: int, rows: int, columns: int, side: int) -> Iterator[Region]:
    for first, down, height in _runs(rows, side):
        for second, across, width in _runs(columns, side):
            own = slice(first, first + down * height), slice(second, second + across * width)
            yield Region(start, *own, down, across, height, width)
            start += down * height * across * width


def _runs(length: int, side: int) -> Iterator[tuple[int, int, int]]:
    """Yield where parts of one length start, how many there are, and how long each is."""
    whole, rest = divmod(length, side)
    if whole:
        yield 0, whole, side
    if rest:
        yield whole * side, 1, rest
