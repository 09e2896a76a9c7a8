"""Numbers that differ from rank to rank, for a generator that runs once for many ranks.

A generator is written for one rank. Given a :class:`Ranks` in place of that rank, it yields the rounds of all of them:
what it computes of its rank is kept as a formula, and becomes an array only when it is asked for. Where the ranks
would go different ways, the run ends in :class:`Split`, and is taken again for each part of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Formula = tuple[Any, ...]
"""A function and its arguments: numbers, and formulas. Equal formulas have equal values."""


class Split(Exception):  # noqa: N818 - says what is to be done, and is no error
    """The ranks do not go on alike; ``parts`` are those that do, by their places among the ranks of the run."""

    def __init__(self, values: Numbers) -> None:
        super().__init__("the ranks do not go on alike")
        numbers = np.unique(values, return_inverse=True)[1]
        self.parts = np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Ranks, Any], Ranks]:
    return lambda own, other: Ranks((function, own.formula, formula_of(other)))


def _swapped(function: Callable[[Any, Any], Any]) -> Callable[[Ranks, Any], Ranks]:
    return lambda own, other: Ranks((function, formula_of(other), own.formula))


class Ranks:
    """A number on each rank of a run: of the rank itself, or computed from it.

    It is computed with as an integer is. Its truth, and its use as an index, are those of all ranks, or else a Split.
    """

    __slots__ = ("formula",)

    def __init__(self, formula: Formula) -> None:
        self.formula = formula

    @classmethod
    def of(cls, values: Numbers) -> Ranks:
        """Return numbers that are known."""
        return cls((partial(np.asarray, values),))

    __add__ = __radd__ = _binary(operator.add)
    __mul__ = __rmul__ = _binary(operator.mul)
    __xor__ = __rxor__ = _binary(operator.xor)
    __sub__, __floordiv__, __mod__ = map(_binary, (operator.sub, operator.floordiv, operator.mod))
    __rsub__, __rfloordiv__, __rmod__ = map(_swapped, (operator.sub, operator.floordiv, operator.mod))
    __lt__, __le__, __gt__, __ge__ = map(_binary, (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__ = _binary(operator.eq)  # type: ignore[assignment]  # the truth of each rank
    __ne__ = _binary(operator.ne)  # type: ignore[assignment]  # the truth of each rank
    __hash__ = None  # type: ignore[assignment]  # equal is no single truth

    def __bool__(self) -> bool:
        """Return the truth that all ranks have."""
        if places(self.formula) is not None:
            raise TypeError("of all other ranks at once, nothing can be asked")
        return bool(_common(value(self.formula) != 0))

    def __index__(self) -> int:
        """Return the number that all ranks have."""
        return int(_common(value(self.formula)))


def _common(values: Numbers) -> Any:
    if np.any(values != values[0]):
        raise Split(values)
    return values[0]


def formula_of(number: Any) -> Any:
    """Return the formula of ranks, and any other number as it is."""
    return number.formula if isinstance(number, Ranks) else number


def value(formula: Any, *, first: bool = False) -> Any:
    """Return the values of a formula, and a number as it is.

    Of a number at other places it is that of the rank's own place, or of the first of all places.
    """
    if not isinstance(formula, tuple):
        return formula
    function, *arguments = formula
    if function is _other:
        return 0 if first else value(arguments[0])
    return function(*[value(argument, first=first) for argument in arguments])


def places(formula: Any) -> Any:
    """Return, of a formula for a number at every other place, how many places there are, and else None."""
    if not isinstance(formula, tuple):
        return None
    return value(formula[2]) if formula[0] is _other else next(filter(None, map(places, formula[1:])), None)


def _other(place: Numbers, size: int) -> Numbers:
    """Stand in a formula for the places up to ``size`` other than ``place``."""
    raise NotImplementedError


# -- what is written alike for one rank and for many


def others(rank: int, size: int, first: int = 0) -> list[int]:
    """Return every other rank, from the next one on, but those below ``first``; not yet taken modulo ``size``.

    In a run for many ranks it is one number that stands for all of them. There it need not say which are left out,
    since a price counts, of messages to all others, those that somebody receives (``clocks``).
    """
    if isinstance(rank, Ranks):
        return [Ranks((_other, rank.formula, size))] if size - first > where(rank < first, 0, 1) else []
    return [peer for peer in range(rank + 1, rank + size) if peer % size >= first]


def where(condition: bool, one: int, other: int) -> int:
    """Return ``one`` if the condition holds, and else ``other``."""
    if isinstance(condition, Ranks):
        return cast("int", Ranks((np.where, condition.formula, formula_of(one), formula_of(other))))
    return one if condition else other


class RankTable:
    """Numbers to be looked up by a number, or by one on each rank."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers, self._array = numbers, np.array(numbers)

    def __getitem__(self, index: int) -> int:
        """Return the number at a place."""
        if isinstance(index, Ranks):
            return cast("int", Ranks((self._array.take, index.formula)))
        return self._numbers[index]
