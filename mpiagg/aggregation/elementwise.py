"""Aggregations that treat every element alike, and so can put tensors together in vectors."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.base import Aggregation
from mpiagg.aggregation.packing import Packing, key_of
from mpiagg.arrays import HOST, Array, settle
from mpiagg.plans.plan import Plan
from mpiagg.plans.program import Program, in_turn
from mpiagg.transport import SHARED_TAG

KEPT_LAYOUTS: Final = 64
"""How many layouts an aggregation remembers."""


class Elementwise(Aggregation):
    """An aggregation that treats every element alike.

    Tensors are put together by dtype, in vectors that are laid out when the ranks first agree on a layout, and
    kept with their plans for the last ``KEPT_LAYOUTS`` layouts: a call with a known layout builds nothing. A contiguous
    tensor that is alone of its dtype is aggregated in its own memory.

    Layouts are compared across the ranks when they are new. With a known layout nothing is compared: what is wrong on
    one rank alone is an error there alone, and the other ranks wait for it, as for one that brings another layout,
    until the timeout.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, *, by_layer: bool = False) -> None:
        super().__init__(comm)
        self._by_layer = by_layer
        self._packings: OrderedDict[tuple[Hashable, bool], Packing] = OrderedDict()

    def aggregate(self, tensors: Sequence[Array]) -> None:
        """Aggregate every array of the list, in place; see :meth:`Aggregation.aggregate`.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            As for :meth:`Aggregation.aggregate`.
        """
        self._run(tensors, self._bind)

    def aggregate_init(self, tensors: Sequence[Array]) -> Plan[None]:
        """Plan the aggregation of arrays that stay where they are; see :meth:`Aggregation.aggregate_init`.

        Arrays that lie one after the other in memory are aggregated there; others are packed, and those of half
        precision, but in memory of devices that ranks map.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            As for :meth:`Aggregation.aggregate`.
        """
        layout = self._agree_on_tensors(tensors)
        parts: list[Program | Callable[[], object]] = []
        for group in Packing(layout, in_place=False, by_layer=self._by_layer).groups:
            own = group.joined(tensors)
            if own is not None and own.dtype != group.working and not self._takes_as_it_is(own):
                own = None
            vector = group.pack(tensors) if own is None else own
            program = self._bind(vector, self._channel.tags.in_turn(self._tags(vector)))
            if own is None:
                parts += [partial(group.pack, tensors), program, partial(group.unpack, vector, tensors)]
            else:
                parts.append(program)
        return self._plan(in_turn(*parts))

    @abstractmethod
    def _bind(self, vector: Array, tag: int = SHARED_TAG) -> Program:
        """Return the program that aggregates a vector, in place."""

    def _takes_as_it_is(self, vector: Array) -> bool:
        """Whether a vector of a dtype that is combined in another need not be converted."""
        del vector
        return False

    def _tags(self, vector: Array) -> int:
        """Return how many tags such a program needs."""
        del vector
        return 1

    def _in_place(self) -> bool:
        """Whether plans can be made on one rank alone, when it has one for other memory than the others."""
        return True

    def free(self) -> None:
        """Free the plans that are kept; a second call does nothing."""
        super().free()
        while self._packings:
            _, packing = self._packings.popitem()
            packing.free()

    def _run(
        self,
        tensors: Sequence[Array],
        bind: Callable[[Array], Program],
        *,
        variant: Hashable = None,
        check_dtype: Callable[[np.dtype[Any]], object] | None = None,
    ) -> None:
        """Run a program on the vectors of the tensors.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            The arrays to change.
        bind : callable
            Returns a program that works in place on a vector.
        variant : hashable
            What tells this program from others of the same aggregation.
        check_dtype : callable, optional
            Takes the place of the aggregation's own check.
        """
        with self._channel.one_thread:  # what the tensors are packed into belongs to this aggregation
            packing = self._packing(tensors, check_dtype or self._check_dtype, in_place=self._in_place())
            for group in packing.groups:
                vector = group.pack(tensors)
                # Once ranks map each other's devices, other plans are right, on all of them at the same call.
                mapped = group.device is not HOST and self._channel.memory.device is not None
                plan = packing.plan(vector, (variant, mapped), lambda memory: self._plan(bind(memory), memory))
                plan()
                group.unpack(vector, tensors)
            settle(*(tensors if any(group.device is not HOST for group in packing.groups) else ()))

    def _packing(
        self, tensors: Sequence[Array], check_dtype: Callable[[np.dtype[Any]], object], *, in_place: bool
    ) -> Packing:
        """Return what is kept for the layout of these tensors, once they are found good.

        Vectors are of their own, and never a tensor's memory, if not ``in_place``.
        """
        self._require_open()
        key = (key_of(tensors), in_place)
        packing = self._packings.get(key)
        if packing is not None:
            self._check_tensors(tensors, check_dtype)
            self._packings.move_to_end(key)
            return packing
        layout = self._agree_on_tensors(tensors, check_dtype)
        packing = self._packings[key] = Packing(layout, in_place=in_place, by_layer=self._by_layer)
        if len(self._packings) > KEPT_LAYOUTS:
            _, oldest = self._packings.popitem(last=False)
            oldest.free()
        return packing
