"""Where parameters lie: whole on each rank, once on a node, or divided over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from mpiagg.arrays import HOST, Array, settle, to_host
from mpiagg.collectives.registered import shared_vector
from mpiagg.errors import PlanError
from mpiagg.plans.background import InBackground
from mpiagg.sharded.division import Unit
from mpiagg.sharded.gradients import NodeVectors
from mpiagg.sharded.traffic import Traffic, free_plans


class Storage(Protocol):
    """The parameters of some units.

    Attributes
    ----------
    nbytes : int
        How many bytes this rank holds for it, beside what the caller has given.
    gathers : bool
        Whether a unit must be gathered before it is used.
    """

    nbytes: int
    gathers: bool

    def own(self, k: int, *, read: bool = True) -> Array:
        """Return this rank's part of a unit, to be changed; what is in it matters if it is to be ``read``."""

    def publish(self, k: int) -> None:
        """Let all ranks have what has become of the parts of a unit; collective."""

    def start(self, k: int) -> None:
        """Begin to gather a unit; collective."""

    def views(self, k: int) -> dict[int, Array]:
        """Return the tensors of a unit, gathered, for reading; if it was not begun to be gathered, collective."""

    def release(self, k: int) -> None:
        """Use a unit no more."""

    def free(self) -> None:
        """Free the plans."""


def flights_in_place(traffic: Traffic, units: Sequence[Unit], vectors: Sequence[Array]) -> list[InBackground]:
    """Return what gathers each unit in its vector, where each rank's part is in its place; collective."""
    rank = traffic.channel.rank
    plans = [traffic.gathering(unit, x[unit.own(rank)], x) for unit, x in zip(units, vectors, strict=True)]
    return [InBackground(plan) for plan in plans]


class Scattered:
    """Parameters in the caller's arrays, whole on each rank; units are gathered in one vector, one after the other."""

    gathers = False

    def __init__(self, traffic: Traffic, units: Sequence[Unit], arrays: Sequence[Array]) -> None:
        self._units, self._arrays, self._rank = units, arrays, traffic.channel.rank
        vectors = NodeVectors(traffic, units, [unit.form.dtype for unit in units], 1)
        self.nbytes = vectors.nbytes
        self._vectors = vectors.of
        self._flights = flights_in_place(traffic, units, self._vectors)

    def own(self, k: int, *, read: bool = True) -> Array:
        """Return this rank's part of a unit in the vector; see :meth:`Storage.own`."""
        unit = self._units[k]
        own = self._vectors[k][unit.own(self._rank)]
        if read:
            fill_part(unit, self._rank, own, self._arrays)
        return own

    def publish(self, k: int) -> None:
        """Gather a unit, and bring it to the arrays."""
        self._flights[k]()
        for index, view in self._units[k].views(self._vectors[k]).items():
            self._arrays[index][...] = view
        settle(self._vectors[k])

    def start(self, k: int) -> None:
        """Do nothing: the arrays are whole."""

    def views(self, k: int) -> dict[int, Array]:
        """Return the arrays of a unit."""
        return {index: self._arrays[index] for index in self._units[k].members}

    def release(self, k: int) -> None:
        """Do nothing: the arrays are whole."""

    def free(self) -> None:
        """Free the plans."""
        free_plans(self._flights)


class Whole:
    """Parameters whole on each rank, each unit in a vector that it is gathered in."""

    gathers = False

    def __init__(self, traffic: Traffic, units: Sequence[Unit], arrays: Sequence[Array]) -> None:
        self._units, self._rank = units, traffic.channel.rank
        self._vectors = [shared_vector(traffic.channel, u.length, u.form.dtype, u.form.device) for u in units]
        self._views = [unit.views(vector) for unit, vector in zip(units, self._vectors, strict=True)]
        for views in self._views:
            for index, view in views.items():
                view[...] = arrays[index]
        settle(*self._vectors)
        self._flights = flights_in_place(traffic, units, self._vectors)
        self.nbytes = sum(vector.nbytes for vector in self._vectors)

    def own(self, k: int, *, read: bool = True) -> Array:
        """Return this rank's part of a unit in its vector; see :meth:`Storage.own`."""
        del read
        return self._vectors[k][self._units[k].own(self._rank)]

    def publish(self, k: int) -> None:
        """Gather a unit."""
        self._flights[k]()

    def start(self, k: int) -> None:
        """Do nothing: the vectors are whole."""

    def views(self, k: int) -> dict[int, Array]:
        """Return the tensors of a unit, as views of its vector."""
        return self._views[k]

    def release(self, k: int) -> None:
        """Do nothing: the vectors are whole."""

    def free(self) -> None:
        """Free the plans."""
        free_plans(self._flights)


class OncePerNode:
    """Parameters once in memory that all ranks map, where they are on one node: each changes its part there.

    Nothing is gathered: who has seen that all have changed theirs reads them where they are.
    """

    gathers = False

    def __init__(self, traffic: Traffic, units: Sequence[Unit], arrays: Sequence[Array]) -> None:
        self._units, self._channel = units, traffic.channel
        rank, memory = traffic.channel.rank, traffic.channel.memory.host
        self._vectors = [memory.once(u.length * u.form.dtype.itemsize).view(u.form.dtype) for u in units]
        self._views = [unit.views(vector) for unit, vector in zip(units, self._vectors, strict=True)]
        for unit, vector in zip(units, self._vectors, strict=True):
            fill_part(unit, rank, vector[unit.own(rank)], arrays)
        self.nbytes = sum(self.own(k).nbytes for k in range(len(units)))

    def own(self, k: int, *, read: bool = True) -> Array:
        """Return this rank's part of a unit, where all map it; see :meth:`Storage.own`."""
        del read
        own: Array = self._vectors[k][self._units[k].own(self._channel.rank)]
        return own

    def publish(self, k: int) -> None:
        """Do nothing: it lies where all read it, once they have come together."""

    def start(self, k: int) -> None:
        """Do nothing: there is nothing to gather."""

    def views(self, k: int) -> dict[int, Array]:
        """Return the tensors of a unit, where all ranks have them."""
        return self._views[k]

    def release(self, k: int) -> None:
        """Do nothing: there is nothing to give back."""

    def free(self) -> None:
        """Let go of the memory, which comes back when no rank has an array in it."""
        self._vectors, self._views = [], []


class Divided:
    """Parameters of which each rank has its parts; units are gathered in some vectors, while they are used.

    Parameters
    ----------
    turns : int
        How many units may be gathered at the same time.
    apart : sequence of hashable, optional
        What is equal for units that may take turns.
    """

    gathers = True

    def __init__(
        self,
        traffic: Traffic,
        units: Sequence[Unit],
        arrays: Sequence[Array],
        turns: int,
        apart: Sequence[Hashable] | None = None,
    ) -> None:
        self._units, rank = units, traffic.channel.rank
        dtypes = [unit.form.dtype for unit in units]
        self._own = [
            shared_vector(traffic.channel, unit.counts[rank], unit.form.dtype, unit.form.device) for unit in units
        ]
        for unit, own in zip(units, self._own, strict=True):
            fill_part(unit, rank, own, arrays)
        settle(*self._own)
        vectors = NodeVectors(traffic, units, dtypes, turns, apart)
        self._vector, self._slot = vectors.of, vectors.slot
        self._flights = [
            InBackground(traffic.gathering(unit, own, vector))
            for unit, own, vector in zip(units, self._own, vectors.of, strict=True)
        ]
        self._views = [unit.views(vector) for unit, vector in zip(units, vectors.of, strict=True)]
        self._has: dict[Any, int] = {}
        self._under_way: set[int] = set()
        self._used = Counter[int | None]()
        self.nbytes = sum(own.nbytes for own in self._own) + vectors.nbytes

    def own(self, k: int, *, read: bool = True) -> Array:
        """Return this rank's part of a unit; see :meth:`Storage.own`."""
        del read
        return self._own[k]

    def publish(self, k: int) -> None:
        """Forget what was gathered of a unit: it is no more what the parts are."""
        if k in self._under_way:
            self._arrive(k)
        if self._has.get(self._slot[k]) == k:
            del self._has[self._slot[k]]

    def start(self, k: int) -> None:
        """Begin to gather a unit, if it is not there; PlanError where the vectors are all in use."""
        slot = self._slot[k]
        before = self._has.get(slot)
        if before == k:
            return
        if self._used[before]:
            raise PlanError(f"units {before} and {k} cannot be gathered at the same time; make it with more prefetch")
        if before in self._under_way:
            self._arrive(before)
        self._has[slot] = k
        self._under_way.add(k)
        self._flights[k].start()

    def may_start(self, k: int) -> bool:
        """Whether a unit can be gathered while others are in use."""
        return not self._used[self._has.get(self._slot[k])]

    def _arrive(self, k: int) -> None:
        self._flights[k].wait()
        self._under_way.discard(k)

    def views(self, k: int) -> dict[int, Array]:
        """Return the tensors of a unit, gathered; see :meth:`Storage.views`."""
        self.bring(k)
        self._used[k] += 1
        return self._views[k]

    def bring(self, k: int) -> None:
        """Have a unit gathered, until another one takes its vector."""
        self.start(k)
        if k in self._under_way:
            self._arrive(k)

    def has(self, k: int) -> bool:
        """Return whether a unit is gathered."""
        return self._has.get(self._slot[k]) == k and k not in self._under_way

    def place(self, k: int) -> dict[int, Array]:
        """Return where the tensors of a unit lie when it is gathered."""
        return self._views[k]

    def take_turns(self, k: int, other: int) -> bool:
        """Return whether two units have the same vector, in turn."""
        return bool(self._slot[k] == self._slot[other])

    def release(self, k: int) -> None:
        """Use a unit no more: others may be gathered in its place."""
        self._used[k] -= 1

    def free(self) -> None:
        """Free the plans."""
        free_plans(self._flights)


def fill_part(unit: Unit, rank: int, own: Array, arrays: Sequence[Array]) -> None:
    """Write a rank's part of a unit from whole arrays."""
    for part in unit.parts(rank):
        if part.start < part.stop:
            own[part.within] = arrays[part.tensor].reshape(-1)[part.start : part.stop]


def storage_for(
    traffic: Traffic,
    units: Sequence[Unit],
    arrays: Sequence[Array],
    turns: int,
    apart: Sequence[Hashable] | None = None,
    *,
    share: bool,
) -> OncePerNode | Divided:
    """Return where divided parameters lie: once on the node, if all ranks are there and it has room; collective."""
    channel = traffic.channel
    on_host = all(unit.form.device is HOST for unit in units)
    if share and on_host and channel.node.size == channel.size:
        with suppress(MemoryError):
            return OncePerNode(traffic, units, arrays)
    return Divided(traffic, units, arrays, turns, apart)


def copy_out(storage: Storage, ks: Sequence[int]) -> dict[int, Array]:
    """Return copies of whole tensors, on the host; collective."""
    found = dict[int, Array]()
    for k in ks:
        found |= {index: to_host(view) for index, view in storage.views(k).items()}
        storage.release(k)
    return found
