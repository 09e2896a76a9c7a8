"""Aggregation by an all-reduce: every rank's arrays become their sum, average, minimum or maximum."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.elementwise import Elementwise
from mpiagg.arrays import Array, reduction, working_dtype
from mpiagg.operations import NATIVE, pick
from mpiagg.program import Program, in_turn
from mpiagg.schedules import Collective
from mpiagg.transport import SHARED_TAG
from mpiagg.tuning import Choice

OPS: Final = ("sum", "avg", "min", "max")


class AllReduce(Elementwise):
    """Reduce the arrays of all ranks, element by element; every rank gets the result.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    op : {"avg", "sum", "min", "max"}
        How values are combined; ``"avg"`` is the sum divided by the number of ranks.
    denom : number, optional
        With ``op="avg"``, what the sum is divided by in place of the number of ranks; the same on all ranks.
    divide_before : bool
        With ``op="avg"``, divide every rank's own values first and add them then: where the sum would overflow.
    algorithm : str
        A name from :func:`mpiagg.algorithms`; ``"auto"`` chooses by length, ``"native"`` is the MPI library's own.
    wire : None
        In which form values travel; as they are.

    Raises
    ------
    ValueError
        For an unknown op, algorithm or wire; a denom that is not a number other than zero; a denom or divide_before
        with another op than ``"avg"``.
    MismatchError
        On all ranks, if they disagree on any argument.

    Notes
    -----
    All ranks end with the same bits. Values of float16 and bfloat16 are combined in float32. Tensors of B bytes cost
    what an all-reduce of B bytes costs; memory: B where they must be packed, and the algorithm's scratch.
    """

    def __init__(  # noqa: PLR0917 - the documented order
        self,
        comm: MPI.Intracomm | None = None,
        op: str = "avg",
        denom: float | None = None,
        divide_before: bool = False,
        algorithm: str = "auto",
        wire: None = None,
    ) -> None:
        super().__init__(comm)
        self.op, self.divide_before, self.algorithm = op, divide_before, algorithm

        self.denom: float = self._channel.size

        def check() -> str:
            if op not in OPS:
                raise ValueError(f"unknown op {op!r}; known: {', '.join(OPS)}")
            if op != "avg" and (denom is not None or divide_before):
                raise ValueError(f"denom and divide_before are for op 'avg', not for {op!r}")
            if wire is not None:
                raise ValueError(f"wire must be None, not {wire!r}")
            pick(algorithm, None, Collective.ALLREDUCE, 0)
            if denom is not None:
                self.denom = _checked_denom(denom)
            how = "divide, then add" if divide_before else op
            return f"AllReduce by {algorithm}: {how}, denom {self.denom}"

        self._channel.agree_on(check)

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        reduction(self.op, dtype, self.denom)

    def _in_place(self) -> bool:
        # The MPI library's persistent collectives are made by all ranks together.
        return self.algorithm != NATIVE

    def _tags(self, vector: Array) -> int:
        return self._choice(vector).lanes

    def _bind(self, vector: Array, tag: int = SHARED_TAG) -> Program:
        how = reduction(self.op, vector.dtype, self.denom)
        before = None
        if self.divide_before:
            how, before = replace(how, divisor=None), partial(how.finish, vector)
        return in_turn(before, self._collective(vector, Collective.ALLREDUCE, how, self._choice(vector), tag=tag))

    def _choice(self, vector: Array) -> Choice:
        return pick(self.algorithm, None, Collective.ALLREDUCE, vector.size * working_dtype(vector.dtype).itemsize)


def _checked_denom(denom: object) -> float:
    number = math.nan
    if isinstance(denom, Real) and not isinstance(denom, bool):
        with suppress(OverflowError):
            number = float(denom)
    if not math.isfinite(number) or number == 0:
        raise ValueError(f"denom must be a finite number other than zero, not {denom!r}")
    return number
