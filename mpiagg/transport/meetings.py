"""What every rank has to say, given to all: bytes of any length, and what it is for.

All that the ranks of a communicator come together for goes the same way, an all-gather of two numbers first. So those
who come for different purposes meet, and are told, where calls of the MPI library that do not belong together hang.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final
from zlib import crc32

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import cuts_of, ranges
from mpiagg.common.once import once
from mpiagg.errors import Error, MismatchError, StallError
from mpiagg.transport.process import ending
from mpiagg.transport.waiting import time_limit, wait_patiently
from mpiagg.watch import OperationLog, Subject, describe_ranks, done, failed, who_says_what

GRACE: Final = 2.0
"""Seconds that who comes late is waited for at the end of the program."""

LONGEST: Final = 300
"""Bytes of what a rank says of its purpose, where ranks have different ones."""


class TooLateError(StallError):
    """Another rank has waited in vain for this one, which comes to a meeting now."""


def gather(
    comm: MPI.Intracomm, data: bytes, purpose: str, log: OperationLog | None = None, word: str = ""
) -> list[bytes]:
    """Return what every rank says; collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    data : bytes
        What this rank says.
    purpose : str
        What all ranks come together for, for messages to people.
    log : OperationLog, optional
        The operations of the communicator, of which this is one.
    word : str
        What more there is to be told of the purpose, if other ranks have another.

    Raises
    ------
    MismatchError
        On all ranks, if they have come for different purposes.
    StallError
        If a rank does not come within the timeout; or if another has waited in vain for this one before.
    """
    with meeting(purpose, OperationLog("", comm.Get_rank(), comm.Get_size()) if log is None else log) as subject:
        return exchange(comm, data, purpose, subject, word=word)


def exchange(
    comm: MPI.Intracomm,
    data: bytes,
    purpose: str,
    subject: Subject,
    timeout: float | None = None,
    *,
    word: str = "",
) -> list[bytes]:
    """Do as `gather`, as part of an operation that has been entered already."""
    end_late(comm, subject)
    new = _AllGather(comm, data, purpose, f"{purpose}{f' ({word})' if word else ''}")
    try:
        return new.finish(subject, timeout)
    finally:
        if not new.over:
            comm.Set_attr(_keyval(), new)
            _late[id(new)] = new


def end_late(comm: MPI.Intracomm, subject: Subject) -> None:
    """Come to the end of an exchange that was given up, before another one begins: the ranks enter them in one order.

    Raises
    ------
    StallError
        If a rank does not come within the timeout.
    Error
        What has been found to be wrong with the communicator meanwhile.
    """
    late = comm.Get_attr(_keyval())
    if isinstance(late, _AllGather):
        late.end(subject)
        comm.Delete_attr(_keyval())


def is_late(comm: MPI.Intracomm) -> bool:
    """Whether an exchange on a communicator was given up, and has not come to its end."""
    return comm.Get_attr(_keyval()) is not None


def end_all(subject: Subject) -> None:
    """Come to the end of all that was given up, if others come for it within `GRACE`; for the end of the program.

    So who comes then is told, and need not wait in vain. Others may never come: they are at their end, too.
    """
    until = time.monotonic() + GRACE
    for late in list(_late.values()):
        with suppress(Error, MPI.Exception):
            late.end(subject, max(0.0, until - time.monotonic()))


class _AllGather:
    """What every rank has to say, on its way to all.

    Attributes
    ----------
    over : bool
        Whether nothing of it is under way any more.
    """

    def __init__(self, comm: MPI.Intracomm, data: bytes, purpose: str, told: str) -> None:
        self._comm, self._data, self._purpose, self._told = comm, data, purpose, told
        self._steps = self._run()
        self._request: MPI.Request | None = None
        self._found: list[bytes] = []
        self._given_up = self.over = False

    def finish(self, subject: Subject, timeout: float | None) -> list[bytes]:
        """Return what every rank says; where that was given up, go on from there."""
        while not self.over:
            try:
                self._request = self._request or next(self._steps)
            except BaseException as error:
                self.over = True
                if isinstance(error, StopIteration):
                    break
                raise
            try:
                complete(self._request, self._told[:LONGEST].replace("\n", " "), subject, timeout)
            except MPI.Exception:
                self.over = True
                raise
            self._request = None
        return self._found

    def end(self, subject: Subject, timeout: float | None = None) -> None:
        """Go on with what this rank has given up, so that the others learn of that; what they say is of no use now."""
        self._given_up = True
        _take_back(self._request)
        try:
            self.finish(subject, timeout)
        except MismatchError:
            if not self.over:  # it is about something else
                raise
        finally:
            if self.over:
                _late.pop(id(self), None)

    def _run(self) -> Iterator[MPI.Request]:
        """Yield the requests that are to be completed one after the other."""
        size = self._comm.Get_size()
        mine = np.array([len(self._data), crc32(self._purpose.encode(errors="replace"))], np.int64)
        all_of_them = np.empty((size, 2), np.int64)
        yield self._comm.Iallgather(mine, all_of_them)
        lengths, purposes = all_of_them.T.tolist()
        if len(set(purposes)) > 1:
            texts = np.zeros((size, LONGEST), np.uint8)
            text = np.frombuffer(self._told.encode(errors="replace")[:LONGEST].ljust(LONGEST, b"\0"), np.uint8)
            yield self._comm.Iallgather(text, texts)
            said: dict[str, list[int]] = {}
            for rank, row in enumerate(texts):
                said.setdefault(row.tobytes().rstrip(b"\0").decode(errors="replace"), []).append(rank)
            raise MismatchError(f"ranks disagree: they have come together to different ends: {who_says_what(said)}")
        everything = bytearray(sum(lengths) + size)
        data = bytes([self._given_up]) + self._data
        counts = [1 + length for length in lengths]
        yield self._comm.Iallgatherv([data, MPI.BYTE], [everything, counts, MPI.BYTE])
        found = [bytes(everything[start:stop]) for start, stop in ranges(cuts_of(counts))]
        gone = [rank for rank, each in enumerate(found) if each[0]]
        if gone and not self._given_up:
            raise TooLateError(f"{describe_ranks(gone)} waited in vain for all ranks to {self._purpose}")
        self._found = [each[1:] for each in found]


_late: dict[int, _AllGather] = {}
"""Those that were given up; each is an attribute of its communicator, too, and forgotten when that is freed."""


@once
def _keyval() -> int:
    return MPI.Comm.Create_keyval(delete_fn=_forget)


def _forget(comm: MPI.Comm, keyval: int, late: _AllGather) -> None:
    del comm, keyval
    _late.pop(id(late), None)


@contextmanager
def meeting(purpose: str, log: OperationLog) -> Iterator[Subject]:
    """Enter a meeting of all ranks as an operation, for those who watch over it.

    Yields
    ------
    Subject
        The operation.
    """
    subject = Subject(log, f"a meeting of all ranks to {purpose}")
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
        with _letting_go:
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
            _given_up[:] = [late for late in _given_up if not _over(late)]
        finally:
            _letting_go.release()


def _take_back(request: MPI.Request | None) -> None:
    """Have nobody else test a request that was given up."""
    with _letting_go:
        _given_up[:] = [late for late in _given_up if late is not request]


def _over(request: MPI.Request) -> bool:
    """Whether a request that was given up is over by now, in whichever way."""
    try:
        return request.Test()
    except MPI.Exception:  # of what nobody waits for
        return True


_for_good: list[object] = []

for _kept in (_given_up, _for_good):  # MPI is finalised after Python has given back all that modules have
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def keep_number(comm: MPI.Intracomm) -> None:
    """Keep MPI from giving the number of a communicator to another one: it would receive what nobody has received here.

    A request belongs to its communicator until it is freed, as MPI has it, also if the communicator is freed before.
    """
    keep_for_good(comm.Recv_init(bytearray(1), comm.rank, 0))


def keep_for_good(left: object) -> None:
    """Keep a plan that has requests under way, with their memory, until the process ends: see ``_given_up``."""
    _for_good.append(left)
