"""Where parameters lie: whole on each rank, once on a node, or divided over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

from mpiagg.arrays import HOST, Array, settle, to_host
from mpiagg.collectives.registered import shared_vector
from mpiagg.errors import PlanError
from mpiagg.plans.background import InBackground
from mpiagg.sharded.division import Unit
from mpiagg.sharded.gradients import NodeVectors
from mpiagg.sharded.traffic import Traffic, free_plans


class Storage(ABC):
    """The parameters of some units.

    Attributes
    ----------
    nbytes : int
        How many bytes this rank holds for it, beside what the caller has given.
    """

    nbytes: int

    @abstractmethod
    def own(self, k: int, *, read: bool = True) -> Array:
        """Return this rank's part of a unit, to be changed; what is in it matters if it is to be ``read``."""

    @abstractmethod
    def publish(self, k: int, *, background: bool = False) -> None:
        """Let all ranks have what has become of the parts of a unit; in the ``background`` until :meth:`wait`."""

    @abstractmethod
    def views(self, k: int) -> dict[int, Array]:
        """Return the tensors of a unit, gathered, for reading; if it was not begun to be gathered, collective."""

    @abstractmethod
    def free(self) -> None:
        """Free the plans, and let go of the memory."""

    # Where nothing is gathered, these have nothing to do.

    def wait(self, k: int) -> None:  # noqa: B027 - not abstract
        """Wait for a unit that is published in the background."""

    def start(self, k: int) -> None:  # noqa: B027 - so too
        """Begin to gather a unit; collective."""

    def release(self, k: int) -> None:  # noqa: B027 - so too
        """Use a unit no more."""


class Replicated(Storage):
    """Parameters whole on each rank; a unit is gathered in its vector, where each rank's part is in its place.

    Parameters
    ----------
    vectors : sequence of array
        Of each unit.
    """

    def __init__(self, traffic: Traffic, units: Sequence[Unit], vectors: Sequence[Array]) -> None:
        self._units, self._vectors, self._rank = units, vectors, traffic.channel.rank
        self._flights = [
            InBackground(traffic.gathering(unit, vector[unit.own(self._rank)], vector))
            for unit, vector in zip(units, vectors, strict=True)
        ]
        self._under_way: list[int] = []
        self._in_turn = all(unit.form.device is HOST for unit in units)

    def publish(self, k: int, *, background: bool = False) -> None:
        """Gather a unit; see :meth:`Storage.publish`."""
        if background:
            if self._under_way and self._in_turn:
                self._flights[k].start_after(self._flights[self._under_way[-1]])
            else:
                self._flights[k].start()
            self._under_way.append(k)
        else:
            self._flights[k]()
            self._arrived(k)

    def wait(self, k: int) -> None:
        """Wait for a unit; see :meth:`Storage.wait`."""
        while k in self._under_way:
            first = self._under_way[0]
            self._flights[first].wait()
            del self._under_way[0]  # not before: who timed out may wait again
            self._arrived(first)

    def _arrived(self, k: int) -> None:
        """Bring a unit that was gathered to where it belongs."""

    def free(self) -> None:
        """Free the plans."""
        free_plans(self._flights)


class Scattered(Replicated):
    """Parameters in the caller's arrays; units are gathered in some vectors, in turn.

    Parameters
    ----------
    turns : int
        How many units may be gathered at the same time.
    """

    def __init__(self, traffic: Traffic, units: Sequence[Unit], arrays: Sequence[Array], turns: int) -> None:
        vectors = NodeVectors(traffic, units, [unit.form.dtype for unit in units], turns)
        super().__init__(traffic, units, vectors.of)
        self._arrays, self._slot, self.nbytes = arrays, vectors.slot, vectors.nbytes

    def own(self, k: int, *, read: bool = True) -> Array:
        """Return this rank's part of a unit in its vector, whose turn it is; see :meth:`Storage.own`."""
        for before in [each for each in self._under_way if self._slot[each] == self._slot[k]]:
            self.wait(before)
        unit = self._units[k]
        own = self._vectors[k][unit.own(self._rank)]
        if read:
            fill_part(unit, self._rank, own, self._arrays)
        return own

    def _arrived(self, k: int) -> None:
        for index, view in self._units[k].views(self._vectors[k]).items():
            self._arrays[index][...] = view
        settle(self._vectors[k])

    def views(self, k: int) -> dict[int, Array]:
        """Return the arrays of a unit."""
        self.wait(k)
        return {index: self._arrays[index] for index in self._units[k].members}


class Whole(Replicated):
    """Parameters in vectors, one for each unit."""

    def __init__(self, traffic: Traffic, units: Sequence[Unit], arrays: Sequence[Array]) -> None:
        vectors = [shared_vector(traffic.channel, u.length, u.form.dtype, u.form.device) for u in units]
        self._views = [unit.views(vector) for unit, vector in zip(units, vectors, strict=True)]
        for views in self._views:
            for index, view in views.items():
                view[...] = arrays[index]
        settle(*vectors)
        super().__init__(traffic, units, vectors)
        self.nbytes = sum(vector.nbytes for vector in vectors)

    def own(self, k: int, *, read: bool = True) -> Array:
        """Return this rank's part of a unit in its vector; see :meth:`Storage.own`."""
        del read
        return self._vectors[k][self._units[k].own(self._rank)]

    def views(self, k: int) -> dict[int, Array]:
        """Return the tensors of a unit, as views of its vector."""
        self.wait(k)
        return self._views[k]


class OncePerNode(Storage):
    """Parameters once in memory that all ranks map, where they are on one node: each changes its part there.

    Nothing is gathered: who has seen that all have changed theirs reads them where they are.
    """

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

    def publish(self, k: int, *, background: bool = False) -> None:
        """Do nothing: it lies where all read it, once they have come together."""

    def views(self, k: int) -> dict[int, Array]:
        """Return the tensors of a unit, where all ranks have them."""
        return self._views[k]

    def free(self) -> None:
        """Let go of the memory, which comes back when no rank has an array in it."""
        self._vectors, self._views = [], []


class Divided(Storage):
    """Parameters of which each rank has its parts; units are gathered in some vectors, while they are used.

    Parameters
    ----------
    turns : int
        How many units may be gathered at the same time.
    apart : sequence of hashable, optional
        What is equal for units that may take turns.
    """

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

    def publish(self, k: int, *, background: bool = False) -> None:
        """Forget what was gathered of a unit: it is no more what the parts are."""
        del background
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
