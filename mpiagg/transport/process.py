"""What watches over this process, from its first communicator of several ranks on."""

from __future__ import annotations

import os
import threading
from typing import Final, NamedTuple

from mpi4py import MPI

from mpiagg.common.once import once
from mpiagg.launch.launchers import on_one_node, started_by
from mpiagg.transport.waiting import timeout_by_environment
from mpiagg.watch import KEEPS, PEER_BYTES, Ending, Recorder, Watchdog, say
from mpiagg.watch.forks import forget_in_children

WARN: Final = "MPIAGG_WARN"
"""The environment variable for the seconds after which a wait is warned of; 30 by default, 0 for never."""

RECORD: Final = "MPIAGG_RECORD"
"""The environment variable that says what is recorded: ``operations`` (the default), ``rounds`` or ``off``."""

WATCH: Final = "MPIAGG_WATCH"
"""The environment variable that is 0 where ranks must not listen on TCP ports for one another's questions."""
_FLAGS: Final = ("MPIAGG_CHECK", "MPIAGG_REPRODUCIBLE")

CHECK, REPRODUCIBLE = (os.environ.get(name) == "1" for name in _FLAGS)
"""Whether ranks compare what they are about to do before each blocking call, and whether calls keep to our own
schedules: by the environment."""


class Process(NamedTuple):
    """What watches over this process.

    Attributes
    ----------
    recorder : Recorder
        Its last operations.
    ending : Ending
        How it ends before its time.
    watchdog : Watchdog or None
        Warns of what makes no progress.
    """

    recorder: Recorder
    ending: Ending
    watchdog: Watchdog | None

    @property
    def peer(self) -> bytes:
        """Where this process listens, for the others."""
        return bytes(PEER_BYTES) if self.watchdog is None else self.watchdog.listener.peer.pack()


_ENDING: list[Ending] = []
_ALONE: Final = threading.Lock()
"""Held by the thread that makes it."""


def ending() -> Ending:
    """Return how this process ends before its time; from now on an error that nobody catches ends the job."""
    with _ALONE:
        if _ENDING:
            return _ENDING[0]
        keeps = os.environ.get(RECORD) or "operations"
        recorder = Recorder(keeps if keeps in KEEPS else "operations")
        if not MPI.Is_initialized() or MPI.Is_finalized():
            return Ending(recorder, 0, 1, _abort)
        made = Ending(recorder, MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), _abort, started_by())
        _ENDING.append(made)
        if made.size > 1:
            made.install()
        return made


@once
def process() -> Process:
    """Return what watches over this process; the first call sets it up.

    Raises
    ------
    ValueError
        If an environment variable does not say what it must.
    """
    warn, keeps, end = warning_time(), os.environ.get(RECORD) or "operations", ending()
    if keeps not in KEEPS:
        raise ValueError(f"{RECORD}={keeps!r} must be one of {', '.join(KEEPS)}")
    for name in _FLAGS:
        if (text := os.environ.get(name, "")) not in {"", "0", "1"}:
            raise ValueError(f"{name}={text!r} must be 0 or 1")
    timeout = timeout_by_environment()
    watched = end.size > 1 and os.environ.get(WATCH) != "0" and keeps != "off"
    return Process(end.recorder, end, _watchdog(end, warn, timeout) if watched else None)


def _watchdog(end: Ending, warn: float, timeout: float) -> Watchdog | None:
    try:
        host = "127.0.0.1" if on_one_node() else ""
        watchdog = Watchdog(end.recorder, warn, timeout, end.give_up, end.dump, host=host)
    except (OSError, RuntimeError) as error:
        say(f"rank {end.rank} cannot listen for the others' questions, and will not be warned of stalls: {error}")
        return None
    forget_in_children(watchdog.listener.socket.close)
    return watchdog


def warning_time() -> float:
    """Return the seconds after which a wait is warned of; ValueError if :data:`WARN` does not say what it must."""
    text = os.environ.get(WARN)
    try:
        seconds = float(text) if text else 30.0
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{WARN}={text!r} must be a number of seconds")
    return seconds


def _abort(status: int) -> None:
    """End all processes of the job."""
    main = threading.current_thread() is threading.main_thread()
    if MPI.Is_finalized() or not (main or MPI.Query_thread() == MPI.THREAD_MULTIPLE):
        os._exit(status)  # the launcher sees that, and ends the others
    MPI.COMM_WORLD.Abort(status)
