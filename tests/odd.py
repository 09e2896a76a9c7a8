"""Odd values for the arguments of everything that users call."""

import math
from collections import namedtuple
from copy import deepcopy

import numpy as np
from hypothesis import strategies as st

import mpiagg

ALLOWED = (mpiagg.Error, ValueError, TypeError)
"""What may come of bad arguments."""


class Unfriendly:
    """Compares to nothing, and says nothing of itself."""

    __hash__ = None
    __eq__ = None

    def __repr__(self):
        return "\ud800"


def read_only(array):
    array.flags.writeable = False
    return array


SCALARS = (
    *(None, True, False, 0, 1, -1, 2, 63, 10**6, 2**50, 2**63, 10**400, 0.0, 1.5, -2.5, 1j),
    *(math.nan, math.inf, -math.inf, np.float32(0.5), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1)),
    *("", "x", "auto", "native", "nccl", "ring", "shared", "u8", "fp16", "avg", "\0", "\ud800", "é" * 100, b"ring"),
    *(object, Unfriendly(), math.sin, len, ..., NotImplemented, ValueError("no"), range(3), slice(2)),
)
LISTS = ([], {}, (), set(), [None], [[]], [1, "x"], {"x": 1}, [[1, 2], [3]], namedtuple("Pair", "a b")(1, 2))  # noqa: PYI024 - an odd one is wanted
ARRAYS = (
    *(np.arange(6.0), np.arange(6), np.ones(6, bool), np.ones((2, 3), np.float16), np.array(3.0), np.empty((0, 4))),
    *(np.ones(6, complex), np.zeros(6, ">f8"), np.zeros(6, "i4,f4"), np.array(["a"] * 6), np.array([None] * 6)),
    *(
        np.zeros(6, "M8[s]"),
        read_only(np.zeros(6)),
        np.broadcast_to(1.0, (6,)),
        np.arange(12.0)[::-2],
        np.full(6, np.nan),
    ),
    *(np.asfortranarray(np.ones((2, 3))), np.ma.masked_array([1.0] * 6, [True] * 6), np.ones((1,) * 32), np.ones(7)),
)


def every():
    """Return all odd values, new ones: what a call has changed must not be what the next one gets."""
    return (*SCALARS, *deepcopy(LISTS), *map(_copy, ARRAYS))


def _copy(array):
    writeable, strides = array.flags.writeable, array.strides
    copy = array[:0] if array.size == 0 else deepcopy(array)
    if array.ndim == 1 and strides[0] < 0:
        copy = copy[::-1].copy()[::-1]
    copy.flags.writeable = writeable
    return copy


odd = st.integers(0, len(every()) - 1).map(lambda number: every()[number])


def kept(value):
    """Return what shows whether a value has been changed."""
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.dtype != object else value.tolist()
    if isinstance(value, list | tuple):
        return [kept(each) for each in value]
    return None
