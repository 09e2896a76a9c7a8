"""What the ranks of a communicator tell one another beside their data: what they are about to do, and what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from mpi4py import MPI

from mpiagg.errors import Error, MismatchError
from mpiagg.transport.failures import Failures, active
from mpiagg.transport.meetings import gather
from mpiagg.transport.process import process
from mpiagg.watch import OperationLog, who_says_what


class Agreement:
    """A communicator whose ranks compare what they are about to do.

    Parameters
    ----------
    comm : MPI.Intracomm
        The communicator, of mpi4py's own class.

    Attributes
    ----------
    comm : MPI.Intracomm
        On which the ranks tell one another.
    rank, size : int
        This rank, and how many there are.
    log : OperationLog
        What is done here, for those who watch over it.
    failures : Failures
        What is known of ranks that have died.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.log = OperationLog("", self.rank, self.size)
        self.failures = Failures(comm)
        if active():
            self.log.alarm = self.failures.look
        with contextlib.suppress(ValueError):  # of which all ranks are told when they compare their settings
            process()  # so that there is somebody to warn

    def agree(self, word: str, error: Exception | None = None) -> None:
        """Compare what the ranks say of a collective call that they are about to make; itself collective.

        Parameters
        ----------
        word : str
            What this rank is about to do; all ranks must say the same.
        error : Exception, optional
            Why this rank cannot do it.

        Raises
        ------
        Exception
            ``error``, where it is given.
        MismatchError
            On the other ranks, if any gave an error; on all ranks, if words differ. All say who said what.
        StallError
            If a rank does not come within the timeout.
        """
        words = self._told(f"{type(error).__name__}: {error}" if error else word, failed=error is not None)
        if error is not None:
            raise error
        failed = [f"rank {rank} raised {text}" for rank, (text, bad) in enumerate(words) if bad]
        if failed:
            raise MismatchError("; ".join(failed))
        if any(text != words[0][0] for text, _ in words):
            said: dict[str, list[int]] = {}
            for rank, (text, _) in enumerate(words):
                said.setdefault(text, []).append(rank)
            raise MismatchError(f"ranks disagree: {who_says_what(said)}")

    def agree_on(self, say: Callable[[], str]) -> None:
        """Go on only if ``say`` accepts on every rank, and says the same of what they are about to do; collective.

        Raises
        ------
        Exception
            What ``say`` raises, on the ranks where it does.
        MismatchError
            On the other ranks then; on all, if their words differ.
        """
        try:
            word = say()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            self.agree("", error)
        else:
            self.agree(word)

    def _told(self, text: str, *, failed: bool) -> list[tuple[str, bool]]:
        """Return every rank's text, and whether it failed."""
        data = bytes([failed]) + text.encode(errors="replace")
        parts = self.gather(data, "agree on what they are about to do", text)
        return [(part[1:].decode(errors="replace"), bool(part[0])) for part in parts]

    def gather(self, data: bytes, purpose: str, word: str = "") -> list[bytes]:
        """Return what every rank says, for a purpose in words; collective.

        Raises
        ------
        MismatchError
            On all ranks, if they have come for different purposes.
        StallError
            If a rank does not come within the timeout.
        RankFailedError
            If a rank has died.
        """
        with self.failures.told():
            return gather(self.comm, data, purpose, self.log, word)

    def disagreement(self) -> Error:
        """Return the error that ranks of a node are in different operations."""
        self.log.explain(self.log.count)
        return self.log.fault or MismatchError("ranks disagree about the collective that they are in")
