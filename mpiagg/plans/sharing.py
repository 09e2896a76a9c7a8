"""Schedules carried out through memory that the ranks of a node share, instead of messages.

Where all vectors lie in such memory, or can be read where they lie, the rank that owns a chunk does all the work on it
(``owners``). Where they do not, the ranks put what they send into mailboxes, and take what they receive from there
(``mailboxes``). Either way the schedule says what is combined, and in which order, so the bits are those of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from mpiagg.arrays import Array, Reduction, device_of
from mpiagg.plans.binding import Lane, Run
from mpiagg.plans.program import Arrival, BoundRound, Callback, Program
from mpiagg.schedules import Action, Round, Step
from mpiagg.transport import NodeBarrier, OtherMemory, SignedBarrier, Some, signature


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


def barrier_program(barrier: SignedBarrier) -> Program:
    """Return the program in which the ranks of a node wait for one another, and do nothing else."""
    label = "barrier"
    met = barrier_round(barrier, label, 0, barrier.leave)
    return Program((met._replace(starts=(partial(barrier.enter, signature(label)), *met.starts)),), (), 0)


class VectorRange(NamedTuple):
    """A range of a vector in the memory of one rank: its elements from ``start`` on."""

    elements: Any
    start: int = 0

    def block(self, start: int, stop: int) -> Any:
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
    scratch = scratch_of(chain(*rounds), task.lanes, length, task.vector)
    exchanges, readers = exchanges_of(rounds), set[int]()
    for number, steps in enumerate(exchanges):
        done = [step for step in steps if step.action is not Action.SEND]
        if sent_chunks(steps) & _chunks(done):
            raise AssertionError("a rank changes what others read in the same round")
        calls: list[Callback] = []
        for lane in task.lanes:
            for run, together in groupby(done, partial(run_of, lane)):
                same_run = list(together)
                for start in range(*run, length):
                    block = start, min(start + length, run[1])
                    own = task.vector[slice(*block)]
                    # What is finished has no peer.
                    others = (
                        vectors.targets[step.peer].block(*block) if step.action.receives else own for step in same_run
                    )
                    operands = ((step, own, own, other) for step, other in zip(same_run, others, strict=True))
                    calls += calls_of(operands, task.reduction, scratch.aside)
        sources = {step.peer for step in done if step.action.receives}
        met = barrier.among(sources | readers) if number else barrier
        yield barrier_round(met, label, number, InTurn(calls))
        readers = {step.peer for step in steps if step.action is Action.SEND}
    yield barrier_round(barrier, label, len(exchanges))


def exchanges_of(rounds: Sequence[Round]) -> list[list[Step]]:
    """Return the steps of each round with messages, and of what comes after it without any."""
    exchanges: list[list[Step]] = []
    for a_round in rounds:
        if a_round.messages or not exchanges:
            exchanges.append([])
        exchanges[-1] += a_round
    return exchanges


def sent_chunks(steps: Iterable[Step]) -> set[int]:
    """Return the chunks that are sent."""
    return _chunks(step for step in steps if step.action is Action.SEND)


def _chunks(steps: Iterable[Step]) -> set[int]:
    return {chunk for step in steps for chunk in range(step.chunk, step.chunk + step.count)}


def run_of(lane: Lane, step: Step) -> Run:
    """Return where the chunks of a step lie in a vector."""
    runs = lane[step.chunk : step.chunk + step.count]
    if any(before[1] != after[0] for before, after in pairwise(runs)):
        raise AssertionError("chunks that are named together lie together")
    return runs[0][0], runs[-1][1]


class InTurn:
    """Calls made one after the other.

    Parameters
    ----------
    calls : sequence of callable
    held : object
        What others may read or write meanwhile, which is kept as long as this.
    """

    def __init__(self, calls: Sequence[Callback], held: object = None) -> None:
        self._calls, self._held = calls, held

    def __call__(self) -> None:
        """Make them."""
        for call in self._calls:
            call()


class BlockScratch(NamedTuple):
    """Room for a block of what is held aside, and of what is read from another process."""

    held: Array
    read: Array

    def aside(self, value: Array) -> Array:
        """Return the room for what is held aside of a value."""
        return self.held[: value.size]


def scratch_of(
    steps: Iterable[Step], lanes: Sequence[Lane], most: int, buffer: Array, *, read: bool = False
) -> BlockScratch:
    """Return the room that steps need for blocks of so many elements at most; ``read`` if they read any."""
    held = (run_of(lane, step) for step in steps if step.action is Action.HOLD for lane in lanes)
    length = min(most, max((stop - start for start, stop in held), default=0))
    device = device_of(buffer)
    return BlockScratch(device.empty(length, buffer.dtype), device.empty(most if read else 0, buffer.dtype))


Operands = tuple[Step, Any, Any, Any]
"""A step, our values, where what it makes of them goes, and the values of its peer: in reach, or to be read."""


def calls_of(
    operands: Iterable[Operands],
    reduction: Reduction,
    aside: Callable[[Any], Any],
    read: Array | None = None,
    call_of: Callable[..., Callback] = partial,
) -> list[Callback]:
    """Return the calls that carry out steps.

    Parameters
    ----------
    operands : iterable of Operands
    reduction : Reduction
    aside : callable
        Returns the room for what is held aside of a value.
    read : numpy.ndarray or None, optional
        Room for what is read from another process, if anything is.
    call_of : callable, optional
        Returns the call of a function with arrays.
    """
    calls: list[Callback] = []
    held: Any = None
    for step, value, target, other in operands:
        if not value.size:
            continue
        if step.action is Action.FINISH:
            if reduction.divisor is not None:
                calls.append(call_of(reduction.finish, target))
        elif step.action is Action.SEND:
            calls.append(call_of(np.copyto, other, value))
        elif step.action is Action.RECEIVE:
            calls.append(copy_of(np.copyto, target, other, call_of))
        else:
            received = other
            if isinstance(other, OtherMemory):
                holds = held is None and step.action is Action.HOLD
                assert read is not None
                received = aside(value) if holds else read[: value.size]
                calls.append(other.reading(received))
            if held is not None:
                calls.append(call_of(reduction.combine, held, received, aside(value)))
                received = aside(value)
            held = received if step.action is Action.HOLD else None
            if step.action is Action.REDUCE:
                left, right = (received, value) if step.received_first else (value, received)
                calls.append(call_of(reduction.combine, left, right, target))
    return calls


def copy_of(
    copy: Callable[[Array, Array], None], target: Any, other: Any, call_of: Callable[..., Callback] = partial
) -> Callback:
    """Return the call that brings a peer's values to a vector of ours: it copies them where they are in reach."""
    return other.reading(target) if isinstance(other, OtherMemory) else call_of(copy, target, other)
