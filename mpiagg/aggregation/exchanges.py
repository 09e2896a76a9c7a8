"""Exchanges: some coordinates of a vector on each rank become one vector on all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import (
    INDEX,
    Array,
    Codec,
    Coordinates,
    Device,
    Reduction,
    accelerator_of,
    cuts_of,
    device_of,
    ranges,
    scratch,
)
from mpiagg.errors import MismatchError
from mpiagg.plans.bound import bind_operation
from mpiagg.plans.choices import Memory, pick
from mpiagg.plans.operation import Operation
from mpiagg.plans.program import Once, Program, in_turn
from mpiagg.schedules import Collective
from mpiagg.transport import Channel


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


class _Encoded(NamedTuple):
    """What a rank sends: coordinates, or where those in a row start, and values, as they travel."""

    form: Coordinates
    coordinates: Array
    values: Array


class Gather(Exchange):
    """An all-gather of coordinates and values.

    Parameters
    ----------
    channel, how, device
        As for :class:`Exchange`.
    length : int
        That of the vectors.
    count : int
        How many values each rank sends. Coordinates ascend.
    widths : sequence of int, optional
        Coordinates of the first of so many values in a row are sent alone.
    codec : Codec, optional
        How values travel. What it loses stays where they were taken from.
    """

    def __init__(
        self,
        channel: Channel,
        how: Reduction,
        device: Device,
        length: int,
        count: int,
        *,
        widths: Sequence[int] | None = None,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(channel, how, device)
        self._length, self._codec = length, codec
        self._widths = widths
        if widths is not None:
            each = np.array(widths, INDEX)
            rows = np.repeat(np.arange(len(each)), each)
            before = np.cumsum(each) - each
            self._rows, self._within = device.from_host(rows), device.from_host(np.arange(count) - before[rows])
        self._end = device.from_host(np.array([length]))
        self._decoded = device.empty(0 if codec is None else count, how.dtype)
        self.program = self._lay_out([count] * channel.size)

    def _lay_out(self, counts: Sequence[int]) -> Program:
        """Make room for each rank's message of so many values, and return the program that gathers them."""
        unit = max(8, self._how.dtype.itemsize)  # where a device can read values
        parts = {}
        for count in set(counts):  # ranks that send as many share what that takes
            form = Coordinates(self._device, count if self._widths is None else len(self._widths), self._length)
            length = count * self._how.dtype.itemsize if self._codec is None else self._codec.nbytes(count)
            cut = -(-form.nbytes // unit) * unit
            parts[count] = form, cut, length, cut + -(-length // unit) * unit
        nbytes = [parts[count][-1] for count in counts]
        encoded = self._device.empty(sum(nbytes), np.uint8)
        encoded.fill(0)
        self._messages = []
        for count, (begin, _) in zip(counts, ranges(cuts_of(nbytes)), strict=True):
            form, cut, length, _ = parts[count]
            coordinates, values = encoded[begin : begin + form.nbytes], encoded[begin + cut : begin + cut + length]
            self._messages.append(_Encoded(form, coordinates, values))
        return self._all_gather(nbytes, encoded)

    def coordinates(self, starts: Array) -> Array:
        """Return the coordinates of all values that are taken from ``starts`` on."""
        return starts if self._widths is None else starts[self._rows] + self._within

    def take(self, starts: Array, kept: Array) -> None:
        """Write this rank's message."""
        coordinates = self.coordinates(starts)
        values = _taken(coordinates, kept)
        self._write(starts, values)
        if self._codec is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                lost = values - self._values(self._messages[self._channel.rank])
            lost[~np.isfinite(lost)] = 0  # what is not finite was not lost, but sent; it would come back for ever
            kept[coordinates] = lost

    def _write(self, starts: Array, values: Array) -> None:
        own = self._messages[self._channel.rank]
        own.form.encode(starts, own.coordinates)
        if self._codec is None:
            own.values.view(self._how.dtype)[...] = values
        else:
            self._codec.encode(values, own.values)

    def _values(self, message: _Encoded) -> Array:
        if self._codec is None:
            return message.values.view(self._how.dtype)
        self._codec.decode(message.values, self._decoded)
        return self._decoded

    def give(self, vector: Array) -> None:
        """Add up the values of all messages, in the order of the ranks."""
        for rank, message in enumerate(self._messages):
            try:
                coordinates = self.coordinates(message.form.decode(message.coordinates))
            except ValueError as error:
                raise MismatchError(f"rank {rank} has sent {error}") from None
            edges = np.concatenate([coordinates, self._end])
            if not (edges[1:] > edges[:-1]).all().item():
                raise MismatchError(f"rank {rank} has sent coordinates that do not ascend below {self._length}")
            vector[coordinates] += self._values(message)
        self._how.finish(vector)


class CountedGather(Gather):
    """An all-gather of as many coordinates as each rank has this time; their counts go before."""

    def __init__(self, channel: Channel, how: Reduction, device: Device, length: int) -> None:
        super().__init__(channel, how, device, length, 0)
        self._own = device.empty(0, INDEX), device.empty(0, how.dtype)
        self._counts = scratch(channel.size, INDEX)
        late = Program((Once(self._lay_out_counted).as_round(),), (), 0, device=accelerator_of(self._own[0]))
        self.program = in_turn(self._all_gather((1,) * channel.size, self._counts), late)

    def take(self, starts: Array, kept: Array) -> None:
        """Hold the values until there is room for them."""
        self._own = starts, _taken(starts, kept)
        self._counts[self._channel.rank] = len(starts)

    def _lay_out_counted(self) -> Program:
        if self._counts.min() < 0 or self._counts.max() > self._length:
            raise MismatchError(f"ranks send {self._counts.tolist()} of {self._length} coordinates")
        program = self._lay_out(self._counts.tolist())
        self._write(*self._own)
        self.more_bytes = program.sent_bytes
        return program


def _taken(coordinates: Array, kept: Array) -> Array:
    """Return the values at some coordinates, and leave zeros there."""
    values = kept[coordinates]
    kept[coordinates] = 0
    return values
