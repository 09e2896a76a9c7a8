"""What a process that was forked from a rank forgets, before it can hear of signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Final

from mpiagg.common.once import once

HELD: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals for which there are handlers of ours, which are for ranks alone."""

_forgets: list[Callable[[], object]] = []
_thread = threading.local()


def forget_in_children(forget: Callable[[], object]) -> None:
    """Have every process that is forked from now on call a function, before a signal reaches it."""
    _register()
    _forgets.append(forget)


@once
def _register() -> None:
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_forget)


def _hold() -> None:
    _thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)


def _forget() -> None:
    try:
        for forget in _forgets:
            forget()
    finally:
        _let_go()
