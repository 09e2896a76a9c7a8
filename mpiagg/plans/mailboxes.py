"""Operations through the mailboxes of a node: a rank copies what it sends to its own, and takes what others sent there.

An input is sent from where it lies, and what arrives goes where the result does. So the arrays may be others at every
run, and of other lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import setitem
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
from mpiagg.schedules import Action, Collective, Step, receive, send
from mpiagg.transport import LINE, Block, Channel, Node

_X, _OUT, _SCRATCH, _ASIDE, _BOXES = range(5)
"""The vectors of an operation: the input, the output, two of the program's own, and from there on the mailboxes."""

_Elements = tuple[int, int, int, int]
"""Which elements of a vector: which vector it is, the lane, its first chunk, and how many chunks."""


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


class Parts(NamedTuple):
    """The elements of vectors that operations of one length work on.

    Attributes
    ----------
    elements : list of slice
    longest : int
        How many a vector of the program's own has.
    between : int
        How many lie between the place of the output in the operation's vector and that of the input.
    signature : int
        That of the operation.
    """

    elements: list[slice]
    longest: int
    between: int
    signature: int


class Mailed:
    """A collective through mailboxes, between the arrays of a plan or between those that each run brings.

    A rank has two mailboxes, which are used in turn from barrier to barrier. While the others may still read from one,
    it writes into the other. It comes back to the first after one more barrier, to which all have come only when they
    had read.

    Parameters
    ----------
    node : Node
        Of which all ranks are.
    operation : Operation
        Of any length that is cut into as many lanes, if no arrays are bound.
    barrier : NodeBarrier
        Where they meet: a signed one, if no arrays are bound.
    block : Block
        Which has the mailboxes.
    bound : pair of numpy.ndarray or None, optional
        The input and the output, as vectors that do not overlap unless the input lies in its place in the output; None
        where this rank has none.
    room : callable, optional
        If no arrays are bound: returns memory of so many bytes at least, which others may use between runs.

    Attributes
    ----------
    x, out : numpy.ndarray or None
        Those of the next run, contiguous, if none are bound.
    parts : Parts
        Of their length.
    vectors : list of numpy.ndarray or None
        What a run works on.
    """

    x: Any = None
    out: Any = None
    parts: Parts

    def __init__(  # noqa: PLR0917 - what there is to be said of it
        self,
        node: Node,
        operation: Operation,
        barrier: Any,
        block: Block,
        bound: tuple[Array | None, Array | None] | None = None,
        room: Callable[[int], Array] | None = None,
    ) -> None:
        self.barrier, self._label, self._is_bound, self._room = barrier, operation.label, bound is not None, room
        self._lanes, o = lanes_of(operation, block), _as_mailed(operation)
        self.operation, self._ranks = o, node.ranks
        dtype, box = o.reduction.dtype, box_of(block)
        boxes = [
            part[start : start + box // dtype.itemsize * dtype.itemsize].view(dtype)
            for start in (LINE, LINE + box)
            for part in block.parts
        ]
        nothing = HOST.empty(0, dtype)
        self.vectors: list[Any] = [*(bound or (None, None)), nothing, nothing, *boxes]
        self._known: dict[_Elements, int] = {}
        self._in_place, self._longest = False, 0
        if bound is not None:
            self._cut = o.lanes(self._lanes)
            self.vectors[_ASIDE] = scratch_of(chain(*o.schedule()), self._cut, o.length, nothing).held
            self._settle(*bound, _between(o))

    def program(self) -> Program:
        """Return the program."""
        o, rounds = self.operation, list[BoundRound]()
        for lane in range(self._lanes):
            chunks = _Chunks(self, lane)
            bound = [_MailboxRound(self, chunks, steps) for steps in exchanges_of(o.schedule())]
            bound[-1].then(chunks.delivered())
            for number, each in enumerate(bound):
                arrival = Arrival(self._label, number, self.barrier)
                rounds.append(BoundRound((each.write,), (self.barrier.passed,), (each.read,), (arrival,)))
        if self._is_bound:
            return Program(tuple(rounds), (), sum(each.nbytes for each in self.vectors[_SCRATCH:_BOXES]))
        begin, end = (BoundRound((each,), (), (), ()) for each in (self._begin, self._end))
        return Program((begin, *rounds, end), (), 0)

    def parts_of(self, operation: Operation) -> Parts:
        """Return the elements of vectors that an operation of other lengths works on."""
        o = _as_mailed(operation)
        lanes = o.lanes(self._lanes)
        elements = [_elements(o, lanes, which) for which in self._known]
        longest = (
            each.stop for each, which in zip(elements, self._known, strict=True) if which[0] in (_SCRATCH, _ASIDE)
        )
        return Parts(elements, max(longest, default=0), _between(o), operation.signature)

    def _begin(self) -> None:
        x, out = (part if part is None or part.ndim == 1 else flat(part) for part in (self.x, self.out))
        self.vectors[_X], self.vectors[_OUT] = x, out
        self._settle(x, out, self.parts.between)
        if self.parts.longest > self._longest:
            dtype = self.operation.reduction.dtype
            assert self._room is not None
            room = self._room(2 * self.parts.longest * dtype.itemsize)
            self._longest = room.nbytes // (2 * dtype.itemsize)
            whole = room[: 2 * self._longest * dtype.itemsize].view(dtype)
            self.vectors[_SCRATCH : _ASIDE + 1] = whole[: self._longest], whole[self._longest :]
        self.barrier.enter(self.parts.signature)

    def _settle(self, x: Array | None, out: Array | None, between: int) -> None:
        """Find out whether the input lies in the output where it would be copied to, or in the way."""
        if x is None or out is None:
            return
        apart = 0 if x is out else MPI.Get_address(x) - MPI.Get_address(out)  # in a tenth of the time that NumPy takes
        self._in_place = apart == between * x.itemsize
        if not self._in_place and -x.nbytes < apart < out.nbytes:
            self.vectors[_X] = x.copy()  # or what arrives would be written over what is still to be sent

    def _end(self) -> None:
        self.barrier.leave()
        self.vectors[_X] = self.vectors[_OUT] = None  # which are the caller's to keep

    # -- while rounds are bound

    def vector(self, which: int, lane: int, chunk: int, count: int = 1) -> Any:
        """Return some chunks of a lane in one of the vectors: as an array, or as what stands for it until it runs."""
        elements = min(which, _BOXES), lane, chunk, count
        if not self._is_bound:
            return _Unbound(self, which, elements, self._known.setdefault(elements, len(self._known)))
        if which == _SCRATCH and not self.vectors[which].size:
            self.vectors[which] = HOST.empty(self.operation.length, self.operation.reduction.dtype)
        return self.vectors[which][_elements(self.operation, self._cut, elements)]

    def box(self, turn: int, lane: int, step: Step) -> Any:
        """Return the chunks of a step in a mailbox of its peer."""
        which = _BOXES + turn * len(self._ranks) + self._ranks.index(step.peer)
        return self.vector(which, lane, step.chunk, step.count)

    def aside(self, value: Any) -> Any:
        """Return the room for what is held aside of a value."""
        return self.vectors[_ASIDE][: value.size] if self._is_bound else self.vector(_ASIDE, *value.elements[1:])

    def copy_to(self, box: Any, value: Any) -> Callback:
        """Return the call that copies values to a mailbox."""
        if not self._is_bound:
            return self.call_of(np.copyto, box, value)
        # A memory view writes in a third of NumPy's time.
        return partial(setitem, box.view(np.uint8).data, slice(None), value.view(np.uint8).data)

    def call_of(self, function: Callable[..., object], *operands: Any) -> Callback:
        """Return the call of a function with arrays, as they are when it is made."""
        if self._is_bound:
            return partial(function, *operands)
        return lambda: function(*[each() for each in operands])

    def deliver(self, copy: Callback) -> None:
        """Copy a part of the input to the output, if it is not there."""
        if not self._in_place:
            copy()


class _Unbound:
    """Some elements of a vector that a program works on, both of which are known when it runs."""

    size = -1  # so that they are not taken for none

    def __init__(self, mailed: Mailed, which: int, elements: _Elements, number: int) -> None:
        self._mailed, self._which, self.elements, self._number = mailed, which, elements, number

    def __call__(self) -> Array:
        """Return them."""
        mailed = self._mailed
        return mailed.vectors[self._which][mailed.parts.elements[self._number]]  # type: ignore[no-any-return]


class _Chunks:
    """Where the chunks of a lane are, while its rounds are bound one after the other."""

    def __init__(self, mailed: Mailed, lane: int) -> None:
        o, self.mailed, self.lane = mailed.operation, mailed, lane
        self._lies = {} if o.source is None else dict.fromkeys(o.had, _X)
        self._promised = range(0) if o.target is None else o.promised

    def value(self, chunk: int) -> Any:
        """Return the values of a chunk that is sent."""
        return self.mailed.vector(self._lies[chunk], self.lane, chunk)

    def operands(self, steps: Iterable[Step]) -> Iterator[Operands]:
        """Yield the operands of steps, with None for what is in a mailbox, and of copies needed before them."""
        for step in steps:
            chunks, goal = range(step.chunk, step.chunk + step.count), self._goal(step)
            lies = {self._lies[chunk] for chunk in chunks if step.action in (Action.REDUCE, Action.FINISH)}
            if len(lies) > 1 or (step.action is Action.FINISH and _X in lies):  # what goes together lies together
                yield from (self._copied(chunk, goal) for chunk in chunks if self._lies[chunk] != goal)
                lies = {goal}
            source = next(iter(lies), goal)
            target = source if step.action is Action.FINISH else goal
            if step.action is not Action.HOLD:
                self._lies.update(dict.fromkeys(chunks, target))
            value, result = (self.mailed.vector(which, self.lane, step.chunk, step.count) for which in (source, target))
            yield step, value, result, None

    def delivered(self) -> list[Callback]:
        """Return the calls that bring what is promised to the output, where it is not there yet."""
        calls: list[Callback] = []
        for chunk in self._promised:
            if (lies := self._lies[chunk]) != _OUT:
                _, _, *operands = self._copied(chunk, _OUT)
                copy = self.mailed.call_of(np.copyto, *operands)
                calls.append(partial(self.mailed.deliver, copy) if lies == _X else copy)
        return calls

    def _goal(self, step: Step) -> int:
        """Return where the values of chunks go: to the output, if they have a place there."""
        first, last = step.chunk, step.chunk + step.count - 1
        return _OUT if first in self._promised and last in self._promised else _SCRATCH

    def _copied(self, chunk: int, goal: int) -> Operands:
        target, source = (self.mailed.vector(which, self.lane, chunk) for which in (goal, self._lies[chunk]))
        return receive(-1, chunk), target, target, source


class _MailboxRound:
    """What a rank writes into its mailbox, and what it does with what it finds in the others', for one round and lane.

    The chunks of a lane lie one after the other in a mailbox, each in its place, whether or not the others are sent.
    """

    def __init__(self, mailed: Mailed, chunks: _Chunks, steps: Sequence[Step]) -> None:
        self._barrier, lane, own = mailed.barrier, chunks.lane, mailed.operation.rank
        sent = [(send(own, chunk), chunks.value(chunk)) for chunk in sorted(sent_chunks(steps))]
        done = list(chunks.operands(step for step in steps if step.action is not Action.SEND))

        def writes(turn: int) -> list[Callback]:
            return [mailed.copy_to(mailed.box(turn, lane, step), value) for step, value in sent if value.size]

        def reads(turn: int) -> list[Callback]:
            operands = (
                (step, value, target, mailed.box(turn, lane, step) if step.action.receives and other is None else other)
                for step, value, target, other in done
            )
            return calls_of(operands, mailed.operation.reduction, mailed.aside, call_of=mailed.call_of)

        self._writes = writes(0), writes(1)
        self._reads = reads(0), reads(1)

    def then(self, calls: Iterable[Callback]) -> None:
        """Make more calls at the end of it."""
        for reads in self._reads:
            reads.extend(calls)

    def write(self) -> None:
        """Write, and come to the barrier."""
        for call in self._writes[self._barrier.count & 1]:
            call()
        self._barrier.come()

    def read(self) -> None:
        """Read what all have written before they came to the barrier that is now passed."""
        for call in self._reads[(self._barrier.count - 1) & 1]:
            call()


def _as_mailed(operation: Operation) -> Operation:
    """Return an operation by the schedule of one round, if it is that short."""
    schedule = at_once(operation)
    return operation if schedule is None else replace(operation, choice=Choice(schedule))


def _elements(operation: Operation, lanes: Sequence[Lane], which: _Elements) -> slice:
    """Return where some chunks of a lane lie in a vector."""
    vector, lane, chunk, count = which
    start, stop = run_of(lanes[lane], receive(-1, chunk, count))
    if vector == _ASIDE:
        return slice(0, stop - start)
    if vector == _BOXES:
        before = start - sum(end - begin for begin, end in lanes[lane][:chunk])
    else:
        part = {_X: operation.source, _OUT: operation.target}.get(vector)
        before = 0 if part is None else part.start
    return slice(start - before, stop - before)


def _between(operation: Operation) -> int:
    """Return how many elements lie between the place of the output and that of the input."""
    source, target = operation.source, operation.target
    return 0 if source is None or target is None else source.start - target.start
