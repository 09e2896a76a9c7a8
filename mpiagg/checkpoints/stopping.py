"""Signals that ask training loops to stop, and who hears of them."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final
from weakref import WeakKeyDictionary

from mpiagg.transport.process import ending
from mpiagg.watch.forks import forget_in_children

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
"""What asks for a checkpoint and an end: what Slurm sends before a job's time is over."""

_asked: WeakKeyDictionary[object, bool] = WeakKeyDictionary()
"""Whether a signal has asked a loop to stop, of those that are to hear of them."""

_before: dict[int, Any] = {}
"""Who had the signals before the first of these loops."""


def listen(loop: object) -> None:
    """Have signals ask a loop to stop; they can be taken in the main thread alone."""
    if threading.current_thread() is threading.main_thread():
        ending()  # which has them else, and is to find them free
        _asked[loop] = False
        for number in SIGNALS if not _before else ():
            _before[number] = signal.signal(number, _ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def listen_no_more(loop: object) -> None:
    """Let signals do what they did before, if there is no other loop."""
    _asked.pop(loop, None)
    if _before and not _asked and threading.current_thread() is threading.main_thread():
        ending().look()
        while _before:
            number, handler = _before.popitem()
            if signal.getsignal(number) is _ask:
                # What was not set from Python cannot be set again from there.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def asked(loop: object) -> bool:
    """Whether a loop has been asked to stop."""
    return _asked.get(loop, False)


def answered(loop: object) -> None:
    """Take it that a loop has stopped as it was asked to."""
    if loop in _asked:
        _asked[loop] = False


def _ask(number: int, frame: FrameType | None) -> None:
    """Ask all loops to stop; where there is none any more, do as was done before the first."""
    loops, before = list(_asked), _before.get(number)
    for loop in loops:
        _asked[loop] = True
    if not loops and callable(before):
        before(number, frame)
    elif not loops and before is not signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _forget() -> None:
    """Have no loop in a process that was forked: it is to end by signals as others do."""
    _asked.clear()
    for number in SIGNALS if _before else ():
        if signal.getsignal(number) is _ask:
            signal.signal(number, signal.SIG_DFL)
    _before.clear()


forget_in_children(_forget)
