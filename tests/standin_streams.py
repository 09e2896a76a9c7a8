"""Streams of the stand-in: work that is done as late as it may be, and what must not happen to memory meanwhile.

What is asked for is *pending* until the host has reason to know that it is done: until a stream's ``done()`` has said
so, or the host has waited for it. Work of one stream is done in the order in which it was asked for; work of two has an
order only by ``follow()``. To ask for work that clashes with pending work that it does not come after is an error at
once, whatever order a real device might take. So it is with messages, and with memory that is freed.
"""

# ruff: noqa: N818 - what goes wrong has a name of its own, and is an error because it fails a test

import threading
from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from mpiagg.arrays import Stream

LOCK = threading.RLock()

POISON = 0xA5
"""What memory is filled with that nobody has written."""


class TouchedByHost(AssertionError):
    """Host code wants to see a device's memory, or gives it a NumPy array, without a copy."""


class NotPinned(AssertionError):
    """A device is to copy from or to memory of the host's that it does not reach by itself."""


class Misaligned(AssertionError):
    """Elements begin where a device cannot read them: not at a multiple of their size."""


class Race(AssertionError):
    """Work touches memory that pending work of another stream touches, and nothing says which comes first."""


class NotReady(AssertionError):
    """A message is started while pending work still touches its memory."""


class InFlight(AssertionError):
    """Work, or another message, touches the memory of a message that is under way."""


class Entry(NamedTuple):
    """Something that has happened.

    ``what`` is "kernel", "fold", "out", "in" or "on" (copies), "synchronise" (the host has waited), "wait" (a stream
    follows another), "done" (a stream has said so), "send", "sent", "receive" or "arrived" (messages).
    """

    what: str
    name: Any = ""
    """Of the function; for messages the peer's rank, for "wait" the number of the stream that is followed."""
    nbytes: int = 0
    """That are written, copied or sent."""
    stream: int | None = None
    memory: str = ""
    """Of a message: "device", "pinned" or "host"."""


class Log(list):
    """What has happened, in order."""

    def of(self, *whats):
        """Return the entries that are one of these."""
        return [entry for entry in self if entry.what in whats]

    def counts(self):
        """Return how many entries there are of each kind."""
        return Counter(entry.what for entry in self)

    def nbytes(self, *whats):
        """Return the bytes of the entries that are one of these."""
        return sum(entry.nbytes for entry in self.of(*whats))


LOG = Log()


@dataclass(eq=False)
class Work:
    """What was asked for and is not done: a call, and the memory (as NumPy arrays) that it reads and writes."""

    number: int
    stream: "StandInStream"
    name: str
    call: Any
    reads: tuple
    writes: tuple

    def __str__(self):
        return f"{self.name} in stream {self.stream.number}"


@dataclass(eq=False)
class Flight:
    """A message under way."""

    name: str
    reads: tuple
    writes: tuple


PENDING: list[Work] = []
FLIGHTS: list[Flight] = []
FREED: list[tuple["StandInStream", np.ndarray]] = []
"""Memory that was freed while work was pending that touches it, and the stream that may be given it without waiting."""

PINNED: dict[int, int] = {}
"""Memory of the host's that devices reach: how long it is, by where it starts."""

_numbers = count(1)
_present = threading.local()


def clashes(reads, writes, others):
    """Yield those of some others (work or messages) that cannot go on at the same time."""
    for other in others:
        pairs = [(mine, theirs) for mine in writes for theirs in (*other.reads, *other.writes)]
        pairs += [(mine, theirs) for mine in reads for theirs in other.writes]
        if any(np.shares_memory(mine, theirs) for mine, theirs in pairs):
            yield other


def is_pinned(array):
    """Whether all of a contiguous NumPy array lies in pinned memory."""
    start = array.__array_interface__["data"][0]
    # A copy, which is made in one go: garbage is collected at any moment, and a list of the items could meet that.
    known = PINNED.copy().items()
    return not array.size or any(first <= start and start + array.nbytes <= first + length for first, length in known)


def check_flights(name, reads, writes):
    """Raise if messages under way forbid to touch memory."""
    for flight in clashes(reads, writes, FLIGHTS):
        raise InFlight(f"{name} touches the memory of a message under way: {flight.name}")


def check_ready(name, reads, writes):
    """Raise if pending work forbids that a message starts to touch memory."""
    for work in clashes(reads, writes, PENDING):
        raise NotReady(f"{name} starts before its memory is ready: {work} is pending")


class StandInStream(Stream):
    """A stream of one device; its number is the device's own count, 0 being the default stream."""

    def __init__(self, device, number):
        self.device, self.number = device, number
        self._last = 0
        self._after = {}
        """For other streams, up to which work of theirs what comes next here waits."""
        self._asked = 0
        """How often it was asked whether it is done, since it was given something to do."""

    # -- which is the present one of a thread

    def __enter__(self):
        _stack(self.device).append(self)
        return self

    def __exit__(self, *error):
        assert _stack(self.device).pop() is self

    # -- work

    def ask(self, what, name, call, *, reads=(), writes=(), nbytes=None):
        """Ask for work: a call, with the memory that it reads and writes, of NumPy arrays."""
        with LOCK:
            check_flights(name, reads, writes)
            for work in clashes(reads, writes, [work for work in PENDING if not self._comes_after(work)]):
                raise Race(f"{name} in stream {self.number} does not wait for {work}, which touches the same memory")
            self._last, self._asked = next(_numbers), 0
            PENDING.append(Work(self._last, self, name, call, tuple(reads), tuple(writes)))
            nbytes = sum(x.nbytes for x in writes) if nbytes is None else nbytes
            LOG.append(Entry(what, name, nbytes, self.number))

    def _comes_after(self, work):
        """Whether what comes next here waits for some work."""
        return work.stream is self or work.number <= self._after.get(work.stream, 0)

    def follow(self):
        """Wait for the thread's present stream, and all that it waits for."""
        with LOCK:
            other = present(self.device)
            if other is self:
                return
            for stream, number in (*other._after.items(), (other, other._last)):
                if stream is not self:
                    self._after[stream] = max(number, self._after.get(stream, 0))
            self._asked = 0
            LOG.append(Entry("wait", other.number, 0, self.number))

    def done(self):
        """Say no ``device.polls`` times after new work; then do it, and say yes."""
        with LOCK:
            if not any(self._comes_after(work) for work in PENDING):
                return True
            if self._asked < self.device.polls:
                self._asked += 1
                return False
            self.finish()
            LOG.append(Entry("done", stream=self.number))
            return True

    def finish(self):
        """Do all that was asked for here, and what it waits for, in the order in which it was asked for."""
        with LOCK:
            for work in [work for work in PENDING if self._comes_after(work)]:
                PENDING.remove(work)
                # A device says nothing about overflow.
                with np.errstate(all="ignore"):
                    work.call()

    # -- memory, which goes back to a pool of the stream in which it was allocated

    def _used_elsewhere(self, memory):
        """Return pending work that touches memory, and that we do not wait for."""
        return list(clashes((), (memory,), [work for work in list(PENDING) if not self._comes_after(work)]))

    def free(self, memory):
        """Remember memory that must not be given away too early."""
        # No lock: garbage is collected in any thread, at any time.
        if self._used_elsewhere(memory):
            FREED.append((self, memory))

    def allocate(self, nbytes):
        """Return new bytes; there must be none that might have been these and are still used elsewhere."""
        with LOCK:
            FREED[:] = [(stream, memory) for stream, memory in FREED if stream._used_elsewhere(memory)]
            for stream, memory in FREED:
                if stream is self and 0 < nbytes <= memory.nbytes:
                    (work, *_) = self._used_elsewhere(memory)
                    raise Race(f"memory is allocated in stream {self.number} that was freed while {work} was pending")
        return np.full(nbytes, POISON, np.uint8)


def present(device):
    """Return the present stream of this thread."""
    stack = _stack(device)
    return stack[-1] if stack else device.default


def _stack(device):
    if not hasattr(_present, "stacks"):
        _present.stacks = {}
    return _present.stacks.setdefault(device, [])


def reset():
    """Forget what was asked for, and all that has happened."""
    with LOCK:
        for everything in (LOG, PENDING, FLIGHTS, FREED):
            everything.clear()
