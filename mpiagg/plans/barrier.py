"""Barriers: by memory that the ranks of a node share, or the MPI library's own."""

from __future__ import annotations

from typing import Final

from mpiagg.plans.plan import Plan
from mpiagg.plans.recorded import Recorded
from mpiagg.plans.sharing import barrier_program
from mpiagg.transport import Channel, Keepable
from mpiagg.watch import END

QUICK_BARRIERS: Final = ("Open MPI",)
"""The MPI libraries whose own barrier takes less time on a node than a barrier of ours: ``bench/calls.py`` shows it."""


class Barrier(Recorded, Keepable):
    """A barrier: by counters in memory that the ranks of a node share, or the MPI library's own.

    Attributes
    ----------
    given_as_it_is : bool
        Whether it is the MPI library's own: by ``record``.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, "barrier")
        on_one_node = channel.library not in QUICK_BARRIERS and 1 < channel.size == channel.node.size
        for_calls = channel.memory.for_calls() if on_one_node else None
        if for_calls is not None:
            program = barrier_program(for_calls[0])
            self.plan = Plan(channel, program, result=None, label="barrier", in_order=True)
        self.given_as_it_is = for_calls is None

    def check(self) -> None:
        """Raise on all ranks if others are about to make another call; collective."""
        self._channel.agree("barrier")

    def run(self) -> None:
        """Wait for all ranks."""
        if not self._log.blocking[END]:
            self._log.check_thread()  # which may be in this plan
        self.plan()
