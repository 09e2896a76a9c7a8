"""MPI's predefined operators and the names that this package has for them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array, Reduction, reduction

_PREDEFINED: Final[dict[str, MPI.Op]] = {
    "sum": MPI.SUM,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "prod": MPI.PROD,
    "land": MPI.LAND,
    "lor": MPI.LOR,
    "lxor": MPI.LXOR,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}
# MPI.Op cannot be hashed; its handle can.
_NAMES: Final[dict[int, str]] = {op.handle: name for name, op in _PREDEFINED.items()}


def op_name(op: MPI.Op) -> str | None:
    """Return the name of a predefined operator, or None if only the MPI library can apply it."""
    return _NAMES.get(op.handle)


_OF_BOOLEANS: Final[dict[str, MPI.Op]] = {"min": MPI.LAND, "max": MPI.LOR}
"""MPI's MIN and MAX are not for booleans; these are the same."""


def mpi_op(name: str, dtype: np.dtype[Any]) -> MPI.Op:
    """Return the MPI library's operator for a name and a dtype; an average starts as a sum."""
    if dtype.kind == "b" and name in _OF_BOOLEANS:
        return _OF_BOOLEANS[name]
    return _PREDEFINED.get(name, MPI.SUM)


def resolve(op: str | MPI.Op, dtype: np.dtype[Any], size: int) -> tuple[Reduction, MPI.Op, bool]:
    """Return how to reduce by ``op``, the MPI library's operator, and whether only the MPI library can do it.

    Raises
    ------
    ValueError
        If the op is unknown.
    TypeError
        If the op is not for this dtype.
    """
    if not isinstance(op, MPI.Op):
        how = reduction(op, dtype, size)
        return how, mpi_op(op, dtype), False
    name = op_name(op)
    if name is None and op.is_predefined:
        raise ValueError(
            f"this MPI.Op is not for arrays of numbers; known: {', '.join(_PREDEFINED)}, or an op of your own"
        )
    if name is None:
        return of_the_users(dtype), op, True
    return reduction(name, dtype, size), mpi_op(name, dtype), False


def of_the_users(dtype: np.dtype[Any]) -> Reduction:
    """Return what stands for an operator of the user's own, which only the MPI library can apply."""
    return Reduction(_by_mpi_alone, dtype, name="of the user's own")


def _by_mpi_alone(*_: Array) -> None:
    raise AssertionError("an operator of the user's is applied by the MPI library")
