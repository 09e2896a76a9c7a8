"""Binding: a schedule becomes a program, with views of a buffer and a persistent request for every message."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mpiagg.arrays import Array, Codec, Device, Reduction, accelerator_of, device_of, even_ranges
from mpiagg.plans.endpoints import Draft, Endpoint, Tag, endpoint_of, of_lane
from mpiagg.plans.program import BoundRound, Interleaved, Program
from mpiagg.plans.staging import piece_bytes
from mpiagg.schedules import Action, Round, Step
from mpiagg.schedules.check import scratch_of
from mpiagg.transport import Channel

Run = tuple[int, int]
"""A range (start, stop) of the buffer."""

Lane = Sequence[Run]
"""The range of every chunk of a schedule in the buffer."""

Chunks = Lane | Mapping[int, Run]
"""The same, or the range of each chunk that this rank names."""


class Segments(NamedTuple):
    """Arrays that are one buffer to a schedule, which lie apart: the elements of each are numbered from its start on.

    Attributes
    ----------
    arrays : tuple of numpy.ndarray
        One-dimensional and contiguous, of one dtype, on one device.
    starts : tuple of int
        Ascending; between two arrays there is one number that is no element's, so that no range is in both.
    """

    arrays: tuple[Array, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Segments:
        """Return some arrays with their elements numbered."""
        return cls(tuple(arrays), tuple(accumulate((array.size + 1 for array in arrays[:-1]), initial=0)))

    def piece(self, run: Run) -> tuple[Array, int, int]:
        """Return in which array a range lies, and where in it."""
        place = bisect_right(self.starts, run[0]) - 1
        start = self.starts[place]
        return self.arrays[place], run[0] - start, run[1] - start


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
    buffer: Array | Segments,
    lanes: Sequence[Chunks],
    reduction: Reduction,
    *,
    label: str,
    tag: Tag,
    wire: Wire | None = None,
    cut: bool = True,
) -> Program:
    """Bind a schedule to a buffer.

    Parameters
    ----------
    channel : Channel
        Where its messages travel.
    schedule : sequence of Round
        What this rank does.
    buffer : numpy.ndarray or Segments
        One-dimensional and contiguous; the schedule's chunks are ranges of it.
    lanes : sequence of Chunks
        For each lane the ranges of its chunks. Lanes are independent runs of the same schedule on parts of the
        buffer, interleaved, so that one reduces while another's messages travel; each has a tag of its own.
    reduction : Reduction
        How values are combined.
    label : str
        What it is, for messages to people.
    tag : int or callable
        The first of ``len(lanes)`` tags; see :class:`mpiagg.plans.endpoints.Endpoint`.
    wire : Wire, optional
        How values travel.
    cut : bool
        Whether messages may be cut; see :class:`mpiagg.plans.endpoints.Endpoint`.
    """
    vector = buffer if isinstance(buffer, Segments) else Segments.of([buffer])
    first = vector.arrays[0]
    device = accelerator_of(first)
    divisible = wire is None or wire.codec.elementwise  # a part of a chunk travels as it does within the chunk
    staged = device is not None and not channel.aware and divisible
    tracks = _turns(lanes, first.itemsize, channel.piece_cost) if staged else [[lane] for lane in lanes]
    binders: list[_Binder] = []
    bound: list[tuple[BoundRound, ...]] = []
    endpoints = [endpoint_of(channel, of_lane(tag, i), first, label, cut=cut) for i in range(len(tracks))]
    for endpoint, track in zip(endpoints, tracks, strict=True):
        rounds: list[BoundRound] = []
        for lane in track:
            place = _LaneBinding(endpoint, vector, lane, reduction)
            binders.append(_Binder(place) if wire is None else _WireBinder(place, wire))
            rounds += binders[-1].bind(schedule)
        bound.append(endpoint.whole(rounds))
    releases = tuple(release for endpoint in endpoints for release in endpoint.releases)
    nbytes = sum(binder.nbytes for binder in binders) + sum(endpoint.nbytes for endpoint in endpoints)
    sent = sum(endpoint.sent_bytes for endpoint in endpoints)
    return Program(bound[0] if len(bound) == 1 else (Interleaved(bound).as_round(),), releases, nbytes, sent, device)


def _turns(lanes: Sequence[Chunks], itemsize: int, cost: int | None) -> list[list[Chunks]]:
    """Return lanes cut into lanes whose chunks are staged in one piece, in at least two rows that take turns.

    Every chunk is cut, so that what is combined in which order stays as it is.
    """
    pieces: list[Chunks] = []
    for lane in lanes:
        chunks = list(lane) if isinstance(lane, Mapping) else range(len(lane))
        longest = max((lane[chunk][1] - lane[chunk][0] for chunk in chunks), default=0)
        count = max(1, -(-longest * itemsize // piece_bytes(longest * itemsize, cost)))
        parts = [even_ranges(*lane[chunk], count) for chunk in chunks]
        pieces += (dict(zip(chunks, piece, strict=True)) for piece in zip(*parts, strict=True))
    rows = min(len(pieces), max(len(lanes), 2))
    return [pieces[row::rows] for row in range(rows)]


def scratch_length(schedule: Sequence[Round], lanes: Sequence[Chunks]) -> int:
    """Return how many elements of scratch a bound schedule has, where values travel as they are."""
    return sum(scratch_of(schedule, partial(_length, lane)) for lane in lanes)


def _length(lane: Chunks, step: Step) -> int:
    """Return how many elements a step moves."""
    return sum(stop - start for start, stop in _runs(lane, step))


def _runs(lane: Chunks, step: Step) -> Iterator[Run]:
    """Yield the contiguous ranges of the buffer that a step's chunks make up, without the empty ones.

    Both ends of a message must find the same ones. Where chunks lie apart, they do so on each rank in another way: then
    a chunk is a range.
    """
    ranges = [lane[chunk] for chunk in range(step.chunk, step.chunk + step.count)]
    if isinstance(lane, Mapping):
        yield from ((first, last) for first, last in ranges if first < last)
        return
    start = stop = 0
    for first, last in ranges:
        if first != stop and start < stop:
            yield start, stop
        start, stop = (start if first == stop else first), last
    if start < stop:
        yield start, stop


class _LaneBinding(NamedTuple):
    """Where a lane of a schedule runs."""

    endpoint: Endpoint
    vector: Segments
    lane: Chunks
    reduction: Reduction

    @property
    def device(self) -> Device:
        """Where the buffer lies."""
        return device_of(self.vector.arrays[0])

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the buffer."""
        return self.vector.arrays[0].dtype


class _Draft(Draft):
    """A round while it is bound, and what has arrived so far.

    Attributes
    ----------
    held : dict of Run to numpy.ndarray
        What has arrived for a run and stands to the left of what is reduced into it next.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Run, Array] = {}


class _Binder:
    """Binds a schedule to one lane; values travel as they are."""

    def __init__(self, place: _LaneBinding) -> None:
        self.place = place
        self.spare = place.device.empty(0, place.dtype)
        self.kept: dict[Run, Array] = {}

    @property
    def nbytes(self) -> int:
        """The memory that belongs to the program alone."""
        return self.spare.nbytes

    def bind(self, schedule: Sequence[Round]) -> list[BoundRound]:
        self.spare = self.place.device.empty(self._scratch(schedule), self.spare.dtype)
        return [part for index, a_round in enumerate(schedule) for part in self._bind_round(index, a_round)]

    def _scratch(self, schedule: Sequence[Round]) -> int:
        """Return how much scratch there must be for what a round receives to reduce, and for what is kept."""
        return scratch_length(schedule, (self.place.lane,))

    def _bind_round(self, index: int, a_round: Round) -> list[BoundRound]:
        draft, used = _Draft(), 0
        for step in a_round:
            for run in self._runs(step):
                if step.action is Action.FINISH:
                    self._bind_finish(draft, run)
                elif step.action is Action.TAKE:
                    draft.reductions.append(partial(self.place.device.convert, self._own(run), self.kept[run]))
                elif step.action is Action.SEND:
                    self._bind_send(draft, index, step, run)
                elif step.action is Action.RECEIVE:
                    self._bind_receive(draft, step, run)
                else:
                    used += self._bind_reduce(draft, step, run, used)
        return self.place.endpoint.rounds(draft, index)

    def _bind_finish(self, draft: _Draft, run: Run) -> None:
        if self.place.reduction.divisor is not None:
            draft.reductions.append(partial(self.place.reduction.finish, self._own(run)))

    def _bind_send(self, draft: _Draft, index: int, step: Step, run: Run) -> None:
        del index
        draft.add(step, *self.place.vector.piece(run))

    def _bind_receive(self, draft: _Draft, step: Step, run: Run) -> None:
        draft.add(step, *self.place.vector.piece(run))

    def _bind_reduce(self, draft: _Draft, step: Step, run: Run, used: int) -> int:
        """Receive into the scratch from ``used`` on, or to its end, where it is kept; return how much that takes."""
        length, keeps = run[1] - run[0], step.action is Action.KEEP and run not in self.kept
        start = self.spare.size - length - sum(kept.size for kept in self.kept.values()) if keeps else used
        arrived = self.spare[start : start + length]
        draft.add(step, self.spare, start, start + length)
        self._combine(draft, step, run, arrived)
        if keeps:
            self.kept[run] = arrived
        return 0 if keeps else length

    def _combine(self, draft: _Draft, step: Step, run: Run, arrived: Array) -> None:
        """Reduce what has arrived into our own values, or keep it aside for the next that arrives."""
        own, combine = self._own(run), self.place.reduction.combine
        if step.action is Action.KEEP and run in self.kept:
            draft.reductions.append(partial(combine, arrived, self.kept[run], self.kept[run]))
        if run in draft.held:
            draft.reductions.append(partial(combine, draft.held.pop(run), arrived, arrived))
        if step.action is Action.HOLD:
            draft.held[run] = arrived
        else:
            pair = (arrived, own) if step.received_first else (own, arrived)
            draft.reductions.append(partial(combine, *pair, own))

    def _own(self, run: Run) -> Array:
        array, start, stop = self.place.vector.piece(run)
        return array[start:stop]

    def _runs(self, step: Step) -> Iterator[Run]:
        return _runs(self.place.lane, step)


class _WireBinder(_Binder):
    """Binds a schedule to one lane; encoded values travel.

    Who sends values goes on with what the receiver gets, and who finishes a chunk goes on with what it will
    send. So a schedule that leaves all ranks with the same values does so with encoded values: ``prove`` checks it.
    An encoded buffer that was received, or is there of values that have not changed, is sent as it is.
    """

    def __init__(self, place: _LaneBinding, wire: Wire) -> None:
        super().__init__(place)
        self.wire = wire
        self.spare = place.device.empty(0, np.uint8)
        self.encoded_buffers: dict[Run, Array] = {}
        self.current: set[Run] = set()
        self.goes_on: set[tuple[int, int]] = set()
        # Two, for what is kept aside and what arrives next.
        self.decoded = [place.device.empty(0, place.dtype)] * 2

    @property
    def nbytes(self) -> int:
        """The memory that belongs to the program alone."""
        encoded_buffers = sum(encoded.nbytes for encoded in self.encoded_buffers.values())
        return super().nbytes + sum(decoded.nbytes for decoded in self.decoded) + encoded_buffers

    def bind(self, schedule: Sequence[Round]) -> list[BoundRound]:
        self.goes_on = _going_on(schedule)
        steps = [step for a_round in schedule for step in a_round]
        for number, actions in enumerate(({Action.REDUCE, Action.HOLD}, {Action.HOLD})):
            lengths = (stop - start for step in steps if step.action in actions for start, stop in self._runs(step))
            self.decoded[number] = self.place.device.empty(max(lengths, default=0), self.place.dtype)
        return super().bind(schedule)

    def _scratch(self, schedule: Sequence[Round]) -> int:
        def arriving(a_round: Round) -> int:
            runs = (run for step in a_round if step.action.reduces for run in self._runs(step))
            return sum(self.wire.codec.nbytes(stop - start) for start, stop in runs)

        return max(map(arriving, schedule), default=0)

    def _bind_finish(self, draft: _Draft, run: Run) -> None:
        super()._bind_finish(draft, run)
        divisor = self.place.reduction.divisor
        draft.reductions += self._encoding(run, 1.0 if divisor is None else divisor)
        draft.reductions.append(partial(self.wire.codec.decode, self.encoded_buffers[run], self._own(run)))

    def _bind_send(self, draft: _Draft, index: int, step: Step, run: Run) -> None:
        if run not in self.current:
            draft.encodings += self._encoding(run)
        if any((index, chunk) in self.goes_on for chunk in range(step.chunk, step.chunk + step.count)):
            draft.encodings.append(partial(self.wire.codec.decode, self.encoded_buffers[run], self._own(run)))
        draft.add(step, self.encoded_buffers[run])

    def _bind_receive(self, draft: _Draft, step: Step, run: Run) -> None:
        encoded = self._encoded_buffer(run)
        draft.add(step, encoded)
        draft.reductions.append(partial(self.wire.codec.decode, encoded, self._own(run)))

    def _bind_reduce(self, draft: _Draft, step: Step, run: Run, used: int) -> int:
        length = run[1] - run[0]
        arrived = self.spare[used : used + self.wire.codec.nbytes(length)]
        draft.add(step, self.spare, used, used + arrived.size)
        first, second = self.decoded
        decoded = (first if run not in draft.held or draft.held[run].base is not first else second)[:length]
        draft.reductions.append(partial(self.wire.codec.decode, arrived, decoded))
        self._combine(draft, step, run, decoded)
        self._changed(run)
        return arrived.size

    def _encoding(self, run: Run, unit: float = 1.0) -> list[Callable[[], object]]:
        """Return the calls that encode our own values, and leave what it loses."""
        own, encoded, residual = self._own(run), self._encoded_buffer(run), self.wire.residual
        calls: list[Callable[[], object]] = [partial(self.wire.codec.encode, own, encoded)]
        if residual is not None:
            calls.append(partial(self._leave, own, encoded, residual[run[0] : run[1]], unit))
        return calls

    def _leave(self, own: Array, encoded: Array, lost: Array, unit: float) -> None:
        """Write what an encoded buffer loses of our own values, in a unit."""
        self.wire.codec.decode(encoded, lost)
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(own, lost, out=lost)
            np.multiply(lost, unit, out=lost)
        # What is not finite was not lost, but sent as such; it would come back for ever.
        np.copyto(lost, 0, where=~np.isfinite(lost))

    def _encoded_buffer(self, run: Run) -> Array:
        """Return where the encoded buffer of a run lies, into which its values are about to be encoded."""
        self._changed(run)
        self.current.add(run)
        if run not in self.encoded_buffers:
            self.encoded_buffers[run] = self.place.device.empty(self.wire.codec.nbytes(run[1] - run[0]), np.uint8)
        return self.encoded_buffers[run]

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
