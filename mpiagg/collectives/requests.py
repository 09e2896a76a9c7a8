"""Requests for collectives that run in the background: mpi4py's classes, driving our plans.

A plan is Python, and MPI's own waits know nothing of it. So the handle of every request is a *token*: a synchronous,
empty message of the process to itself, which is received once the plan is done. With it ``MPI.Request.Waitall`` and
its siblings wait as long as they have to, for our requests alone or among others.

Somebody must drive the plans meanwhile: the thread in :mod:`mpiagg.plans.background`.
"""

# ruff: noqa: N802 - the names are mpi4py's

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from mpi4py import MPI

from mpiagg.collectives.request_lines import RequestLine, Runnable
from mpiagg.common.once import once
from mpiagg.errors import PlanError
from mpiagg.plans.background import driver
from mpiagg.plans.plan import Plan
from mpiagg.transport import free_if_over

if TYPE_CHECKING:
    from typing_extensions import Self

_QUIET: Final = partial(np.errstate, all="ignore")
"""MPI does not warn of what becomes of numbers."""

_EMPTY: Final = (None, 0, MPI.BYTE)


class Request(MPI.Request):
    """A collective that has been started.

    Parameters
    ----------
    plan : Runnable
        What to start; it is freed when it is done.
    line : RequestLine, optional
        Those that come before.
    """

    def __new__(cls, plan: Runnable, line: RequestLine | None = None) -> Self:
        """Return a request whose handle is a token."""
        del plan, line
        tokens = _tokens()
        tag = tokens.new_tag()
        self = MPI.Request.__new__(cls, cls._new_token(tokens.comm, tag))
        self._tag = tag
        return self

    _tag: int

    def __init__(self, plan: Runnable, line: RequestLine | None = None) -> None:
        self.plan = plan
        self._tokens = _tokens()
        self._line = RequestLine() if line is None else line
        self._error: Exception | None = None
        self.running = False
        self._tokens.add(self._tag, self)
        try:
            self._begin()
        except BaseException:
            self._withdraw()
            self._tokens.remove(self._tag)
            free_if_over(plan)
            raise

    def _withdraw(self) -> None:
        """Receive the token of a request that is over: the next one with its tag is to get its own."""
        self._tokens.receive(self._tag)
        MPI.Request.Wait(self)

    @staticmethod
    def _new_token(comm: MPI.Intracomm, tag: int) -> MPI.Request:
        return comm.Issend(_EMPTY, 0, tag)

    def _begin(self) -> None:
        with _QUIET():
            self._line.enter(self)

    def _started(self) -> bool:
        """Whether the plan is to be driven."""
        return self.running

    def done(self) -> None:
        """Let MPI's waits return, now that the plan is done."""
        self.running = False
        self._complete()

    def _complete(self) -> None:
        # The plan goes first: who waits may free the communicator next.
        self.plan.free()
        self._tokens.receive(self._tag)
        self._tokens.remove(self._tag)

    def failed(self, error: Exception) -> None:
        """Raise an error to whoever waits."""
        self._error = error
        driver().remove(self)  # its tag stays taken, as its token stays on its way

    def drive(self, *, wait: bool) -> None:
        """Let the plan go on: as far as it can without waiting, or to its end.

        Raises
        ------
        StallError
            If a message does not complete within the timeout.
        Exception
            What went wrong with the plan, in whichever thread.
        """
        with self._line.lock, _QUIET():
            if self._error is not None:
                raise self._error
            if not self._started():
                return
            while self.running:
                if not self._line.go_on(wait=wait):
                    return

    def drive_if_free(self) -> bool:
        """Drive the plan unless another thread does; return whether it runs."""
        if self._line.lock.acquire(blocking=False):
            try:
                self.drive(wait=False)
            finally:
                self._line.lock.release()
        return self.running

    # -- what mpi4py's requests do

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Wait until the collective is done."""
        self.drive(wait=True)
        return super().Wait(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the collective is done."""
        self.drive(wait=False)
        return super().Test(status)

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return whether the collective is done, and leave the request as it is."""
        self.drive(wait=False)
        return super().Get_status(status)

    def wait(self, status: MPI.Status | None = None) -> Any:
        """Wait until the collective is done."""
        self.drive(wait=True)
        return super().wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, Any | None]:
        """Return whether the collective is done, and None."""
        self.drive(wait=False)
        return super().test(status)

    def get_status(self, status: MPI.Status | None = None) -> bool:
        """Return whether the collective is done, and leave the request as it is."""
        return self.Get_status(status)

    @classmethod
    def Waitall(cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None) -> Literal[True]:
        """Wait for all requests, ours and others."""
        _drive_all(requests, wait=True)
        return super().Waitall(requests, statuses)

    @classmethod
    def waitall(cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None) -> list[Any]:
        """Wait for all requests, ours and others."""
        _drive_all(requests, wait=True)
        return super().waitall(requests, statuses)

    @classmethod
    def Testall(cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None) -> bool:
        """Return whether all requests are done, ours and others."""
        _drive_all(requests, wait=False)
        return super().Testall(requests, statuses)

    @classmethod
    def testall(
        cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """Return whether all requests are done, ours and others."""
        _drive_all(requests, wait=False)
        return super().testall(requests, statuses)

    def Cancel(self) -> None:
        """Refuse: MPI cancels no collectives."""
        raise MPI.Exception(MPI.ERR_REQUEST)

    def cancel(self) -> None:
        """Refuse: MPI cancels no collectives."""
        self.Cancel()

    def Free(self) -> None:
        """Refuse: MPI frees the requests of nonblocking collectives when they are done."""
        raise MPI.Exception(MPI.ERR_REQUEST)

    def free(self) -> None:
        """Free the request if it is not null."""
        if self:
            self.Free()


class Prequest(Request, MPI.Prequest):
    """A collective that can be started again and again, as MPI's also when its communicator is freed.

    What it runs on then stays, on all ranks, until the program ends, also when the request is freed later: programs
    that make many communicators free the requests first.

    Parameters
    ----------
    plan : Plan
        What to run at each start.
    """

    def __init__(self, plan: Plan[Any]) -> None:
        super().__init__(plan)
        plan.lasts = True

    @staticmethod
    def _new_token(comm: MPI.Intracomm, tag: int) -> MPI.Request:
        return comm.Ssend_init(_EMPTY, 0, tag)

    def _begin(self) -> None:
        """Wait for ``Start``."""

    def _started(self) -> bool:
        # MPI.Prequest.Startall starts the token alone: it is on its way, and nobody has received it.
        if not self.running and self._tokens.comm.Iprobe(0, self._tag):
            super()._begin()
        return self.running

    def _complete(self) -> None:
        """Let MPI's waits return, and stay ready for the next start."""
        self._tokens.receive(self._tag)

    def Start(self) -> None:
        """Start the collective.

        Raises
        ------
        MPI.Exception
            If it is running, has failed, or is freed.
        PlanError
            If its plan cannot start.
        """
        with self._line.lock:
            if self.running:
                raise MPI.Exception(MPI.ERR_REQUEST)
            MPI.Prequest.Start(self)
            try:
                super()._begin()
            except PlanError:
                self._withdraw()
                raise
        driver().wake()

    @classmethod
    def Startall(cls, requests: list[MPI.Prequest]) -> None:
        """Start all requests, ours and others."""
        for request in requests:
            request.Start()

    def Free(self) -> None:
        """Free the request and its plan.

        Raises
        ------
        PlanError
            If it is running.
        """
        with self._line.lock:
            self.plan.free()
            if self and self._error is not None:
                self._withdraw()
            self._tokens.remove(self._tag)
            MPI.Request.Free(self)


def _drive_all(requests: Iterable[MPI.Request], *, wait: bool) -> None:
    for request in requests:
        if isinstance(request, Request):
            request.drive(wait=wait)


class _Tokens:
    """The communicator on which tokens travel, and the requests that they stand for."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_SELF.Dup()
        self._tags = cycle(range(32768))
        self._requests: dict[int, Request] = {}
        self._driver = driver()
        atexit.register(self.free)

    def new_tag(self) -> int:
        """Return a tag that no open request has."""
        return next(tag for tag in self._tags if tag not in self._requests)

    def add(self, tag: int, request: Request) -> None:
        """Drive a request from now on."""
        self._requests[tag] = request
        self._driver.add(request)

    def remove(self, tag: int) -> None:
        """Drive a request no longer."""
        request = self._requests.pop(tag, None)
        if request is not None:
            self._driver.remove(request)

    def receive(self, tag: int) -> None:
        """Receive the token of a request."""
        self.comm.Recv(_EMPTY, 0, tag)

    def free(self) -> None:
        """Free the persistent requests that the program has left."""
        self._driver.stop()
        if MPI.Is_finalized():
            return
        for request in list(self._requests.values()):
            with contextlib.suppress(PlanError, MPI.Exception):
                request.Free()
        if not self._requests:
            self.comm.Free()


@once
def _tokens() -> _Tokens:
    return _Tokens()
