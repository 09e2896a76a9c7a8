"""Barriers: by memory that the ranks of a node share, or the MPI library's own."""

from __future__ import annotations

from typing import Final

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array, Reduction
from mpiagg.plans.call import WithPlan
from mpiagg.plans.choices import NATIVE, Choice
from mpiagg.plans.operation import Operation
from mpiagg.plans.plan import Plan
from mpiagg.plans.recorded import Recorded
from mpiagg.plans.sharing import barrier_program
from mpiagg.schedules import Collective
from mpiagg.transport import DEFAULT_TIMEOUT, Channel

QUICK_BARRIERS: Final = ("Open MPI",)
"""The MPI libraries whose own barrier takes less time on a node than a barrier of ours: ``bench/calls.py`` shows it."""


class Barrier(WithPlan, Recorded):
    """A barrier: by counters in memory that the ranks of a node share, or the MPI library's own."""

    def __init__(self, channel: Channel) -> None:
        how = Reduction(np.bitwise_or, np.dtype(np.uint8), "bor")
        byte = Operation(Collective.ALLREDUCE, channel.rank, channel.layout, 0, (1,), how, Choice(NATIVE), MPI.BOR)
        WithPlan.__init__(self, channel, byte)
        Recorded.__init__(self, channel, "barrier")
        on_one_node = channel.library not in QUICK_BARRIERS and 1 < channel.size == channel.node.size
        for_calls = channel.memory.for_calls() if on_one_node else None
        if for_calls is not None:
            program = barrier_program(for_calls[0], "barrier")
            self._take(Plan(channel, program, result=None, label="barrier", in_order=True))
        self.given_as_it_is = for_calls is None

    def check(self) -> None:
        """Raise on all ranks if others are about to make another call; collective."""
        self.channel.agree("barrier")

    def run(self, x: Array | None, out: Array | None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Wait for all ranks."""
        del x, out
        self._run(timeout)
