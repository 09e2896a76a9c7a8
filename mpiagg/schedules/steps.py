"""The words that a schedule is written in: steps, rounds, and what a collective promises.

A schedule tells one rank what to do, as a sequence of rounds. The buffer is cut into chunks, numbered
from 0, and a step names the chunks it moves. Within a round all messages are posted together; the round is
over when all of them have completed, and only then are its reductions applied, in the order in which they
stand. So what is sent in a round is always the state from before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

MOST_LANES: Final = 64
"""Into how many parts a buffer can be cut, so that a schedule runs on each and the runs are interleaved."""


class Action(Enum):
    """What a step does with its chunks."""

    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "reduce"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank: an action on ``count`` chunks from ``chunk`` on, with ``peer``.

    ``received_first`` says on which side of the operator a reduction puts what was received. Every operator
    that is offered commutes, but its bits need not (which zero, whose NaN), so the side is part of
    the schedule.
    """

    action: Action
    peer: int
    chunk: int
    count: int = 1
    received_first: bool = True


def send(peer: int, chunk: int = 0, count: int = 1) -> Step:
    """Send ``count`` chunks, from ``chunk`` on, to ``peer``."""
    return Step(Action.SEND, peer, chunk, count)


def receive(peer: int, chunk: int = 0, count: int = 1) -> Step:
    """Receive ``count`` chunks, from ``chunk`` on, from ``peer``, in place of our own."""
    return Step(Action.RECEIVE, peer, chunk, count)


def reduce_from(peer: int, chunk: int = 0, count: int = 1, *, received_first: bool = True) -> Step:
    """Receive chunks from ``peer`` and reduce them into our own: ``own = received op own``.

    With ``received_first=False`` it is ``own = own op received``.
    """
    return Step(Action.REDUCE, peer, chunk, count, received_first)


def finish(chunk: int = 0, count: int = 1) -> Step:
    """Every rank's contribution is in: apply what the operator does last (the division of an average)."""
    return Step(Action.FINISH, -1, chunk, count)


class Round(tuple[Step, ...]):
    """Steps that are posted together and complete together."""

    __slots__ = ()

    def __new__(cls, *steps: Step) -> Round:  # noqa: PYI034 - Self needs Python 3.11
        """Make a round of ``steps``."""
        return super().__new__(cls, steps)

    @property
    def messages(self) -> tuple[Step, ...]:
        """The steps that communicate."""
        return tuple(step for step in self if step.action is not Action.FINISH)


class Collective(str, Enum):
    """What a schedule promises, by its name in the field.

    ==================  ======================================  ==================================
    collective          before, on rank r                       after, on rank r
    ==================  ======================================  ==================================
    ``ALLREDUCE``       its own vector                          the reduction of all vectors
    ``REDUCE``          its own vector                          on the root: the reduction
    ``BROADCAST``       on the root: the vector                 the root's vector
    ``ALLGATHER``       chunk r                                 every chunk
    ``REDUCE_SCATTER``  its own vector                          chunk r of the reduction
    ==================  ======================================  ==================================
    """

    ALLREDUCE = "allreduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALLGATHER = "allgather"
    REDUCE_SCATTER = "reduce_scatter"

    @property
    def reduces(self) -> bool:
        """Whether values of several ranks are combined."""
        return self in (Collective.ALLREDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER)

    @property
    def rooted(self) -> bool:
        """Whether one rank, the root, plays a part of its own."""
        return self in (Collective.REDUCE, Collective.BROADCAST)


Generator = Callable[[int, int], Iterator[Round]]
"""A schedule as it is written: ``f(rank, size)`` yields the rounds of one rank, for root 0.

Peers and chunks may be any integers; they are taken modulo the number of ranks and of chunks.
"""
