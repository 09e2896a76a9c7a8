"""Ranks that die, and how the others hear of it: by MPI's user-level failure mitigation (ULFM), as Open MPI has it.

MPI learns that a process has died, and raises an error for those who have to do with it. Whoever waits for one of those
would wait for ever, and at a barrier MPI is not even asked. So waits that last look for themselves now and then, and
who learns that a rank has died *revokes* the channel's communicators: what is under way on them fails, on all ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Final

import numpy as np
from mpi4py import MPI

from mpiagg.errors import Error, RankFailedError
from mpiagg.transport.meetings import complete, meeting
from mpiagg.transport.reading import ProcessGoneError
from mpiagg.watch import OperationLog, describe_ranks

ENABLED: Final = "OMPI_MCA_mpi_ft_enable"
"""The environment variable that ``mpiexec --with-ft ulfm`` of Open MPI sets for its ranks."""

PAUSE: Final = 0.05
"""Seconds between two looks of a wait that lasts."""

PROBES: Final = 8
"""How often MPI is called before it is asked: it learns of deaths while it is called, but not every time."""

PATIENCE: Final = 10.0
"""Seconds that a rank waits to learn who has died, when it has learned that somebody has."""

NEEDED: Final = (
    "ranks that die can be survived under Open MPI alone, started with: "
    "mpiexec --with-ft ulfm --mca async_mpi_finalize 1 -n ..."
)


@cache
def active() -> bool:
    """Whether this job goes on when a rank dies."""
    return MPI.get_vendor()[0] == "Open MPI" and os.environ.get(ENABLED, "").lower() in {"1", "true", "yes"}


def failed_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks of a communicator that are known to have died."""
    for _ in range(PROBES):
        MPI.COMM_SELF.Iprobe()
    failed, everyone = comm.Get_failed(), comm.Get_group()
    try:
        return tuple(sorted(MPI.Group.Translate_ranks(failed, None, everyone)))
    finally:
        failed.Free()
        everyone.Free()


class Failures:
    """What a channel knows of ranks that have died.

    Parameters
    ----------
    comm : MPI.Intracomm
        The channel's communicator, in whose ranks the dead are told.

    Attributes
    ----------
    comms : list of MPI.Intracomm
        It, and the others on which the channel's ranks wait for one another.
    broken : bool
        Whether nothing can be done on them any more.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comms = [comm]
        self.broken = False
        self._size = comm.Get_size()
        self._looked = 0.0

    def look(self) -> None:
        """Raise RankFailedError if a rank has died, as far as is known; for waits, which may call this often."""
        now = time.monotonic()
        if now - self._looked > PAUSE:
            self._looked = now
            if self.found():
                raise self.give_up()
        elif self.broken:
            raise self.give_up()

    def found(self) -> bool:
        """Whether a rank is known to have died, or another rank has given the channel up."""
        return active() and bool(failed_ranks(self.comms[0]) or any(comm.Is_revoked() for comm in self.comms))

    def give_up(self) -> RankFailedError:
        """Have nobody wait for anybody on the channel any more, and return the error that says why."""
        if not self.broken:
            for comm in self.comms:
                with suppress(MPI.Exception):
                    comm.Revoke()
            self.broken = True
        deadline = time.monotonic() + PATIENCE
        # Another rank may have known first, and revoked.
        while not (ranks := failed_ranks(self.comms[0])) and time.monotonic() < deadline:
            time.sleep(1e-3)
        if not ranks:
            return RankFailedError("another rank has given the communicator up; comm.shrink() gives a new one")
        dead = f"{describe_ranks(ranks)} of {self._size} {'has' if len(ranks) == 1 else 'have'} died"
        return RankFailedError(f"{dead}; comm.shrink() gives a communicator of the others", ranks)

    def raise_for(self, error: BaseException) -> None:
        """Raise RankFailedError, if an error comes of a death."""
        known = isinstance(error, MPI.Exception | Error | ProcessGoneError)
        if isinstance(error, RankFailedError) or not known or not active():
            return
        told = isinstance(error, ProcessGoneError)
        told = told or (isinstance(error, MPI.Exception) and (error.Get_error_class() in _TOLD or self.found()))
        if self.broken or told:
            raise self.give_up() from error

    @contextmanager
    def told(self) -> Iterator[None]:
        """Raise RankFailedError for errors in this block that come of a death."""
        try:
            yield
        except (MPI.Exception, Error) as error:
            self.raise_for(error)
            raise


_TOLD: Final = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}
"""The classes of errors that tell of a death. Elsewhere than under Open MPI they may all be the same."""


def survivors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks that are alive, in their order; collective among them.

    Raises
    ------
    Error
        If this job does not go on when ranks die.
    StallError
        If a rank that is alive does not come within the timeout.
    """
    if not active():
        raise Error(NEEDED)
    plain = MPI.Intracomm(comm)
    if failed_ranks(plain):
        plain.Revoke()  # whoever is still in a call on it comes here, too
    all_agree(plain, word=True)  # only to have all of them here: the next call has no deadline
    return MPI.Intracomm(plain.Shrink())


def all_agree(comm: MPI.Intracomm, *, word: bool) -> bool:
    """Return whether all ranks are alive and say yes: the same on all that are alive; collective, also after deaths.

    Raises
    ------
    StallError
        If a rank that is alive does not come within the timeout.
    """
    agreed, purpose = np.array([word], np.intc), "agree on who is alive"
    try:
        with meeting(purpose, OperationLog("", comm.Get_rank(), comm.Get_size())) as subject:
            complete(comm.Iagree(agreed), purpose, subject)
    except MPI.Exception:
        return False
    return bool(agreed[0])
