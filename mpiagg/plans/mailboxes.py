"""Operations through the mailboxes of a node: a rank copies what it sends to its own, and takes what others sent there.

An input is sent from where it lies, and what arrives goes where the result does. So the arrays may be others at every
run, and of other lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Array, cuts_of
from mpiagg.plans.binding import Lane
from mpiagg.plans.choices import Choice
from mpiagg.plans.one_shot import as_vector, as_written, at_once, box_of, boxes_of, segment_of
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Arrival, BoundRound, Callback, Program
from mpiagg.plans.sharing import Operands, calls_of, exchanges_of, sent_chunks
from mpiagg.schedules import Action, Collective, Step, receive
from mpiagg.transport import Block, Channel

_X, _OUT, _SCRATCH, _ASIDE, _BOXES = range(5)
"""The vectors of an operation: the input, the output, two of the program's own, and from there on the mailboxes."""


class MailboxChunks(NamedTuple):
    """Some chunks of a lane in one of the vectors."""

    vector: int
    lane: int
    chunk: int
    chunks: int = 1

    def within(self, operation: Operation, lane: Lane, packed: Sequence[int]) -> slice:
        """Return where they lie in the vector; in mailboxes and scratch, the chunks of a lane are ``packed``."""
        place, to_all = self.chunk, operation.collective is Collective.ALLTOALL
        if to_all:  # a rank has a chunk for each other, and gets one from each
            to, by = divmod(self.chunk, operation.size)
            place = by if self.vector == _OUT else to
        last = place + self.chunks
        start, length = lane[place][0], packed[last] - packed[place]
        if lane[last - 1][1] - start != length:
            raise AssertionError("chunks that are named together lie together")
        first = 0 if self.vector == _ASIDE else packed[place]
        if self.vector in (_X, _OUT):
            part = operation.source if self.vector == _X else operation.target
            assert part is not None  # or it would have no chunks there
            first = start if to_all else start - part.start  # the lanes of an all-to-all are those of either vector
        return slice(first, first + length)


def goes_by_mailboxes(channel: Channel, operation: Operation) -> bool:
    """Whether an operation on host arrays that ranks do not map goes through mailboxes."""
    o = operation
    if not channel.node.size == o.size > 1 or not o.shares:
        return False
    if o.collective is Collective.ALLTOALL and len({*o.counts, *o.received}) > 1:
        return False  # a mailbox has room for chunks of one length
    return o.choice.unregistered is None or at_once(o) is not None  # short vectors, wherever they lie


def lanes_of(operation: Operation, block: Block) -> int:
    """Return the number of lanes into which mailboxes in a block cut the vector of an operation."""
    o = operation
    # The boxes lie in the same places for all who share the block, so that nobody writes where another still reads.
    return o.lanes_within(min(box_of(block), segment_of(o)) // o.reduction.dtype.itemsize)


class MailboxParts(NamedTuple):
    """What an operation of some length works on.

    Attributes
    ----------
    given : list of tuple
        The parts of the input and of the output: which it is, and where in it.
    own : pair of lists
        The parts of mailboxes and of other memory, for either turn that a run begins with.
    nbytes : int
        Bytes of the other memory.
    between : int
        Bytes from the place of the output in the operation's vector to that of the input.
    signature : int
        That of the operation.
    """

    given: list[tuple[int, slice]]
    own: tuple[list[Any], list[Any]]
    nbytes: int
    between: int
    signature: int


class ThroughMailboxes:
    """A collective through the mailboxes of a node, of which all ranks are.

    A rank has two mailboxes, which are used in turn from barrier to barrier. While the others may still read from one,
    it writes into the other. It comes back to the first after one more barrier, to which all have come only when they
    had read.

    Parameters
    ----------
    operation : Operation
        Of any length that is cut into as many lanes.
    barrier : NodeBarrier
        Where the ranks meet; a signed one, if each run brings its vectors.
    block : Block
        Which has the mailboxes.
    room : callable, optional
        Returns memory of so many bytes at least, which others may use between runs.

    Attributes
    ----------
    x, out : numpy.ndarray or None
        The next input, and where the result goes: contiguous; None where this rank has none.
    parts : MailboxParts
        The parts of such vectors.
    """

    x: Any = None
    out: Any = None
    parts: MailboxParts

    def __init__(
        self, operation: Operation, barrier: Any, block: Block, room: Callable[[int], Array] | None = None
    ) -> None:
        self._label, self._lanes, self._barrier = operation.label, lanes_of(operation, block), barrier
        schedule, dtype = at_once(operation), operation.reduction.dtype
        self._operation = operation if schedule is None else replace(operation, choice=Choice(schedule))
        self._boxes = boxes_of(block, box_of(block) // dtype.itemsize * dtype.itemsize, dtype)
        self._room = room
        self._given: dict[MailboxChunks, int] = {}
        self._own: dict[tuple[MailboxChunks, int], int] = {}
        self._arrays: list[Any] = []
        self._in_place = False

    def program(self) -> Program:
        """Return the program of calls, before each of which ``x``, ``out`` and ``parts`` are set."""
        first, *others = self._rounds()
        *before, last = first._replace(starts=(self._begin, *first.starts)), *others
        return Program((*before, last._replace(reductions=(*last.reductions, self._end))), (), 0)

    def bound_to(self, x: Array | None, out: Array | None) -> Program:
        """Return the program between two vectors; they overlap only if the input lies in its place in the output."""
        first, *others = self._rounds()
        parts = self.parts_of(self._operation)
        self._in_place = x is not None and out is not None and _distance(x, out) == parts.between
        given = _parts(parts, x, out)
        arrays = [[*given, *own] for own in parts.own]

        def begin() -> None:
            self._arrays = arrays[self._barrier.count & 1]

        first = first._replace(starts=(begin, *first.starts))
        return Program((first, *others), (), parts.nbytes if self._room is None else 0)

    def parts_of(self, operation: Operation) -> MailboxParts:
        """Return the parts of vectors of an operation's length."""
        o, dtype = operation, operation.reduction.dtype
        lanes = o.lanes(self._lanes)
        cut = [(o, lane, cuts_of([stop - start for start, stop in lane])) for lane in lanes]
        given = [(each.vector, each.within(*cut[each.lane])) for each in self._given]
        own = [(each.vector, turn, each.within(*cut[each.lane])) for each, turn in reversed(self._own)]
        scratch = [part for vector, _, part in own if vector == _SCRATCH]
        before = min((part.start for part in scratch), default=0)
        length = max((part.stop for part in scratch), default=0) - before
        aside = max((part.stop for vector, _, part in own if vector == _ASIDE), default=0)
        nbytes = (length + aside) * dtype.itemsize
        room = (HOST.empty(nbytes, np.uint8) if self._room is None else self._room(nbytes))[:nbytes].view(dtype)
        written = _BOXES + o.rank

        def found(first: int, vector: int, turn: int, part: slice) -> Any:
            if vector == _SCRATCH:
                return room[part.start - before : part.stop - before]
            if vector == _ASIDE:
                return room[length:][part]
            box = self._boxes[first ^ turn][vector - _BOXES][part]
            return as_written(box) if vector == written else box

        arrays = [found(0, *each) for each in own], [found(1, *each) for each in own]
        return MailboxParts(given, arrays, nbytes, _between(o) * dtype.itemsize, o.signature)

    def _begin(self) -> None:
        x, out, parts = self.x, self.out, self.parts
        if x is not None and not (x.__class__ is np.ndarray and x.ndim == 1):
            x = as_vector(x)
        if out is not None and not (out.__class__ is np.ndarray and out.ndim == 1):
            out = as_vector(out)
        if x is not None and out is not None:
            distance = _distance(x, out)
            self._in_place = distance == parts.between
            if not self._in_place and -x.nbytes < distance < out.nbytes:
                x = x.copy()  # or what arrives would be written over what is still to be sent
        self._arrays = _parts(parts, x, out)
        self._arrays += parts.own[self._barrier.count & 1]
        self._barrier.enter(parts.signature)

    def _end(self) -> None:
        self._barrier.leave()
        self._arrays = []

    def forget(self) -> None:
        """Let go of the caller's arrays."""
        self.x = self.out = None
        self._arrays = []

    # -- how rounds are bound

    def _rounds(self) -> Iterator[BoundRound]:
        """Yield the rounds, lane after lane."""
        o, barrier, turn = self._operation, self._barrier, 0
        for lane in range(self._lanes):
            chunks, exchanges = _Chunks(o, lane), exchanges_of(o.schedule())
            for number, steps in enumerate(exchanges):
                later = partial(self._later, turn)
                starts = [self._write_of(*map(later, pair)) for pair in chunks.sent(steps)]
                done = chunks.operands(steps)
                operands = ((step, later(value), later(target), later(other)) for step, value, target, other in done)
                reads = calls_of(operands, o.reduction, partial(self._aside, turn), call_of=self._call_of)
                if number == len(exchanges) - 1:
                    for target, source in chunks.delivered():
                        copy = self._call_of(np.copyto, later(target), later(source))
                        reads.append(partial(self._deliver, copy) if source.vector == _X else copy)
                awaited = (Arrival(self._label, number, barrier),)
                yield BoundRound((*starts, barrier.come), (barrier.passed,), tuple(reads), awaited)
                turn ^= 1

    def _later(self, turn: int, chunks: MailboxChunks) -> _Later:
        """Return the number of some elements in the round of a turn: from the end, if they are not the caller's."""
        if chunks.vector in (_X, _OUT):
            return _Later(chunks, self._given.setdefault(chunks, len(self._given)))
        return _Later(chunks, -1 - self._own.setdefault((chunks, turn), len(self._own)))

    def _aside(self, turn: int, value: _Later) -> _Later:
        """Return the room for what is held aside of a value."""
        return self._later(turn, value.chunks._replace(vector=_ASIDE))

    def _call_of(self, function: Callable[..., object], *operands: _Later) -> Callback:
        """Return the call of a function with what its operands are when it is made."""
        take: Callable[[list[Any]], Any] = itemgetter(*(each.number for each in operands))
        if len(operands) == 1:
            return lambda: function(take(self._arrays))
        return lambda: function(*take(self._arrays))

    def _write_of(self, box: _Later, value: _Later) -> Callback:
        """Return the call that copies to a mailbox."""
        to, what = box.number, value.number

        def write() -> None:
            arrays = self._arrays
            try:
                arrays[to][:] = arrays[what]
            except ValueError:  # a memory view of another of several equal dtypes
                np.copyto(np.asarray(arrays[to]), arrays[what])

        return write

    def _deliver(self, copy: Callback) -> None:
        """Copy a part of the input to the output, if it is not there."""
        if not self._in_place:
            copy()


class _Chunks:
    """Where the chunks of a lane are, from one round to the next."""

    def __init__(self, operation: Operation, lane: int) -> None:
        o, self._lane = operation, lane
        self._own_box = _BOXES + o.rank
        self._lie = {} if o.source is None else dict.fromkeys(o.had, _X)
        self._promised = range(0) if o.target is None else o.promised

    def sent(self, steps: Iterable[Step]) -> list[tuple[MailboxChunks, MailboxChunks]]:
        """Return where in this rank's mailbox the chunks go that are sent, and where they are."""
        sent = sorted(sent_chunks(steps))
        return [(self._in(self._own_box, chunk), self._in(self._lie[chunk], chunk)) for chunk in sent]

    def operands(self, steps: Iterable[Step]) -> Iterator[Operands]:
        """Yield the operands of what is done in a round, and of copies that are needed before."""
        for step in steps:
            if step.action is Action.SEND:
                continue
            chunks = range(step.chunk, step.chunk + step.count)
            goal = _OUT if chunks[0] in self._promised and chunks[-1] in self._promised else _SCRATCH
            lie = {self._lie[chunk] for chunk in chunks if step.action in (Action.REDUCE, Action.FINISH)}
            if len(lie) > 1 or (step.action is Action.FINISH and _X in lie):  # what goes together lies together
                for chunk in chunks:
                    if self._lie[chunk] != goal:
                        target = self._in(goal, chunk)
                        yield receive(-1, chunk), target, target, self._in(self._lie[chunk], chunk)
                lie = {goal}
            source = next(iter(lie), goal)
            target = self._in(source if step.action is Action.FINISH else goal, step.chunk, step.count)
            if step.action is not Action.HOLD:
                self._lie.update(dict.fromkeys(chunks, target.vector))
            other = self._in(_BOXES + step.peer, step.chunk, step.count) if step.action.receives else target
            yield step, target._replace(vector=source), target, other

    def delivered(self) -> Iterator[tuple[MailboxChunks, MailboxChunks]]:
        """Yield where in the output the promised chunks go that are not there, and where they are."""
        for chunk in self._promised:
            if self._lie[chunk] != _OUT:
                yield self._in(_OUT, chunk), self._in(self._lie[chunk], chunk)

    def _in(self, vector: int, chunk: int, count: int = 1) -> MailboxChunks:
        return MailboxChunks(vector, self._lane, chunk, count)


class _Later(NamedTuple):
    """Some elements that are known when a program runs: their number among all of them."""

    chunks: MailboxChunks
    number: int
    size: int = -1  # so that they are not taken for none


def _between(operation: Operation) -> int:
    """Return how many elements lie between the place of the output and that of the input."""
    source, target = operation.source, operation.target
    if source is None or target is None or operation.collective is Collective.ALLTOALL:
        return 0
    between: int = source.start - target.start
    return between


def _distance(x: Array, out: Array) -> int:
    """Return how many bytes lie between two arrays."""
    if x is out:
        return 0
    return MPI.Get_address(x) - MPI.Get_address(out)  # in a tenth of the time that NumPy takes to tell


def _parts(parts: MailboxParts, *given: Array | None) -> list[Any]:
    """Return the parts of an input and an output."""
    return [given[vector][part] for vector, part in parts.given]  # type: ignore[index]  # who has parts has both
