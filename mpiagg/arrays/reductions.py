"""Operators: what ``op=`` takes, which dtypes each is for, and in which dtype values are combined.

Values of half precision (float16, bfloat16) are combined in float32 and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Combine = Callable[[Array, Array, Array], object]
"""``combine(left, right, out)``: as a NumPy ufunc takes its arguments."""

OPS: Final = ("sum", "avg", "min", "max", "prod")


def _minimum(left: Array, right: Array, out: Array) -> None:
    np.minimum(left, right, out=out)  # NumPy deprecates a third positional argument here


def _maximum(left: Array, right: Array, out: Array) -> None:
    np.maximum(left, right, out=out)


def _complex_product(left: Array, right: Array, out: Array) -> None:
    # NumPy rounds a single complex product otherwise in place than into other memory, and ranks that reduce the same
    # values by themselves do one and the other.
    if out.size == 1:
        np.copyto(out, np.multiply(left, right))
    else:
        np.multiply(left, right, out)


class _Operator(NamedTuple):
    combine: Combine
    kinds: str
    """The kinds of dtype it is for, in NumPy's letters."""


_OPERATORS: Final[dict[str, _Operator]] = {
    "sum": _Operator(np.add, "iufc"),
    "avg": _Operator(np.add, "fc"),
    "min": _Operator(_minimum, "biuf"),
    "max": _Operator(_maximum, "biuf"),
    "prod": _Operator(np.multiply, "iufc"),
    "land": _Operator(np.logical_and, "biu"),
    "lor": _Operator(np.logical_or, "biu"),
    "lxor": _Operator(np.logical_xor, "biu"),
    "band": _Operator(np.bitwise_and, "iu"),
    "bor": _Operator(np.bitwise_or, "iu"),
    "bxor": _Operator(np.bitwise_xor, "iu"),
}
"""The five of ``OPS`` by their names; the others are reached as MPI.LAND, MPI.BXOR and so on."""


@dataclass(frozen=True)
class Reduction:
    """An operator at work on one dtype.

    Attributes
    ----------
    combine : callable
        ``combine(left, right, out)`` combines two arrays into a third, which may be one of them.
    dtype : numpy.dtype
        The dtype in which values are combined, and travel.
    name : str
        The operator's name, by which kernels know it.
    divisor : float or None
        What the finished sum is divided by.
    """

    combine: Combine
    dtype: np.dtype[Any]
    name: str
    divisor: float | None = None

    def finish(self, chunk: Array) -> None:
        """Do in place what the operator does last, once every contribution is in."""
        if self.divisor is not None:
            np.divide(chunk, self.divisor, out=chunk)


def reduction(op: str, dtype: np.dtype[Any], divisor: float) -> Reduction:
    """Return the reduction for an op and a dtype; ``divisor`` is for averages.

    Raises
    ------
    ValueError
        If the op is unknown.
    TypeError
        If the op is not for this dtype.
    """
    if not isinstance(op, str) or op not in _OPERATORS:
        raise ValueError(f"unknown op {op!r}; known: {', '.join(OPS)}, or an MPI.Op")
    return _reduction(op, dtype, divisor)


@cache
def _reduction(op: str, dtype: np.dtype[Any], divisor: float) -> Reduction:
    operator, work = _OPERATORS[op], working_dtype(dtype)
    if work.kind not in operator.kinds:
        raise TypeError(_refusal(op, dtype))
    combine = _complex_product if (op, work.kind) == ("prod", "c") else operator.combine
    return Reduction(combine, work, op, divisor if op == "avg" else None)


@cache
def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of ``dtype`` are combined: float32 for half precision, else the same.

    Raises
    ------
    TypeError
        If arrays of this dtype cannot travel: objects, strings, records, dates, or numbers in foreign byte order.
    """
    if dtype.kind not in "biufc" and dtype.name != "bfloat16":
        raise TypeError(f"arrays of dtype {dtype} cannot be aggregated; numbers can")
    if not dtype.isnative:
        raise TypeError(f"dtype {dtype.str} is not in native byte order; convert it with x.astype({dtype.name!r})")
    return np.dtype(np.float32) if dtype.kind in "fV" and dtype.itemsize < 4 else dtype


def _refusal(op: str, dtype: np.dtype[Any]) -> str:
    if op == "avg" and dtype.kind in "iu":
        return (
            f"op 'avg' is not for integers ({dtype}): an average need not be one. "
            "Convert with x.astype('float64'), or take op='sum' and divide as you see fit"
        )
    if dtype.kind == "b":
        return (
            f"op {op!r} is not for booleans; take op='max' for any, op='min' for all, or count with x.astype('int64')"
        )
    return f"op {op!r} is not for dtype {dtype}"
