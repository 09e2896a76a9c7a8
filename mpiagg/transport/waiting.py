"""How to wait for what others do: by polling, so that ranks may outnumber cores, signals be seen and deadlines kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from mpiagg.errors import StallError

YIELDS: Final = 1000
"""How often a wait yields the core before it starts to sleep."""

YIELDS_IN_A_CROWD: Final = 200
"""The same where ranks outnumber cores: those who wait take turns with those who work."""

LONGEST_SLEEP: Final = 1e-3
"""Seconds that it sleeps at most between two tests."""

DEFAULT_TIMEOUT: Final = float(os.environ.get("MPIAGG_TIMEOUT", "1800"))
"""Seconds that a wait lasts at most; the environment variable MPIAGG_TIMEOUT sets it."""


def wait_patiently(
    test: Callable[[], bool],
    awaited: Callable[[], object],
    timeout: float = DEFAULT_TIMEOUT,
    *,
    yields: int = YIELDS,
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
    yields : int
        How often it yields before it starts to sleep.

    Raises
    ------
    StallError
        If it does not succeed in time.
    """
    for _ in range(yields):
        os.sched_yield()
        if test():
            return
    last, since, pause = awaited(), time.monotonic(), 0.0
    while not test():
        now = awaited()
        if now is not last:
            last, since, pause = now, time.monotonic(), 0.0
        if time.monotonic() - since > timeout:
            raise StallError(f"waited {timeout:g} s in vain for {last}")
        pause = min(pause + 2e-6, LONGEST_SLEEP)
        time.sleep(pause)
