"""Aggregation by an all-reduce: every rank's arrays become their sum, average, minimum or maximum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.backends import Backend
from mpiagg.aggregation.elementwise import Elementwise
from mpiagg.arrays import HOST, Array, check_wire_dtype, check_wire_op, device_of, reduction, working_dtype
from mpiagg.common.arguments import check_flag, check_number
from mpiagg.plans.choices import NATIVE, NCCL, Choice, pick
from mpiagg.plans.on_node import reduces_in_place
from mpiagg.plans.program import Program, in_turn
from mpiagg.schedules import Collective
from mpiagg.transport import SHARED_TAG

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
        A name from :func:`mpiagg.algorithms`, or like ``"knomial-8"``;
        ``"auto"`` chooses by length, ``"native"`` is the MPI library's own,
        and ``"nccl"`` NVIDIA's, for arrays on GPUs.
    wire : {None, "fp16", "bf16", "u8", "u4", "u2", "exact"}
        How values travel: as they are, or by a codec (:mod:`mpiagg.arrays.codecs`). ``"u8"``, ``"u4"`` and
        ``"u2"`` take the algorithm ``"direct"``, so that a value is quantised once on each way; the last two are for
        :class:`ErrorFeedback`, for what they lose is much. ``"exact"`` is for sums and averages that have the
        same bits by every algorithm, in every order of the ranks, in buckets of any length
        (:mod:`mpiagg.arrays.exact`).
    by_layer : bool
        Reduce every tensor by itself, and not all of a dtype together.
    reproducible : bool, optional
        Whether results must have the bits of our own algorithms. They have in any case, but with ``"native"``,
        ``"nccl"`` or a backend, which are refused then.
    backend : callable, optional
        Another library's all-reduce to use in place of an algorithm; see :mod:`mpiagg.aggregation.backends`.

    Raises
    ------
    ValueError
        For an unknown op, algorithm or wire; a denom that is not a number other than zero; arguments that are not for
        one another.
    TypeError
        For a backend that is not callable.
    MismatchError
        On all ranks, if they disagree on any argument.

    Notes
    -----
    All ranks end with the same bits (a backend may do otherwise). Values of float16 and bfloat16 are combined in
    float32. Tensors of B bytes cost what an all-reduce of B bytes costs; with a wire for float32 one of B/2 (fp16,
    bf16), about B/4 (u8), B/7.5 (u4), B/14 (u2), or 2.25 B (exact). Memory: B where tensors must be packed, the
    algorithm's scratch, and with a wire a copy in the codec's form; with exact 2.25 B, but no more than 36 MiB. What a
    wire loses can be kept for the next time: :class:`ErrorFeedback`.

    The form of reduction with u8 is that of ByteGrad in Bagua (Gan et al., VLDB 2021): scatter quantised parts, add
    up in float32, gather the quantised result.

    Examples
    --------
    >>> gradients = [np.full(3, float(rank)), np.full((2, 2), 5.0)]
    >>> with mpiagg.AllReduce() as average:
    ...     average.aggregate(gradients)
    >>> bool(np.allclose(gradients[0], (size - 1) / 2))
    True
    >>> print(gradients[1])
    [[5. 5.]
     [5. 5.]]
    """

    def __init__(  # noqa: PLR0917 - the documented order
        self,
        comm: MPI.Intracomm | None = None,
        op: str = "avg",
        denom: float | None = None,
        divide_before: bool = False,
        algorithm: str = "auto",
        wire: str | None = None,
        *,
        by_layer: bool = False,
        reproducible: bool | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(comm, by_layer=by_layer)
        self.op, self.divide_before, self.algorithm, self.wire = op, divide_before, algorithm, wire
        self.by_layer, self.backend = by_layer, backend
        self.denom: float = self._channel.size
        self._reproducible = bool(reproducible)

        def check() -> str:
            self._check_arguments(denom)
            self._check_reproducible(reproducible)
            how = "divide, then add" if divide_before else op
            each = "each tensor" if by_layer else "all tensors"
            by = "a backend" if backend else algorithm
            bits = ", reproducible" if self._reproducible else ""
            return f"AllReduce of {each} by {by}: {how}, denom {self.denom}, wire {wire}{bits}"

        self._channel.agree_on(check)

    def _check_arguments(self, denom: float | None) -> None:
        for name, flag in (("divide_before", self.divide_before), ("by_layer", self.by_layer)):
            check_flag(name, flag)
        if self.op not in OPS:
            raise ValueError(f"unknown op {self.op!r}; known: {', '.join(OPS)}")
        if self.op != "avg" and (denom is not None or self.divide_before):
            raise ValueError(f"denom and divide_before are for op 'avg', not for {self.op!r}")
        if denom is not None:
            self.denom = check_number("denom", denom, "a finite number other than zero", lambda x: x != 0)
        if self.backend is not None and not callable(self.backend):
            raise TypeError(f"backend must be callable, not {type(self.backend).__name__}")
        if self.backend is not None and (self.algorithm != "auto" or self.wire is not None):
            raise ValueError("a backend takes the place of an algorithm, and sends values as it likes: no wire")
        pick(self.algorithm, None, self._channel.case(Collective.ALLREDUCE, 0), self.wire)
        check_wire_op(self.wire, self.op)

    def _check_reproducible(self, reproducible: bool | None) -> None:
        if reproducible is not None:
            check_flag("reproducible", reproducible)
        if reproducible and (self.backend is not None or self.algorithm in (NATIVE, NCCL)):
            by = "a backend" if self.backend is not None else f"algorithm {self.algorithm!r}"
            raise ValueError(f"{by} has bits of its own; reproducible=True keeps to our algorithms")

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        self.check_dtype(dtype)

    def _check_tensors(self, tensors: Sequence[Array], check_dtype: Callable[[np.dtype[Any]], object]) -> None:
        super()._check_tensors(tensors, check_dtype)
        if self.backend is not None and any(device_of(x) is not HOST for x in tensors):
            raise TypeError("a backend is for arrays of NumPy's")

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise TypeError if tensors of this dtype cannot be reduced so.

        Parameters
        ----------
        dtype : numpy.dtype
            The tensors' own.
        """
        reduction(self.op, dtype, self.denom)
        check_wire_dtype(self.wire, dtype)

    def _in_place(self) -> bool:
        # The MPI library's persistent collectives are made by all ranks together.
        return self.algorithm != NATIVE

    def _takes_as_it_is(self, vector: Array) -> bool:
        if self.wire is not None or self.backend is not None or self.divide_before:
            return False
        how = reduction(self.op, vector.dtype, self.denom)
        operation = self._operation(vector, Collective.ALLREDUCE, how, self.choice(vector))
        return reduces_in_place(self._channel, operation, vector)

    def _tags(self, vector: Array) -> int:
        return self.choice(vector).lanes

    def _bind(self, vector: Array, tag: int = SHARED_TAG) -> Program:
        return self.bind(vector, tag)

    def bind(self, vector: Array, tag: int, residual: Array | None = None) -> Program:
        """Return the program that reduces a vector, in place.

        Parameters
        ----------
        vector : numpy.ndarray
            Of the dtype in which values are combined, or as :func:`mpiagg.plans.on_node.reduces_in_place` says.
        tag : int
            The first of the tags of its messages, one for each of the lanes of :meth:`choice`.
        residual : numpy.ndarray, optional
            As long as the vector, to which it is added first; what the codec loses is left there.

        Returns
        -------
        Program
            The rounds, which work in the vector's place.
        """
        how = reduction(self.op, vector.dtype, self.denom)
        before = None
        if self.divide_before:
            how, before = replace(how, divisor=None), partial(how.finish, vector)
        if self.backend is not None:
            name = "sum" if self.op == "avg" else self.op
            return in_turn(before, partial(self.backend, vector, name), partial(how.finish, vector))
        add = None if residual is None else partial(np.add, vector, residual, vector)
        choice = self.choice(vector)
        program = self._collective(vector, Collective.ALLREDUCE, how, choice, tag=tag, residual=residual)
        return in_turn(before, add, program)

    def choice(self, vector: Array) -> Choice:
        """Return how a vector is reduced.

        Parameters
        ----------
        vector : numpy.ndarray
            As for :meth:`bind`.

        Returns
        -------
        Choice
            The algorithm and its lanes.
        """
        nbytes = vector.size * working_dtype(vector.dtype).itemsize
        case = self._channel.case(Collective.ALLREDUCE, nbytes, reproducible=self._reproducible)
        return pick(self.algorithm, None, case, self.wire, device_of(vector))
