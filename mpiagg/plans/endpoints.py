"""How the messages of a round leave memory and enter it: at once, or when a device is ready for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Accelerator, Array, Stream, accelerator_of, device_of
from mpiagg.plans.program import Awaited, BoundRound, Callback, Computing
from mpiagg.schedules import Action, Step
from mpiagg.transport import Channel, signature

PACKED: Final = 32 * 2**10
"""Bytes up to which pieces that go to one rank in a round are packed into one message. Longer ones travel by
themselves, since to copy them costs more than a message does."""

SHORT: Final = 2**16
"""Bytes of the longest messages that MPI libraries send over TCP without being asked: these find their receive posted.

A longer one is announced, and begins when the receiver asks for it, once its receive is posted. The question waits
behind what the receiver sends to the same rank. So where two ranks exchange long messages, one that posted its receive
first would let the other begin, and its own message would wait for all of the other's. It announces its own first.
"""

Tag = int | Callable[[int], int]
"""The tag of messages, or what returns one for each length in bytes."""


def of_lane(tag: Tag, lane: int) -> Tag:
    """Return the tag of a lane, of which the first has this one."""
    return tag + lane if isinstance(tag, int) else lambda nbytes: tag(nbytes) + lane


def by_length(channel: Channel, words: str) -> Tag:
    """Return the tags of blocking calls of which no rank knows all lengths: those of the same words share them."""
    return lambda nbytes: channel.tags.shared(signature(f"{words}, {nbytes} bytes"))


class Piece(NamedTuple):
    """A range of memory that is sent, or received."""

    memory: Array
    start: int
    stop: int

    @property
    def array(self) -> Array:
        """Its values."""
        return self.memory[self.start : self.stop]


class Draft:
    """A round while it is bound.

    Attributes
    ----------
    pieces : dict of (bool, int) to list of (Step, Piece)
        By whether it is sent, and the peer, what goes to one rank or comes from it.
    receives, sends : list of (MPI.Prequest, Awaited)
        Its messages.
    encodings, arrivals, reductions : list of callables
        What is done before they are sent, and when all of them are done: first what brings what has come to its place.
    """

    def __init__(self) -> None:
        self.pieces: dict[tuple[bool, int], list[tuple[Step, Piece]]] = {}
        self.receives: list[tuple[MPI.Prequest, Awaited]] = []
        self.sends: list[tuple[MPI.Prequest, Awaited]] = []
        self.encodings: list[Callback] = []
        self.arrivals: list[Callback] = []
        self.reductions: list[Callback] = []

    def add(self, step: Step, memory: Array, start: int = 0, stop: int | None = None) -> None:
        """Add a range of memory that is sent, or received."""
        piece = Piece(memory, start, memory.size if stop is None else stop)
        self.pieces.setdefault((step.action is Action.SEND, step.peer), []).append((step, piece))


class Endpoint:
    """Messages of memory that the MPI library reaches; what is computed is done when a call returns.

    Parameters
    ----------
    channel : Channel
        Where messages travel.
    tag : int or callable
        Theirs. Where only the ends of a message know its length, and have not compared it, a tag for each length keeps
        them from taking it for another: MPI libraries have written beyond the end of what was too short for it.
    label : str
        What they are for, for messages to people.
    cut : bool
        Whether they may be cut; see :meth:`Channel.send_init`.

    Attributes
    ----------
    nbytes : int
        The memory that belongs to the endpoint.
    sent_bytes : int
        What one run of its rounds sends.
    device : Accelerator or None
        Where the messages' memory lies, if not on the host.
    """

    device: Accelerator | None = None

    def __init__(self, channel: Channel, tag: Tag, label: str, *, cut: bool = True) -> None:
        self.nbytes = self.sent_bytes = 0
        self._channel, self._tag, self._label, self._cut = channel, tag, label, cut
        self._requests: list[MPI.Prequest] = []
        self._rooms: dict[tuple[object, ...], Array] = {}

    @property
    def releases(self) -> tuple[Callback, ...]:
        """What frees the requests of all messages."""
        return tuple(request.Free for request in self._requests)

    def send(self, draft: Draft, message: Array, awaited: Awaited) -> None:
        """Add a message to send."""
        requests = list(self._channel.send_init(message, awaited.step.peer, self._tag_of(message), cut=self._cut))
        self._requests += requests
        draft.sends += ((request, awaited) for request in requests)

    def receive(self, draft: Draft, message: Array, awaited: Awaited) -> None:
        """Add a message to receive, before what is to be done with it."""
        requests = list(self._channel.receive_init(message, awaited.step.peer, self._tag_of(message), cut=self._cut))
        self._requests += requests
        draft.receives += ((request, awaited) for request in requests)

    def _tag_of(self, message: Array) -> int:
        return self._tag if isinstance(self._tag, int) else self._tag(message.nbytes)

    def rounds(self, draft: Draft, number: int) -> list[BoundRound]:
        """Return the round as it runs, in parts."""
        for pieces in draft.pieces.values():
            for _, together in groupby(enumerate(pieces), _by_itself):
                self._post(draft, number, [piece for _, piece in together])
        return self._parts(draft)

    def _post(self, draft: Draft, number: int, pieces: Sequence[tuple[Step, Piece]]) -> None:
        """Post a message of some pieces; they are packed, unless they lie one after the other."""
        (step, first), *_ = pieces
        *_, (_, last) = pieces
        parts: list[Array] = []
        if all(one.memory is other.memory and one.stop == other.start for (_, one), (_, other) in pairwise(pieces)):
            message = first._replace(stop=last.stop).array
        else:
            parts = [piece.array.view(np.uint8) for _, piece in pieces]
            key = ("out", len(draft.sends)) if step.action is Action.SEND else ("in", len(draft.receives))
            empty = partial(device_of(first.memory).empty, dtype=np.uint8)
            message = self._room(key, sum(part.size for part in parts), empty)
        cuts = [0, *accumulate(part.size for part in parts)]
        packed = [(message[start:stop], part) for (start, stop), part in zip(pairwise(cuts), parts, strict=True)]
        convert = device_of(message).convert
        awaited = Awaited(self._label, number, step, message.nbytes)
        if step.action is Action.SEND:
            self.sent_bytes += message.nbytes
            draft.encodings += (partial(convert, inside, part) for inside, part in packed)
            self.send(draft, message, awaited)
        else:
            self.receive(draft, message, awaited)
            draft.arrivals += (partial(convert, part, inside) for inside, part in packed)

    def _room(self, key: tuple[object, ...], nbytes: int, make: Callable[[int], Array]) -> Array:
        """Return memory for a message of a round; the next round uses it again."""
        if key not in self._rooms or self._rooms[key].nbytes < nbytes:
            self._rooms[key] = make(nbytes)
            self.nbytes += nbytes
        return self._rooms[key][:nbytes]

    def _parts(self, draft: Draft) -> list[BoundRound]:
        """Return a round as it runs. Receives come first, but where two ranks exchange long messages."""
        posted = draft.receives + draft.sends
        receives = [request.Start for request, _ in draft.receives]
        sends = [*draft.encodings, *(request.Start for request, _ in draft.sends)]
        peers = {awaited.step.peer for _, awaited in draft.sends}
        exchanged = any(each.nbytes > SHORT and each.step.peer in peers for _, each in draft.receives)
        # All receives change places, not the long ones alone: MPI matches one rank's messages in the order of these.
        return [
            BoundRound(
                (*sends, *receives) if exchanged else (*receives, *sends),
                tuple(request.Test for request, _ in posted),
                (*draft.arrivals, *draft.reductions),
                tuple(awaited for _, awaited in posted),
            )
        ]

    def whole(self, rounds: Sequence[BoundRound]) -> tuple[BoundRound, ...]:
        """Return all rounds, with what stands before and after them."""
        return tuple(a_round for a_round in rounds if a_round.starts or a_round.reductions)


class Asking:
    """A stream of a device's for what an operation asks of it."""

    def __init__(self, device: Accelerator, label: str) -> None:
        self.stream, self._computing = device.stream(), Computing(label)

    def follow(self) -> BoundRound:
        """Return the round that waits for all that was asked for before."""
        return self.done(self.stream.follow)

    def done(self, *starts: Callback) -> BoundRound:
        """Return the round that begins with some calls, and waits for what was asked for here."""
        return BoundRound(starts, (self.stream.done,), (), (self._computing,))

    def ask(self, *calls: Callback) -> Callback:
        """Return the call that makes some calls, whose work goes to the stream."""
        return partial(_ask, self.stream, calls)


def _ask(stream: Stream, calls: Sequence[Callable[[], object]]) -> None:
    """Make calls whose work goes to a stream."""
    with stream:
        for call in calls:
            call()


class DeviceEndpoint(Endpoint):
    """Messages of a device's memory, which it works on in a stream of this endpoint's own.

    MPI knows nothing of streams. So before a round's messages are started, the stream is done: with what is sent, and
    with what still reads the memory that is received in. What is computed with received values is only asked for, and
    goes on while other endpoints' messages travel.
    """

    device: Accelerator

    def __init__(self, channel: Channel, tag: Tag, label: str, device: Accelerator, *, cut: bool = True) -> None:
        super().__init__(channel, tag, label, cut=cut)
        self.device, self._asking = device, Asking(device, label)

    def _parts(self, draft: Draft) -> list[BoundRound]:
        """Return the round in two parts: what the device does before the messages, and these with what it does then."""
        ready = self._asking.done(*self._asked(draft.encodings))
        messages = Draft()
        messages.receives, messages.sends = draft.receives, draft.sends
        (crossing,) = super()._parts(messages)
        return (
            [ready, crossing._replace(reductions=self._asked([*draft.arrivals, *draft.reductions]))]
            if crossing.starts
            else [BoundRound(self._asked([*draft.encodings, *draft.reductions]), (), (), ())]
        )

    def whole(self, rounds: Sequence[BoundRound]) -> tuple[BoundRound, ...]:
        """Return all rounds, after what was asked for before them, until the device is done."""
        asked = (a_round for a_round in rounds if a_round.starts or a_round.tests)
        return (BoundRound((self._asking.stream.follow,), (), (), ()), *asked, self._asking.done())

    def _asked(self, calls: Sequence[Callback]) -> tuple[Callback, ...]:
        return (self._asking.ask(*calls),) if calls else ()


class StagedEndpoint(DeviceEndpoint):
    """Messages of a device's memory by way of the host's, for an MPI library that does not reach the device.

    For each message of a round there is a piece of pinned memory, which the next round uses again.
    """

    def send(self, draft: Draft, message: Array, awaited: Awaited) -> None:
        """Add a message to send, and its copy to the host."""
        twin = self._room(("sent", len(draft.sends)), message.nbytes, self.device.pinned)
        draft.encodings.append(partial(self.device.copy, twin, message.view(np.uint8)))
        super().send(draft, twin, awaited)

    def receive(self, draft: Draft, message: Array, awaited: Awaited) -> None:
        """Add a message to receive, and its copy from the host."""
        twin = self._room(("received", len(draft.receives)), message.nbytes, self.device.pinned)
        super().receive(draft, twin, awaited)
        draft.arrivals.append(partial(self.device.copy, message.view(np.uint8), twin))


def endpoint_of(channel: Channel, tag: Tag, memory: Array, label: str, *, cut: bool = True) -> Endpoint:
    """Return the endpoint for messages of such memory."""
    device = accelerator_of(memory)
    if device is None:
        return Endpoint(channel, tag, label, cut=cut)
    return (DeviceEndpoint if channel.aware else StagedEndpoint)(channel, tag, label, device, cut=cut)


def _by_itself(numbered: tuple[int, tuple[Step, Piece]]) -> int:
    """Return a number that is another for each piece that is too long to be packed, and -1 for the others."""
    number, (_, piece) = numbered
    return number if piece.array.nbytes > PACKED else -1
