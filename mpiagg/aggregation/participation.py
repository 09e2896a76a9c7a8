"""Rounds to which ranks come in time or not: who takes part is for rank 0 to say, to all alike."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpiagg.transport import keep_for_good, keep_number, meet
from mpiagg.transport.waiting import time_limit, wait_patiently

ARRIVAL: Final = 1
DECISION: Final = 2

_AWAY: Final = 0
_HERE: Final = 1
_BACK: Final = 2
"""What is said of a rank: that it does not take part, that it does, and that it does and has missed a round before."""


class Members(NamedTuple):
    """Who takes part in a round.

    Attributes
    ----------
    ranks : tuple of int
        In their order; rank 0 is one of them.
    back : bool
        Whether any of them has missed the round before.
    calls : int
        How many calls rank 0 has counted.
    final : bool
        Whether it is the last round: all have come to the end.
    """

    ranks: tuple[int, ...]
    back: bool
    calls: int
    final: bool


class Participation:
    """Who takes part in the rounds of one list of tensors; making this is collective.

    A rank that comes says so to rank 0. That waits for all, but no longer than is asked for, and tells all who is in,
    those too that are not. A rank that has missed a round puts itself down for the next one at once; it goes on
    meanwhile, and looks in each call whether that round has begun.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.

    Attributes
    ----------
    missed : int
        How many rounds this rank has missed.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        meet(comm, "participation")
        self.comm = MPI.Intracomm(comm).Dup()
        self.missed = 0
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._round = 0
        self._put_down = False
        self._behind: set[int] = set()
        self._here, self._ended = {0}, {0}  # who has come to the next round, and who of them is at its end
        self._hearing: tuple[MPI.Request, npt.NDArray[np.int64]] | None = None
        self._sent: list[tuple[MPI.Request, npt.NDArray[np.int64]]] = []

    def free(self) -> None:
        """Give the communicator back; collective. What late ranks were told on it they may never have received."""
        keep_for_good((self._hearing, self._sent))
        keep_number(self.comm)
        self.comm.Free()

    def come(self, calls: int, patience: float | None, *, due: bool, final: bool = False) -> Members | None:
        """Return who takes part in the round that has begun; None if this rank does not, or none has.

        Parameters
        ----------
        calls : int
            How many calls this rank has counted.
        patience : float or None
            Seconds that rank 0 waits for others; None as long as a message may take.
        due : bool
            Whether it is time for a round, as this rank counts.
        final : bool
            Whether this rank is at the end. Rank 0 waits for all then, and the round is the last one if all are there;
            a rank that has yet to take steps takes part, and another round follows.

        Raises
        ------
        StallError
            If rank 0 does not say who is in within the timeout; on rank 0, if a rank does not come that is waited for.
        """
        if self._rank == 0:
            return self._decide(calls, patience, final=final) if due else None
        if not due and not (self._put_down and self._is_told()):
            return None
        if self._put_down and self._hearing is None and not final and not self._is_told():
            return None  # it is late, and waits for nobody
        if not self._put_down:
            self._put_itself_down(final=final)
        while True:
            members = self._decision()
            self._put_down = False
            if members is not None:
                return members
            self.missed += 1
            if not self._is_told():
                self._put_itself_down(final=final)
                if not final:
                    return None

    def _put_itself_down(self, *, final: bool) -> None:
        self._send(np.array([self._round + 1, final]), 0, ARRIVAL)
        self._put_down = True

    def _send(self, words: npt.NDArray[np.int64], rank: int, tag: int) -> None:
        """Send what a rank that is late may take much later."""
        self._sent = [each for each in self._sent if not each[0].Test()]
        self._sent.append((self.comm.Isend(words, rank, tag), words))

    def _is_told(self) -> bool:
        return self.comm.Iprobe(0, DECISION) if self._hearing is None else self._hearing[0].Test()

    def _decision(self) -> Members | None:
        if self._hearing is None:  # if it has waited in vain before, it goes on
            words = np.zeros(3 + self._size, np.int64)
            self._hearing = self.comm.Irecv(words, 0, DECISION), words
        request, words = self._hearing
        try:
            wait_patiently(request.Test, lambda: "all ranks to hear who takes part", time_limit())
        except BaseException:
            keep_for_good(self._hearing)  # rank 0 still tells it
            raise
        self._hearing = None
        self._round += 1
        assert words[0] == self._round, "rank 0 tells of every round"
        return self._members(words) if words[3 + self._rank] else None

    @staticmethod
    def _members(words: npt.NDArray[np.int64]) -> Members:
        said = words[3:]
        return Members(
            tuple(map(int, np.flatnonzero(said))), bool((said == _BACK).any()), int(words[1]), bool(words[2])
        )

    def _decide(self, calls: int, patience: float | None, *, final: bool) -> Members:
        here, ended, got, status = self._here, self._ended, np.zeros(2, np.int64), MPI.Status()
        end = None if patience is None or final else time.monotonic() + patience

        def settled() -> bool:
            while self.comm.Iprobe(MPI.ANY_SOURCE, ARRIVAL, status):
                source = status.Get_source()
                self.comm.Recv(got, source, ARRIVAL)
                if got[0] == self._round + 1:  # else it is late for an earlier one
                    here.add(source)
                    ended.update([source] if got[1] else [])
            return len(here) == self._size or (end is not None and time.monotonic() >= end)

        limit = time_limit() if end is None or patience is None else patience + time_limit()
        wait_patiently(settled, lambda: "the ranks of a round", limit)
        self._round += 1
        self._here, self._ended = {0}, {0}
        words = np.zeros(3 + self._size, np.int64)
        words[:3] = self._round, calls, final and len(ended) == self._size
        for rank in range(self._size):
            words[3 + rank] = _AWAY if rank not in here else _BACK if rank in self._behind else _HERE
        self._behind = set(range(self._size)) - here
        for rank in range(1, self._size):
            self._send(words, rank, DECISION)
        return self._members(words)
