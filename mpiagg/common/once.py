"""What a process makes once, whichever of its threads asks for it first."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import TypeVar

_T = TypeVar("_T")


def once(make: Callable[[], _T]) -> Callable[[], _T]:
    """Decorate a function that makes what a process has one of: all threads get the same.

    ``functools.cache`` lets threads that ask at the same time each make one of their own.
    """
    made: list[_T] = []
    lock = RLock()  # what is made may ask for something else that asks for it

    @wraps(make)
    def get() -> _T:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0]

    return get
