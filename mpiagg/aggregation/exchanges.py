"""Exchanges: some coordinates of a vector on each rank become one vector on all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Array, Codec, Device, Reduction, accelerator_of, cuts_of, device_of, ranges, scratch
from mpiagg.errors import MismatchError
from mpiagg.plans.bound import bind_operation
from mpiagg.plans.choices import Memory, pick
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Once, Program, in_turn
from mpiagg.schedules import Collective
from mpiagg.transport import Channel

INDEX: Final = np.dtype(np.int64)
"""How coordinates travel."""

SHORT_INDEX: Final = np.dtype(np.uint16)
"""How coordinates within a chunk travel."""


class Exchange(ABC):
    """Takes values out of a vector on each rank, and gives their sum or average to all ranks as a vector.

    Parameters
    ----------
    channel : Channel
        Where messages travel.
    how : Reduction
        A sum, or an average, of values of a dtype.
    device : Device
        Where the vectors lie.

    Attributes
    ----------
    program : Program
        What runs between :meth:`take` and :meth:`give`.
    more_bytes : int
        What the last run has sent, beside what each run sends.
    """

    program: Program
    more_bytes = 0

    def __init__(self, channel: Channel, how: Reduction, device: Device) -> None:
        self._channel, self._how, self._device = channel, how, device
        self._tag = channel.tags.in_turn()

    @abstractmethod
    def take(self, starts: Array, kept: Array) -> None:
        """Take values out of what is kept, where zeros stay.

        Parameters
        ----------
        starts : numpy.ndarray
            The values' coordinates; or where they start, if several in a row are taken.
        kept : numpy.ndarray
            A vector.
        """

    def coordinates(self, starts: Array) -> Array:
        """Return the coordinates of all values that are taken from ``starts`` on."""
        return starts

    @abstractmethod
    def give(self, vector: Array) -> None:
        """Combine in a vector of zeros what all ranks have taken.

        Raises
        ------
        MismatchError
            If a rank has sent coordinates that the vector does not have.
        """

    def _bind(self, collective: Collective, counts: Sequence[int], how: Reduction, buffer: Array) -> Program:
        channel = self._channel
        case = channel.case(collective, buffer.nbytes, Memory.NONE)
        choice = pick("auto", 1, case, device=device_of(buffer))
        operation = Operation(collective, channel.rank, channel.layout, 0, tuple(counts), how, choice, MPI.SUM)
        return bind_operation(channel, operation, buffer, self._tag, memory=Memory.NONE)

    def _all_gather(self, counts: Sequence[int], buffer: Array) -> Program:
        return self._bind(Collective.ALLGATHER, counts, Reduction(np.add, buffer.dtype, "sum"), buffer)


class Reduce(Exchange):
    """All ranks take the same coordinates: an all-reduce of the values alone."""

    def __init__(self, channel: Channel, how: Reduction, device: Device, count: int) -> None:
        super().__init__(channel, how, device)
        self._coordinates = device.empty(0, INDEX)
        self._values = device.empty(count, how.dtype)
        self.program = self._bind(Collective.ALLREDUCE, (count,), how, self._values)

    def take(self, starts: Array, kept: Array) -> None:
        """Take the values to be reduced."""
        self._coordinates = starts
        self._values[...] = _taken(starts, kept)

    def give(self, vector: Array) -> None:
        """Put the reduced values where they belong."""
        vector[self._coordinates] = self._values


class _Message(NamedTuple):
    """Coordinates and values, as views of the bytes that travel."""

    starts: Array
    values: Array


class Gather(Exchange):
    """An all-gather of coordinates and values: ``count`` of both, or with widths as many values from each start on."""

    def __init__(
        self, channel: Channel, how: Reduction, device: Device, count: int, widths: Sequence[int] | None = None
    ) -> None:
        super().__init__(channel, how, device)
        self._widths = None if widths is None else np.array(widths, INDEX)
        self.program = self._lay_out([(count if widths is None else len(widths), count)] * channel.size)

    def _lay_out(self, lengths: Sequence[tuple[int, int]]) -> Program:
        """Make room for each rank's starts and values, so many, and return the program that gathers them."""
        # A device reads values only where they could lie in an array of their own.
        unit = 1 if self._device is HOST else max(INDEX.itemsize, self._how.dtype.itemsize)
        parts = [
            (-(-INDEX.itemsize * starts // unit) * unit, -(-self._how.dtype.itemsize * values // unit) * unit)
            for starts, values in lengths
        ]
        nbytes = [sum(each) for each in parts]
        encoded = self._device.empty(sum(nbytes), np.uint8)
        self._messages: list[_Message] = []
        for (begin, end), (cut, _), (starts, values) in zip(ranges(cuts_of(nbytes)), parts, lengths, strict=True):
            coordinates, numbers = (
                encoded[begin : begin + cut].view(INDEX),
                encoded[begin + cut : end].view(self._how.dtype),
            )
            self._messages.append(_Message(coordinates[:starts], numbers[:values]))
        return self._all_gather(nbytes, encoded)

    def coordinates(self, starts: Array) -> Array:
        """Return the coordinates of all values that are taken from ``starts`` on."""
        if self._widths is None:
            return starts
        before = np.cumsum(self._widths) - self._widths
        rows = np.repeat(np.arange(len(self._widths)), self._widths)
        within = np.arange(self._widths.sum()) - before[rows]
        return starts[self._device.from_host(rows)] + self._device.from_host(within)

    def take(self, starts: Array, kept: Array) -> None:
        """Write this rank's message."""
        own = self._messages[self._channel.rank]
        own.starts[...] = starts
        own.values[...] = _taken(self.coordinates(starts), kept)

    def give(self, vector: Array) -> None:
        """Add up the values of all messages, in the order of the ranks."""
        for rank, (starts, values) in enumerate(self._messages):
            coordinates = self.coordinates(starts)
            if not ((coordinates >= 0) & (coordinates < len(vector))).all().item():
                raise MismatchError(f"rank {rank} has sent coordinates outside of the {len(vector)} that there are")
            vector[coordinates] += values
        self._how.finish(vector)


class CountedGather(Gather):
    """An all-gather of as many coordinates as each rank has this time; their counts go before."""

    def __init__(self, channel: Channel, how: Reduction, device: Device) -> None:
        super().__init__(channel, how, device, 0)
        self._own = _Message(device.empty(0, INDEX), device.empty(0, how.dtype))
        self._length = 0
        self._counts = scratch(channel.size, INDEX)
        late = Program((Once(self._lay_out_counted).as_round(),), (), 0, device=accelerator_of(self._own.starts))
        self.program = in_turn(self._all_gather((1,) * channel.size, self._counts), late)

    def take(self, starts: Array, kept: Array) -> None:
        """Hold the values until there is room for them."""
        self._own = _Message(starts, _taken(starts, kept))
        self._length = len(kept)
        self._counts[self._channel.rank] = len(starts)

    def _lay_out_counted(self) -> Program:
        if self._counts.min() < 0 or self._counts.max() > self._length:
            raise MismatchError(f"ranks send {self._counts.tolist()} of {self._length} coordinates")
        program = self._lay_out([(count, count) for count in self._counts.tolist()])
        for room, own in zip(self._messages[self._channel.rank], self._own, strict=True):
            room[...] = own
        self.more_bytes = program.sent_bytes
        return program


class CodedGather(Exchange):
    """An all-gather of as many values from each rank, by a codec, with short coordinates: counted within a chunk.

    What a codec loses of the values stays where they were taken from.

    Parameters
    ----------
    starts, stops : numpy.ndarray
        For each value that is sent, where the chunk that it is from begins and ends in the vector; on the host.
    codec : Codec, optional
        How values travel; as they are without one.
    """

    def __init__(  # noqa: PLR0917 - those of an exchange, then its own
        self, channel: Channel, how: Reduction, device: Device, starts: Array, stops: Array, codec: Codec | None
    ) -> None:
        super().__init__(channel, how, device)
        self._codec, count = codec, len(starts)
        self._starts, self._stops = device.from_host(starts), device.from_host(stops)
        self._values = device.empty(count, how.dtype)
        unit = max(8, how.dtype.itemsize)  # where a device can read values
        cut = -(-SHORT_INDEX.itemsize * count // unit) * unit
        length = count * how.dtype.itemsize if codec is None else codec.nbytes(count)
        nbytes = cut + -(-length // unit) * unit
        encoded = device.empty(nbytes * channel.size, np.uint8)
        encoded.fill(0)
        self._messages = [
            _Message(part[:cut].view(SHORT_INDEX)[:count], part[cut : cut + length])
            for part in (encoded[begin : begin + nbytes] for begin in range(0, nbytes * channel.size, nbytes or 1))
        ] or [_Message(encoded[:0].view(SHORT_INDEX), encoded[:0])] * channel.size
        self.program = self._all_gather((nbytes,) * channel.size, encoded)

    def take(self, starts: Array, kept: Array) -> None:
        """Write this rank's message; ``starts`` are coordinates, as many of each chunk as were said."""
        own = self._messages[self._channel.rank]
        own.starts[...] = starts - self._starts
        self._values[...] = kept[starts]
        if self._codec is None:
            own.values.view(self._how.dtype)[...] = self._values
        else:
            self._codec.encode(self._values, own.values)
        lost = kept[starts] - self._decoded(own)
        lost[~np.isfinite(lost)] = 0  # what is not finite was not lost, but sent as such; it would come back for ever
        kept[starts] = lost

    def give(self, vector: Array) -> None:
        """Add up the values of all messages, in the order of the ranks."""
        for rank, message in enumerate(self._messages):
            coordinates = self._starts + message.starts
            if not (coordinates < self._stops).all().item():
                raise MismatchError(f"rank {rank} has sent coordinates outside of their chunks")
            vector[coordinates] += self._decoded(message)
        self._how.finish(vector)

    def _decoded(self, message: _Message) -> Array:
        if self._codec is None:
            return message.values.view(self._how.dtype)
        self._codec.decode(message.values, self._values)
        return self._values


def _taken(coordinates: Array, kept: Array) -> Array:
    """Return the values at some coordinates, and leave zeros there."""
    values = kept[coordinates]
    kept[coordinates] = 0
    return values
