"""Where the threads of this process are, in words."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Final

_STARTS: Final = re.compile(r"^<frozen runpy>$|/(runpy|mpi4py/run|mpi4py/__main__)\.py$")
"""The files by which Python starts a program."""

_PACKAGE: Final = f"{Path(__file__).parents[1]}{os.sep}"


def call_site(thread: int) -> str:
    """Return where a thread has called this package; nothing, if it has not."""
    return next(iter(stack(thread, most=1, outside=True)), "")


def stack(thread: int | None = None, *, most: int = 6, outside: bool = False) -> list[str]:
    """Return where a thread is, innermost first.

    Parameters
    ----------
    thread : int, optional
        The main thread by default.
    most : int
        How many places at most.
    outside : bool
        Whether to begin where the thread has called this package.
    """
    ident = threading.main_thread().ident if thread is None else thread
    frame = frames().get(ident or 0)
    if outside:
        while frame is not None and not is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        while frame is not None and is_ours(frame.f_code.co_filename):
            frame = frame.f_back
    places: list[str] = []
    while frame is not None and len(places) < most:
        if not _STARTS.search(frame.f_code.co_filename):
            places.append(_place(frame))
        frame = frame.f_back
    return places


def frames() -> dict[int, FrameType]:
    """Return where every thread is."""
    # No garbage is collected meanwhile. Python before 3.11.9 and 3.12.3 keeps a lock here, which it takes again to give
    # back what belongs to a thread: it hangs for ever, and the whole process with it (python/cpython, 106883).
    with _asking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()  # noqa: SLF001 - there is no other way to ask for another thread's
        finally:
            if collects:
                gc.enable()


_asking: Final = threading.RLock()
"""Held while no garbage is collected; a handler of a signal may ask, too, within."""


def is_ours(path: str) -> bool:
    """Whether a file of code belongs to this package."""
    return path.startswith((_PACKAGE, "<compiled rounds>"))


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    where = Path(path.parent.name, path.name)
    return f"{where}:{frame.f_lineno} in {frame.f_code.co_name}"
