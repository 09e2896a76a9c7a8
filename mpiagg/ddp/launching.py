"""The buckets of one step on their way: started in one order, whatever order their gradients come in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from mpiagg.arrays import Array
from mpiagg.ddp.adapters import Source
from mpiagg.ddp.buckets import Bucket
from mpiagg.ddp.finite import FiniteCheck, unwarned


class Flight(Protocol):
    """What aggregates a bucket: a plan, or one that a thread brings forward."""

    def start(self) -> None:
        """Start it."""

    def test(self) -> bool:
        """Go as far as possible without waiting, and return whether it is done."""

    def __call__(self) -> object:
        """Run it from start to end."""

    def wait(self, meanwhile: Sequence[Any] = ()) -> object:
        """Wait until it is done, and bring others forward meanwhile."""


class ForeignFlight(Flight, Protocol):
    """One that is the user's.

    Attributes
    ----------
    fault : Exception or None
        What was wrong with it this time.
    """

    fault: Exception | None


class Launcher:
    """Starts a bucket when all its gradients are in, but never before those with lower numbers.

    So all ranks start the buckets in the same order, also where their gradients come in different ones.

    Parameters
    ----------
    buckets : sequence of Bucket
        The buckets.
    flights : sequence of Flight
        What aggregates each.
    check : FiniteCheck, optional
        Looks at every bucket before it is sent; gradients that are not finite are left out.

    Attributes
    ----------
    placed : set of int
        The parameters whose gradients are in.
    fault : Exception or None
        What was wrong with a gradient of this step, if something was.
    """

    def __init__(self, buckets: Sequence[Bucket], flights: Sequence[Flight], check: FiniteCheck | None = None) -> None:
        self._buckets, self._flights, self._check = buckets, flights, check
        self._number_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.views}
        self.placed: set[int] = set()
        self.fault: Exception | None = None
        self._begin()

    def _begin(self) -> None:
        self.placed.clear()
        self.fault = None
        self._started = 0
        self._missing = [len(bucket.views) for bucket in self._buckets]

    def place(self, index: int, gradient: Array | None) -> None:
        """Bring a gradient in, None being zeros, and start the buckets whose turn has come."""
        number = self._number_of[index]
        self._buckets[number].place({index: gradient})
        self._arrived(index, number)

    def take(self, index: int, pair: tuple[Any, Any], source: Source) -> None:
        """Bring a gradient in that its source copies, at the latest when it is the last of its bucket."""
        number = self._number_of[index]
        self._buckets[number].take(pair, source)
        self._arrived(index, number)

    def _arrived(self, index: int, number: int) -> None:
        self.placed.add(index)
        self._missing[number] -= 1
        if not self._missing[number]:
            self._buckets[number].close()
            if len(self.placed) < len(self._number_of):  # the last bucket has nothing left to hide behind
                self._launch()

    def _launch(self) -> None:
        """Start the buckets whose turn has come."""
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._set_out(self._started, self._flights[self._started].start)
            self._started += 1

    def _set_out(self, number: int, send: Callable[[], object]) -> None:
        """Send a bucket, all of whose gradients are in."""
        with self._buckets[number].when_brought_in(), unwarned(self._check):
            if self._check is not None:
                self._check.leave_out_of(self._buckets[number])
            send()

    def place_rest(self, gradients: Sequence[Array | None], copied: Collection[int] | None = None) -> None:
        """Bring in the gradients that are not in yet: now all buckets are on their way.

        Parameters
        ----------
        gradients : sequence of numpy.ndarray or None
            Those of all parameters.
        copied : collection of int, optional
            As for :meth:`Bucket.pack`, where none is in yet.
        """
        for number, bucket in enumerate(self._buckets):
            if copied is None:
                missing = bucket.views.keys() - self.placed
                bucket.place({index: gradients[index] for index in missing})
                for index in missing:
                    self._arrived(index, number)
            else:
                bucket.pack(gradients, copied)
                self._missing[number] = 0
                self._launch()

    def drive(self) -> None:
        """Bring what is on its way forward."""
        for flight in self._flights[: self._started]:
            flight.test()

    def wait(self) -> Iterator[Bucket]:
        """Yield each bucket when it is back; after the last, the next step can begin."""
        if self._started < len(self._buckets) - 1:
            self._launch()
        for number, bucket in enumerate(self._buckets):
            self._bring_back(number)
            yield bucket
        self._begin()

    def _bring_back(self, number: int) -> None:
        try:
            if number == self._started == len(self._buckets) - 1:  # nobody need bring it forward meanwhile
                self._set_out(number, self._flights[number])
            else:
                self._flights[number].wait(meanwhile=self._flights[number + 1 : self._started])
        except BaseException:
            self._begin()  # all buckets: to start what still runs is an error then
            raise
