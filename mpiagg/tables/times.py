"""What collectives and exchanges take on some ranks: by the model of the schedules, or as they were measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Protocol

from mpiagg.schedules import Cluster, Collective, Layout
from mpiagg.schedules.model import Pricing
from mpiagg.tables.predicted import Prices
from mpiagg.tables.rows import Memory, Table


class Times(Protocol):
    """What collectives take on some ranks."""

    layout: Layout

    def seconds(self, collective: Collective, nbytes: int) -> float:
        """Return what the fastest algorithm takes for a vector of ``nbytes``."""

    def exchange(self, nbytes: int, peers: int) -> float:
        """Return what it takes all ranks to send ``nbytes`` to so many peers, and to receive as much."""

    def central(self, nbytes: int) -> float:
        """Return what it takes all ranks to send ``nbytes`` to one of them, and to receive the sum from there."""


class Modelled:
    """Times by the model of the schedules.

    Parameters
    ----------
    layout : Layout
        The ranks, and their nodes.
    cluster : Cluster
        What messages and reductions cost.
    """

    def __init__(self, layout: Layout, cluster: Cluster) -> None:
        self.layout, self._cluster = layout, cluster
        self._prices: dict[Collective, Prices] = {}

    def seconds(self, collective: Collective, nbytes: int) -> float:
        """Return what the fastest algorithm takes for a vector of ``nbytes``."""
        if self.layout.size == 1:
            return 0.0
        if collective not in self._prices:
            self._prices[collective] = Prices(collective, self.layout, Memory.NONE, self._cluster)
        return min(self._prices[collective].seconds(nbytes).values())

    def exchange(self, nbytes: int, peers: int) -> float:
        """Return what it takes all ranks to send ``nbytes`` to so many peers, and to receive as much."""
        cluster, nodes = self._cluster, self.layout.nodes
        if not peers:
            return 0.0
        if cluster.node_alpha is not None and cluster.node_beta is not None and len(nodes) == 1:
            return cluster.node_alpha + peers * nbytes * cluster.node_beta
        # All ranks of a node may have their peers elsewhere.
        sharing = 1 if cluster.node_alpha is None else max(map(len, nodes))
        return cluster.alpha + peers * nbytes * sharing * max(cluster.links, default=cluster.beta)

    def central(self, nbytes: int) -> float:
        """Return what an all-reduce by way of one rank takes."""
        if self.layout.size == 1:
            return 0.0
        return Pricing("parameter_server", Collective.ALLREDUCE, self.layout, self._cluster).seconds(nbytes)


class Measured:
    """Times from a table that ``mpiagg tune`` has written, between and beyond the lengths that it has measured.

    Raises
    ------
    ValueError
        If the table has no times of all-reduces and all-gathers, as a default table.
    """

    def __init__(self, table: Table) -> None:
        if table.origin is None:
            raise ValueError(f"{table.name} was not measured: make a table with mpiagg tune")
        self.layout = table.origin.layout
        self._points: dict[Collective, list[tuple[int, float]]] = {}
        for collective in (Collective.ALLREDUCE, Collective.ALLGATHER):
            best: dict[int, float] = {}
            for row in table.rows:
                for nbytes, times in row.times.items() if row.collective is collective else ():
                    best[nbytes] = min([best.get(nbytes, math.inf), *times.values()])
            if len(best) < 2:
                raise ValueError(
                    f"{table.name} has no times of {collective.value} for two lengths: make a table with mpiagg tune, "
                    "with both allreduce and allgather"
                )
            self._points[collective] = sorted(best.items())

    def seconds(self, collective: Collective, nbytes: int) -> float:
        """Return what the fastest measured algorithm takes for a vector of ``nbytes``."""
        points = self._points[collective]
        place = min(max(1, bisect_left(points, (nbytes, 0.0))), len(points) - 1)
        (low, first), (high, second) = points[place - 1], points[place]
        return max(0.0, first + (second - first) * (nbytes - low) / (high - low)) or first

    def exchange(self, nbytes: int, peers: int) -> float:
        """Return what an all-reduce takes that sends as much."""
        size = self.layout.size
        if not peers:
            return 0.0
        return self.seconds(Collective.ALLREDUCE, nbytes * peers * size // (2 * max(1, size - 1)))

    def central(self, nbytes: int) -> float:
        """Return what two exchanges take that send as much as the one rank does."""
        return 2 * self.exchange(nbytes, self.layout.size - 1)
