"""Calls of the MPI library's own collectives, with the recorder around them, and a comparison of signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from mpiagg.plans.choices import NATIVE
from mpiagg.transport import DEFAULT_TIMEOUT, SIGNATURE_BITS, WRITTEN, Channel, Keepable, process, signature
from mpiagg.watch import END, Entry, Subject, clock, failed

_LAST: Final = WRITTEN - 1


class Recorded:
    """Calls of the MPI library's own, with the recorder around them, and a comparison of signatures on each node.

    Parameters
    ----------
    channel : Channel
    what : str
        What is called.
    collective : str, optional
        Which collective that is.
    nbytes : int
        The bytes of its buffer.
    signed : bool
        Whether all ranks call it in the same words, so that a rank that does not is in another operation.
    """

    def __init__(
        self, channel: Channel, what: str, collective: str | None = None, nbytes: int = 0, *, signed: bool = True
    ) -> None:
        self.subject = Subject(channel.log, f"{what} by {NATIVE}" if collective is None else what, collective, nbytes)
        self.subject.unleavable = DEFAULT_TIMEOUT
        self._channel, self._log, self._keep = channel, channel.log, process().recorder.keep
        self._written = channel.memory.signatures()
        self._own, self._beside = (self._written.own, self._written.beside) if signed else ({}, ())
        self._signature = signature(what)

    def record(self, call: Callable[..., object], given: tuple[Any, ...]) -> None:
        """Make a call with the arguments that it is given.

        Raises
        ------
        PlanError
            If another thread is in a blocking call on the communicator.
        MismatchError
            If a rank of the node that this one compares with has made another call instead, and that shows by now.
        """
        log, written = self._log, self._written
        # What the recorder's ``begin`` does, since to call it takes a twentieth of a short call's time.
        order = log.count + 1
        entry: Entry = [self.subject, order, clock(), 0, True, None]
        if not log.blocking[END]:
            log.check_thread()
        if log.blocking[END]:
            log.blocking = entry
        log.count = order
        self._keep(entry)
        written.count = count = written.count + 1
        place = count & _LAST
        self._own[place] = mine = count << SIGNATURE_BITS | self._signature
        try:
            call(*given)
        except BaseException as error:
            failed(entry)
            self._channel.failures.raise_for(error)
            raise
        entry[END] = clock()
        for words in self._beside:
            theirs = words[place]
            if theirs != mine and theirs >> SIGNATURE_BITS == count:
                raise self._channel.disagreement()


class Unread(Recorded, Keepable):
    """A call of a method whose arguments are for the MPI library alone.

    Parameters
    ----------
    channel : Channel
    name : str
        The method's.
    words : str
        What all ranks must agree on.
    """

    given_as_it_is = True

    def __init__(self, channel: Channel, name: str, words: str) -> None:
        super().__init__(channel, name, signed=False)  # ranks may describe the same data in different ways
        self.words = words

    def check(self) -> None:
        """Raise on all ranks if they are about to make different calls; collective."""
        self._channel.agree(self.words)
