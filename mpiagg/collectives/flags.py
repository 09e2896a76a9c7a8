"""Flags that the ranks share before they go on: what is set on any of them, and whether any has found a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array
from mpiagg.collectives.reducing_plans import allreduce_init
from mpiagg.transport import channel_of, free_if_over


class Flags:
    """Some flags a rank; sharing them costs one short all-reduce. Making this is collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    count : int
        How many flags there are.
    """

    def __init__(self, comm: MPI.Intracomm, count: int = 0) -> None:
        self._channel = channel_of(comm)
        self._flags = np.zeros(count + 1, np.uint8)
        self._plan = allreduce_init(self._flags, "max", out=self._flags, comm=comm)
        self.sent_bytes = self._plan.sent_bytes

    def share(self, check: Callable[[], Sequence[bool]]) -> Array:
        """Return the flags that any rank has set, if no rank has raised an error; collective.

        Parameters
        ----------
        check : callable
            Returns this rank's flags, or raises.

        Raises
        ------
        Exception
            What ``check`` raises, on the ranks where it does.
        MismatchError
            On the other ranks then.
        """
        fault: Exception | None = None
        self._flags.fill(0)
        try:
            self._flags[:-1] = check()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            fault = error
            self._flags[-1] = 1
        self._plan()
        if self._flags[-1]:
            self._channel.agree("", fault)
        return self._flags[:-1]

    def free(self) -> None:
        """Free the plan; a second call does nothing."""
        free_if_over(self._plan)
