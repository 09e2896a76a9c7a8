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

    @property
    def now(self) -> Awaited:
        """What is waited for at present."""
        return self


class BoundRound(NamedTuple):
    """A round as it runs: what to start, what to test until it is done, what to compute then.

    ``awaited`` says of each of the ``tests`` what it waits for.
    """

    starts: tuple[Callable[[], object], ...]
    tests: tuple[Callable[[], bool], ...]
    folds: tuple[Callable[[], object], ...]
    awaited: tuple[Awaited | Interleaved, ...]


def run(rounds: Sequence[BoundRound]) -> Iterator[Awaited]:
    """Run rounds one after the other; yield what is waited for whenever it has not come."""
    for starts, tests, folds, awaited in rounds:
        for start in starts:
            start()
        for test, message in zip(tests, awaited, strict=True):
            while not test():
                yield message.now
        for fold in folds:
            fold()


class Interleaved:
    """Several lanes as one round: whenever one would wait, the next goes on."""

    def __init__(self, lanes: Sequence[Sequence[BoundRound]]) -> None:
        self._lanes = lanes
        self._running: list[tuple[Iterator[Awaited], Awaited | None]] = []

    def start(self) -> None:
        """Start all lanes."""
        self._running = [(run(lane), None) for lane in self._lanes]

    def test(self) -> bool:
        """Let all lanes go on, and return whether they are done."""
        waits = [(lane, next(lane, None)) for lane, _ in self._running]
        self._running = [(lane, awaited) for lane, awaited in waits if awaited is not None]
        return not self._running

    @property
    def now(self) -> Awaited:
        """What the first unfinished lane waits for at present."""
        awaited = self._running[0][1]
        assert awaited is not None
        return awaited

    def as_round(self) -> BoundRound:
        """Return the round that runs all lanes."""
        return BoundRound((self.start,), (self.test,), (), (self,))


@dataclass(frozen=True)
class Program:
    """What a plan runs, and what belongs to it.

    Attributes
    ----------
    rounds : tuple of BoundRound
        What is run.
    requests : tuple of MPI.Prequest
        The persistent requests in them, to be freed with the plan.
    nbytes : int
        The memory that belongs to the program alone.
    sent_bytes : int
        What one run sends; 0 where the MPI library's own collective does it, which does not tell.
    """

    rounds: tuple[BoundRound, ...]
    requests: tuple[MPI.Prequest, ...]
    nbytes: int
    sent_bytes: int = 0


def in_turn(*parts: Program | Callable[[], object] | None) -> Program:
    """Return the program that runs programs one after the other, with calls between them; None is nothing."""
    rounds: list[BoundRound] = []
    requests: list[MPI.Prequest] = []
    nbytes = sent_bytes = 0
    for part in parts:
        if isinstance(part, Program):
            rounds += part.rounds
            requests += part.requests
            nbytes += part.nbytes
            sent_bytes += part.sent_bytes
        elif part is not None:
            rounds.append(BoundRound((part,), (), (), ()))
    return Program(tuple(rounds), tuple(requests), nbytes, sent_bytes)


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
    bound = [binder.bind(schedule) for binder in binders]
    rounds = bound[0] if len(bound) == 1 else (Interleaved(bound).as_round(),)
    requests = tuple(request for binder in binders for request in binder.requests)
    sent = sum(binder.sent_bytes for binder in binders)
    return Program(rounds, requests, sum(binder.spare.nbytes for binder in binders), sent)


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
        most = max((self._reduced(a_round) for a_round in schedule), default=0)
        self.spare = scratch(most, self.buffer.dtype)
        rounds = [self._bind_round(index, a_round) for index, a_round in enumerate(schedule)]
        return tuple(a_round for a_round in rounds if a_round.starts or a_round.folds)

    def _reduced(self, a_round: Round) -> int:
        """Return how many elements a round receives for reduction."""
        return sum(len(run) for step in a_round if step.action is Action.REDUCE for run in self._runs(step))

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
        # Receives come first, so that messages find them posted.
        posted = receives + sends
        self.requests += (request for request, _ in posted)
        return BoundRound(
            tuple(request.Start for request, _ in posted),
            tuple(request.Test for request, _ in posted),
            tuple(folds),
            tuple(awaited for _, awaited in posted),
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
