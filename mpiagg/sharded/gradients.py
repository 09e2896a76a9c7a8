"""Gradients on their way to the ranks that have the parts: packed into vectors, reduced, and only the own part kept."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from mpiagg.arrays import Array, Device, settle
from mpiagg.collectives.registered import shared_vector
from mpiagg.plans.background import InBackground
from mpiagg.sharded.division import Unit
from mpiagg.sharded.traffic import Traffic, free_plans


class NodeVectors:
    """Vectors in memory that the ranks of a node share, which units use in turn.

    Parameters
    ----------
    traffic : Traffic
        Whose channel it is.
    units : sequence of Unit
        Which units.
    dtypes : sequence of numpy.dtype
        Of the vector of each.
    turns : int
        How many units may have a vector at the same time; of each dtype there are as many vectors.
    apart : sequence of hashable, optional
        What is equal for units that may take turns.

    Attributes
    ----------
    of : list of numpy.ndarray
        For each unit its vector.
    slot : list of hashable
        What is equal for units that have a vector in turn.
    """

    def __init__(
        self,
        traffic: Traffic,
        units: Sequence[Unit],
        dtypes: Sequence[np.dtype[Any]],
        turns: int,
        apart: Sequence[Hashable] | None = None,
    ) -> None:
        kinds: dict[tuple[np.dtype[Any], Device, Hashable], list[int]] = {}
        for number, (unit, dtype) in enumerate(zip(units, dtypes, strict=True)):
            kinds.setdefault((dtype, unit.form.device, apart and apart[number]), []).append(number)
        found: dict[int, tuple[Any, Array]] = {}
        self.nbytes = 0
        for kind, ((dtype, device, _), numbers) in enumerate(kinds.items()):
            for turn in range(min(turns, len(numbers))):
                sharing = numbers[turn::turns]
                longest = max(units[number].length for number in sharing)
                vector = shared_vector(traffic.channel, longest, dtype, device)
                vector.fill(0)
                settle(vector)
                self.nbytes += vector.nbytes
                found |= {number: ((kind, turn), vector[: units[number].length]) for number in sharing}
        self.of = [found[number][1] for number in range(len(units))]
        self.slot = [found[number][0] for number in range(len(units))]


class Gradients:
    """The gradients of one step, unit by unit, from the last to the first.

    Parameters
    ----------
    traffic : Traffic
        How they travel.
    units : sequence of Unit
        The units; those without gradients are left out of ``trained``.
    trained : sequence of int
        The units that have gradients, in rising order.
    dtypes : sequence of numpy.dtype
        In which each unit is reduced.
    turns : int
        How many units may be on their way at once.

    Attributes
    ----------
    own : dict of int to numpy.ndarray
        For each unit this rank's part of the reduced gradients.
    nbytes : int
        Bytes of the parts.
    waiting : list of int
        The units that have not set out in this step, the next one last.
    """

    def __init__(
        self,
        traffic: Traffic,
        units: Sequence[Unit],
        trained: Sequence[int],
        dtypes: Sequence[np.dtype[Any]],
        turns: int,
    ) -> None:
        rank = traffic.channel.rank
        order = list(reversed(trained))
        self._trained = list(trained)
        self.vectors = NodeVectors(traffic, [units[k] for k in order], [dtypes[k] for k in order], turns)
        vector = dict(zip(order, self.vectors.of, strict=True))
        self._slot = dict(zip(order, self.vectors.slot, strict=True))
        self.views = {index: view for k in order for index, view in units[k].views(vector[k]).items()}
        self.own = {k: units[k].form.device.empty(units[k].counts[rank], dtypes[k]) for k in trained}
        self.nbytes = sum(each.nbytes for each in self.own.values())
        self._units = units
        self._flights = {}
        for k in order:
            self._flights[k] = InBackground(traffic.reducing(units[k], vector[k], self.own[k]))
        self._under_way: dict[Any, int] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.waiting = list(self._trained)

    def make_room(self, k: int) -> None:
        """Wait for the unit that is on its way in a unit's vector, if one is."""
        self._come_back(self._slot[k])

    def bring_in(self, k: int, gradients: Mapping[int, Array | None]) -> None:
        """Copy a unit's gradients into its vector, which has room, where they do not lie there.

        A missing one counts as zeros.
        """
        for index in self._units[k].members:
            view, gradient = self.views[index], gradients[index]
            if gradient is None:
                view.fill(0)
            elif gradient is not view:
                self._units[k].form.device.convert(view, gradient)

    def start(self, *, background: bool) -> None:
        """Send the next unit, whose gradients are in."""
        k = self.waiting.pop()
        if background:
            self._flights[k].start()
            self._under_way[self._slot[k]] = k
        else:
            self._flights[k]()

    def drive(self) -> None:
        """Bring what is on its way forward."""
        for k in self._under_way.values():
            self._flights[k].test()

    def _come_back(self, slot: Any) -> None:
        """Wait for the unit that has a vector, if one has."""
        k = self._under_way.get(slot)
        if k is not None:
            self._flights[k].wait()
            del self._under_way[slot]  # not before: who timed out may wait again

    def come_back(self) -> None:
        """Wait for all that is on its way."""
        for slot in list(self._under_way):
            self._come_back(slot)

    def free(self) -> None:
        """Free the plans."""
        free_plans(self._flights.values())
