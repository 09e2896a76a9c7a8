"""What watches over this process, from its first communicator of several ranks on."""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Final, NamedTuple

from mpi4py import MPI

from mpiagg.transport.waiting import DEFAULT_TIMEOUT
from mpiagg.watch import CARD_BYTES, Ending, Recorder, Watchdog

WARN: Final = "MPIAGG_WARN"
"""The environment variable for the seconds after which a wait is warned of; 30 by default, 0 for never."""

RECORD: Final = "MPIAGG_RECORD"
"""The environment variable that says what is recorded: ``operations`` (the default), ``rounds`` or ``off``."""

WATCH: Final = "MPIAGG_WATCH"
"""The environment variable that is 0 where ranks must not listen on TCP ports for one another's questions."""

CHECK: Final = os.environ.get("MPIAGG_CHECK") == "1"
"""Whether ranks compare what they are about to do before each blocking call: the environment variable MPIAGG_CHECK."""


class Process(NamedTuple):
    """What watches over this process.

    Attributes
    ----------
    recorder : Recorder
        Its last operations.
    ending : Ending
        How it ends before its time.
    watchdog : Watchdog or None
        Warns of what does not get on.
    """

    recorder: Recorder
    ending: Ending
    watchdog: Watchdog | None

    @property
    def card(self) -> bytes:
        """Where this process listens, for the others."""
        return bytes(CARD_BYTES) if self.watchdog is None else self.watchdog.card.pack()


@cache
def process() -> Process:
    """Return what watches over this process; the first call sets it up.

    Raises
    ------
    ValueError
        If an environment variable does not say what it must.
    """
    recorder = Recorder(os.environ.get(RECORD) or "operations")
    warn = _seconds(WARN, 30.0)
    ending = Ending(recorder, MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), _abort)
    if MPI.COMM_WORLD.Get_size() == 1:
        return Process(recorder, ending, None)
    ending.install()
    if os.environ.get(WATCH) == "0":
        return Process(recorder, ending, None)
    return Process(recorder, ending, Watchdog(recorder, warn, DEFAULT_TIMEOUT, ending.give_up, ending.dump))


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{name}={text!r} must be a number of seconds")
    return seconds


def _abort(status: int) -> None:
    """End all processes of the job."""
    main = threading.current_thread() is threading.main_thread()
    if MPI.Is_finalized() or not (main or MPI.Query_thread() == MPI.THREAD_MULTIPLE):
        os._exit(status)  # the launcher sees that, and ends the others
    MPI.COMM_WORLD.Abort(status)
