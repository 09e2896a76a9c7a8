"""What an aggregation is: a list of arrays in, the same arrays aggregated in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.packing import TensorLayout, check_tensors, describe_layout, layout_of
from mpiagg.arrays import Array, Reduction, reduction
from mpiagg.collectives.mpi_ops import mpi_op
from mpiagg.errors import PlanError
from mpiagg.plans.bound import bind_operation
from mpiagg.plans.choices import Choice
from mpiagg.plans.operation import Operation
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import Program, in_turn
from mpiagg.schedules import Collective
from mpiagg.transport import channel_of
from mpiagg.watch import Subject

Self = TypeVar("Self", bound="Aggregation")


class Aggregation(ABC):
    """A way to aggregate lists of arrays across the ranks of a communicator.

    Subclasses say in :meth:`aggregate` what that means. Making one is collective, and so is every call that
    aggregates: all ranks make it in the same order. An aggregation is freed explicitly, or by leaving its
    ``with`` block.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.

    Attributes
    ----------
    aggregates : {"gradients", "weights"}
        What it is meant for.
    comm : MPI.Intracomm
        The ranks.
    bytes_sent : int
        What this rank has sent so far to aggregate, also by plans. Messages of the MPI library's own collectives
        (``algorithm="native"``) and of other libraries are not known and not counted.

    Examples
    --------
    An aggregation of one's own, which limits the values of each rank before it adds them up:

    >>> class Limited(mpiagg.Aggregation):
    ...     def aggregate(self, tensors):
    ...         for x in tensors:
    ...             mpiagg.allreduce(np.clip(x, -1, 1), out=x, comm=self.comm)
    >>> gradients = [np.array([0.5, 8.0])]
    >>> with Limited(comm) as limited:
    ...     limited.aggregate(gradients)
    >>> print(gradients[0] / size)
    [0.5 1. ]
    """

    aggregates: ClassVar[Literal["gradients", "weights"]] = "gradients"

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        self.comm = MPI.COMM_WORLD if comm is None else comm
        self.bytes_sent = 0
        self._channel = channel_of(self.comm)
        self._freed = False

    @abstractmethod
    def aggregate(self, tensors: Sequence[Array]) -> None:
        """Aggregate the arrays of all ranks; every array of the list is left aggregated, in place.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray or cupy.ndarray
            Arrays of any shapes and layouts, NumPy's or CuPy's, the same number, shapes, dtypes and kinds on all ranks.

        Raises
        ------
        TypeError
            For what is not an array of numbers, or of a dtype that cannot be aggregated so.
        ValueError
            For a read-only array.
        MismatchError
            On all ranks, if the layout is new and not the same everywhere.
        PlanError
            If the aggregation is freed.
        StallError
            If a message does not complete within the timeout.
        """

    def aggregate_init(self, tensors: Sequence[Array]) -> Plan[None]:
        """Plan the aggregation of arrays that stay where they are, in place, each time the plan runs; collective.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray or cupy.ndarray
            As for :meth:`aggregate`.

        Returns
        -------
        Plan
            To be started and waited for, or called; to be freed by the caller. An aggregation that cannot start and
            wait separately does all of it when the plan is started.

        Raises
        ------
        TypeError, ValueError, MismatchError, PlanError
            As :meth:`aggregate`.
        """
        self._agree_on_tensors(tensors)
        return self._plan(in_turn(partial(self.aggregate, tensors)))

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved to go on later exactly as if nothing had happened.

        Returns
        -------
        dict
            Arrays, numbers and strings by name; empty where nothing is kept from step to step.

        Raises
        ------
        PlanError
            If what is kept has been freed with the aggregation.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; collective.

        Parameters
        ----------
        state : dict
            What :meth:`state_dict` returned on this rank.

        Raises
        ------
        ValueError
            If ``state`` has not the form of this one's.
        MismatchError
            On all ranks, if their states differ where they must not.
        """

        def check() -> str:
            expect_keys(state, ())
            return "no state"

        self._channel.agree_on(check)

    def free(self) -> None:
        """Give back what the aggregation holds; a second call does nothing."""
        self._freed = True

    def __enter__(self: Self) -> Self:  # noqa: PYI019 - typing.Self needs Python 3.11
        """Return the aggregation."""
        return self

    def __exit__(self, *error: object) -> None:
        """Free the aggregation."""
        self.free()

    def _plan(self, program: Program, vector: Array | None = None) -> Plan[None]:
        """Return a plan that counts what it sends; ``vector`` is what it works on, if that is one, for reports."""

        def count() -> None:
            self.bytes_sent += plan.sent_bytes

        name = type(self).__name__
        what = name if vector is None else f"{name} of {vector.size} {vector.dtype}"
        subject = Subject(self._channel.log, what, nbytes=0 if vector is None else vector.nbytes)
        plan = Plan(self._channel, in_turn(program, count), result=None, label=name, subject=subject)
        return plan

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise TypeError if tensors of this dtype cannot be aggregated."""
        reduction("avg", dtype, 1)

    def _check_tensors(self, tensors: Sequence[Array], check_dtype: Callable[[np.dtype[Any]], object]) -> None:
        check_tensors(tensors)
        for dtype in {x.dtype for x in tensors}:
            check_dtype(dtype)

    def _agree_on_tensors(
        self, tensors: Sequence[Array], check_dtype: Callable[[np.dtype[Any]], object] | None = None
    ) -> TensorLayout:
        """Return the layout of tensors, once all ranks have found theirs good and the same."""
        self._require_open()
        layout = layout_of(tensors)

        def check() -> str:
            self._check_tensors(tensors, check_dtype or self._check_dtype)
            return f"{type(self).__name__} of {describe_layout(layout)}"

        self._channel.agree_on(check)
        return layout

    def _collective(
        self,
        vector: Array,
        collective: Collective,
        how: Reduction,
        choice: Choice,
        *,
        root: int = 0,
        tag: int,
        residual: Array | None = None,
    ) -> Program:
        """Return the program of a collective on a vector, in place; ``residual`` as for :func:`bind_operation`."""
        operation = self._operation(vector, collective, how, choice, root=root)
        return bind_operation(self._channel, operation, vector, tag, residual=residual)

    def _operation(
        self, vector: Array, collective: Collective, how: Reduction, choice: Choice, *, root: int = 0
    ) -> Operation:
        """Return the collective on a vector in full."""
        channel, op = self._channel, mpi_op(how.name, how.dtype)
        return Operation(collective, channel.rank, channel.layout, root, (vector.size,), how, choice, op)

    def _require_open(self) -> None:
        if self._freed:
            raise PlanError(f"{type(self).__name__} is freed")


def expect_keys(state: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise ValueError if ``state`` has other keys than these."""
    if not isinstance(state, Mapping) or set(state) != set(keys):
        raise ValueError(f"state must have the keys {sorted(keys)}; this is {state!r}")
