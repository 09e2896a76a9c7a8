"""How to wait for what others do: by polling, so that ranks may outnumber cores, signals be seen and deadlines kept."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Final

from mpiagg.errors import StallError
from mpiagg.watch import Subject

YIELDS: Final = 1000
"""How often a wait yields the core before it starts to sleep."""

YIELDS_IN_A_CROWD: Final = 200
"""The same where others want the core, too: those who wait take turns with those who work."""

QUICK_YIELD: Final = 1.5e-6
"""Seconds that a yield takes at most where nobody else wants the core: a call of the kernel's is 0.3 to 0.7 us, two
switches from one process to another with what the other does are 3."""

LONGEST_SLEEP: Final = 1e-3
"""Seconds that it sleeps at most between two tests."""


TIMEOUT: Final = "MPIAGG_TIMEOUT"
"""The environment variable for the seconds that a wait lasts at most; half an hour by default."""

_HALF_AN_HOUR: Final = 1800.0


def timeout_by_environment() -> float:
    """Return the seconds that a wait lasts at most by the environment.

    Raises
    ------
    ValueError
        If it does not give a number of seconds above 0.
    """
    text = os.environ.get(TIMEOUT)
    with suppress(ValueError):
        if (seconds := float(text) if text else _HALF_AN_HOUR) > 0:
            return seconds
    raise ValueError(f"{TIMEOUT}={text!r} must be a number of seconds above 0")


def _default_timeout() -> float:
    try:
        return timeout_by_environment()
    except ValueError:  # of which the first communicator tells all ranks
        return _HALF_AN_HOUR


DEFAULT_TIMEOUT: Final = _default_timeout()
"""Seconds that a wait lasts at most, where nothing else is said."""


_limit: ContextVar[float] = ContextVar("limit", default=DEFAULT_TIMEOUT)


def time_limit() -> float:
    """Return the seconds that a meeting of ranks may last: the timeout of the call that it is for."""
    return _limit.get()


@contextmanager
def limited(timeout: float | None) -> Iterator[None]:
    """Let meetings of ranks in this block last so many seconds; None leaves that as it is.

    A bad timeout changes nothing: it is for the call to refuse it, on all ranks together.
    """
    try:
        seconds = time_limit() if timeout is None else check_timeout(timeout)
    except (TypeError, ValueError):
        seconds = time_limit()
    before = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(before)


def check_timeout(timeout: float | None) -> float:
    """Return a timeout in seconds, the default for None.

    Raises
    ------
    ValueError
        If it is not above 0.
    TypeError
        If it is not a number.
    """
    if timeout is None:
        return DEFAULT_TIMEOUT
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0, not {timeout!r}")
    return timeout


class Core:
    """The core that this rank runs on, as its waits have found it.

    Attributes
    ----------
    shared : bool
        Whether somebody else ran when the rank last yielded: another rank, on this node or another one on the same
        machine, or whatever else works there.
    """

    def __init__(self) -> None:
        self.shared = False

    def give_way(self) -> None:
        """Yield the core, and learn whether somebody else wanted it."""
        before = time.perf_counter()
        os.sched_yield()
        self.shared = time.perf_counter() - before > QUICK_YIELD


CORE: Final = Core()


def wait_patiently(
    test: Callable[[], bool],
    awaited: Callable[[], object],
    timeout: float = DEFAULT_TIMEOUT,
    *,
    subject: Subject | None = None,
) -> None:
    """Test until it succeeds, yielding the core between tests at first, then sleeping ever longer.

    Parameters
    ----------
    test : callable
        Returns whether it is done.
    awaited : callable
        Returns what is waited for at present, which says what it is as a string; another object is progress.
    timeout : float
        Seconds to wait without progress, from when the yielding ends.
    subject : Subject, optional
        What is waited in, for those who watch over it.

    Raises
    ------
    StallError
        If it does not succeed in time.
    Error
        What has been found to be wrong with the communicator meanwhile.
    """
    CORE.give_way()
    for _ in range(YIELDS_IN_A_CROWD if CORE.shared else YIELDS):
        if test():
            return
        os.sched_yield()
    if subject is not None:
        subject.waits, subject.thread = awaited, threading.get_ident()
    try:
        _sleep_until(test, awaited, timeout, subject)
    finally:
        if subject is not None:
            subject.waits = None


def _sleep_until(
    test: Callable[[], bool], awaited: Callable[[], object], timeout: float, subject: Subject | None
) -> None:
    last, since, pause = awaited(), time.monotonic(), 0.0
    while not test():
        now = awaited()
        if now is not last:
            last, since, pause = now, time.monotonic(), 0.0
        if subject is not None:
            subject.log.check()
        if time.monotonic() - since > timeout:
            who = "" if subject is None else subject.log.whole.explain()
            raise StallError(f"waited {timeout:g} s in vain for {last}" + (f"\n{who}" if who else ""))
        pause = min(pause + 2e-6, LONGEST_SLEEP)
        time.sleep(pause)
