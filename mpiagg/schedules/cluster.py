"""What messages and reductions cost on a cluster, and which links its ranks have."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mpiagg.schedules.layout import Layout


@dataclass(frozen=True)
class Cluster:
    """What messages and reductions cost.

    Attributes
    ----------
    alpha : float
        Seconds for a message, however short.
    beta : float
        Seconds for each byte on a link.
    gamma : float
        Seconds for each byte reduced.
    node_alpha, node_beta : float, optional
        What ``alpha`` and ``beta`` are for messages within a node; those two are then for messages between nodes, and
        all ranks of a node share its link. Without them every rank has a link of its own, wherever it is.
    links : tuple of float
        Where links differ: ``beta`` for each node, by its number in the layout. A message goes at the pace of the
        slower of its two ends.

    Raises
    ------
    ValueError
        If only one of ``node_alpha`` and ``node_beta`` is given.
    """

    alpha: float = 2e-6
    beta: float = 1 / 10e9
    gamma: float = 1 / 20e9
    node_alpha: float | None = None
    node_beta: float | None = None
    links: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse half of what a message within a node costs."""
        if (self.node_alpha is None) != (self.node_beta is None):
            raise ValueError("node_alpha and node_beta go together")


@dataclass(frozen=True)
class Links:
    """The links of the ranks of a layout.

    Attributes
    ----------
    of : numpy.ndarray of int64
        For each rank the number of its link; ranks that share one are on one node.
    alpha : float
        Seconds for a message between links.
    beta : numpy.ndarray of float64
        Seconds for each byte on each link.
    node_alpha, node_beta : float
        The same for messages between ranks that share a link, which do not pass it.
    """

    of: npt.NDArray[np.int64]
    alpha: float
    beta: npt.NDArray[np.float64]
    node_alpha: float = 0.0
    node_beta: float = 0.0

    @classmethod
    def between(cls, layout: Layout, cluster: Cluster) -> Links:
        """Return the links that the ranks of a layout have on a cluster.

        Raises
        ------
        ValueError
            If the cluster's links are of another number of nodes.
        """
        nodes = len(layout.nodes)
        if cluster.links and len(cluster.links) != nodes:
            raise ValueError(f"the cluster has links of {len(cluster.links)} nodes, but the ranks are on {nodes}")
        node_of = node_numbers(layout)
        betas = np.array(cluster.links or [cluster.beta] * nodes, np.float64)
        ranks = np.arange(layout.size)
        if cluster.node_alpha is None or cluster.node_beta is None:
            return cls(ranks, cluster.alpha, betas[node_of])
        if nodes == 1:
            return cls(ranks, cluster.node_alpha, np.full(layout.size, cluster.node_beta))
        return cls(node_of, cluster.alpha, betas, cluster.node_alpha, cluster.node_beta)

    def with_alpha(self, factor: float) -> Links:
        """Return the links with latencies that are ``factor`` times as long."""
        return replace(self, alpha=factor * self.alpha, node_alpha=factor * self.node_alpha)


def node_numbers(layout: Layout) -> npt.NDArray[np.int64]:
    """Return for each rank the number of its node."""
    numbers = np.empty(layout.size, np.int64)
    numbers[np.concatenate(layout.nodes)] = np.repeat(
        np.arange(len(layout.nodes)), [len(node) for node in layout.nodes]
    )
    return numbers
