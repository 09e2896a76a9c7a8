"""The order of requests that share tags."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from mpiagg.errors import PlanError, StallError
from mpiagg.watch import OperationLog


class Runnable(Protocol):
    """What a request runs."""

    def start(self) -> object:
        """Bring the data in and post the first messages."""

    def test(self) -> bool:
        """Go as far as possible without waiting, and return whether it is done."""

    def wait(self) -> object:
        """Wait until it is done."""

    def free(self) -> object:
        """Give back what it holds."""


class UnderWay(Protocol):
    """A request, as a line knows it.

    Attributes
    ----------
    plan : Runnable
    running : bool
        Whether it has entered, and is not done.
    """

    plan: Runnable
    running: bool

    def done(self) -> None:
        """Let those who wait for it go on."""

    def failed(self, error: Exception) -> None:
        """Raise an error to whoever waits for it."""


class RequestLine:
    """Requests that use the same tags: each starts when the one before it is done.

    What a rank sends for one of them then comes after what it has sent for those before, which MPI keeps in order. A
    program cannot tell: all ranks start nonblocking calls in one order, and what the last one needs, the first one
    needs, too.

    Parameters
    ----------
    log : OperationLog, optional
        That of the communicator, which is told if one starts later than others that were called after it.
    """

    def __init__(self, log: OperationLog | None = None) -> None:
        self._log = log
        self.lock = threading.RLock()
        """Held by who lets them go on, perhaps for long: a request enters meanwhile."""
        self._entering = threading.Lock()
        self._under_way: deque[UnderWay] = deque()
        self._fault: Exception | None = None

    def enter(self, request: UnderWay) -> None:
        """Start a request, now or after those that are under way.

        Raises
        ------
        PlanError
            If one before it has failed, or it cannot start.
        """
        with self._entering:
            if self._fault is not None:
                raise PlanError("a nonblocking call like this has failed before") from self._fault
            if not self._under_way:
                request.plan.start()
            elif self._log is not None:
                self._log.in_order = False
            request.running = True  # before others see it
            self._under_way.append(request)

    def go_on(self, *, wait: bool) -> bool:
        """Let the first request go on, or wait for it; return whether it is done, and the next one has started.

        Raises
        ------
        StallError
            If a message does not complete within the timeout.
        Exception
            What went wrong: with that one, and so with all that come after it.
        """
        if not self._under_way:  # the first has started, and is not put down yet
            return False
        first = self._under_way[0]
        try:
            if wait:
                first.plan.wait()
            if not first.plan.test():
                return False
            first.done()
            with self._entering:
                self._under_way.popleft()
                if self._under_way:
                    self._under_way[0].plan.start()
        except StallError:  # it runs on
            raise
        except Exception as error:
            with self._entering:
                self._fault = error
                for request in self._under_way:
                    request.failed(error)
                self._under_way.clear()
            raise
        return True
