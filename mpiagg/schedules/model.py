"""The price of schedules under a LogGP-like model of links between ranks, or between and within nodes.

A message of b bytes takes ``alpha + beta * b`` seconds from when both of its ends have come to it, and reducing b
bytes takes ``gamma * b``. Messages that a rank sends (or receives) in one round share its link. They also share the
rank: it spends ``overhead`` on each, and is occupied by each beside the first that it sends, and the first that it
receives. A link and a rank work at the same time, so a message takes ``alpha``, and the longer of the two. Of messages
of fewer bytes than ``eager`` the sender does not wait for the receiver, and spends ``overhead`` in place of ``alpha``.

Where a cluster says what a message within a node costs, each node has one link to the others, in both
directions at once, and each rank one within its node. Messages that leave (enter) a node share its link if a rank sends
(receives) them in one round, and if they belong to rounds of the same numbers, at the ranks that send them and
at the ranks that receive them; only rounds with messages are numbered. So ranks of a node that do the same at the
same time share the link evenly, and those whose turns come one after another do not. What lies between the nodes is
shared in the same way (``networks``).

The price is that of the rank that is done last. It is computed for all ranks at once: ``posts`` runs the generators for
many ranks, ``waves`` finds which messages pass together, and ``clocks`` prices them. Tests hold that to a walk
through the schedules.

Sources: Hockney, The communication challenge for MPP, Parallel Computing 20 (1994); Alexandrov, Ionescu, Schauser,
Scheiman, LogGP, SPAA 1995; Thakur et al. (2005) for gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from mpiagg.errors import ScheduleError
from mpiagg.schedules.clocks import Chance, Clocks
from mpiagg.schedules.cluster import Cluster, Links, Noise
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.networks import Values
from mpiagg.schedules.posts import Irregular, Together, posts_of
from mpiagg.schedules.steps import Collective
from mpiagg.schedules.table import Algorithm, algorithm

__all__ = ["Cluster", "Noise", "Prediction", "Pricing", "price"]


@dataclass(frozen=True)
class Prediction:
    """What a collective takes, and what of.

    Attributes
    ----------
    seconds : float
        Its price.
    latency, bandwidth, reduction : float
        The seconds of it that are latency of messages, bytes on links, and reduction, on the longest way.
    rounds : int
        The most messages that follow one another.
    busiest : float
        The bytes that leave, or enter, by the busiest link: of a node to the others, where there are several.
    crossing : tuple of float
        The bytes that cross each level, all together: those that leave nodes, and those that take the links of each
        level of the network; on a torus a byte counts once for each hop.
    """

    seconds: float
    latency: float
    bandwidth: float
    reduction: float
    rounds: int
    busiest: float
    crossing: tuple[float, ...]


def price(
    name: str, collective: Collective | str, ranks: Layout | int, nbytes: float, cluster: Cluster, *, root: int = 0
) -> float:
    """Return the seconds that an algorithm of the table takes for a vector of ``nbytes``.

    Raises
    ------
    ValueError
        If the name is unknown, the algorithm does not serve the collective, or the cluster has links of another
        number of nodes; or if ranks do not go on alike, and have some million messages.
    ScheduleError
        If messages cannot pass.
    """
    return Pricing(name, collective, Layout.of_ranks(ranks), cluster, root=root).seconds(nbytes)


class Pricing:
    """An algorithm on a layout and a cluster, to be priced for vectors of several lengths.

    Parameters and errors are those of :func:`price`.
    """

    def __init__(
        self, name: str, collective: Collective | str, layout: Layout, cluster: Cluster, *, root: int = 0
    ) -> None:
        entry, goal = algorithm(name), Collective(collective)
        entry.generator(goal)  # refuses what the algorithm does not serve
        links, self._gamma = Links.between(layout, cluster), cluster.gamma
        self._clocks = _clocks(entry, goal, layout, links, root)
        self._pieces = entry.pieces(goal, layout)

    def seconds(self, nbytes: float) -> float:
        """Return the price for a vector of ``nbytes``."""
        return self._price(nbytes, self._gamma)

    def predict(self, nbytes: float) -> Prediction:
        """Return the price, and what it is made of."""
        seconds = self.seconds(nbytes)
        # The price is the longest way's sum of costs: as a cost grows a little, the price grows by its share.
        slower = self._price(nbytes, self._gamma, latency=1 + _LITTLE)
        latency = min(seconds, max(0.0, slower - seconds) / _LITTLE)
        slower = self._price(nbytes, self._gamma * (1 + _LITTLE))
        reduction = min(seconds - latency, max(0.0, slower - seconds) / _LITTLE)
        chunk = nbytes / self._pieces
        return Prediction(
            seconds,
            latency,
            seconds - latency - reduction,
            reduction,
            self._clocks.rounds,
            self.busiest(nbytes),
            tuple(chunk * chunks for chunks in self._clocks.crossing()),
        )

    def busiest(self, nbytes: float) -> float:
        """Return how many bytes leave, or enter, by the busiest link."""
        return self._clocks.busiest() * nbytes / self._pieces

    def sample(self, nbytes: float, noise: Noise, seeds: Sequence[int]) -> list[float]:
        """Return what a vector of ``nbytes`` takes with noise, in seconds, once for each seed; equal seeds are equal.

        The seconds are counted from when the first ranks start. Of more than some hundred rounds that are repeated, the
        first are carried out, and the others take as long.
        """
        return [self._price(nbytes, self._gamma, chance=Chance(noise, seed)) for seed in seeds]

    def in_a_row(self, nbytes: float, calls: int = 32, *, buffered: bool = False) -> float:
        """Return what a call takes among many that follow one another, of which ranks that are done begin the next.

        Parameters
        ----------
        nbytes : float
        calls : int
            How many are carried out, of which the later half counts.
        buffered : bool
            Whether no sender waits for its receiver, however long its message is.

        Raises
        ------
        ValueError
            If there are fewer than two calls.
        """
        if calls < 2:
            raise ValueError(f"calls in a row are at least 2, not {calls}")
        clocks: Values | None = None
        times = []
        for _ in range(calls):
            clocks = self._clocks.run(nbytes / self._pieces, self._gamma, start=clocks, buffered=buffered)
            times.append(float(clocks.max()))
        return max((times[-1] - times[calls // 2 - 1]) / (calls - calls // 2), self._least(nbytes))

    def _price(self, nbytes: float, gamma: float, *, latency: float = 1.0, chance: Chance | None = None) -> float:
        chunk = nbytes / self._pieces
        clocks = self._clocks.run(chunk, gamma, latency=latency, chance=chance)
        return max(float(clocks.max()), self._least(nbytes))

    def _least(self, nbytes: float) -> float:
        """Return the seconds of the busiest link: messages of different rounds may be under way at the same time."""
        return nbytes / self._pieces * self._clocks.least()


_LITTLE: Final = 1e-5


def _clocks(entry: Algorithm, goal: Collective, layout: Layout, links: Links, root: int) -> Clocks:
    """Return the clocks of an algorithm, with as much taken together as fits together."""
    for together in (Together.ROUNDS, Together.RANKS, Together.NOTHING):
        with suppress(Irregular):
            try:
                return Clocks(posts_of(entry, goal, layout, root, together=together), links)
            except ValueError:  # too many messages
                with suppress(Irregular):
                    posts = posts_of(entry, goal, layout, root, together=Together.SOME)
                    return Clocks(posts, links, overlapping=True)
                raise
    raise ScheduleError(f"messages of {entry.name!r} for {goal.value} do not pass; check() says which")
