"""Checks of arguments that several subpackages share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from numbers import Real
from operator import index
from typing import Final, SupportsIndex

import numpy as np

NODES: Final = "MPIAGG_NODES"
"""The environment variable that says how many ranks of the world each node has, as in ``2,2``: for tests, and
for ranks that are better looked at in smaller groups than nodes."""


def check_integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return ``value`` as an int, if it is an integer of Python's or NumPy's in a range.

    Raises
    ------
    ValueError
        If it is not; a boolean is not.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be an integer {span}, not {value!r}")
    return number


def check_number(name: str, value: object, wanted: str, accept: Callable[[float], bool]) -> float:
    """Return ``value`` as a float, if it is a finite number that is accepted.

    Parameters
    ----------
    name, value
        The argument.
    wanted : str
        What it must be, in words.
    accept : callable
        Whether a number is that.

    Raises
    ------
    ValueError
        If it is not; a boolean is not.
    """
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
    if not (math.isfinite(number) and accept(number)):
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
    return number


def check_flag(name: str, value: object) -> bool:
    """Return ``value``, if it is a boolean of Python's or NumPy's.

    Raises
    ------
    ValueError
        If it is not.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, not {value!r}")  # noqa: TRY004 - as for numbers
    return bool(value)


def check_root(root: object, size: int) -> int:
    """Return ``root`` as an int, if it is a rank.

    Raises
    ------
    ValueError
        If it is not.
    """
    try:
        return check_integer("root", root, 0, size - 1)
    except ValueError:
        raise ValueError(f"root must be a rank from 0 to {size - 1}, not {root!r}") from None


def check_counts(name: str, counts: Iterable[SupportsIndex], number: int, what: str) -> tuple[int, ...]:
    """Return numbers of rows, one for each rank or neighbor; raise ValueError if they are not so many, or negative.

    TypeError says that they are no integers.
    """
    try:
        found = tuple(map(index, counts))
    except TypeError:
        raise TypeError(f"{name} must be {number} integers, one for each {what}, not {counts!r}") from None
    if len(found) != number or min(found, default=0) < 0 or max(found, default=0) > sys.maxsize:
        raise ValueError(f"{name} must be {number} numbers of rows, one for each {what}; they are {found}")
    return found


def ranks_of_nodes(text: str, size: int) -> list[int]:
    """Return how many ranks each node has according to the text of MPIAGG_NODES.

    Raises
    ------
    ValueError
        If it does not say that of so many ranks.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words) or sum(map(int, words)) != size:
        raise ValueError(f"{NODES}={text!r} must say how many ranks each node has, {size} in all, as in {size - 1},1")
    return [int(word) for word in words]
