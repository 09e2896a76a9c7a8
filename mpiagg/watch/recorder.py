"""What this process does: a ring of its last operations.

An operation is entered when it starts and marked when it ends; that costs a clock's reading each, and a small list.
Nothing is written anywhere until somebody asks: a stall, an error, a signal.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any, Final, NamedTuple

from mpiagg.errors import Error, PlanError
from mpiagg.watch.stacks import call_site, frames, is_ours

clock: Final = perf_counter_ns
"""The clock of all that is recorded, in nanoseconds."""

LENGTH: Final = 512
"""How many operations are kept."""

KEEPS: Final = ("operations", "rounds", "off")
"""What can be kept."""

Entry = list[Any]
"""A run of an operation: its subject, order, start, end, whether the caller waits for it, and the clock within its
rounds.

An end of 0 is one that has not come; one below 0 is that of a failure.
"""

SUBJECT, ORDER, START, END, BLOCKING, STAMPS = range(6)

_WATCH: Final = f"{Path(__file__).parent}{os.sep}"


class OperationLog:
    """The operations of one communicator on this rank, in their order.

    Attributes
    ----------
    name : str
        The same on all ranks of the communicator, and of no other; empty where they have not agreed on one.
    whole : OperationLog
        That of all its ranks.
    rank, size : int
        This rank of the communicator, and how many there are.
    count : int
        How many operations this rank has entered.
    in_order : bool
        Whether all ranks enter the same operations in the same order: not where plans were made, which a program may
        start in any.
    fault : Error or None
        Why no wait on this communicator can end well, once that is known.
    blocking : Entry
        The last operation that a thread has entered to wait for its end; of those within one another, the outermost.
    alarm : callable or None
        Called now and then while a wait is slow; may raise.
    ranks : tuple of int
        Its ranks, in their order, by their numbers in the whole job; none where that is not known.
    label : str
        What the program calls the communicator.
    callers : deque of (int, str)
        Where another interface is on top of this one: the number of the first operation of each of its calls, and its
        name for the call.
    """

    __slots__ = (
        *("alarm", "blocking", "callers", "count", "explain", "fault", "in_order", "label", "name", "rank", "ranks"),
        "size",
    )

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.count = 0
        self.in_order = True
        self.blocking: Entry = [None, 0, 0, 1, True, None]
        self.fault: Error | None = None
        self.alarm: Callable[[], object] | None = None
        self.ranks: tuple[int, ...] = ()
        self.label = ""
        self.callers: deque[tuple[int, str]] = deque(maxlen=LENGTH)
        self.explain: Callable[..., str] = _nothing
        """Returns in words who is where; nothing, where nobody can be asked. It may be given the number of an operation
        that ranks are known to disagree in."""

    @property
    def whole(self) -> OperationLog:
        """The log of all its ranks: this one, where it is not an :class:`Aside`."""
        return self

    def check_thread(self) -> None:
        """Raise PlanError if another thread is in a blocking operation of this communicator.

        All ranks enter the operations of a communicator in one order, and two threads have none. Within an operation
        of its own a thread may enter another. What was started, and is waited for by itself, is not looked at.
        """
        if not self.blocking[END]:
            _check_thread(self.blocking)

    def check(self) -> None:
        """Raise what is known to be wrong with this communicator."""
        if self.alarm is not None:
            self.alarm()
        if self.fault is not None:
            raise type(self.fault)(str(self.fault))


class Aside(OperationLog):
    """Operations of some ranks of a communicator alone: they are not numbered with those of all its ranks.

    Parameters
    ----------
    log : OperationLog
        The communicator's.
    """

    __slots__ = ("_log",)

    def __init__(self, log: OperationLog) -> None:
        super().__init__("", log.rank, log.size)
        self._log = log

    @property
    def whole(self) -> OperationLog:
        """The communicator's log."""
        return self._log

    def check(self) -> None:
        """Raise what is known to be wrong with the communicator."""
        self._log.check()


class Data(NamedTuple):
    """What goes into an operation on one rank, and what comes out.

    Attributes
    ----------
    dtype : str
    sent, received : int or None
        Elements of the input, and of the output; None where this rank has none, or they are not known.
    even : bool
        Whether that is the same on all ranks, but for the root.
    """

    dtype: str
    sent: int | None
    received: int | None
    even: bool


class Subject:
    """An operation, which may run many times.

    Attributes
    ----------
    log : OperationLog
        Its communicator's.
    what : str
        The operation in words; on all ranks the same.
    collective : str or None
        The collective that it is, if it is one.
    nbytes : int
        The bytes of its buffer.
    rounds : tuple of str
        The names of its rounds.
    waits : callable or None
        While somebody waits for it: returns what is waited for at present.
    thread : int
        The thread that waits.
    unleavable : float
        Seconds that it may last, where it is a call of the MPI library's from which no error can be raised; else 0.
    data : callable or None
        Returns what goes in and comes out, where that is known.
    """

    __slots__ = ("collective", "data", "log", "nbytes", "rounds", "thread", "unleavable", "waits", "what")

    def __init__(self, log: OperationLog, what: str, collective: str | None = None, nbytes: int = 0) -> None:
        self.log, self.what, self.collective, self.nbytes = log, what, collective, nbytes
        self.rounds: tuple[str, ...] = ()
        self.waits: Callable[[], object] | None = None
        self.thread = 0
        self.unleavable = 0.0
        self.data: Callable[[], Data] | None = None


class Recorder:
    """The last operations of this process.

    Parameters
    ----------
    keeps : {"operations", "rounds", "off"}
        What is kept: operations; the clock within their rounds, too; or nothing.
    """

    def __init__(self, keeps: str = "operations") -> None:
        if keeps not in KEEPS:
            raise ValueError(f"what is recorded must be one of {', '.join(KEEPS)}, not {keeps!r}")
        self.rounds = keeps == "rounds"
        self._ring: deque[Entry] = deque(maxlen=LENGTH)
        self.keep: Callable[[Entry], object] = len if keeps == "off" else self._ring.append
        """Keep an entry, for who makes one as ``begin`` does."""
        self.begin: Callable[[Subject, bool], Entry] = _no_entry if keeps == "off" else _entering(self.keep)
        """Enter an operation that starts, and say whether its caller waits for it; return its entry."""
        self.logs: dict[str, OperationLog] = {}
        """The communicators that there are, by name."""
        self.status = "runs"
        """What is to be said of this process as a whole."""

    @property
    def entries(self) -> list[Entry]:
        """The entries that are kept, in the order in which they started."""
        return list(self._ring)

    @property
    def running(self) -> list[Entry]:
        """The entries whose end has not come."""
        return [entry for entry in self.entries if entry[END] == 0]

    @property
    def dropped(self) -> int:
        """How many operations came before these on the same communicators, and are no longer kept."""
        oldest: dict[OperationLog, int] = {}
        for entry in self.entries:
            oldest.setdefault(entry[SUBJECT].log, entry[ORDER])
        return sum(order - 1 for order in oldest.values())


def _entering(keep: Callable[[Entry], object]) -> Callable[[Subject, bool], Entry]:
    """Return what enters an operation; a function of its own, because each operation pays for it."""

    def begin(subject: Subject, blocking: bool) -> Entry:
        log = subject.log
        order = log.count + 1
        entry = [subject, order, clock(), 0, blocking, None]
        if blocking:
            if not log.blocking[END]:
                _check_thread(log.blocking)
            # Nothing is called between the question and the answer, so that no other thread comes between.
            if log.blocking[END]:
                log.blocking = entry
        log.count = order
        keep(entry)
        return entry

    return begin


def _check_thread(last: Entry) -> None:
    """Raise PlanError if another thread is in an operation; if none is, an error has ended it before it could say so.

    The thread is found by its stack, which takes long, but only then; to note it would cost each operation as much as
    to read the clock.
    """
    own = get_ident()
    found = frames()
    for ident in sorted(found, key=lambda ident: ident != own):
        frame: FrameType | None = found[ident]
        while frame is not None and last[END] == 0:
            if _runs_operations(frame) and _is_in(frame.f_locals, last):
                if ident == own:
                    return
                raise _two_threads(ident, last[SUBJECT].what)
            frame = frame.f_back
    if last[END] == 0:
        failed(last)


def _runs_operations(frame: FrameType) -> bool:
    """Whether a function is of this package, and not of those who only look at operations."""
    path = frame.f_code.co_filename
    return is_ours(path) and (path == __file__ or not path.startswith(_WATCH))


def _is_in(known: Mapping[str, Any], entry: Entry) -> bool:
    """Whether a function is one that runs an operation, or waits for its end, by what it has."""
    return known.get("entry") is entry or known.get("subject") is entry[SUBJECT]


def _two_threads(other: int, what: str) -> PlanError:
    """Return the error that this thread comes to a communicator while another is in something there."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    one, two = threading.current_thread().name, names.get(other, other)
    return PlanError(
        f"thread {one!r} cannot use a communicator while thread {two!r} is in {what}, called at "
        f"{call_site(other)}: other ranks could come to the two in another order; "
        "give each thread a communicator of its own, by comm.Dup()"
    )


class OneThread:
    """A block in which one thread of a process is at a time; it may enter again within it.

    Attributes
    ----------
    leave : callable
        Leaves the block. With ``enter`` and this a short call takes half of the time of a ``with`` statement.

    Raises
    ------
    PlanError
        When another thread is in it.
    """

    __slots__ = ("_enter", "_holder", "leave")

    def __init__(self) -> None:
        lock = threading.RLock()
        self._enter, self._holder, self.leave = lock.acquire, 0, lock.release

    def enter(self) -> None:
        """Enter the block."""
        if not self._enter(False):
            raise _two_threads(self._holder, "another call")
        self._holder = get_ident()

    __enter__ = enter

    def __exit__(self, *error: object) -> None:
        """Leave the block."""
        self.leave()


def _no_entry(subject: Subject, blocking: bool) -> Entry:
    del subject, blocking
    return [None] * 6


def _nothing(differ_in: int = 0) -> str:
    del differ_in
    return ""


def done(entry: Entry) -> None:
    """Mark the end of an operation."""
    entry[END] = clock()


def failed(entry: Entry) -> None:
    """Mark the end of an operation that an error has ended."""
    entry[END] = -clock()
