"""Networks between nodes, as data, and what the messages of a round share there beyond the links of their nodes.

A network is a tuple of :class:`Groups`, the smallest first, or a :class:`Torus`. Contention is what crosses each level:

- The bytes that leave (enter) a group share its links to the others. That is a fat tree, with oversubscription or
  without, as it is routed over all its upper switches.
- Where each two groups have links of their own (a dragonfly), bytes take these, or go by way of a third group, which
  uses links twice: whichever is less.
- On a torus each message takes a shortest way, and the byte-hops of a round in one direction of one dimension share all
  links of that direction. Where all ranks do the same, that is the load of each link.

Sources: Leiserson, Fat-trees, IEEE Transactions on Computers 34 (1985); Kim, Dally, Scott, Abts, Technology-driven,
highly-scalable dragonfly topology, ISCA 2008; Dally, Seitz, The torus routing chip, Distributed Computing 1 (1986).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mpiagg.schedules.posts import Irregular
from mpiagg.schedules.ranks import Numbers

Values = npt.NDArray[np.float64]

_DENSE: Final = 8  # so many times as many keys as values may be counted


@dataclass(frozen=True)
class Groups:
    """Groups of nodes that have links in common to the other groups: of one switch, or one pod.

    Attributes
    ----------
    nodes : int
        How many nodes are in each group; nodes of neighbouring numbers are together.
    oversubscription : float
        How many times the bandwidth of a group's links to the others is exceeded by that of its nodes' links.
    alpha : float
        Seconds that a message between groups takes longer.
    paired : bool
        Whether each two groups have links of their own, each pair as many (a dragonfly).
    """

    nodes: int
    oversubscription: float = 1.0
    alpha: float = 0.0
    paired: bool = False


@dataclass(frozen=True)
class Torus:
    """Nodes in a grid that is closed to a ring in each dimension; each has a link to both neighbours in each.

    Attributes
    ----------
    sides : tuple of int
        How many nodes there are in each dimension. The last one is that of neighbouring numbers. All links have the
        bandwidth of the slowest node.
    alpha : float
        Seconds for each hop after the first.
    """

    sides: tuple[int, ...]
    alpha: float = 0.0


class Level:
    """Groups of ranks and their links to one another, which a message takes if its ends are in different groups.

    ``ends`` are the senders and the receivers of messages. Messages share links if the rounds that they belong to have
    the same numbers at both ends. What ends in ``with_all`` is of ranks that meet all others of their sets in a round,
    and send (or receive) so many chunks that leave (enter) their groups, to (from) each rank there alike.

    Attributes
    ----------
    of : numpy.ndarray of int64
        The number of each rank's group.
    beta : numpy.ndarray of float64
        Seconds a byte on the links of each group.
    alpha : float
        Seconds that a message takes longer.
    paired : bool
        As of :class:`Groups`.
    """

    def __init__(self, of: Numbers, beta: Values, alpha: float = 0.0, *, paired: bool = False) -> None:
        self.of, self.beta, self.alpha, self.paired = of, beta, alpha, paired

    def crossing(self, ends: Numbers) -> Values:
        """Return for each message how many links of this level it takes, one after the other."""
        groups = self.of[ends]
        return np.where(groups[0] != groups[1], 1.0, 0.0)

    def latency(self, ends: Numbers) -> Values:
        """Return the seconds that each message takes longer."""
        found: Values = self.alpha * self.crossing(ends)
        return found

    def pools(self, ends: Numbers) -> Numbers:
        """Return the numbers of the links that messages share with others at their senders' and receivers' sides."""
        return self.of[ends]

    def paces(self, ends: Numbers, numbers: Numbers, counts: Values) -> Values:
        """Return for each message the seconds that each byte of a chunk takes at both sides."""
        groups, across = self.of[ends], self.crossing(ends) > 0
        loads = np.stack([sums(counts, group, *numbers, across) for group in groups]) * self.beta[groups]
        if self.paired:
            on_pair = sums(counts, *groups, *numbers, across) * self.beta[groups] * (len(self.beta) - 1)
            loads = np.clip(on_pair, loads, 2 * loads)
        return np.where(across, loads, 0.0)

    def hops_with_all(self, ranks: Numbers, sets: Numbers, leaving: Values) -> Values:  # noqa: ARG002 - a torus asks
        """Return how many chunks take links, each as often as it takes one; on a torus for each direction."""
        found: Values = leaving.sum(keepdims=True)
        return found

    def paces_with_all(self, ranks: Numbers, sets: Numbers, leaving: Values) -> Values:
        """Return for each rank the seconds that each byte of a chunk takes."""
        group = self.of[ranks]
        loads: Values = np.bincount(group, leaving)[group] * self.beta[group]
        if self.paired and np.any(leaving):
            loads = loads * min(2.0, max(1.0, (len(self.beta) - 1) / self._met(group, sets, leaving)))
        return loads

    def _met(self, group: Numbers, sets: Numbers, leaving: Values) -> int:
        """Return how many other groups each group exchanges with, if it exchanges alike with all of these.

        Raises
        ------
        Irregular
            If it does not; then each pair of groups is to be looked at by itself.
        """
        pairs, counts = np.unique(np.stack([sets, group]), axis=1, return_counts=True)
        met = np.bincount(pairs[0])
        here = np.unique(group)
        if met[0] != len(here) or any(map(np.ptp, (counts, met, leaving, self.beta[here]))):
            raise Irregular
        return len(here) - 1

    def latency_with_all(self, ranks: Numbers) -> float:  # noqa: ARG002 - a torus asks where they are
        """Return the seconds that the last message takes longer."""
        return self.alpha


class TorusLinks(Level):
    """The links of a torus, for the nodes that ranks are on; their groups are the nodes.

    Of messages to all others the latency is that of two nodes as far apart as the sides allow.
    """

    def __init__(self, of: Numbers, torus: Torus, beta: float) -> None:
        super().__init__(of, np.full(math.prod(torus.sides), beta), torus.alpha)
        self._sides, self._places = torus.sides, np.stack(np.unravel_index(of, torus.sides))

    def crossing(self, ends: Numbers) -> Values:
        """Return for each message how many links it takes, one after the other."""
        found: Values = sum(self._hops(ends), np.zeros(ends.shape[1]))
        return found

    def latency(self, ends: Numbers) -> Values:
        """Return the seconds that each message takes longer: none to a neighbour."""
        found: Values = self.alpha * np.maximum(0, self.crossing(ends) - 1)
        return found

    def pools(self, ends: Numbers) -> Numbers:
        """Return the same number for all: each message may share links with any other."""
        return np.zeros_like(ends)

    def paces(self, ends: Numbers, numbers: Numbers, counts: Values) -> Values:
        """Return for each message the seconds that each byte of a chunk takes, the same at both sides."""
        found = np.zeros(ends.shape[1])
        for hops in self._hops(ends):
            found = np.maximum(found, (hops > 0) * sums(counts * hops, *numbers))
        paces: Values = np.stack([found, found]) * self.beta[0] / len(self.beta)
        return paces

    def hops_with_all(self, ranks: Numbers, sets: Numbers, leaving: Values) -> Values:
        """Return the hops of all chunks in each direction."""
        there = np.bincount(sets)[sets] - sums(np.ones(len(ranks)), sets, self.of[ranks])
        each = leaving / np.maximum(1, there)
        totals = []
        for place, side in zip(self._places[:, ranks], self._sides, strict=True):
            found = np.bincount(sets * side + place, minlength=(int(sets.max()) + 1) * side).reshape(-1, side)[sets]
            ways = _ways(np.arange(side) - np.arange(side)[:, np.newaxis], side)
            totals += [float(np.sum(each * (found * hops[place]).sum(axis=1))) for hops in ways]
        return np.array(totals)

    def paces_with_all(self, ranks: Numbers, sets: Numbers, leaving: Values) -> Values:
        """Return for each rank the seconds that each byte of a chunk takes."""
        return np.full(len(ranks), self.hops_with_all(ranks, sets, leaving).max() * self.beta[0] / len(self.beta))

    def latency_with_all(self, ranks: Numbers) -> float:
        """Return the seconds that a message takes longer between nodes as far apart as can be."""
        places = self._places[:, ranks]
        hops = sum(side // 2 for side, place in zip(self._sides, places, strict=True) if np.ptp(place))
        return self.alpha * max(0, hops - 1)

    def _hops(self, ends: Numbers) -> Iterator[Values]:
        """Yield for each direction the hops of each message."""
        for place, side in zip(self._places, self._sides, strict=True):
            yield from _ways(place[ends[1]] - place[ends[0]], side)


def _ways(distance: Numbers, side: int) -> Iterator[Values]:
    """Yield the hops forwards and backwards around a ring; halfway around, half of it goes either way."""
    forwards = distance % side
    for hops in (forwards, -forwards % side):
        yield np.where(2 * hops < side, hops, np.where(2 * hops == side, hops / 2, 0.0))


def levels_of(network: tuple[Groups, ...] | Torus, link: Numbers, betas: Values) -> tuple[Level, ...]:
    """Return the levels of a network between links of so many seconds a byte, for ranks that have these links.

    Raises
    ------
    ValueError
        If groups are not made of those below them, or a torus has another number of nodes.
    """
    if isinstance(network, Torus):
        nodes = math.prod(network.sides)
        if min(network.sides, default=0) < 1 or nodes != len(betas):
            raise ValueError(
                f"a torus of {' x '.join(map(str, network.sides))} has {nodes:,} nodes, but there are {len(betas):,}"
            )
        return (TorusLinks(link, network, float(betas.max())),)
    found: list[Level] = []
    for smaller, groups in pairwise((Groups(1), *network)):
        if groups.nodes < 1 or not groups.oversubscription > 0:
            raise ValueError(
                f"a group must have a node and an oversubscription above 0, not {groups.nodes:,} nodes and "
                f"{groups.oversubscription:g}"
            )
        if groups.nodes % smaller.nodes:
            raise ValueError(f"groups of {groups.nodes:,} nodes cannot be made of groups of {smaller.nodes:,}")
        group = np.arange(len(betas)) // groups.nodes
        with np.errstate(divide="ignore"):  # a link that costs nothing
            beta = groups.oversubscription / np.bincount(group, 1 / betas)
        found.append(Level(group[link], beta, groups.alpha, paired=groups.paired))
    return tuple(found)


def sums(values: npt.NDArray[Any], *keys: npt.NDArray[Any]) -> Values:
    """Return for each value the sum of those that have the same keys."""
    joint = np.zeros(len(values), np.int64)
    for key in keys:
        width = int(key.max(initial=0)) + 1
        if (int(joint.max(initial=0)) + 1) * width >= 2**62:
            joint = np.unique(joint, return_inverse=True)[1]
        joint = joint * width + key
    if joint.max(initial=0) > _DENSE * len(joint):  # else counting is faster than sorting
        joint = np.unique(joint, return_inverse=True)[1]
    return np.bincount(joint, values)[joint].astype(np.float64)
