"""What messages and reductions cost on a cluster, and which links its ranks have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpiagg.schedules.layout import Layout
from mpiagg.schedules.networks import Groups, Level, Torus, levels_of


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
    overhead, node_overhead : float
        Seconds in which a rank sends, or receives, a message and can do the same with no other: between nodes, and
        within one. Of each round the first message sent and the first received are free of it, unless they are eager:
        ``alpha`` has it.
    node_alpha, node_beta : float, optional
        What ``alpha`` and ``beta`` are for messages within a node; those two are then for messages between nodes, and
        all ranks of a node share its link. Without them every rank has a link of its own, wherever it is.
    links : tuple of float
        Where links differ: ``beta`` for each node, by its number in the layout. A message goes at the pace of the
        slower of its two ends.
    eager : float
        Messages of fewer bytes are sent whether or not their receivers have come: a sender does not wait for them.
    network : tuple of Groups, or Torus
        What lies between the nodes; without it they can all send at once. Without ``node_alpha`` a rank is a node.

    Raises
    ------
    ValueError
        If only one of ``node_alpha`` and ``node_beta`` is given, or a cost is negative.
    """

    alpha: float = 2e-6
    beta: float = 1 / 10e9
    gamma: float = 1 / 20e9
    node_alpha: float | None = None
    node_beta: float | None = None
    links: tuple[float, ...] = ()
    overhead: float = 0.3e-6
    node_overhead: float = 0.1e-6
    eager: float = 8192.0
    network: tuple[Groups, ...] | Torus = ()

    def __post_init__(self) -> None:
        """Refuse half of what a message within a node costs, and negative costs."""
        costs = (self.alpha, self.beta, self.gamma, self.node_alpha or 0, self.node_beta or 0, *self.links)
        if not all(cost >= 0 for cost in (*costs, self.overhead, self.node_overhead, self.eager)):
            raise ValueError("no cost may be negative")
        if (self.node_alpha is None) != (self.node_beta is None):
            raise ValueError("node_alpha and node_beta go together")


@dataclass(frozen=True)
class Noise:
    """What makes messages and ranks late, by chance.

    Attributes
    ----------
    jitter : float
        Seconds that each message takes longer, on average; they are exponentially distributed.
    stragglers : int
        How many ranks, picked by chance, start late.
    delay : float
        By how many seconds these start late.
    """

    jitter: float = 0.0
    stragglers: int = 0
    delay: float = 0.0


@dataclass(frozen=True)
class Links:
    """The links of the ranks of a layout, and what they cost.

    Attributes
    ----------
    of : numpy.ndarray of int64
        For each rank the number of its link; ranks that share one are on one node.
    alpha, overhead : float
        Seconds for a message between links, and those of it that occupy its ends.
    beta : numpy.ndarray of float64
        Seconds for each byte on each link.
    node_alpha, node_beta, node_overhead : float
        The same for messages between ranks that share a link, which do not pass it.
    eager : float
        As of the cluster.
    network : tuple
        The levels between the links.
    """

    of: npt.NDArray[np.int64]
    alpha: float
    beta: npt.NDArray[np.float64]
    overhead: float
    node_alpha: float = 0.0
    node_beta: float = 0.0
    node_overhead: float = 0.0
    eager: float = 0.0
    network: tuple[Level, ...] = ()

    @classmethod
    def between(cls, layout: Layout, cluster: Cluster) -> Links:
        """Return the links that the ranks of a layout have on a cluster.

        Raises
        ------
        ValueError
            If the cluster's links, or its network, are of another number of nodes.
        """
        nodes = len(layout.nodes)
        if cluster.links and len(cluster.links) != nodes:
            raise ValueError(f"the cluster has links of {len(cluster.links)} nodes, but the ranks are on {nodes}")
        node_of, ranks = node_numbers(layout), np.arange(layout.size)
        betas = np.array(cluster.links or [cluster.beta] * nodes, np.float64)
        if cluster.node_alpha is None or cluster.node_beta is None:
            betas = betas[node_of]
            network = levels_of(cluster.network, ranks, betas)
            return cls(ranks, cluster.alpha, betas, cluster.overhead, eager=cluster.eager, network=network)
        if nodes == 1:
            betas = np.full(layout.size, cluster.node_beta)
            return cls(ranks, cluster.node_alpha, betas, cluster.node_overhead, eager=cluster.eager)
        within = cluster.node_alpha, cluster.node_beta, cluster.node_overhead
        network = levels_of(cluster.network, node_of, betas)
        return cls(node_of, cluster.alpha, betas, cluster.overhead, *within, cluster.eager, network)


def node_numbers(layout: Layout) -> npt.NDArray[np.int64]:
    """Return for each rank the number of its node."""
    numbers = np.empty(layout.size, np.int64)
    numbers[np.concatenate(layout.nodes)] = np.repeat(
        np.arange(len(layout.nodes)), [len(node) for node in layout.nodes]
    )
    return numbers
