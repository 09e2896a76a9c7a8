"""The end of a process group."""

from __future__ import annotations

import time
from typing import Final, NoReturn

import torch.distributed as dist

from mpiagg.collectives.comm import Comm
from mpiagg.errors import MismatchError, StallError
from mpiagg.torch.works import as_torch_words_it
from mpiagg.transport import TooLateError, limited

_LATER: Final = 60.0
"""Seconds for which a group is waited for longer than for a call of it: those of other ranks may have begun later."""

_SHORTEST: Final = 0.1
"""Seconds for which it is waited for in any case."""


class Destroyed:
    """Stands for the communicators of a group that was destroyed: whatever is asked of it is an error.

    Parameters
    ----------
    name : str
        The group.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, asked: str) -> NoReturn:
        """Raise torch's error."""
        raise dist.DistBackendError(f"process group {self._name} was destroyed")


def free_patiently(comm: Comm, timeout: float) -> None:
    """Free a communicator when all have come: also those who are in a call in vain, when their time is over.

    Parameters
    ----------
    comm : Comm
    timeout : float
        Seconds that a call waits.

    Raises
    ------
    torch.distributed.DistBackendError
        If a rank does not come. Then it cannot be freed.
    MismatchError
        If one is in something else until then.
    """
    last = time.monotonic() + timeout + min(timeout, _LATER)
    while not _freed(comm, last):
        pass


def _freed(comm: Comm, last: float) -> bool:
    """Whether all came; if not, they still can."""
    left = last - time.monotonic()
    try:
        with limited(max(left, _SHORTEST)):
            comm.Free()
    except (MismatchError, TooLateError):
        if left < 0:
            raise
        return False
    except StallError as error:
        raise as_torch_words_it(error) from error
    return True
