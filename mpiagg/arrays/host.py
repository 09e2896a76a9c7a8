"""NumPy arrays behind the small face that the floors above use: views, addresses, memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpiagg.arrays.reductions import Array, working_dtype


def as_input(x: object) -> Array:
    """Return ``x`` as an array that can travel.

    Raises
    ------
    TypeError
        If its dtype is not a number.
    """
    array = np.asarray(x)
    working_dtype(array.dtype)
    return array


def check_output(out: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return ``out`` if a result of ``shape`` and ``dtype`` can be written to it.

    Raises
    ------
    TypeError
        If it is not an array, or of another dtype.
    ValueError
        If it is of another shape, or read-only.
    """
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, not {type(out).__name__}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, the result has {dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, the result has {shape}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    return out


def flat(array: Array) -> Array | None:
    """Return a one-dimensional view of all elements in C order, or None where there is no such view."""
    return array.reshape(-1) if array.flags.c_contiguous else None


def address(array: Array) -> int:
    """Return where the first element lies."""
    pointer: int = array.__array_interface__["data"][0]
    return pointer


def same_memory(x: Array, view: Array) -> bool:
    """Return whether a contiguous view and ``x`` are the same elements in the same order, so that no copy is needed."""
    return x.dtype == view.dtype and x.shape == view.shape and x.flags.c_contiguous and address(x) == address(view)


def joined(arrays: Sequence[Array]) -> Array | None:
    """Return arrays that lie one after the other in memory as one vector, or None where they do not."""
    filled = [x for x in arrays if x.size]
    if not filled or not all(x.flags.c_contiguous and x.dtype == filled[0].dtype for x in filled):
        return None
    start = end = address(filled[0])
    for x in filled:
        if address(x) != end:
            return None
        end += x.nbytes
    return borrow(start, sum(x.size for x in filled), filled[0].dtype, filled)


def borrow(start: int, length: int, dtype: npt.DTypeLike, owner: object = None) -> Array:
    """Return an array over memory that somebody else owns: ``owner``, or who keeps it alive while it is used."""
    wanted = np.dtype(dtype)
    if length == 0:
        return np.empty(0, wanted)
    memory = (ctypes.c_char * (length * wanted.itemsize)).from_address(start)
    memory.owner = owner  # type: ignore[attr-defined]  # kept alive with the memory
    borrowed: Array = np.frombuffer(memoryview(memory), wanted)
    return borrowed


def scratch(length: int, dtype: npt.DTypeLike) -> Array:
    """Return uninitialised memory for ``length`` elements."""
    return np.empty(length, dtype)
