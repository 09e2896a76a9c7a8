"""Which coordinates of a tensor are sent: the largest, or some at random.

Values are vectors, and coordinates are int64. A NaN counts as infinitely large: it is sent, and not kept unseen.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import numpy as np

from mpiagg.arrays import Array, accelerator_of

Selection = Literal["topk", "randomk", "blockk", "threshold"]


def how_many(length: int, ratio: float) -> int:
    """Return how many of ``length`` coordinates a ratio means: rounded up, and none only of none."""
    # As the ratio is written: 0.07 * 100 is 7, not a little more.
    return max(1, math.ceil(Fraction(str(ratio)) * length)) if length else 0


def top_k(values: Array, k: int, spare: Array) -> Array:
    """Return where the k largest magnitudes are, in ascending order; of equal ones those that come first.

    Parameters
    ----------
    values : numpy.ndarray
        A vector.
    k : int
        From 1 to its length.
    spare : numpy.ndarray
        A vector like it, which is overwritten.
    """
    magnitudes, accelerator = _magnitudes(values, spare), accelerator_of(values)
    if accelerator is None:
        magnitudes.partition(len(values) - k)
        least = magnitudes[len(values) - k]
        magnitudes = _magnitudes(values, spare)
    else:  # CuPy's partition sorts them all
        least = accelerator.kth_largest(magnitudes, k)
    larger = np.flatnonzero(magnitudes > least)
    equal = np.flatnonzero(magnitudes == least)
    return np.sort(np.concatenate([larger, equal[: k - len(larger)]]))


def top_k_of_rows(rows: Array, k: int, spare: Array) -> Array:
    """Return where the k largest magnitudes of each row are, in ascending order; of equal ones those that come first.

    Parameters
    ----------
    rows : numpy.ndarray
        A contiguous matrix.
    k : int
        From 1 to the length of a row.
    spare : numpy.ndarray
        A vector like the matrix, which is overwritten.

    Returns
    -------
    numpy.ndarray
        A row of k places for each row.
    """
    count, length = rows.shape
    magnitudes = _magnitudes(rows.reshape(-1), spare).reshape(rows.shape)
    magnitudes.partition(length - k, axis=1)
    least = magnitudes[:, length - k : length - k + 1].copy()
    magnitudes = _magnitudes(rows.reshape(-1), spare).reshape(rows.shape)
    larger, equal = magnitudes > least, magnitudes == least
    room = k - np.count_nonzero(larger, axis=1)
    chosen = larger | (equal & (np.cumsum(equal, axis=1) <= room[:, None]))
    return np.nonzero(chosen)[1].reshape(count, k)


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
    magnitudes = spare.view(np.empty(0, values.dtype).real.dtype)[: len(values)]
    np.abs(values, out=magnitudes)
    # It takes the number where there is one: NaN becomes infinity, and all else stays.
    np.fmin(magnitudes, np.inf, out=magnitudes)
    return magnitudes
