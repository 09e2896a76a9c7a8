"""Aggregations that treat every element alike, and so can put tensors together in vectors."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.base import Aggregation
from mpiagg.aggregation.packing import Layout, Packing, check_tensors, layout_in_words, layout_of
from mpiagg.arrays import Array, Reduction
from mpiagg.mpi_ops import mpi_op
from mpiagg.operations import Operation, prepare
from mpiagg.plan import Plan
from mpiagg.schedules import Collective
from mpiagg.transport import SHARED_TAG
from mpiagg.tuning import Choice

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

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        super().__init__(comm)
        self._packings: OrderedDict[Layout, Packing] = OrderedDict()

    @abstractmethod
    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise TypeError if tensors of this dtype cannot be aggregated."""

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
        make: Callable[[Array], Plan[Any]],
        *,
        variant: Hashable = None,
        check_dtype: Callable[[np.dtype[Any]], object] | None = None,
    ) -> None:
        """Run a plan on the vectors of the tensors.

        Parameters
        ----------
        tensors : sequence of numpy.ndarray
            The arrays to change.
        make : callable
            Returns a plan that works in place on a vector.
        variant : hashable
            What tells this plan from others of the same aggregation.
        check_dtype : callable, optional
            Takes the place of the aggregation's own check.
        """
        packing = self._packing(tensors, check_dtype or self._check_dtype)
        for group in packing.groups:
            vector = group.pack(tensors)
            plan = packing.plan(vector, variant, make)
            plan()
            self.bytes_sent += plan.sent_bytes
            group.unpack(vector, tensors)

    def _packing(self, tensors: Sequence[Array], check_dtype: Callable[[np.dtype[Any]], object]) -> Packing:
        """Return what is kept for the layout of these tensors, once they are found good."""
        self._require_open()

        def check() -> str:
            check_tensors(tensors)
            for dtype in {dtype for dtype, _ in layout}:
                check_dtype(dtype)
            return f"{type(self).__name__} of {layout_in_words(layout)}"

        layout = layout_of(tensors)
        packing = self._packings.get(layout)
        if packing is not None:
            check()
            self._packings.move_to_end(layout)
            return packing
        self._channel.agree_on(check)
        packing = self._packings[layout] = Packing(layout, in_place=self._in_place())
        if len(self._packings) > KEPT_LAYOUTS:
            _, oldest = self._packings.popitem(last=False)
            oldest.free()
        return packing

    def _agree_on_vector(self, vector: Array) -> None:
        """Check an array that a plan is to be made for."""
        self._require_open()

        def check() -> str:
            check_tensors([vector])
            self._check_dtype(vector.dtype)
            return f"a plan for {type(self).__name__} of {layout_in_words(layout_of([vector]))}"

        self._channel.agree_on(check)

    def _prepare(
        self,
        vector: Array,
        collective: Collective,
        how: Reduction,
        choice: Choice,
        *,
        root: int = 0,
        tag: int = SHARED_TAG,
        before: Callable[[Array], object] | None = None,
    ) -> Plan[Any]:
        """Return a plan of a collective on a vector, in place."""
        channel = self._channel
        counts, op = (vector.size,), mpi_op(how.name, how.dtype)
        operation = Operation(collective, channel.rank, channel.size, root, counts, how, choice, op)
        return prepare(channel, operation, vector, vector, tag, before=before)
