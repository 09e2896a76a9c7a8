"""What every rank has to say, given to all: bytes of any length."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import cuts_of, ranges
from mpiagg.transport.process import ending
from mpiagg.transport.waiting import time_limit, wait_patiently
from mpiagg.watch import Subject, Trail, done, failed


def gather(comm: MPI.Intracomm, data: bytes, purpose: str, trail: Trail | None = None) -> list[bytes]:
    """Return what every rank says; collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    data : bytes
        What this rank says.
    purpose : str
        What all ranks come together for, for messages to people.
    trail : Trail, optional
        The operations of the communicator, of which this is one.

    Raises
    ------
    StallError
        If a rank does not come within the timeout.
    """
    with meeting(purpose, Trail("", comm.Get_rank(), comm.Get_size()) if trail is None else trail) as subject:
        lengths = np.empty(comm.Get_size(), np.int64)
        complete(comm.Iallgather(np.array([len(data)], np.int64), lengths), purpose, subject)
        everything = bytearray(lengths.sum())
        complete(comm.Iallgatherv([data, MPI.BYTE], [everything, lengths.tolist(), MPI.BYTE]), purpose, subject)
    return [bytes(everything[start:stop]) for start, stop in ranges(cuts_of(lengths.tolist()))]


@contextmanager
def meeting(purpose: str, trail: Trail) -> Iterator[Subject]:
    """Enter a meeting of all ranks as an operation, for those who watch over it.

    Yields
    ------
    Subject
        The operation.
    """
    subject = Subject(trail, f"a meeting of all ranks to {purpose}")
    entry = ending().recorder.begin(subject, True)
    try:
        yield subject
    except BaseException:
        failed(entry)
        raise
    done(entry)


def complete(request: MPI.Request, purpose: str, subject: Subject | None = None, timeout: float | None = None) -> None:
    """Wait for a request that all ranks start, for a purpose; by default as long as the call may last that it is for.

    Raises
    ------
    StallError
        If it does not complete within the timeout.
    """
    awaited = f"all ranks to {purpose}"  # one object: another would be progress
    _let_go()
    try:
        wait_patiently(request.Test, lambda: awaited, time_limit() if timeout is None else timeout, subject=subject)
    except BaseException:
        _given_up.append(request)
        raise


_given_up: list[MPI.Request] = []
"""Requests that this rank waits for no more, with their memory. A rank that comes late still sends, and MPI writes what
arrives to where it was told to: if that had been given back, it would be somebody else's memory by then."""

_letting_go = threading.Lock()


def _let_go() -> None:
    """Let go of what was given up and is over: it holds its communicator, too."""
    if _given_up and _letting_go.acquire(blocking=False):
        try:
            for late in list(_given_up):
                if _over(late):
                    _given_up.remove(late)
        finally:
            _letting_go.release()


def _over(request: MPI.Request) -> bool:
    """Whether a request that was given up is over by now, in whichever way."""
    try:
        return request.Test()
    except MPI.Exception:  # of what nobody waits for
        return True


_for_good: list[object] = []

for _kept in (_given_up, _for_good):  # MPI is finalised after Python has given back all that modules have
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def keep_for_good(left: object) -> None:
    """Keep a plan that has requests under way, with their memory, until the process ends: see ``_given_up``."""
    _for_good.append(left)
