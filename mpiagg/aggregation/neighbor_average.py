"""Aggregation of weights on a graph: every rank averages with its neighbors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

import numpy as np
from mpi4py import MPI

from mpiagg.aggregation.gossip import Phase, metropolis, neighbor_row
from mpiagg.aggregation.mixing import Mixing
from mpiagg.arrays import Array
from mpiagg.common.arguments import check_number
from mpiagg.errors import MismatchError
from mpiagg.plans.neighbors import neighbors_of


class NeighborAverage(Mixing):
    """Replace the weights of each rank by a weighted mean of its own and those of its neighbors.

    x_i <- sum_j W_ij x_j, with W_ij = 1 / (1 + max(deg_i, deg_j)) for neighbors and what is left for i itself: the
    Metropolis weights (Xiao, Boyd and Kim, JPDC 2007). They keep the mean over all ranks on any graph, where the plain
    mean of oneself and one's neighbors does so only if all have equally many. ``start(weights)`` and ``wait()`` do the
    same while the next gradient is computed; see :class:`mpiagg.aggregation.mixing.Mixing`.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The ranks; the world by default.
    neighbors : iterable of int, optional
        The ranks that this rank exchanges with, which must name it in turn. The rank itself and repetitions are
        ignored. A rank without neighbors keeps its weights. Common graphs: :func:`mpiagg.aggregation.gossip.ring` and
        :func:`mpiagg.aggregation.gossip.exponential`, such as ``neighbors=ring(comm.rank, comm.size)``. By default they
        are those of the communicator's topology (``comm.Create_cart``, ``Create_graph``, ``Create_dist_graph``), whose
        edges must lead both ways.
    weights : mapping of int to float, optional
        For each neighbor its W_ij, in place of the Metropolis weights: positive, the same on both sides, and at most 1
        together. Given on all ranks or on none.
    communication_interval : int
        Communicate on the first call and then on every so many; the calls between only count.

    Raises
    ------
    ValueError
        Without neighbors and a topology, or for a neighbor that is not a rank; if a rank has other sources than
        destinations in the topology; weights that are not of just the neighbors, not positive, or
        more than 1 together; an interval that is not an integer of at least 1.
    MismatchError
        On all ranks, if a rank names another that does not name it, or gives it another weight; if they disagree on any
        other argument.

    Notes
    -----
    Values of float16 and bfloat16 are combined in float32; the sum is taken in the order of the ranks. The mean is
    kept to rounding, and the distance from it never grows. For weights of B bytes a rank with d neighbors sends
    d B bytes in one step, and needs scratch of at most d MiB. Making it compares all edges: n**2 numbers on each
    rank for a moment.

    It is wrong to use where all ranks must have the same weights after each step. On a graph that is not connected
    only the parts come together; on a long ring that takes a number of calls of the order of n**2.

    Examples
    --------
    >>> from mpiagg.aggregation.gossip import ring
    >>> weights = [np.full(3, float(rank))]
    >>> with mpiagg.NeighborAverage(neighbors=ring(rank, size)) as neighbor_average:
    ...     for _ in range(60):
    ...         neighbor_average.aggregate(weights)
    >>> bool(np.allclose(weights[0], (size - 1) / 2))
    True
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        neighbors: Iterable[int] | None = None,
        *,
        weights: Mapping[int, float] | None = None,
        communication_interval: int = 1,
    ) -> None:
        self.neighbors: list[int] = []

        def check() -> str:
            found = neighbors_of(self.comm, neighbors)
            sources, targets = ({*ends} - {self._channel.rank, MPI.PROC_NULL} for ends in found[:2])
            if sources != targets:
                raise ValueError(
                    f"neighbors must be both: sources are {sorted(sources)}, destinations {sorted(targets)}"
                )
            self.neighbors = sorted(targets)
            if weights is not None:
                _check_weights(weights, self.neighbors)
            return f"NeighborAverage with {'Metropolis' if weights is None else 'given'} weights"

        super().__init__(comm, communication_interval, check)
        table = self._table(dict.fromkeys(self.neighbors, 1.0) if weights is None else weights)
        _check_symmetric(table)
        rank = self._channel.rank
        if weights is None:
            each = metropolis(rank, [np.flatnonzero(row).tolist() for row in table])
        else:
            each = {peer: Fraction(table[rank, peer]) for peer in self.neighbors}
        self._row = neighbor_row(rank, each)

    def _phases(self) -> tuple[Phase, ...]:
        return (self._row,)

    def _table(self, entries: Mapping[int, float]) -> Array:
        """Return what every rank has entered for each rank, with zeros for the others; collective."""
        comm = self._channel.comm
        table = np.zeros((comm.size, comm.size))
        for peer, entry in entries.items():
            table[comm.rank, peer] = entry
        with self._channel.failures.told():
            comm.Allgather(MPI.IN_PLACE, table)
        return table


def _check_weights(weights: Mapping[int, float], neighbors: list[int]) -> None:
    if not isinstance(weights, Mapping) or set(weights) != set(neighbors):
        raise ValueError(
            f"weights must be a mapping from each of the neighbors {neighbors} to its own; not {weights!r}"
        )
    for peer, weight in weights.items():
        check_number(f"the weight of neighbor {peer}", weight, "a positive number", lambda x: x > 0)
    if not math.fsum(weights.values()) <= 1:
        raise ValueError(f"the weights of the neighbors must be at most 1 together, not {math.fsum(weights.values())}")


def _check_symmetric(table: Array) -> None:
    """Raise MismatchError if an edge is not the same on both of its sides."""
    for one, other in np.argwhere(table != table.T).tolist():
        here, there = table[one, other], table[other, one]
        if not there:
            raise MismatchError(f"rank {one} has rank {other} as a neighbor, but rank {other} has not rank {one}")
        if here:
            raise MismatchError(f"rank {one} gives rank {other} the weight {here}, which gives it {there}")
