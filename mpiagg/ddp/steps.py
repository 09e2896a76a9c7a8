"""Steps of training as the ranks take them together: what is shared, sent and received, in the same order on all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation import Aggregation
from mpiagg.arrays import Array, Form
from mpiagg.collectives.flags import Flags
from mpiagg.collectives.registered import shared_vector
from mpiagg.ddp.buckets import Bucket, fill_buckets
from mpiagg.ddp.finite import FiniteCheck, unwarned
from mpiagg.ddp.launching import Flight, ForeignFlight, Launcher
from mpiagg.ddp.settled import Settled
from mpiagg.errors import PlanError
from mpiagg.plans.background import InBackground
from mpiagg.plans.plan import Plan
from mpiagg.transport import channel_of, free_if_over

GradientList = list[Array | None]
Copied = Collection[int] | None
"""Which gradients of a list must be copied to the buckets and back, where that is known: see :class:`Settled`."""


class Steps:
    """The buckets of some parameters, and what is done with them in each step. Making this is collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    aggregation : Aggregation
        What is done to the buckets.
    forms : sequence of Form
        The parameters' dtypes and shapes.
    cap : int
        How many bytes a bucket has at most.
    hooked : bool
        Whether buckets are launched before the step is run.
    check : FiniteCheck, optional
        Looks at the gradients before they are sent, and at what comes back.

    Attributes
    ----------
    views : list of numpy.ndarray
        Each parameter's gradient in its bucket.
    settled : Settled
        What is known of lists of gradients.
    launcher : Launcher
        Takes gradients before the step is run, if it is hooked.
    begun : bool
        Whether a step has begun.
    failed : bool
        Whether an error has ended the last step.
    attend : callable, optional
        While ranks join: shares whether this rank is active in the next step, and returns what averages are to be
        multiplied by, or 0 if no rank is.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        aggregation: Aggregation,
        forms: Sequence[Form],
        cap: int,
        *,
        hooked: bool,
        check: FiniteCheck | None = None,
    ) -> None:
        self.aggregation = aggregation
        self._hooked, self._check = hooked, check
        allocate = partial(shared_vector, channel_of(aggregation.comm))
        self._buckets = [Bucket(members, forms, allocate) for members in fill_buckets(forms, cap)]
        self._flags = Flags(comm, len(forms) + (0 if check is None else len(check.flags())))
        self._plans: list[Plan[None]] = []
        try:
            for bucket in self._buckets:
                self._plans.append(aggregation.aggregate_init(list(bucket.views.values())))
        except Exception:
            self.free()
            raise
        views = {index: view for bucket in self._buckets for index, view in bucket.views.items()}
        self.views = [views[index] for index in range(len(forms))]
        self.settled = Settled(self.views)
        self._everything: Sequence[bool] = np.ones(len(forms), bool)  # type: ignore[assignment]  # as good as one
        self._flights: list[Flight] = [InBackground(plan) if hooked else plan for plan in self._plans]
        self._foreign: list[ForeignFlight] = []
        self.launcher = Launcher(self._buckets, self._flights, check if hooked else None)
        self.begun = self.failed = False
        self.attend: Callable[[bool], float] | None = None
        self._scale = 1.0

    def begin(self, *, active: bool = True) -> bool:
        """Begin a step, if it has not begun; return whether any rank is active in it."""
        if not self.begun:
            if self.attend is not None:
                if self.failed:
                    raise PlanError("an error in a step has ended the join")
                self.failed = True
                self._scale = self.attend(active)
                self.failed = False
            self.begun = self._scale > 0
        return self.begun

    def run(
        self, take: Callable[[], tuple[GradientList, Copied]], *, overlapped: bool = True
    ) -> tuple[GradientList, Array | None]:
        """Aggregate once, with all ranks.

        Parameters
        ----------
        take : callable
            Returns this rank's gradients, and which are copied, or raises what is wrong with them.
        overlapped : bool
            Whether all buckets are on their way at the same time.

        Returns
        -------
        list of numpy.ndarray or None
            This rank's gradients, aggregated.
        numpy.ndarray or None
            For each parameter whether any rank has a gradient; None if this rank has all.

        Raises
        ------
        Exception
            What ``take`` raises, on the ranks where it does.
        MismatchError
            On the other ranks then.
        NonFiniteError
            On all ranks, if there is a check and it has found something.
        """
        self.begin()
        self.failed = True
        gradients, copied, fault = self.no_gradients(), None, None
        try:
            gradients, copied = take()
            if self._check is not None and not self._hooked:
                self._check.look_at(gradients)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            fault = error

        def which() -> Sequence[bool]:
            present = self._everything if copied is not None else [gradient is not None for gradient in gradients]
            return _unless(fault, present)

        try:
            if self._hooked:  # what is on its way must come back before an error is raised
                self._exchange(gradients, copied, overlapped=True)
                fault = fault or self._fault_of_foreign()
                present = self._share(which)
            else:  # nothing is on its way yet, and what is refused stays as it was
                present = self._share(which)
                self._exchange(gradients, copied, overlapped=overlapped)
                fault, gone = self._fault_of_foreign(), [False] * len(self.views)
                if self._check is not None or self._foreign:
                    self._share(partial(_unless, fault, gone))
        finally:
            self.begun = False
            if self._check is not None:
                self._check.clear()
        self.failed = False
        return gradients, None if copied is not None else present

    def replace(self, make: Callable[[int, Bucket, bool], ForeignFlight]) -> None:
        """Let something else aggregate each bucket, made of its number, itself, and whether it is the last."""
        self.require_end()
        last = len(self._buckets) - 1
        self._foreign = [make(number, bucket, number == last) for number, bucket in enumerate(self._buckets)]
        self._flights[:] = self._foreign

    def _fault_of_foreign(self) -> Exception | None:
        return next((flight.fault for flight in self._foreign if flight.fault is not None), None)

    def require_end(self) -> None:
        """Raise PlanError if a step has begun."""
        if self.begun:
            raise PlanError(
                "the last backward pass was not followed by sync_gradients(), or a forward of a join by no backward"
            )

    def no_gradients(self) -> GradientList:
        """Return the gradients of a rank that has none."""
        return [None] * len(self.views)

    def pack(self, gradients: GradientList) -> GradientList:
        """Bring gradients into the buckets, and return the views that have taken their place."""
        for bucket in self._buckets:
            bucket.pack(gradients)
        return [None if gradient is None else view for gradient, view in zip(gradients, self.views, strict=True)]

    def _share(self, which: Callable[[], Sequence[bool]]) -> Array:
        """Share which gradients there are, and whether any rank has found fault."""
        check = self._check
        flags = self._flags.share(which if check is None else lambda: [*which(), *check.flags()])
        self.aggregation.bytes_sent += self._flags.sent_bytes
        if check is None:
            return flags
        *present, given, made = flags.tolist()
        check.require(given=given, made=made)
        return np.array(present, flags.dtype)

    def _exchange(self, gradients: GradientList, copied: Copied, *, overlapped: bool) -> None:
        """Send the buckets, and bring what comes back to the gradients."""
        with unwarned(self._check):
            for bucket in self._arriving(gradients, copied, overlapped=overlapped):
                if self._scale != 1:
                    bucket.vector *= self._scale
                if self._check is not None:
                    self._check.look_at_result(bucket)
                bucket.unpack(gradients, copied)

    def _arriving(self, gradients: GradientList, copied: Copied, *, overlapped: bool) -> Iterator[Bucket]:
        """Send the buckets, and yield each when it is back."""
        if overlapped:
            self.launcher.place_rest(gradients, copied)
            yield from self.launcher.wait()
        else:
            for bucket, flight in zip(self._buckets, self._flights, strict=True):
                bucket.pack(gradients, copied)
                flight()
                yield bucket

    def end_joining(self) -> None:
        """Go on without asking which ranks are active."""
        self.attend, self._scale, self.begun = None, 1.0, False

    def free(self) -> None:
        """Free the plans. The views stay good as arrays."""
        self._flags.free()
        for plan in self._plans:
            free_if_over(plan)


def _unless(fault: Exception | None, found: Sequence[bool]) -> Sequence[bool]:
    """Return what was found, or raise the fault."""
    if fault is not None:
        raise fault
    return found
