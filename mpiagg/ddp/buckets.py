"""Buckets: gradients put together in vectors of one dtype, laid out once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpiagg.arrays import Array, cuts_of, ranges, same_memory

FIRST_BUCKET_BYTES: Final = 2**20
"""How long the first bucket is at most: it is full early in the backward pass, so that sending starts early."""

Form = tuple[np.dtype[Any], tuple[int, ...]]
"""The dtype and shape of a parameter."""


Allocate = Callable[[int, np.dtype[Any]], Array]
"""Returns a vector of so many elements, uninitialised."""


def fill_buckets(forms: Sequence[Form], cap: int) -> list[list[int]]:
    """Return which parameters share a bucket, from the last parameter to the first.

    Backward passes reach the last parameter first, so its bucket is full first. A bucket holds one dtype, and is closed
    before the next parameter would make it longer than ``cap`` bytes; a longer parameter has one alone. Until the first
    is closed, buckets have ``FIRST_BUCKET_BYTES`` at most.

    Returns
    -------
    list of lists of int
        The parameters of each bucket, the buckets in the order in which a backward pass fills them.
    """
    buckets: list[list[int]] = []
    filling: dict[np.dtype[Any], list[int]] = {}
    length: dict[np.dtype[Any], int] = {}
    limit = min(FIRST_BUCKET_BYTES, cap)
    for index in reversed(range(len(forms))):
        dtype, shape = forms[index]
        nbytes = math.prod(shape) * dtype.itemsize
        if dtype in filling and length[dtype] + nbytes > limit:
            limit = cap
            del filling[dtype]
        if dtype not in filling:
            filling[dtype], length[dtype] = [], 0
            buckets.append(filling[dtype])
        filling[dtype].append(index)
        length[dtype] += nbytes
    return sorted(buckets, key=min, reverse=True)


class Bucket:
    """The gradients of some parameters in one vector.

    Attributes
    ----------
    vector : numpy.ndarray
        All of them, one after the other.
    views : dict of int to numpy.ndarray
        For each parameter its part of the vector, in the parameter's shape.
    """

    def __init__(self, members: Sequence[int], forms: Sequence[Form], allocate: Allocate = np.empty) -> None:
        cuts = cuts_of([math.prod(forms[index][1]) for index in members])
        self.vector = allocate(cuts[-1], forms[members[0]][0])
        self.vector.fill(0)
        self.views = {
            index: self.vector[start:stop].reshape(forms[index][1])
            for index, (start, stop) in zip(members, ranges(cuts), strict=True)
        }

    def place(self, index: int, gradient: Array | None) -> None:
        """Bring a parameter's gradient in, unless it is there; a missing one counts as zeros."""
        view = self.views[index]
        if gradient is None:
            view.fill(0)
        elif not same_memory(gradient, view):
            np.copyto(view, gradient)

    def pack(self, gradients: Sequence[Array | None]) -> None:
        """Bring all the gradients in."""
        for index in self.views:
            self.place(index, gradients[index])

    def unpack(self, gradients: Sequence[Array | None]) -> None:
        """Bring the gradients that are not missing back out, unless they are views of the bucket."""
        for index, view in self.views.items():
            gradient = gradients[index]
            if gradient is not None and not same_memory(gradient, view):
                np.copyto(gradient, view)
