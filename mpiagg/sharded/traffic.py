"""Plans of units: what reduces vectors so that each rank has its part, and what gathers the parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiagg.arrays import Array, Reduction, device_of, reduction
from mpiagg.collectives.mpi_ops import mpi_op
from mpiagg.plans.background import InBackground
from mpiagg.plans.bound import prepare
from mpiagg.plans.choices import pick
from mpiagg.plans.operation import Operation
from mpiagg.plans.plan import Plan
from mpiagg.schedules import Collective
from mpiagg.sharded.division import Unit
from mpiagg.transport import Channel, free_if_over


class Traffic:
    """How units travel.

    Parameters
    ----------
    channel : Channel
        Where.
    op : {"avg", "sum"}
        How gradients are combined.
    denom : float
        What a sum is divided by to be an average.
    algorithm : str
        By which algorithm; ``"auto"`` chooses by length.
    """

    def __init__(self, channel: Channel, op: str, denom: float, algorithm: str) -> None:
        self.channel, self._op, self._denom, self._algorithm = channel, op, denom, algorithm

    def reducing(self, unit: Unit, vector: Array, out: Array) -> Plan[Any]:
        """Return a plan that reduces a unit's vectors, and leaves this rank's part in ``out``; collective."""
        how = reduction(self._op, vector.dtype, self._denom)
        return self._plan(Collective.REDUCE_SCATTER, unit, how, vector, out, op=mpi_op(how.name, how.dtype))

    def gathering(self, unit: Unit, own: Array, vector: Array) -> Plan[Any]:
        """Return a plan that gathers the ranks' parts of a unit, which may lie in the vector; collective."""
        how = Reduction(np.add, vector.dtype, "sum")
        return self._plan(Collective.ALLGATHER, unit, how, own, vector)

    def _plan(
        self,
        collective: Collective,
        unit: Unit,
        how: Reduction,
        x: Array,
        out: Array,
        *,
        op: MPI.Op = MPI.SUM,
    ) -> Plan[Any]:
        channel = self.channel
        case = channel.case(collective, unit.length * how.dtype.itemsize)
        choice = pick(self._algorithm, None, case, None, device_of(x))
        operation = Operation(collective, channel.rank, channel.layout, 0, unit.counts, how, choice, op)
        return prepare(channel, operation, x, out, tag=channel.tags.in_turn(choice.lanes))


def free_plans(flights: Iterable[InBackground]) -> None:
    """Free plans, save those that an error has left in the middle."""
    for flight in flights:
        flight.forget()
        free_if_over(flight.plan)
