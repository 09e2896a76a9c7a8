"""Schedules carried out through memory that the ranks of a node share, instead of messages.

Where all vectors lie in such memory, the rank that owns a chunk does all the work on it: it reduces the chunk of
everybody's vector and writes the result into everybody's vector, block by block, so that a block is still in the cache
when it is written. Where they do not, the ranks put what they send into mailboxes, and take what they receive from
there. Either way the schedule says what is combined, and in which order, so the bits are those of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from mpiagg.arrays import Array, Reduction, cuts_of, device_of, ranges
from mpiagg.plans.binding import Lane, Run
from mpiagg.plans.program import Arrival, BoundRound, Callback, Program
from mpiagg.schedules import Action, Round, Step
from mpiagg.transport import NodeBarrier, SignedBarrier, Some, signature


def barrier_round(barrier: NodeBarrier | Some, label: str, number: int, call: Callback | None = None) -> BoundRound:
    """Return the round in which the ranks of a node wait for one another, and then make a call."""
    return BoundRound((barrier.come,), (barrier.passed,), (call,) if call else (), (Arrival(label, number, barrier),))


class NodeTask(NamedTuple):
    """What is reduced.

    Attributes
    ----------
    vector : numpy.ndarray
        This rank's.
    lanes : sequence of Lane
        Where the chunks lie in it, in each part of it on which a schedule runs by itself.
    reduction : Reduction
        How values are combined.
    """

    vector: Array
    lanes: Sequence[Lane]
    reduction: Reduction


def barrier_program(barrier: SignedBarrier, label: str) -> Program:
    """Return the program in which the ranks of a node wait for one another, and do nothing else."""
    met = barrier_round(barrier, label, 0, barrier.leave)
    return Program((met._replace(starts=(partial(barrier.enter, signature(label)), *met.starts)),), (), 0)


class VectorRange(NamedTuple):
    """A range of a vector in the memory of one rank: its elements from ``start`` on."""

    elements: Array
    start: int = 0

    def block(self, start: int, stop: int) -> Array:
        """Return the elements of the vector from ``start`` to ``stop``."""
        return self.elements[start - self.start : stop - self.start]


class Vectors(NamedTuple):
    """Where the vectors of an operation lie, of this rank and of all others on its node that are reached.

    Attributes
    ----------
    source, target : VectorRange or None
        This rank's input, and where its result goes, or what it reduces if that goes to another rank.
    target_of : int
        Whose memory ``target`` is.
    sources, targets : mapping of int to VectorRange
        Those of the others.
    apart : bool
        Whether this rank's input must be brought to where its result goes.
    """

    source: VectorRange | None
    target: VectorRange | None
    target_of: int
    sources: Mapping[int, VectorRange]
    targets: Mapping[int, VectorRange]
    apart: bool = False


def owner_work(  # noqa: PLR0917 - what there is to be said of them
    rounds: Sequence[Round],
    owned: range,
    lanes: Sequence[Lane],
    reduction: Reduction,
    vectors: Vectors,
    segment: int,
) -> Callback:
    """Return the call that does an owner's part of some rounds, on vectors that all lie in reach.

    Between a barrier before and a barrier after it nobody else touches the chunks that a rank owns, in any vector:
    whoever sends or receives them in these rounds leaves it to their owner. So there is nothing to wait for in between.

    Parameters
    ----------
    rounds : sequence of Round
        What this rank does; in each message one end owns the chunks.
    owned : range
        The chunks that this rank owns.
    lanes : sequence of Lane
        Where the chunks lie in a vector, in each part of it on which a schedule runs by itself.
    reduction : Reduction
        How values are combined.
    vectors : Vectors
        Where the vectors lie.
    segment : int
        Bytes of a block.
    """
    steps = [step for a_round in rounds for step in a_round if step.chunk in owned]
    if any((step.chunk, step.count) != (owned.start, len(owned)) for step in steps):
        raise AssertionError("an owner's chunks go together")
    length = max(1, segment // reduction.dtype.itemsize)
    own = vectors.source or vectors.target
    assert own is not None
    aside = _aside(steps, lanes, length, own.elements)
    calls: list[Callback] = []
    for lane in lanes:
        start, stop = lane[owned.start][0], lane[owned.stop - 1][1]
        for first in range(start, stop, length):
            calls += _block_work(steps, reduction, vectors, (first, min(first + length, stop)), aside)
    return InTurn(calls)


def exchange_work(vectors: Vectors, counts: Sequence[int], rank: int) -> Callback:
    """Return the call that takes what is for this rank from the inputs of all, in an all-to-all."""
    target, own = vectors.target, slice(*ranges(cuts_of(counts))[rank])
    assert target is not None
    blocks = [target.block(*run) for run in ranges(cuts_of(counts))]
    return taking(blocks, [vectors.sources[source].block(own.start, own.stop) for source in range(len(counts))], rank)


def taking(blocks: Sequence[Array], found: Sequence[Array], rank: int) -> Callback:
    """Return the call that copies to some blocks, one from each rank, what is found for them.

    It begins with its own, and goes on with the rank after it, so that the ranks read from different ones.
    """
    convert = device_of(blocks[rank]).convert
    return InTurn(
        [
            partial(convert, blocks[source], found[source])
            for source in [*range(rank, len(blocks)), *range(rank)]
            if blocks[source].size
        ]
    )


def _block_work(
    steps: Sequence[Step], reduction: Reduction, vectors: Vectors, block: tuple[int, int], aside: Array
) -> list[Callback]:
    """Return the calls that carry out an owner's steps on one block."""
    target: Any = None if vectors.target is None else vectors.target.block(*block)
    value: Any = target if vectors.source is None else vectors.source.block(*block)
    fresh = vectors.apart  # whether nothing has been written to the target yet
    operands: list[Operands] = []
    for step in steps:
        if step.action is Action.SEND:
            if step.peer != vectors.target_of:
                operands.append((step, value, value, vectors.targets[step.peer].block(*block)))
            continue
        other = target if step.action is Action.FINISH else vectors.sources[step.peer].block(*block)
        operands.append((step, value, target, other))
        if step.action is not Action.HOLD:
            value, fresh = target, False
    calls = _calls(operands, reduction, aside)
    return [*calls, partial(np.copyto, target, value)] if fresh and target is not None else calls


class Mailboxes(NamedTuple):
    """The mailboxes of the ranks of a node: two for each, used in turn from barrier to barrier.

    While the others may still read from one, a rank writes into the other. It comes back to the first after one more
    barrier, to which all have come only when they had read.

    Attributes
    ----------
    barrier : NodeBarrier
        Where they meet.
    own : pair of numpy.ndarray
        The mailboxes of this rank, as bytes.
    boxes : pair of mappings
        The mailboxes of all ranks.
    """

    barrier: NodeBarrier
    own: tuple[Array, Array]
    boxes: tuple[Mapping[int, Array], Mapping[int, Array]]


def mailbox_rounds(rounds: Sequence[Round], task: NodeTask, mailboxes: Mailboxes, label: str) -> Iterator[BoundRound]:
    """Yield the rounds that carry a schedule out through mailboxes, lane after lane.

    All ranks of the schedule are on this node, and have as many rounds with messages.
    """
    exchanges = _exchanges(rounds)
    aside = _aside(chain(*rounds), task.lanes, task.vector.size, task.vector)
    for lane in task.lanes:
        for number, steps in enumerate(exchanges):
            mailbox_round = _MailboxRound(steps, lane, task, mailboxes, aside)
            arrival = Arrival(label, number, mailboxes.barrier)
            yield BoundRound((mailbox_round.write,), (mailboxes.barrier.passed,), (mailbox_round.read,), (arrival,))


class _MailboxRound:
    """What a rank writes into its mailbox, and what it does with what it finds in the others', for one round and lane.

    The chunks of a lane lie one after the other in a mailbox, each in its place, whether or not the others are sent.
    """

    def __init__(self, steps: Sequence[Step], lane: Lane, task: NodeTask, mailboxes: Mailboxes, aside: Array) -> None:
        self._barrier, buffer = mailboxes.barrier, task.vector
        places = [0, *accumulate((stop - start) * buffer.itemsize for start, stop in lane)]
        sent = _sent(steps)
        done = [step for step in steps if step.action is not Action.SEND]

        def writes(box: Array) -> list[tuple[memoryview, memoryview]]:
            chunks = ((box[places[c] : places[c + 1]], buffer[slice(*lane[c])].view(np.uint8)) for c in sorted(sent))
            return [(target.data, source.data) for target, source in chunks if source.size]

        def reads(boxes: Mapping[int, Array]) -> list[Callback]:
            def operands(step: Step) -> Operands:
                own = buffer[slice(*_run(lane, step))]
                box = boxes.get(step.peer, mailboxes.own[0])
                return step, own, own, box[places[step.chunk] : places[step.chunk + step.count]].view(buffer.dtype)

            return _calls(map(operands, done), task.reduction, aside)

        self._writes = (writes(mailboxes.own[0]), writes(mailboxes.own[1]))
        self._reads = (reads(mailboxes.boxes[0]), reads(mailboxes.boxes[1]))

    def write(self) -> None:
        """Write, and come to the barrier."""
        for target, source in self._writes[self._barrier.count & 1]:
            target[:] = source
        self._barrier.come()

    def read(self) -> None:
        """Read what all have written before they came to the barrier that is now passed."""
        for call in self._reads[(self._barrier.count - 1) & 1]:
            call()


def rounds_in_place(  # noqa: PLR0917 - what there is to be said of them
    rounds: Sequence[Round], task: NodeTask, vectors: Vectors, barrier: NodeBarrier, segment: int, label: str
) -> Iterator[BoundRound]:
    """Yield the rounds that carry a schedule out where all vectors lie in reach: each rank reads from the others'.

    All ranks of the schedule are on this node, and have as many rounds with messages. In a round a rank writes into its
    own vector alone, and there nothing that others read in this round. All meet before the first round and after the
    last. Before another round a rank waits for two kinds of ranks alone:

    - those that it now reads from. They have then written what it reads, and do not change it in a later round before
      it has been read, by the second rule;
    - those that read from it in the round before. They have then read what it may now change. For those of rounds
      before that it has waited in the same way.

    Parameters
    ----------
    rounds : sequence of Round
        What this rank does.
    task : NodeTask
        What is reduced, in this rank's vector.
    vectors : Vectors
        Where the vectors lie.
    barrier : NodeBarrier
        Where the ranks wait for one another.
    segment : int
        Bytes of a block.
    label : str
        The operation in words.
    """
    length = max(1, segment // task.reduction.dtype.itemsize)
    aside = _aside(chain(*rounds), task.lanes, length, task.vector)
    exchanges, readers = _exchanges(rounds), set[int]()
    for number, steps in enumerate(exchanges):
        done = [step for step in steps if step.action is not Action.SEND]
        if _sent(steps) & _chunks(done):
            raise AssertionError("a rank changes what others read in the same round")
        calls: list[Callback] = []
        for lane in task.lanes:
            for run, together in groupby(done, partial(_run, lane)):
                same_run = list(together)
                for start in range(*run, length):
                    block = start, min(start + length, run[1])
                    own = task.vector[slice(*block)]
                    # What is finished has no peer.
                    others = (
                        vectors.targets[step.peer].block(*block) if step.action.receives else own for step in same_run
                    )
                    calls += _calls(
                        ((s, own, own, other) for s, other in zip(same_run, others, strict=True)), task.reduction, aside
                    )
        sources = {step.peer for step in done if step.action.receives}
        met = barrier.among(sources | readers) if number else barrier
        yield barrier_round(met, label, number, InTurn(calls))
        readers = {step.peer for step in steps if step.action is Action.SEND}
    yield barrier_round(barrier, label, len(exchanges))


def _exchanges(rounds: Sequence[Round]) -> list[list[Step]]:
    """Return the steps of each round with messages, and of what comes after it without any."""
    exchanges: list[list[Step]] = []
    for a_round in rounds:
        if a_round.messages or not exchanges:
            exchanges.append([])
        exchanges[-1] += a_round
    return exchanges


def _sent(steps: Iterable[Step]) -> set[int]:
    """Return the chunks that are sent."""
    return _chunks(step for step in steps if step.action is Action.SEND)


def _chunks(steps: Iterable[Step]) -> set[int]:
    return {chunk for step in steps for chunk in range(step.chunk, step.chunk + step.count)}


def _run(lane: Lane, step: Step) -> Run:
    """Return where the chunks of a step lie in a vector."""
    runs = lane[step.chunk : step.chunk + step.count]
    if any(before[1] != after[0] for before, after in pairwise(runs)):
        raise AssertionError("chunks that are named together lie together")
    return runs[0][0], runs[-1][1]


class InTurn:
    """Calls made one after the other."""

    def __init__(self, calls: Sequence[Callback]) -> None:
        self._calls = calls

    def __call__(self) -> None:
        """Make them."""
        for call in self._calls:
            call()


def _aside(steps: Iterable[Step], lanes: Sequence[Lane], most: int, buffer: Array) -> Array:
    """Return scratch for a block of what is held aside, if anything is."""
    held = (_run(lane, step) for step in steps if step.action is Action.HOLD for lane in lanes)
    return device_of(buffer).empty(min(most, max((stop - start for start, stop in held), default=0)), buffer.dtype)


Operands = tuple[Step, Array, Array, Array]
"""A step, our values, where what it makes of them goes, and the values of its peer, which lie in reach."""


def _calls(operands: Iterable[Operands], reduction: Reduction, aside: Array) -> list[Callback]:
    """Return the calls that carry out steps."""
    calls: list[Callback] = []
    held: Array | None = None
    for step, value, target, other in operands:
        if not value.size:
            continue
        if step.action is Action.FINISH:
            if reduction.divisor is not None:
                calls.append(partial(reduction.finish, target))
        elif step.action is Action.SEND:
            calls.append(partial(np.copyto, other, value))
        elif step.action is Action.RECEIVE:
            calls.append(partial(np.copyto, target, other))
        else:
            received = other
            if held is not None:
                received = aside[: value.size]
                calls.append(partial(reduction.combine, held, other, received))
            held = received if step.action is Action.HOLD else None
            if step.action is Action.REDUCE:
                left, right = (received, value) if step.received_first else (value, received)
                calls.append(partial(reduction.combine, left, right, target))
    return calls
