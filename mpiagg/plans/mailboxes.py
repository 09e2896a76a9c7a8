"""Operations through the mailboxes of a node: a rank copies what it sends to its own, and takes what others sent there.

An input is sent from where it lies, and what arrives goes where the result does. So the arrays may be others at every
run, and of other lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Array, flat
from mpiagg.plans.binding import Lane
from mpiagg.plans.choices import NATIVE, NCCL, SEGMENT, Choice
from mpiagg.plans.one_shot import at_once, box_of
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Arrival, BoundRound, Callback, Program
from mpiagg.plans.sharing import Operands, calls_of, exchanges_of, run_of, scratch_of, sent_chunks
from mpiagg.schedules import Action, Collective, Step, receive
from mpiagg.transport import LINE, Block, Channel, NodeBarrier, SignedBarrier

_X, _OUT, _SCRATCH, _ASIDE, _BOXES = range(5)
"""The vectors of an operation: the input, the output, two of the program's own, and from there on the mailboxes."""


class Elements(NamedTuple):
    """Some chunks of a lane in one of the vectors."""

    vector: int
    lane: int
    chunk: int
    chunks: int = 1

    def within(self, operation: Operation, lanes: Sequence[Lane]) -> slice:
        """Return where they lie in the vector."""
        start, stop = run_of(lanes[self.lane], receive(-1, self.chunk, self.chunks))
        if self.vector == _ASIDE:
            return slice(0, stop - start)
        if self.vector >= _BOXES:
            before = start - sum(end - begin for begin, end in lanes[self.lane][: self.chunk])
        else:
            part = {_X: operation.source, _OUT: operation.target}.get(self.vector)
            before = 0 if part is None else part.start
        return slice(start - before, stop - before)


def goes_by_mail(channel: Channel, operation: Operation) -> bool:
    """Whether an operation on host arrays that ranks do not map goes through mailboxes."""
    o = operation
    if not channel.node.size == o.size > 1 or o.choice.wire is not None or o.choice.algorithm in (NATIVE, NCCL):
        return False
    if not o.entry.shares or o.ragged or o.collective is Collective.ALLTOALL:  # whose chunks no mailbox has room for
        return False
    return o.choice.unregistered is None or at_once(o) is not None  # short vectors, wherever they lie


def segment_of(operation: Operation) -> int:
    """Return how many bytes go through memory at a time: of a chunk for each rank, two elements at least."""
    return max(operation.choice.segment or SEGMENT, 2 * operation.size * operation.reduction.dtype.itemsize)


def lanes_of(operation: Operation, block: Block) -> int:
    """Return the number of lanes into which mailboxes in a block cut the vector of an operation."""
    o = operation
    # The boxes lie in the same places for all who share the block, so that nobody writes where another still reads.
    room = min(box_of(block), segment_of(o)) // o.reduction.dtype.itemsize
    if o.length > room:
        room -= o.size  # where each rank's chunk is cut, each part may have an element more than the others
    return max(1, -(-o.length // max(1, room)))


class _Mailed:
    """A collective through the mailboxes of a node, of which all ranks are.

    A rank has two mailboxes, which are used in turn from barrier to barrier. While the others may still read from one,
    it writes into the other. It comes back to the first after one more barrier, to which all have come only when they
    had read. The chunks of a lane lie one after the other in a mailbox, each in its place, whether or not it is sent.

    Parameters
    ----------
    operation : Operation
    barrier : NodeBarrier
        Where the ranks meet.
    block : Block
        Which has the mailboxes.
    """

    def __init__(self, operation: Operation, barrier: NodeBarrier, block: Block) -> None:
        self._label, self._lanes, self._barrier = operation.label, lanes_of(operation, block), barrier
        self._operation, self._dtype, box = _as_mailed(operation), operation.reduction.dtype, box_of(block)
        room = box // self._dtype.itemsize * self._dtype.itemsize
        self._boxes = [
            [part[start : start + room].view(self._dtype) for part in block.parts] for start in (LINE, LINE + box)
        ]

    def _rounds(self) -> list[BoundRound]:
        """Return the rounds, lane after lane."""
        rounds: list[BoundRound] = []
        for lane in range(self._lanes):
            chunks, exchanges = _Chunks(self._operation, lane), exchanges_of(self._operation.schedule())
            for number, steps in enumerate(exchanges):
                exchange = _Exchange(chunks.sent(steps), list(chunks.operands(steps)), [])
                if number == len(exchanges) - 1:
                    exchange.delivered.extend(chunks.delivered())
                rounds.append(self._bind(exchange, len(rounds) % 2, Arrival(self._label, number, self._barrier)))
        return rounds

    def _bind(self, exchange: _Exchange, turn: int, arrival: Arrival) -> BoundRound:
        raise NotImplementedError


class _Exchange(NamedTuple):
    """What a rank does in a round.

    Attributes
    ----------
    sent : list
        The mailbox to which it writes, and what.
    done : list
        The operands of what it does then.
    delivered : list
        Where in the output it copies what is not there yet, and what.
    """

    sent: list[tuple[Elements, Elements]]
    done: list[Operands]
    delivered: list[tuple[Elements, Elements]]


class _Chunks:
    """Where the chunks of a lane are, from one round to the next."""

    def __init__(self, operation: Operation, lane: int) -> None:
        o, self._lane = operation, lane
        self._own_box = _BOXES + o.rank
        self._lie = {} if o.source is None else dict.fromkeys(o.had, _X)
        self._promised = range(0) if o.target is None else o.promised

    def sent(self, steps: Iterable[Step]) -> list[tuple[Elements, Elements]]:
        """Return where in this rank's mailbox the chunks go that are sent, and where they are."""
        return [(self._in(self._own_box, chunk), self._in(self._lie[chunk], chunk)) for chunk in sent_chunks(steps)]

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

    def delivered(self) -> Iterator[tuple[Elements, Elements]]:
        """Yield where in the output the promised chunks go that are not there, and where they are."""
        for chunk in self._promised:
            if self._lie[chunk] != _OUT:
                yield self._in(_OUT, chunk), self._in(self._lie[chunk], chunk)

    def _in(self, vector: int, chunk: int, count: int = 1) -> Elements:
        return Elements(vector, self._lane, chunk, count)


class MailedPlan(_Mailed):
    """A collective through mailboxes between two vectors.

    Parameters
    ----------
    operation, barrier, block
        As for any.
    x, out : numpy.ndarray or None
        The input and the output, which do not overlap unless the input lies in its place in the output; None where
        this rank has none.
    """

    def __init__(
        self, operation: Operation, barrier: NodeBarrier, block: Block, x: Array | None, out: Array | None
    ) -> None:
        super().__init__(operation, barrier, block)
        o, nothing = self._operation, HOST.empty(0, self._dtype)
        self._cut = o.lanes(self._lanes)
        aside = scratch_of(chain(*o.schedule()), self._cut, o.length, nothing).held
        self._vectors: list[Any] = [x, out, nothing, aside]
        self._in_place = x is not None and out is not None and _distance(x, out) == _between(o) * x.itemsize

    def program(self) -> Program:
        """Return the program."""
        rounds = tuple(self._rounds())
        return Program(rounds, (), sum(each.nbytes for each in self._vectors[_SCRATCH:]))

    def _bind(self, exchange: _Exchange, turn: int, arrival: Arrival) -> BoundRound:
        del turn  # the first of a run depends on how many rounds other plans had
        found = _MailboxRound(self._barrier, self._writes(exchange), self._reads(exchange))
        return BoundRound((found.write,), (self._barrier.passed,), (found.read,), (arrival,))

    def _writes(self, exchange: _Exchange) -> list[list[tuple[memoryview, memoryview]]]:
        # A memory view writes in a third of NumPy's time.
        return [
            [
                (box.view(np.uint8).data, value.view(np.uint8).data)
                for box, value in (map(partial(self._array, turn), pair) for pair in exchange.sent)
                if value.size
            ]
            for turn in (0, 1)
        ]

    def _reads(self, exchange: _Exchange) -> list[list[Callback]]:
        reads = []
        for turn in (0, 1):
            array = partial(self._array, turn)
            operands = (
                (step, array(value), array(target), array(other)) for step, value, target, other in exchange.done
            )
            calls = calls_of(operands, self._operation.reduction, lambda value: self._vectors[_ASIDE][: value.size])
            calls += [
                partial(np.copyto, *map(array, pair))
                for pair in exchange.delivered
                if not (self._in_place and pair[1].vector == _X)
            ]
            reads.append(calls)
        return reads

    def _array(self, turn: int, elements: Elements) -> Any:
        vector = elements.vector
        if vector == _SCRATCH and not self._vectors[vector].size:
            self._vectors[vector] = HOST.empty(self._operation.length, self._dtype)
        whole = self._boxes[turn][vector - _BOXES] if vector >= _BOXES else self._vectors[vector]
        return whole[elements.within(self._operation, self._cut)]


class _MailboxRound:
    """A round between two vectors: what is written to the mailbox of a turn, and what is done after the barrier."""

    def __init__(
        self,
        barrier: NodeBarrier,
        writes: Sequence[Sequence[tuple[memoryview, memoryview]]],
        reads: Sequence[Sequence[Callback]],
    ) -> None:
        self._barrier, self._writes, self._reads = barrier, writes, reads

    def write(self) -> None:
        """Write, and come to the barrier."""
        for target, source in self._writes[self._barrier.count & 1]:
            target[:] = source
        self._barrier.come()

    def read(self) -> None:
        """Read what all have written before they came to the barrier that is now passed."""
        for call in self._reads[(self._barrier.count - 1) & 1]:
            call()


class MailedParts(NamedTuple):
    """What an operation of some length works on.

    Attributes
    ----------
    given : list of tuple
        The parts of the input and of the output: which it is, and where in it.
    own : pair of lists
        The parts of mailboxes and of other memory, for either turn that a run begins with.
    between : int
        Bytes from the place of the output in the operation's vector to that of the input.
    signature : int
        That of the operation.
    """

    given: list[tuple[int, slice]]
    own: tuple[list[Array], list[Array]]
    between: int
    signature: int


class MailedCalls(_Mailed):
    """A collective through mailboxes between the vectors that each run brings.

    Parameters
    ----------
    operation : Operation
        Of any length that is cut into as many lanes.
    barrier : SignedBarrier
    block : Block
    room : callable
        Returns memory of so many bytes at least, which others may use between runs.

    Attributes
    ----------
    x, out : numpy.ndarray or None
        The next input, and where the result goes: contiguous; None where this rank has none.
    parts : MailedParts
        The parts of such vectors.
    """

    x: Any = None
    out: Any = None
    parts: MailedParts

    def __init__(
        self, operation: Operation, barrier: SignedBarrier, block: Block, room: Callable[[int], Array]
    ) -> None:
        super().__init__(operation, barrier, block)
        self._signed, self._room = barrier, room
        self._given: dict[Elements, int] = {}
        self._own: dict[tuple[Elements, int], int] = {}
        self._arrays: list[Array] = []
        self._in_place = False

    def program(self) -> Program:
        """Return the program."""
        begin, end = (BoundRound((each,), (), (), ()) for each in (self._begin, self._end))
        return Program((begin, *self._rounds(), end), (), 0)

    def parts_of(self, operation: Operation) -> MailedParts:
        """Return the parts of vectors of an operation's length."""
        o = _as_mailed(operation)
        lanes = o.lanes(self._lanes)
        given = [(each.vector, each.within(o, lanes)) for each in self._given]
        own = [(each, turn, each.within(o, lanes)) for each, turn in reversed(self._own)]
        longest = max((part.stop for each, _, part in own if each.vector < _BOXES), default=0)
        room = self._room(2 * longest * self._dtype.itemsize)[: 2 * longest * self._dtype.itemsize].view(self._dtype)
        vectors = {_SCRATCH: room[:longest], _ASIDE: room[longest:]}

        def found(first: int) -> list[Array]:
            return [
                (self._boxes[first ^ turn][each.vector - _BOXES] if each.vector >= _BOXES else vectors[each.vector])[
                    part
                ]
                for each, turn, part in own
            ]

        return MailedParts(given, (found(0), found(1)), _between(o) * self._dtype.itemsize, operation.signature)

    def _begin(self) -> None:
        x, out, parts = self.x, self.out, self.parts
        if x is not None and x.ndim != 1:
            x = flat(x)
        if out is not None and out.ndim != 1:
            out = flat(out)
        if x is not None and out is not None:
            distance = _distance(x, out)
            self._in_place = distance == parts.between
            if not self._in_place and -x.nbytes < distance < out.nbytes:
                x = x.copy()  # or what arrives would be written over what is still to be sent
        given = x, out
        self._arrays = [given[vector][part] for vector, part in parts.given]
        self._arrays += parts.own[self._signed.count & 1]
        self._signed.enter(parts.signature)

    def _end(self) -> None:
        self._signed.leave()
        self._arrays = []  # which are the caller's to keep

    def _bind(self, exchange: _Exchange, turn: int, arrival: Arrival) -> BoundRound:
        def later(elements: Elements) -> _Later:
            if elements.vector in (_X, _OUT):
                return _Later(elements, turn, self._given.setdefault(elements, len(self._given)))
            return _Later(elements, turn, -1 - self._own.setdefault((elements, turn), len(self._own)))

        def aside(value: _Later) -> _Later:
            return later(value.elements._replace(vector=_ASIDE))

        writes = [self._call_of(np.copyto, *map(later, pair)) for pair in exchange.sent]
        operands = ((step, later(value), later(target), later(other)) for step, value, target, other in exchange.done)
        reads = calls_of(operands, self._operation.reduction, aside, call_of=self._call_of)
        for pair in exchange.delivered:
            copy = self._call_of(np.copyto, *map(later, pair))
            reads.append(partial(self._deliver, copy) if pair[1].vector == _X else copy)
        return BoundRound((*writes, self._barrier.come), (self._barrier.passed,), tuple(reads), (arrival,))

    def _call_of(self, function: Callable[..., object], *operands: _Later) -> Callback:
        """Return the call of a function with what its operands are when it is made."""
        take: Callable[[list[Array]], Any] = itemgetter(*(each.number for each in operands))
        if len(operands) == 1:
            return lambda: function(take(self._arrays))
        return lambda: function(*take(self._arrays))

    def _deliver(self, copy: Callback) -> None:
        """Copy a part of the input to the output, if it is not there."""
        if not self._in_place:
            copy()


class _Later(NamedTuple):
    """Some elements that are known when a program runs: their number among all of them."""

    elements: Elements
    turn: int
    number: int
    size: int = -1  # so that they are not taken for none


def _as_mailed(operation: Operation) -> Operation:
    """Return an operation by the schedule of one round, if it is that short."""
    schedule = at_once(operation)
    return operation if schedule is None else replace(operation, choice=Choice(schedule))


def _between(operation: Operation) -> int:
    """Return how many elements lie between the place of the output and that of the input."""
    source, target = operation.source, operation.target
    return 0 if source is None or target is None else source.start - target.start


def _distance(x: Array, out: Array) -> int:
    """Return how many bytes lie between two arrays."""
    if x is out:
        return 0
    return MPI.Get_address(x) - MPI.Get_address(out)  # in a tenth of the time that NumPy takes to tell
