"""Calls of the MPI library's own collectives, with the recorder around them and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpiagg.plans.choices import NATIVE
from mpiagg.transport import DEFAULT_TIMEOUT, Channel, process
from mpiagg.watch import END, Subject, clock, failed


class Recorded:
    """Calls of the MPI library's own, with the recorder around them and nothing else.

    Parameters
    ----------
    channel : Channel
    what : str
        What is called.
    collective : str, optional
        Which collective that is.
    nbytes : int
        The bytes of its buffer.
    """

    def __init__(self, channel: Channel, what: str, collective: str | None = None, nbytes: int = 0) -> None:
        self.subject = Subject(channel.trail, f"{what} by {NATIVE}" if collective is None else what, collective, nbytes)
        self.subject.unleavable = DEFAULT_TIMEOUT
        self._failures, self._begin = channel.failures, process().recorder.begin

    def record(self, call: Callable[..., object], given: tuple[Any, ...]) -> None:
        """Make a call with the arguments that it is given."""
        entry = self._begin(self.subject, True)
        try:
            call(*given)
        except BaseException as error:
            failed(entry)
            self._failures.raise_for(error)
            raise
        entry[END] = clock()


class Unread(Recorded):
    """A call of a method whose arguments are for the MPI library alone.

    Parameters
    ----------
    channel : Channel
    name : str
        The method's.
    """

    given_as_it_is = True
    used = True
    once = False

    def __init__(self, channel: Channel, name: str) -> None:
        super().__init__(channel, name)
