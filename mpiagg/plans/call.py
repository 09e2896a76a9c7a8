"""What all resolved calls have in common."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any, Final

import numpy as np

from mpiagg.arrays import Array
from mpiagg.plans.operation import Operation
from mpiagg.plans.plan import Plan
from mpiagg.transport import DEFAULT_TIMEOUT, Channel, Keepable
from mpiagg.watch import END

_NEW_ERRSTATE: Final = int(np.__version__.partition(".")[0]) >= 2
"""Whether NumPy's errors are handled as a context says, and not as a thread says."""


class Call(Keepable):
    """A collective call that has been resolved.

    Parameters
    ----------
    channel : Channel
    operation : Operation
    quiet : bool
        Whether NumPy does not warn of what becomes of numbers, as MPI does not.

    Attributes
    ----------
    dtype : numpy.dtype
        That of the arrays.
    shape : tuple of int
        That of the result, for those who make it.
    has_source, has_result : bool
        Whether this rank has an input, and whether it gets a result.
    given_as_it_is : bool
        Whether a method of mpi4py's is for the MPI library, with the arguments that it was given: by ``record``.
    vectors : tuple
        Of a method: how the arguments become the input and the output.
    of_any_lengths : bool
        Whether it serves all operations that are like its own but for the lengths of blocks: by ``run_other``.
    """

    given_as_it_is = False
    of_any_lengths = False
    vectors: Any = None
    plan: Plan[Any] | None = None

    def __init__(self, channel: Channel, operation: Operation, *, quiet: bool = False) -> None:
        self.channel, self.operation, self.quiet = channel, operation, quiet
        self.dtype = operation.reduction.dtype if operation.form is None else operation.form.dtype
        self.shape: tuple[int, ...] = ()
        self.has_source = self.has_result = True

    @property
    def words(self) -> str:
        """What all ranks must agree on."""
        return self.operation.description

    def check(self) -> None:
        """Raise on all ranks if they are about to make different calls; collective."""
        self.channel.agree(self.words)

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Carry the operation out, from ``x`` to ``out``.

        Parameters
        ----------
        x, out : numpy.ndarray or None
            The input and the output, as they were when this was resolved; None where this rank has none.
        timeout : float
            Seconds that a wait may last without any message completing.
        """
        raise NotImplementedError

    def freely(self, plan: Plan[Any]) -> Callable[[], object]:
        """Return what runs a plan, without NumPy's warnings if they are not wanted."""
        if not self.quiet or self.operation.reduction.dtype.kind not in "fc":
            return plan
        if not _NEW_ERRSTATE:
            return partial(in_errstate, plan)
        context = Context()
        context.run(np.seterr, all="ignore")
        return partial(context.run, plan)


class WithPlan(Call):
    """A call that has a plan of its own."""

    def _take(self, plan: Plan[Any]) -> None:
        self.plan = plan
        self._go = self.freely(plan)

    def _run(self, timeout: float) -> None:
        if not self.channel.log.blocking[END]:
            self.channel.log.check_thread()  # which may be in this plan
        self.plan.timeout = timeout  # type: ignore[union-attr]  # who runs it has taken one
        self._go()


def in_errstate(act: Callable[..., object], *arguments: object) -> None:
    """Make a call without NumPy's warnings."""
    with np.errstate(all="ignore"):
        act(*arguments)
