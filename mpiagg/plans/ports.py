"""How the messages of a round leave memory and enter it: at once, or when a device is ready for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Accelerator, Array, Stream, accelerator_of
from mpiagg.plans.program import Awaited, BoundRound, Call, Computing
from mpiagg.transport import Channel


class Draft:
    """A round while it is bound.

    Attributes
    ----------
    receives, sends : list of (MPI.Prequest, Awaited)
        Its messages.
    encodings, folds : list of callables
        What is computed before they are sent, and when all of them are done.
    """

    def __init__(self) -> None:
        self.receives: list[tuple[MPI.Prequest, Awaited]] = []
        self.sends: list[tuple[MPI.Prequest, Awaited]] = []
        self.encodings: list[Call] = []
        self.folds: list[Call] = []


class Port:
    """Messages of memory that the MPI library reaches; what is computed is done when a call returns.

    Parameters
    ----------
    channel : Channel
        Where messages travel.
    tag : int
        Theirs.

    Attributes
    ----------
    nbytes : int
        The memory that belongs to the port.
    device : Accelerator or None
        Where the messages' memory lies, if not on the host.
    """

    nbytes = 0
    device: Accelerator | None = None

    def __init__(self, channel: Channel, tag: int) -> None:
        self._channel, self._tag = channel, tag
        self._requests: list[MPI.Prequest] = []

    @property
    def releases(self) -> tuple[Call, ...]:
        """What frees the requests of all messages."""
        return tuple(request.Free for request in self._requests)

    def send(self, draft: Draft, message: Array, awaited: Awaited) -> None:
        """Add a message to send."""
        requests = list(self._channel.send_init(message, awaited.step.peer, self._tag))
        self._requests += requests
        draft.sends += ((request, awaited) for request in requests)

    def receive(self, draft: Draft, message: Array, awaited: Awaited) -> None:
        """Add a message to receive, before what is to be done with it."""
        requests = list(self._channel.receive_init(message, awaited.step.peer, self._tag))
        self._requests += requests
        draft.receives += ((request, awaited) for request in requests)

    def rounds(self, draft: Draft) -> list[BoundRound]:
        """Return the round as it runs, in parts. Receives come first, so that messages find them posted."""
        posted = draft.receives + draft.sends
        receives, sends = ([request.Start for request, _ in some] for some in (draft.receives, draft.sends))
        return [
            BoundRound(
                (*receives, *draft.encodings, *sends),
                tuple(request.Test for request, _ in posted),
                tuple(draft.folds),
                tuple(awaited for _, awaited in posted),
            )
        ]

    def whole(self, rounds: Sequence[BoundRound]) -> tuple[BoundRound, ...]:
        """Return all rounds, with what stands before and after them."""
        return tuple(a_round for a_round in rounds if a_round.starts or a_round.folds)


class DevicePort(Port):
    """Messages of a device's memory, which it works on in a stream of this port's own.

    MPI knows nothing of streams. So before a round's messages are started, the stream is done: with what is sent, and
    with what still reads the memory that is received in. What is computed with received values is only asked for, and
    goes on while other ports' messages travel.
    """

    device: Accelerator

    def __init__(self, channel: Channel, tag: int, device: Accelerator, label: str) -> None:
        super().__init__(channel, tag)
        self.device, self._stream = device, device.stream()
        self._computing = Computing(label)

    def rounds(self, draft: Draft) -> list[BoundRound]:
        """Return the round in two parts: what the device does before the messages, and these with what it does then."""
        ready = BoundRound(self._asked(draft.encodings), (self._stream.done,), (), (self._computing,))
        messages = Draft()
        messages.receives, messages.sends = draft.receives, draft.sends
        (crossing,) = super().rounds(messages)
        return (
            [ready, crossing._replace(folds=self._asked(draft.folds))]
            if crossing.starts
            else [BoundRound(self._asked([*draft.encodings, *draft.folds]), (), (), ())]
        )

    def whole(self, rounds: Sequence[BoundRound]) -> tuple[BoundRound, ...]:
        """Return all rounds, after what was asked for before them, until the device is done."""
        after = BoundRound((self._stream.follow,), (), (), ())
        done = BoundRound((), (self._stream.done,), (), (self._computing,))
        return (after, *(a_round for a_round in rounds if a_round.starts or a_round.tests), done)

    def _asked(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        return (partial(ask, self._stream, tuple(calls)),) if calls else ()


class StagedPort(DevicePort):
    """Messages of a device's memory by way of the host's, for an MPI library that does not reach the device.

    For each message of a round there is a piece of pinned memory, which the next round uses again.
    """

    def __init__(self, channel: Channel, tag: int, device: Accelerator, label: str) -> None:
        super().__init__(channel, tag, device, label)
        self._sent: dict[int, Array] = {}
        self._received: dict[int, Array] = {}

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # it grows
        """The pinned memory that belongs to the port."""
        return sum(twin.nbytes for twin in (*self._sent.values(), *self._received.values()))

    def send(self, draft: Draft, message: Array, awaited: Awaited) -> None:
        """Add a message to send, and its copy to the host."""
        twin = self._twin(self._sent, len(draft.sends), message.nbytes)
        draft.encodings.append(partial(self.device.copy, twin, message.view(np.uint8)))
        super().send(draft, twin, awaited)

    def receive(self, draft: Draft, message: Array, awaited: Awaited) -> None:
        """Add a message to receive, and its copy from the host."""
        twin = self._twin(self._received, len(draft.receives), message.nbytes)
        super().receive(draft, twin, awaited)
        draft.folds.append(partial(self.device.copy, message.view(np.uint8), twin))

    def _twin(self, twins: dict[int, Array], number: int, nbytes: int) -> Array:
        """Return the pinned memory of a message of a round."""
        if number not in twins or twins[number].nbytes < nbytes:
            twins[number] = self.device.pinned(nbytes)
        return twins[number][:nbytes]


def port_of(channel: Channel, tag: int, memory: Array, label: str) -> Port:
    """Return the port for messages of such memory."""
    device = accelerator_of(memory)
    if device is None:
        return Port(channel, tag)
    return (DevicePort if channel.aware else StagedPort)(channel, tag, device, label)


def ask(stream: Stream, calls: Sequence[Callable[[], object]]) -> None:
    """Make calls whose work goes to a stream."""
    with stream:
        for call in calls:
            call()
