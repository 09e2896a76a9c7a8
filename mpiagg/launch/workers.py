"""Processes that Python's multiprocessing has started, such as workers of data loaders: they are no ranks."""

from __future__ import annotations

import sys
from typing import Any


def in_worker() -> bool:
    """Whether multiprocessing has started this process, or the server from which it forks such processes.

    Both import the program's main module again, and with it what that imports. The server has no parent in the sense
    of multiprocessing: what tells it is the mark by which multiprocessing itself refuses to start processes meanwhile.
    """
    known: Any = sys.modules.get("multiprocessing.process")
    if known is None:
        return False
    return known.parent_process() is not None or getattr(known.current_process(), "_inheriting", False)
