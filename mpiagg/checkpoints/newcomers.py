"""Ranks that are started in the places of those that died, and how they and the others come together.

``MPI_Comm_spawn`` returns when the new processes have initialised MPI. What a program does before it trains takes
longer: so the others go on meanwhile, and a new rank says when it is ready, and is told what to do. Open MPI does not
revoke an intercommunicator on its other side, so this is said by messages.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Final

import numpy as np
from mpi4py import MPI

from mpiagg.collectives.comm import Comm
from mpiagg.errors import RankFailedError, StallError
from mpiagg.transport import channel_of, meet
from mpiagg.transport.failures import failed_ranks
from mpiagg.transport.meetings import complete, keep_for_good
from mpiagg.transport.waiting import time_limit

START_SECONDS: Final = 60.0
"""How long new ranks may take until they are ready. Others are started then: that a process has died before it has sent
anything is not told by Open MPI."""

END_SECONDS: Final = 10.0
"""How long ranks that end wait for those that they have just started. These end by themselves if nobody tells them."""

PAUSE: Final = 0.01
"""Seconds between two looks of a new rank that waits for the others."""

_READY: Final = 1
_WORD: Final = 2
_GO: Final = 1
_STOP: Final = 0


class Newcomers:
    """Ranks that have been started and do not train yet; making this is collective.

    Parameters
    ----------
    comm : Comm
        The ranks that are alive, which start them.
    count : int
        How many are started. Each runs this program from its beginning, in a world of its own.

    Raises
    ------
    MPI.Exception
        If they cannot be started, or a rank dies meanwhile.
    """

    def __init__(self, comm: Comm, count: int) -> None:
        meet(comm, "starting ranks")
        info = MPI.Info.Create()
        info.Set("wdir", os.getcwd())  # noqa: PTH109 - a str for MPI
        try:
            self._link = comm.Spawn(sys.executable, sys.orig_argv[1:], count, info, root=0)
        finally:
            info.Free()
        self._first = comm.rank == 0
        self._late = time.monotonic() + START_SECONDS

    def look(self) -> tuple[bool, bool]:
        """Return whether they are ready, and whether they are given up; rank 0 finds it out, others say False twice."""
        if not self._first:
            return False, False
        try:
            ready = self._link.Iprobe(0, _READY)
        except MPI.Exception:
            return False, True
        return ready, not ready and time.monotonic() > self._late

    def join(self, words: str) -> Comm:
        """Return a communicator of the ranks of before and, after these, of the new ones; collective.

        Raises
        ------
        MPI.Exception, RankFailedError
            If a rank has died.
        MismatchError
            On all ranks, if the new ones do something else than ``words`` say.
        """
        if self._first:
            self._tell(_GO)
        return _together(self._link, lambda: words, new=False)

    def dismiss(self) -> None:
        """Have them end, if they are ready within a while; who ends before they listen would leave them waiting.

        Others end by themselves when nobody takes them in. Nothing is sent to a process that may have died before it
        was ever reached: Open MPI waits for its address then.
        """
        deadline = time.monotonic() + END_SECONDS
        ready, given_up = self.look()
        while self._first and not ready and not given_up and time.monotonic() < deadline:
            time.sleep(PAUSE)
            ready, given_up = self.look()
        if ready:
            with suppress(MPI.Exception):
                self._tell(_STOP)

    def _tell(self, word: int) -> None:
        for rank in range(self._link.Get_remote_size()):
            self._link.Send(np.array([word]), rank, _WORD)


@cache
def is_new() -> bool:
    """Whether this process was started by others that train; MPI knows it no more when they have come together."""
    return bool(MPI.Comm.Get_parent() != MPI.COMM_NULL)


def enter(check: Callable[[], str]) -> Comm:
    """Join those that have started this rank, and return the communicator of all; collective.

    Parameters
    ----------
    check : callable
        Returns in words what this rank is about to do, or raises.

    Raises
    ------
    SystemExit
        If the others do not want this rank any more, have died, or do not take it in within the timeout.
    """
    link, word, ready = MPI.Comm.Get_parent(), np.array([_STOP]), np.array([_READY])
    world = MPI.Intracomm(MPI.COMM_WORLD)
    # Calls on the way cannot be given up where those who would answer have died.
    over = threading.Timer(2 * time_limit(), os._exit, (0,))
    over.daemon = True
    over.start()
    try:
        meet(world, "joining others")
        request = link.Irecv(word, 0, _WORD)
        if world.rank == 0:
            complete(link.Isend(ready, 0, _READY), "hear of new ranks")
        complete(request, "take new ranks in")
        if word[0] == _GO:
            return _together(link, check, new=True)
    except (MPI.Exception, RankFailedError, StallError):
        pass
    finally:
        over.cancel()
    raise SystemExit(0)  # quietly: others are started in its place, if they are wanted


def _together(link: MPI.Intercomm, check: Callable[[], str], *, new: bool) -> Comm:
    merged = link.Merge(high=new)
    link.Disconnect()  # else Open MPI crashes at the end of the program
    try:
        comm = Comm(merged)
        channel_of(comm).agree_on(check)
    except (MPI.Exception, RankFailedError):
        merged.Revoke()
        keep_for_good(merged)
        raise
    if failed_ranks(comm):
        raise RankFailedError("a rank has died", failed_ranks(comm))
    return comm
