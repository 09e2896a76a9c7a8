"""Join: ranks whose batches have run out shadow the steps of the others until all are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation import Aggregation
from mpiagg.collectives.flags import Flags
from mpiagg.common.arguments import check_flag
from mpiagg.ddp.steps import Copied, GradientList, Steps
from mpiagg.errors import PlanError


class JoinState:
    """What the ranks share before each step: which of them are active. Making this is collective.

    Parameters
    ----------
    comm : MPI.Intracomm
    divide_by_initial_size : bool
        See :meth:`DDP.join`.
    sync : callable
        Called on all ranks before each step, with a rank that is active in it.

    Attributes
    ----------
    last : int
        A rank that was active in the last step, the same on all ranks.
    """

    def __init__(self, comm: MPI.Intracomm, *, divide_by_initial_size: bool, sync: Callable[[int], None]) -> None:
        self._own = np.arange(comm.Get_size()) == comm.Get_rank()
        self._by_initial_size, self._sync = divide_by_initial_size, sync
        self._flags = Flags(comm, comm.Get_size())
        self.sent_bytes = 0
        self.last = 0

    def share(self, active: bool) -> float:
        """Share whether this rank is active.

        Returns
        -------
        float
            What an average over all ranks is to be multiplied by; 0 if no rank is active.
        """
        ranks = np.flatnonzero(self._flags.share(lambda: self._own & active))
        self.sent_bytes += self._flags.sent_bytes
        if not len(ranks):
            return 0
        self.last = int(ranks[-1])  # as torch has it
        self._sync(self.last)
        return 1 if self._by_initial_size else self._own.size / len(ranks)

    def free(self) -> None:
        """Free what it holds."""
        self._flags.free()


def check_join(steps: Steps, aggregation: Aggregation, divide_by_initial_size: bool) -> str:
    """Raise PlanError or ValueError if steps cannot be joined now, by this aggregation; return in words what is asked.

    The aggregation's communicator has as many ranks as that of the steps.
    """
    if steps.attend is not None:
        raise PlanError("there is a join already")
    check_flag("divide_by_initial_size", divide_by_initial_size)
    op, size = getattr(aggregation, "op", "avg"), aggregation.comm.size
    plain = op == "avg" and getattr(aggregation, "denom", size) == size
    if op in ("min", "max") or not (plain or divide_by_initial_size):
        what = f"op {op!r}" if op != "avg" else "a denom of its own"
        raise ValueError(f"ranks without batches cannot be left out of an aggregation with {what}")
    return f"DDP.join, divide_by_initial_size={divide_by_initial_size}"


@contextmanager
def joined(steps: Steps, join_state: JoinState, stream: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run steps inside this block on the ranks that have some, and then on with the others until all are done.

    ``stream`` returns a block in which devices are asked in the streams in which the module is computed.

    An error in a step is known to all ranks, and ends the block on all. One elsewhere is reported to the others in
    their next step.
    """
    steps.attend, steps.failed = join_state.share, False
    try:
        yield
        with stream():
            _shadow(steps)
    except Exception as error:
        if not steps.failed:
            with stream():
                _report(steps, error)
        raise
    finally:
        steps.end_joining()
        steps.aggregation.bytes_sent += join_state.sent_bytes
        join_state.free()


def _shadow(steps: Steps) -> None:
    """Take part in the others' steps without gradients, until no rank is active."""
    steps.require_end()
    while steps.begin(active=False):
        steps.run(lambda: (steps.no_gradients(), None))


def _report(steps: Steps, error: Exception) -> None:
    """Let the other ranks know of an error in their next step, or in the one that this rank has begun."""

    def refuse() -> tuple[GradientList, Copied]:
        raise error

    with suppress(Exception):  # they have all been told, or none can be
        steps.run(refuse)
