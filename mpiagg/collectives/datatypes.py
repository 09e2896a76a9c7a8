"""MPI's predefined datatypes: how long each is, and which of MPI's operators we combine it with, and how.

What is not here, derived datatypes and operators of the user's among it, is for the MPI library.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array, Combine, Reduction, reduction
from mpiagg.collectives.mpi_ops import op_name
from mpiagg.common.once import once
from mpiagg.plans.native import PAIRS

_LOGICAL: Final = ("land", "lor", "lxor")
_BITWISE: Final = ("band", "bor", "bxor")
_INTEGER: Final = ("sum", "prod", "min", "max", *_LOGICAL, *_BITWISE)
_OPS: Final[dict[str, tuple[str, ...]]] = {
    "b": _LOGICAL,
    "i": _INTEGER,
    "u": _INTEGER,
    "f": ("sum", "prod", "min", "max"),
    "c": ("sum", "prod"),
}
"""The operators that MPI defines for each kind of number, in NumPy's letters.

BYTE is taken for a number, as some MPI libraries do.
"""

# Fortran's truth need not be C's, and a quadruple is no long double, though its typestr is.
_NOT_NUMBERS: Final = {
    getattr(MPI, name).handle
    for name in ("PACKED", "LOGICAL", "LOGICAL1", "LOGICAL2", "LOGICAL4", "LOGICAL8", "REAL16", "COMPLEX32")
}

_PREDEFINED: Final = {
    thing.handle: thing
    for thing in vars(MPI).values()
    if isinstance(thing, MPI.Datatype) and thing != MPI.DATATYPE_NULL
}
_DTYPES: Final = {np.dtype(code).str[1:]: np.dtype(code) for code in "?bhilqBHILQfdgFDG"}
"""The dtypes of numbers by their type strings, as ``MPI.Datatype.typestr`` spells them."""

_NUMBER: Final = {
    handle: _DTYPES[datatype.typestr]
    for handle, datatype in _PREDEFINED.items()
    if datatype.typestr in _DTYPES and handle not in _NOT_NUMBERS
}
"""The dtype of every datatype of numbers, by the datatype's handle."""

_HALVES: Final = {handle: np.dtype(np.float16) for handle, datatype in _PREDEFINED.items() if datatype.typestr == "f2"}


Datatype = MPI.Datatype | np.dtype[Any]
"""A datatype of MPI's; for half precision NumPy's: not every MPI library has one, and those that have combine in it."""


@once
def _identities() -> int:
    return MPI.Datatype.Create_keyval()


def identity(datatype: MPI.Datatype) -> Hashable:
    """Return what tells a datatype from all others, those among them that were freed and whose handle it has.

    Raises
    ------
    TypeError
        If it is none.
    """
    handle = datatype.handle
    if handle in _PREDEFINED:
        return handle
    try:
        found = datatype.Get_attr(_identities())
    except MPI.Exception:
        raise TypeError("no datatype") from None
    if found is None:  # it stays until the datatype is freed
        datatype.Set_attr(_identities(), found := object())
    return found


def half_of(thing: object) -> np.dtype[Any] | None:
    """Return the dtype of an array of half precision; None for others."""
    dtype = getattr(thing, "dtype", None)
    return dtype if isinstance(dtype, np.dtype) and _is_half(dtype) else None


@cache  # its name takes longer
def _is_half(dtype: np.dtype[Any]) -> bool:
    return dtype.name in {"float16", "bfloat16"} and dtype.isnative  # mpi4py refuses others


def half_or_itself(datatype: MPI.Datatype) -> Datatype:
    """Return NumPy's half precision for MPI's, and any other datatype as it is."""
    return _HALVES.get(datatype.handle, datatype)


def is_mpis(datatype: Datatype) -> bool:
    """Whether the MPI library can be given numbers of a datatype, as arrays."""
    return not isinstance(datatype, np.dtype) or (datatype.name == "float16" and bool(_HALVES))


def extent_of(datatype: Datatype) -> int | None:
    """Return the bytes from one element to the next, or None if the datatype is not a predefined one."""
    return datatype.itemsize if isinstance(datatype, np.dtype) else _extents().get(datatype.handle)


@cache  # asked of MPI, which must have been initialised
def _extents() -> dict[int, int]:
    """Return the bytes from one element to the next of every predefined datatype, by the datatype's handle."""
    return {handle: extent for handle, datatype in _PREDEFINED.items() if (extent := datatype.extent) > 0}


def reduction_of(datatype: Datatype, op: object) -> Reduction | None:
    """Return how we combine values of a datatype by an ``MPI.Op``, or None if that is for the MPI library."""
    if not isinstance(op, MPI.Op):
        return None
    if isinstance(datatype, np.dtype):
        half = op_name(op)
        return reduction(half, datatype, 1) if half in _OPS["f"] else None
    locating = _LOCATING.get(op.handle)
    if locating is not None:
        return _locating(datatype.handle, locating)
    name = op_name(op)
    return None if name is None else _reduction(datatype.handle, name)


def number_of(datatype: Datatype) -> np.dtype[Any] | None:
    """Return the dtype of numbers of a predefined datatype; None for what are no numbers."""
    return datatype if isinstance(datatype, np.dtype) else _NUMBER.get(datatype.handle)


@cache  # there are only so many
def _locating(datatype: int, name: str) -> Reduction | None:
    for code, pair in PAIRS.items():
        dtype = np.dtype([("value", code), ("index", "i")], align=True)
        if pair.handle == datatype and extent_of(pair) == dtype.itemsize:
            return Reduction(_LOCATORS[name], dtype, name)
    return None


@cache  # there are only so many
def _reduction(datatype: int, name: str) -> Reduction | None:
    dtype = _NUMBER.get(datatype)
    return None if dtype is None or name not in _OPS[dtype.kind] else reduction(name, dtype, 1)


def _locate(better: Callable[[Array, Array], Array], left: Array, right: Array, out: Array) -> None:
    """Take the pair with the better value; of equal ones that with the lower index."""
    tied = (left["value"] == right["value"]) & (right["index"] < left["index"])
    out[...] = np.where(better(right["value"], left["value"]) | tied, right, left)


_LOCATORS: Final[dict[str, Combine]] = {
    "maxloc": partial(_locate, np.greater),
    "minloc": partial(_locate, np.less),
}
_LOCATING: Final = {MPI.MAXLOC.handle: "maxloc", MPI.MINLOC.handle: "minloc"}
