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
"""How often a wait gives way before it sleeps ever longer."""

YIELDS_IN_A_CROWD: Final = 200
"""The same where others want the core, too: those who wait take turns with those who work."""

QUICK_YIELD: Final = 1.5e-6
"""Seconds that a yield takes at most where nobody else wants the core: a call of the kernel's is 0.3 to 0.7 us, two
switches from one process to another with what the other does are 3."""

SLOW_YIELD: Final = 3e-4
"""Seconds that a yield takes at least where somebody computes on the core: a kernel lets him go on for 1 to 4 ms, where
one who has slept gets the core back at once. Ranks that all wait are back sooner."""

SHORTEST_SLEEP: Final = 2e-6
"""Seconds that a rank asks to sleep in place of a slow yield; it takes some 55 us, by the kernel's timer slack."""

FIRST_PAUSE, LONGEST_PAUSE = 5e-3, 0.1
"""Seconds after a slow yield until a rank yields again, to see whether somebody still computes: twice as many each time
that he does, since such a try takes as long as the slow yield."""

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
        self._pause = FIRST_PAUSE
        self._next_yield = 0.0

    def give_way(self) -> None:
        """Yield the core, and learn whether somebody else wanted it; where he computes, sleep instead for a while."""
        before = time.perf_counter()
        if before < self._next_yield:
            time.sleep(SHORTEST_SLEEP)
            return
        os.sched_yield()
        now = time.perf_counter()
        self.shared = now - before > QUICK_YIELD
        if now - before < SLOW_YIELD:
            self._pause = FIRST_PAUSE
        else:
            self._next_yield = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


CORE: Final = Core()


def wait_patiently(
    test: Callable[[], bool],
    awaited: Callable[[], object],
    timeout: float = DEFAULT_TIMEOUT,
    *,
    subject: Subject | None = None,
) -> None:
    """Test until it succeeds, giving way to others between tests at first, then sleeping ever longer.

    Parameters
    ----------
    test : callable
        Returns whether it is done.
    awaited : callable
        Returns what is waited for at present, which says what it is as a string; another object is progress.
    timeout : float
        Seconds to wait without progress, from when the sleeps grow.
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
        CORE.give_way()
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
