"""Which coordinates of a tensor are sent: the largest, or some at random.

Values are vectors, and coordinates are int64. A NaN counts as infinitely large: it is sent, and not kept unseen.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final, Literal

import numpy as np

from mpiagg.arrays import Array, accelerator_of

Selection = Literal["topk", "randomk", "blockk", "threshold"]

FEWEST_GROUPS: Final = 256
SMALLEST_GROUP: Final = 4
"""Of values whose maxima are looked at first: with fewer groups, or smaller ones, partitioning them all is as fast."""


def how_many(length: int, ratio: float) -> int:
    """Return how many of ``length`` coordinates a ratio means: rounded up, and none only of none."""
    # As the ratio is written: 0.07 * 100 is 7, not a little more.
    return max(1, math.ceil(Fraction(str(ratio)) * length)) if length else 0


def top_k(rows: Array, k: int, spare: Array) -> Array:
    """Return which are the k largest magnitudes of each row, in ascending order; of equal ones those that come first.

    Parameters
    ----------
    rows : numpy.ndarray
        A contiguous matrix.
    k : int
        From 1 to the length of a row.
    spare : numpy.ndarray
        A vector as long as the matrix, and of its dtype, which is overwritten.

    Returns
    -------
    numpy.ndarray
        Coordinates in the flat matrix, k for each row.
    """
    magnitudes, accelerator = _magnitudes(rows, spare), accelerator_of(rows)
    if accelerator is None:
        found = _among_candidates(magnitudes, k)
        if found is not None:
            return found
        least = None
    else:  # CuPy's partition sorts them all
        least = accelerator.kth_largest(magnitudes[0], k) if len(rows) == 1 else None
    if least is None:
        least = _kth_largest(magnitudes, k)
        magnitudes = _magnitudes(rows, spare)
    return np.flatnonzero(_are_largest(magnitudes, least, k))


def _among_candidates(magnitudes: Array, k: int) -> Array | None:
    """Return what :func:`top_k` does; or None where too many values come into question.

    Of 2 k groups or more that a row is divided into, the k-th largest maximum is a bound: k values at least are not
    below it, and usually few more. Among these alone the k largest are looked for.
    """
    count, length = magnitudes.shape
    many = max(2 * k, FEWEST_GROUPS)
    size = length // many
    if size < SMALLEST_GROUP or not count:
        return None
    largest = magnitudes[:, : size * many].reshape(count, size, many).max(axis=1)
    candidates = np.flatnonzero(magnitudes >= _kth_largest(largest, k))
    counts = np.diff(np.searchsorted(candidates, np.arange(count + 1) * length))
    widest = int(counts.max())
    if 2 * widest > length:
        return None
    taken = np.arange(widest) < counts[:, None]
    values = np.full((count, widest), -1, magnitudes.dtype)
    values[taken] = magnitudes.reshape(-1)[candidates]
    chosen: Array = candidates[_are_largest(values, _kth_largest(values.copy(), k), k)[taken]]
    return chosen


def _kth_largest(magnitudes: Array, k: int) -> Array:
    """Return a column of the k-th largest of each row, whose order is lost."""
    place = magnitudes.shape[1] - k
    magnitudes.partition(place, axis=1)
    least: Array = magnitudes[:, place, None].copy()
    return least


def _are_largest(magnitudes: Array, least: Array, k: int) -> Array:
    """Return which are the k largest of each row, of which the k-th is known; of equal ones those that come first."""
    if accelerator_of(magnitudes) is None:  # a device would be waited for
        largest: Array = magnitudes >= least
        if np.count_nonzero(largest) == k * len(magnitudes):
            return largest
    larger, equal = magnitudes > least, magnitudes == least
    if len(magnitudes) == 1:  # a long vector, perhaps: counting takes eight bytes a value
        equal[0, np.flatnonzero(equal)[k - larger.sum().item() :]] = False
    else:
        room = k - np.count_nonzero(larger, axis=1)
        equal &= np.cumsum(equal, axis=1) <= room[:, None]
    larger |= equal
    return larger


def at_least(values: Array, threshold: float, spare: Array) -> Array:
    """Return where magnitudes reach a threshold, in ascending order; ``spare`` is as for :func:`top_k`."""
    return np.flatnonzero(_magnitudes(values, spare) >= threshold)


def random_k(length: int, k: int, random: np.random.Generator) -> Array:
    """Return k different coordinates out of ``length``, in ascending order; all are equally likely."""
    return np.sort(random.choice(length, k, replace=False, shuffle=False))


def random_block(length: int, k: int, random: np.random.Generator) -> Array:
    """Return where a block of k coordinates starts, as a vector of one.

    Blocks start at the multiples of k. The last ends where the values end and overlaps the one before it, if k does not
    divide their length: so each coordinate has its turn, and each block has k.
    """
    block = random.integers(math.ceil(length / k), size=1)
    return np.minimum(block * k, length - k)


def _magnitudes(values: Array, spare: Array) -> Array:
    magnitudes = spare.view(np.empty(0, values.dtype).real.dtype)[: values.size].reshape(values.shape)
    np.abs(values, out=magnitudes)
    if accelerator_of(values) is not None or np.isnan(np.max(magnitudes, initial=0)):  # a device would be waited for
        # It takes the number where there is one: NaN becomes infinity, and all else stays.
        np.fmin(magnitudes, np.inf, out=magnitudes)
    return magnitudes
