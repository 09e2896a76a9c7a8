"""What every rank has to say, given to all: bytes of any length."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import cuts_of, ranges
from mpiagg.transport.waiting import wait_patiently


def gather(comm: MPI.Intracomm, data: bytes, purpose: str) -> list[bytes]:
    """Return what every rank says; collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    data : bytes
        What this rank says.
    purpose : str
        What all ranks come together for, for messages to people.

    Raises
    ------
    StallError
        If a rank does not come within the timeout.
    """
    size = comm.Get_size()
    lengths = np.empty(size, np.int64)
    _complete(comm.Iallgather(np.array([len(data)], np.int64), lengths), purpose)
    everything = bytearray(lengths.sum())
    _complete(comm.Iallgatherv([data, MPI.BYTE], [everything, lengths.tolist(), MPI.BYTE]), purpose)
    return [bytes(everything[start:stop]) for start, stop in ranges(cuts_of(lengths.tolist()))]


def _complete(request: MPI.Request, purpose: str) -> None:
    awaited = f"all ranks to {purpose}"  # one object: another would be progress
    wait_patiently(request.Test, lambda: awaited)
