"""Buckets: gradients put together in vectors of one dtype, laid out once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, Final

import numpy as np

from mpiagg.arrays import Array, Device, Form, accelerator_of, cuts_of, ranges, same_memory, settle
from mpiagg.ddp.adapters import Source

FIRST_BUCKET_BYTES: Final = 2**20
"""How long the first bucket is at most: it is full early in the backward pass, so that sending starts early."""

Allocate = Callable[[int, np.dtype[Any], Device], Array]
"""Returns a vector of so many elements of a dtype on a device, uninitialised."""


def _anywhere(length: int, dtype: np.dtype[Any], device: Device) -> Array:
    return device.empty(length, dtype)


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
    filling: dict[tuple[np.dtype[Any], Device], list[int]] = {}
    length: dict[tuple[np.dtype[Any], Device], int] = {}
    limit = min(FIRST_BUCKET_BYTES, cap)
    for index in reversed(range(len(forms))):
        dtype, shape, device = forms[index]
        kind = dtype, device
        nbytes = math.prod(shape) * dtype.itemsize
        if kind in filling and length[kind] + nbytes > limit:
            limit = cap
            del filling[kind]
        if kind not in filling:
            filling[kind], length[kind] = [], 0
            buckets.append(filling[kind])
        filling[kind].append(index)
        length[kind] += nbytes
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

    def __init__(self, members: Sequence[int], forms: Sequence[Form], allocate: Allocate = _anywhere) -> None:
        cuts = cuts_of([math.prod(forms[index].shape) for index in members])
        self.vector = allocate(cuts[-1], forms[members[0]].dtype, forms[members[0]].device)
        self.vector.fill(0)
        self.views = {
            index: self.vector[start:stop].reshape(forms[index].shape)
            for index, (start, stop) in zip(members, ranges(cuts), strict=True)
        }
        picked: Any = itemgetter(*members)
        self._pick = picked if len(members) > 1 else lambda gradients: (picked(gradients),)
        accelerator = accelerator_of(self.vector)
        self._brought_in = None if accelerator is None else accelerator.stream()
        self._source: Source | None = None
        self._pairs: list[tuple[Any, Any]] = []
        settle(self.vector)

    def when_brought_in(self) -> AbstractContextManager[object]:
        """Return a block in which what is asked of a device waits for all gradients, whatever stream they came in."""
        return nullcontext() if self._brought_in is None else self._brought_in

    def place(self, gradients: Mapping[int, Array | None]) -> None:
        """Bring some parameters' gradients in, unless they are there; a missing one counts as zeros."""
        for index, gradient in gradients.items():
            view = self.views[index]
            if gradient is None:
                view.fill(0)
            elif gradient is not view and (_surely_apart(gradient, view) or not same_memory(gradient, view)):
                np.copyto(view, gradient)
        if self._brought_in is not None:
            self._brought_in.follow()

    def take(self, pair: tuple[Any, Any], source: Source) -> None:
        """Have a gradient copied by its source, together with others that come from there."""
        if source is not self._source:  # those so far are waited for where they come from
            self.close()
            self._source = source
        self._pairs.append(pair)

    def close(self) -> None:
        """Have all that was taken copied, and wait for that before the bucket is sent."""
        if self._source is not None:
            source, pairs, self._source, self._pairs = self._source, self._pairs, None, []
            source.copy(pairs)
            if self._brought_in is not None:
                with source.inside():
                    self._brought_in.follow()

    def pack(self, gradients: Sequence[Array | None], copied: Collection[int] | None = None) -> None:
        """Bring all the gradients in; those that are ``copied``, where that is known of arrays of NumPy's."""
        if copied is None:
            self.place({index: gradients[index] for index in self.views})
        elif len(copied) == len(gradients):
            np.concatenate(self._pick(gradients), axis=None, out=self.vector)
        else:
            for index in copied:
                if index in self.views:
                    np.copyto(self.views[index], gradients[index])  # type: ignore[arg-type]  # none is missing

    def unpack(self, gradients: Sequence[Array | None], copied: Collection[int] | None = None) -> None:
        """Bring the gradients that are not missing back out, unless they are views of the bucket; as :meth:`pack`."""
        if copied is not None:
            whole = len(copied) == len(gradients)
            for index, view in self.views.items():
                if whole or index in copied:
                    gradients[index][...] = view  # type: ignore[index]  # none is missing
            return
        for index, view in self.views.items():
            gradient = gradients[index]
            if gradient is not None and gradient is not view and not same_memory(gradient, view):
                np.copyto(gradient, view)
        settle(self.vector)


def _surely_apart(gradient: Array, view: Array) -> bool:
    """Whether arrays of NumPy's have no memory in common, as is quickly seen."""
    return isinstance(view, np.ndarray) and not np.may_share_memory(gradient, view)
