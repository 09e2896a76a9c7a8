"""Numbers that go bad: NaN and infinity in gradients are found, and all ranks learn where they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import numpy as np

from mpiagg.arrays import Array, accelerator_of
from mpiagg.ddp.buckets import Bucket
from mpiagg.errors import NonFiniteError

DEBUG: Final = "MPIAGG_DEBUG"
"""The environment variable that turns checks on which are off otherwise: ``1`` or ``0``."""

MOST_NAMED: Final = 20
"""How many parameters of a rank are named; the others are counted. Where one is bad, soon all are."""

_RESULTS: Final = {"sum": "sum", "avg": "average"}
"""The ops whose results people have a word for."""


def asked_for(check_finite: bool | None) -> bool:
    """Return whether gradients are to be checked; None leaves it to the environment.

    Raises
    ------
    TypeError
        For what is neither a boolean nor None.
    ValueError
        If the environment says something else than yes or no.
    """
    if check_finite is None:
        said = os.environ.get(DEBUG, "")
        if said not in ("", "0", "1"):
            raise ValueError(f"{DEBUG} must be 1 or 0, not {said!r}")
        return said == "1"
    if not isinstance(check_finite, bool):
        raise TypeError(f"check_finite must be True, False or None, not {check_finite!r}")
    return check_finite


class FiniteCheck:
    """What one rank has found in a step that is not finite, until all ranks learn of it.

    Parameters
    ----------
    tell : callable
        Gives what this rank says to all, and returns what every rank says; collective.
    names : sequence of str
        The parameters' names, empty where they have none.
    aggregation : str
        What the gradients are aggregated by.
    op : str, optional
        How they are combined.
    """

    def __init__(
        self, tell: Callable[[bytes], list[bytes]], names: Sequence[str], aggregation: str, op: str | None = None
    ) -> None:
        self._tell, self._names = tell, names
        self._result = f"their {_RESULTS.get(op or '', 'aggregate')} by {aggregation}"
        self._given: dict[int, str] = {}
        self._made: dict[int, str] = {}

    def look_at(self, gradients: Sequence[Array | None]) -> None:
        """Look at the gradients of this rank; a device is waited for once."""
        there = [(index, gradient) for index, gradient in enumerate(gradients) if gradient is not None]
        for (index, gradient), good in zip(there, _finite([gradient for _, gradient in there]), strict=True):
            if not good:
                self._given[index] = self._described(index, gradient)

    def leave_out_of(self, bucket: Bucket) -> None:
        """Look at a bucket that is to set out, and leave those of this rank's gradients out that are not finite."""
        for index, view in _bad(bucket):
            self._given[index] = self._described(index, view)
            view.fill(0)

    def look_at_result(self, bucket: Bucket) -> None:
        """Look at what has become of a bucket's gradients."""
        for index, view in _bad(bucket):
            self._made[index] = self._described(index, view)

    def flags(self) -> list[bool]:
        """Return whether anything is bad in this rank's gradients, and in what has become of all."""
        return [bool(self._given), bool(self._made)]

    def require(self, *, given: bool, made: bool) -> None:
        """Raise the same error on all ranks if any has found something; collective then.

        Parameters
        ----------
        given, made : bool
            Whether any rank has found something in its gradients, and in what has become of all.

        Raises
        ------
        NonFiniteError
            If one of them is true.
        """
        if given:
            raise NonFiniteError(f"gradients are not finite: {_by_rank(self._gather(self._given))}")
        if made:
            told = self._gather(self._made)
            where = told[0] if len(set(told)) == 1 else _by_rank(told)
            raise NonFiniteError(
                f"overflow: the gradients of all ranks were finite, but {self._result} is not: {where}"
            )

    def clear(self) -> None:
        """Begin a step in which nothing has been found."""
        self._given.clear()
        self._made.clear()

    def _described(self, index: int, array: Array) -> str:
        name = f"{self._names[index]!r}, " if self._names[index] else ""
        kinds = (("NaN", np.isnan(array)), ("Inf", np.isinf(array)))
        counts = ", ".join(f"{int(which.sum().item())} {kind}" for kind, which in kinds)
        return f"parameter {index} ({name}{array.dtype} {array.shape}): {counts} of {array.size}"

    def _gather(self, found: dict[int, str]) -> list[str]:
        """Return what every rank has found."""
        named = [found[index] for index in sorted(found)]
        if len(named) > MOST_NAMED:
            named[MOST_NAMED:] = [f"and {len(named) - MOST_NAMED} more parameters"]
        return [part.decode(errors="replace") for part in self._tell(", ".join(named).encode(errors="replace"))]


def unwarned(check: FiniteCheck | None) -> AbstractContextManager[object]:
    """Return a block in which NumPy does not warn of what a check reports.

    A warning that is an error would end an exchange in the middle, on the rank where a sum overflows and on no other.
    """
    return nullcontext() if check is None else np.errstate(over="ignore", invalid="ignore")


def _finite(arrays: Sequence[Array]) -> list[bool]:
    """Return which arrays are finite; those on a device are waited for together."""
    accelerator = accelerator_of(arrays[0]) if arrays else None
    if accelerator is None:
        return [bool(np.isfinite(array).all()) for array in arrays]
    found = accelerator.empty(len(arrays), np.bool_)
    for place, array in enumerate(arrays):
        found[place] = np.isfinite(array).all()
    return accelerator.to_host(found).tolist()  # type: ignore[no-any-return]  # of booleans


def _bad(bucket: Bucket) -> Sequence[tuple[int, Array]]:
    """Return the gradients of a bucket that are not finite."""
    if _finite([bucket.vector])[0]:
        return []
    good = _finite(list(bucket.views.values()))
    return [item for item, fine in zip(bucket.views.items(), good, strict=True) if not fine]


def _by_rank(told: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
