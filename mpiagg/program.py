"""Binding: a schedule becomes a program, with views of a buffer and a persistent request for every message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from mpi4py import MPI

from mpiagg.arrays import Array, Reduction, scratch
from mpiagg.schedules import Action, Round, Step
from mpiagg.transport import SHARED_TAG, Channel


class Awaited(NamedTuple):
    """What a wait is for: one message of a round."""

    label: str
    round: int
    step: Step
    nbytes: int

    def __str__(self) -> str:
        """Say it in words."""
        way = "be sent to" if self.step.action is Action.SEND else "arrive from"
        return f"{self.label}, round {self.round}: {self.nbytes} bytes to {way} rank {self.step.peer}"


class BoundRound(NamedTuple):
    """A round as it runs: what to start, what to wait for, what to compute."""

    starts: tuple[Callable[[], object], ...]
    tests: tuple[tuple[Callable[[], bool], Awaited], ...]
    folds: tuple[Callable[[], object], ...]


@dataclass(frozen=True)
class Program:
    """What a plan runs: its lanes, each a sequence of rounds, and what they hold.

    Attributes
    ----------
    lanes : tuple of tuples of BoundRound
        Independent sequences of rounds, which are interleaved.
    requests : tuple of MPI.Prequest
        The persistent requests in them, to be freed with the plan.
    nbytes : int
        The memory that belongs to the program alone.
    sent_bytes : int
        What one run sends; 0 where the MPI library's own collective does it, which does not tell.
    """

    lanes: tuple[tuple[BoundRound, ...], ...]
    requests: tuple[MPI.Prequest, ...]
    nbytes: int
    sent_bytes: int = 0


Lane = Sequence[tuple[int, int]]
"""The range (start, stop) of every chunk of a schedule in the buffer."""


def bind(
    channel: Channel,
    schedule: Sequence[Round],
    buffer: Array,
    lanes: Sequence[Lane],
    reduction: Reduction,
    *,
    label: str,
    tag: int = SHARED_TAG,
) -> Program:
    """Bind a schedule to a buffer.

    Parameters
    ----------
    channel : Channel
        Where its messages travel.
    schedule : sequence of Round
        What this rank does.
    buffer : numpy.ndarray
        One-dimensional and contiguous; the schedule's chunks are ranges of it.
    lanes : sequence of Lane
        For each lane the ranges of its chunks. Lanes are independent runs of the same schedule on parts of the
        buffer, interleaved, so that one reduces while another's messages travel; each has a tag of its own.
    reduction : Reduction
        How values are combined.
    label : str
        What it is, for messages to people.
    tag : int
        The first of ``len(lanes)`` tags.
    """
    binders = [
        _Binder(channel, buffer, lane, reduction, label=label, tag=tag + number) for number, lane in enumerate(lanes)
    ]
    bound = tuple(binder.bind(schedule) for binder in binders)
    requests = tuple(request for binder in binders for request in binder.requests)
    sent = sum(binder.sent_bytes for binder in binders)
    return Program(bound, requests, sum(binder.spare.nbytes for binder in binders), sent)


class _Binder:
    """Binds a schedule to one lane."""

    def __init__(
        self, channel: Channel, buffer: Array, lane: Lane, reduction: Reduction, *, label: str, tag: int
    ) -> None:
        self.channel, self.buffer, self.lane, self.reduction = channel, buffer, lane, reduction
        self.label, self.tag = label, tag
        self.requests: list[MPI.Prequest] = []
        self.spare = scratch(0, buffer.dtype)
        self.sent_bytes = 0

    def bind(self, schedule: Sequence[Round]) -> tuple[BoundRound, ...]:
        most = max((self._elements(a_round, Action.REDUCE) for a_round in schedule), default=0)
        self.spare = scratch(most, self.buffer.dtype)
        rounds = [self._bind_round(index, a_round) for index, a_round in enumerate(schedule)]
        return tuple(a_round for a_round in rounds if a_round.starts or a_round.folds)

    def _elements(self, a_round: Round, action: Action) -> int:
        return sum(len(run) for step in a_round if step.action is action for run in self._runs(step))

    def _bind_round(self, index: int, a_round: Round) -> BoundRound:
        sends: list[tuple[MPI.Prequest, Awaited]] = []
        receives: list[tuple[MPI.Prequest, Awaited]] = []
        folds: list[Callable[[], object]] = []
        used = 0
        for step in a_round:
            for own in self._runs(step):
                awaited = Awaited(self.label, index, step, own.nbytes)
                if step.action is Action.FINISH:
                    if self.reduction.divisor is not None:
                        folds.append(partial(self.reduction.finish, own))
                elif step.action is Action.SEND:
                    self.sent_bytes += own.nbytes
                    sends += ((r, awaited) for r in self.channel.send_init(own, step.peer, self.tag))
                elif step.action is Action.RECEIVE:
                    receives += ((r, awaited) for r in self.channel.receive_init(own, step.peer, self.tag))
                else:
                    arrived = self.spare[used : used + own.size]
                    used += own.size
                    receives += ((r, awaited) for r in self.channel.receive_init(arrived, step.peer, self.tag))
                    pair = (arrived, own) if step.received_first else (own, arrived)
                    folds.append(partial(self.reduction.combine, *pair, own))
        # Receives are started first, so that messages find them posted. Sends are tested first: short ones are done
        # at once, and that is found out while the others' are on their way.
        starts, tests = receives + sends, sends + receives
        self.requests += (request for request, _ in starts)
        return BoundRound(
            tuple(request.Start for request, _ in starts),
            tuple((request.Test, awaited) for request, awaited in tests),
            tuple(folds),
        )

    def _runs(self, step: Step) -> Iterator[Array]:
        """Yield the contiguous parts of the buffer that a step's chunks make up, without the empty ones."""
        start = stop = 0
        for first, last in self.lane[step.chunk : step.chunk + step.count]:
            if first != stop and start < stop:
                yield self.buffer[start:stop]
            start, stop = (start if first == stop else first), last
        if start < stop:
            yield self.buffer[start:stop]
