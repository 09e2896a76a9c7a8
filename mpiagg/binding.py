"""Binding: a schedule becomes a program, with views of a buffer and a persistent request for every message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array, Codec, Reduction, scratch
from mpiagg.program import Awaited, BoundRound, Interleaved, Program
from mpiagg.schedules import Action, Round, Step
from mpiagg.transport import SHARED_TAG, Channel

Run = tuple[int, int]
"""A range (start, stop) of the buffer."""

Lane = Sequence[Run]
"""The range of every chunk of a schedule in the buffer."""


_ASIDE: Final = (Action.REDUCE, Action.HOLD)
"""What is received does not land in the buffer at once."""


@dataclass(frozen=True)
class Wire:
    """How values travel other than as they are.

    Attributes
    ----------
    codec : Codec
        Turns values into what travels, and back.
    residual : numpy.ndarray, optional
        As long as the buffer: where what the codec loses of this rank's contributions is left.
    """

    codec: Codec
    residual: Array | None = None


def bind(
    channel: Channel,
    schedule: Sequence[Round],
    buffer: Array,
    lanes: Sequence[Lane],
    reduction: Reduction,
    *,
    label: str,
    tag: int = SHARED_TAG,
    wire: Wire | None = None,
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
    wire : Wire, optional
        How values travel.
    """
    binders: list[_Binder] = []
    for number, lane in enumerate(lanes):
        place = _Place(channel, buffer, lane, reduction, label, tag + number)
        binders.append(_Binder(place) if wire is None else _WireBinder(place, wire))
    bound = [binder.bind(schedule) for binder in binders]
    rounds = bound[0] if len(bound) == 1 else (Interleaved(bound).as_round(),)
    releases = tuple(request.Free for binder in binders for request in binder.requests)
    sent = sum(binder.sent_bytes for binder in binders)
    return Program(rounds, releases, sum(binder.nbytes for binder in binders), sent)


def scratch_length(schedule: Sequence[Round], lanes: Sequence[Lane]) -> int:
    """Return how many elements of scratch a bound schedule has, where values travel as they are."""
    return sum(max((_arriving(lane, a_round) for a_round in schedule), default=0) for lane in lanes)


def _arriving(lane: Lane, a_round: Round) -> int:
    """Return how many elements arrive in a round that do not land in the buffer at once."""
    return sum(stop - start for step in a_round if step.action in _ASIDE for start, stop in _runs(lane, step))


def _runs(lane: Lane, step: Step) -> Iterator[Run]:
    """Yield the contiguous ranges of the buffer that a step's chunks make up, without the empty ones."""
    start = stop = 0
    for first, last in lane[step.chunk : step.chunk + step.count]:
        if first != stop and start < stop:
            yield start, stop
        start, stop = (start if first == stop else first), last
    if start < stop:
        yield start, stop


class _Place(NamedTuple):
    """Where a lane of a schedule runs."""

    channel: Channel
    buffer: Array
    lane: Lane
    reduction: Reduction
    label: str
    tag: int


class _Draft:
    """A round while it is bound."""

    def __init__(self) -> None:
        self.receives: list[tuple[MPI.Prequest, Awaited]] = []
        self.sends: list[tuple[MPI.Prequest, Awaited]] = []
        self.encodings: list[Callable[[], object]] = []
        self.folds: list[Callable[[], object]] = []
        self.held: dict[Run, Array] = {}
        """What has arrived for a run and stands to the left of what is reduced into it next."""

    def done(self) -> BoundRound:
        """Return the round. Receives come first, so that messages find them posted."""
        posted = self.receives + self.sends
        receives, sends = ([request.Start for request, _ in some] for some in (self.receives, self.sends))
        return BoundRound(
            (*receives, *self.encodings, *sends),
            tuple(request.Test for request, _ in posted),
            tuple(self.folds),
            tuple(awaited for _, awaited in posted),
        )


class _Binder:
    """Binds a schedule to one lane; values travel as they are."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.requests: list[MPI.Prequest] = []
        self.sent_bytes = 0
        self.spare = scratch(0, place.buffer.dtype)

    @property
    def nbytes(self) -> int:
        """The memory that belongs to the program alone."""
        return self.spare.nbytes

    def bind(self, schedule: Sequence[Round]) -> tuple[BoundRound, ...]:
        self.spare = scratch(self._scratch(schedule), self.spare.dtype)
        rounds = [self._bind_round(index, a_round) for index, a_round in enumerate(schedule)]
        return tuple(a_round for a_round in rounds if a_round.starts or a_round.folds)

    def _scratch(self, schedule: Sequence[Round]) -> int:
        """Return how much scratch there must be for what a round receives to reduce."""
        return scratch_length(schedule, (self.place.lane,))

    def _bind_round(self, index: int, a_round: Round) -> BoundRound:
        draft, used = _Draft(), 0
        for step in a_round:
            for run in self._runs(step):
                if step.action is Action.FINISH:
                    self._bind_finish(draft, run)
                elif step.action is Action.SEND:
                    self._bind_send(draft, index, step, run)
                elif step.action is Action.RECEIVE:
                    self._bind_receive(draft, index, step, run)
                else:
                    used += self._bind_reduce(draft, index, step, run, used)
        self.requests += (request for request, _ in draft.receives + draft.sends)
        return draft.done()

    def _bind_finish(self, draft: _Draft, run: Run) -> None:
        if self.place.reduction.divisor is not None:
            draft.folds.append(partial(self.place.reduction.finish, self._own(run)))

    def _bind_send(self, draft: _Draft, index: int, step: Step, run: Run) -> None:
        self._post_send(draft, index, step, self._own(run))

    def _bind_receive(self, draft: _Draft, index: int, step: Step, run: Run) -> None:
        self._post_receive(draft, index, step, self._own(run))

    def _bind_reduce(self, draft: _Draft, index: int, step: Step, run: Run, used: int) -> int:
        """Receive into the scratch from ``used`` on, and return how much of it that takes."""
        arrived = self.spare[used : used + run[1] - run[0]]
        self._post_receive(draft, index, step, arrived)
        self._combine(draft, step, run, arrived)
        return arrived.size

    def _combine(self, draft: _Draft, step: Step, run: Run, arrived: Array) -> None:
        """Reduce what has arrived into our own values, or keep it aside for the next that arrives."""
        own, combine = self._own(run), self.place.reduction.combine
        if run in draft.held:
            draft.folds.append(partial(combine, draft.held.pop(run), arrived, arrived))
        if step.action is Action.HOLD:
            draft.held[run] = arrived
        else:
            pair = (arrived, own) if step.received_first else (own, arrived)
            draft.folds.append(partial(combine, *pair, own))

    def _post_send(self, draft: _Draft, index: int, step: Step, message: Array) -> None:
        self.sent_bytes += message.nbytes
        awaited = Awaited(self.place.label, index, step, message.nbytes)
        draft.sends += ((r, awaited) for r in self.place.channel.send_init(message, step.peer, self.place.tag))

    def _post_receive(self, draft: _Draft, index: int, step: Step, message: Array) -> None:
        awaited = Awaited(self.place.label, index, step, message.nbytes)
        draft.receives += ((r, awaited) for r in self.place.channel.receive_init(message, step.peer, self.place.tag))

    def _own(self, run: Run) -> Array:
        return self.place.buffer[run[0] : run[1]]

    def _runs(self, step: Step) -> Iterator[Run]:
        return _runs(self.place.lane, step)


class _WireBinder(_Binder):
    """Binds a schedule to one lane; images of values travel.

    Who sends values goes on with what the receiver gets, and who finishes a chunk goes on with what it will
    send. So a schedule that leaves all ranks with the same values does so with images, too: ``prove`` shows it.
    An image that was received, or is there of values that have not changed, is sent as it is.
    """

    def __init__(self, place: _Place, wire: Wire) -> None:
        super().__init__(place)
        self.wire = wire
        self.spare = scratch(0, np.uint8)
        self.images: dict[Run, Array] = {}
        self.current: set[Run] = set()
        self.goes_on: set[tuple[int, int]] = set()
        # Two, for what is kept aside and what arrives next.
        self.decoded = [scratch(0, place.buffer.dtype)] * 2

    @property
    def nbytes(self) -> int:
        """The memory that belongs to the program alone."""
        images = sum(image.nbytes for image in self.images.values())
        return self.spare.nbytes + sum(decoded.nbytes for decoded in self.decoded) + images

    def bind(self, schedule: Sequence[Round]) -> tuple[BoundRound, ...]:
        self.goes_on = _going_on(schedule)
        steps = [step for a_round in schedule for step in a_round]
        for number, actions in enumerate((_ASIDE, (Action.HOLD,))):
            lengths = (stop - start for step in steps if step.action in actions for start, stop in self._runs(step))
            self.decoded[number] = scratch(max(lengths, default=0), self.place.buffer.dtype)
        return super().bind(schedule)

    def _scratch(self, schedule: Sequence[Round]) -> int:
        def arriving(a_round: Round) -> int:
            runs = (run for step in a_round if step.action in _ASIDE for run in self._runs(step))
            return sum(self.wire.codec.nbytes(stop - start) for start, stop in runs)

        return max(map(arriving, schedule), default=0)

    def _bind_finish(self, draft: _Draft, run: Run) -> None:
        super()._bind_finish(draft, run)
        divisor = self.place.reduction.divisor
        draft.folds += self._encoding(run, 1.0 if divisor is None else divisor)
        draft.folds.append(partial(self.wire.codec.decode, self.images[run], self._own(run)))

    def _bind_send(self, draft: _Draft, index: int, step: Step, run: Run) -> None:
        if run not in self.current:
            draft.encodings += self._encoding(run)
        if any((index, chunk) in self.goes_on for chunk in range(step.chunk, step.chunk + step.count)):
            draft.encodings.append(partial(self.wire.codec.decode, self.images[run], self._own(run)))
        self._post_send(draft, index, step, self.images[run])

    def _bind_receive(self, draft: _Draft, index: int, step: Step, run: Run) -> None:
        image = self._image(run)
        self._post_receive(draft, index, step, image)
        draft.folds.append(partial(self.wire.codec.decode, image, self._own(run)))

    def _bind_reduce(self, draft: _Draft, index: int, step: Step, run: Run, used: int) -> int:
        length = run[1] - run[0]
        arrived = self.spare[used : used + self.wire.codec.nbytes(length)]
        self._post_receive(draft, index, step, arrived)
        first, second = self.decoded
        decoded = (first if run not in draft.held or draft.held[run].base is not first else second)[:length]
        draft.folds.append(partial(self.wire.codec.decode, arrived, decoded))
        self._combine(draft, step, run, decoded)
        self._changed(run)
        return arrived.size

    def _encoding(self, run: Run, unit: float = 1.0) -> list[Callable[[], object]]:
        """Return the calls that make the image of our own values, and leave what it loses."""
        own, image, residual = self._own(run), self._image(run), self.wire.residual
        calls: list[Callable[[], object]] = [partial(self.wire.codec.encode, own, image)]
        if residual is not None:
            calls.append(partial(self._leave, own, image, residual[run[0] : run[1]], unit))
        return calls

    def _leave(self, own: Array, image: Array, lost: Array, unit: float) -> None:
        """Write what an image loses of our own values, in a unit."""
        self.wire.codec.decode(image, lost)
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(own, lost, out=lost)
            np.multiply(lost, unit, out=lost)
        # What is not finite was not lost, but sent as such; it would come back for ever.
        np.copyto(lost, 0, where=~np.isfinite(lost))

    def _image(self, run: Run) -> Array:
        """Return where the image of a run lies, which is about to be that of its values."""
        self._changed(run)
        self.current.add(run)
        if run not in self.images:
            self.images[run] = scratch(self.wire.codec.nbytes(run[1] - run[0]), np.uint8)
        return self.images[run]

    def _changed(self, run: Run) -> None:
        self.current = {(start, stop) for start, stop in self.current if stop <= run[0] or start >= run[1]}


def _going_on(schedule: Sequence[Round]) -> set[tuple[int, int]]:
    """Return (round, chunk) for what is sent in a round and then combined or finished, not received anew."""
    found: set[tuple[int, int]] = set()
    combined: dict[int, bool] = {}
    for index in reversed(range(len(schedule))):
        for step in schedule[index]:
            if step.action is not Action.SEND:
                for chunk in range(step.chunk, step.chunk + step.count):
                    combined[chunk] = step.action is not Action.RECEIVE
        for step in schedule[index]:
            if step.action is Action.SEND:
                found |= {(index, chunk) for chunk in range(step.chunk, step.chunk + step.count) if combined.get(chunk)}
    return found
