"""The price of schedules under an alpha-beta-gamma model of links between ranks, or between and within nodes.

A message of b bytes takes ``alpha + beta * b`` seconds from when both of its ends have come to it, and reducing b
bytes takes ``gamma * b``. Messages that a rank sends (or receives) in one round share its link.

Where a cluster says what a message within a node costs, each node has one link to the others, in both
directions at once, and each rank one within its node. Messages that leave (enter) a node share its link if a rank sends
(receives) them in one round, and if they belong to rounds of the same numbers, at the ranks that send them and
at the ranks that receive them; only rounds with messages are numbered. So ranks of a node that do the same at the
same time share the link evenly, and those whose turns come one after another do not.

The price is that of the rank that is done last. It is computed for all ranks at once: ``posts`` runs the generators for
many ranks, ``waves`` finds which messages pass together, and ``clocks`` prices them. The walk through the schedules, in
``finish_times``, is what that is held to.

Source: Hockney, The communication challenge for MPP, Parallel Computing 20 (1994); Thakur et al. (2005) for gamma.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from mpiagg.errors import ScheduleError
from mpiagg.schedules.clocks import Clocks
from mpiagg.schedules.cluster import Cluster, Links
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.posts import Irregular, Together, posts_of
from mpiagg.schedules.steps import Collective, Round
from mpiagg.schedules.table import algorithm
from mpiagg.schedules.walk import Message, walk

__all__ = ["Cluster", "Prediction", "Pricing", "finish_times", "price"]


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
    """

    seconds: float
    latency: float
    bandwidth: float
    reduction: float
    rounds: int
    busiest: float


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
        self._links, self._gamma = Links.between(layout, cluster), cluster.gamma
        for together in Together:  # as much as fits together
            with suppress(Irregular):
                self._clocks = Clocks(posts_of(entry, goal, layout, root, together=together), self._links)
                break
        else:
            raise ScheduleError(f"messages of {name!r} for {goal.value} do not pass; check() says which")
        self._pieces = entry.pieces(goal, layout)

    def seconds(self, nbytes: float) -> float:
        """Return the price for a vector of ``nbytes``."""
        return self._price(nbytes, self._links, self._gamma)

    def predict(self, nbytes: float) -> Prediction:
        """Return the price, and what it is made of."""
        seconds = self.seconds(nbytes)
        # The price is the longest way's sum of costs: as a cost grows a little, the price grows by its share.
        slower = self._price(nbytes, self._links.with_alpha(1 + _LITTLE), self._gamma)
        latency = min(seconds, max(0.0, slower - seconds) / _LITTLE)
        slower = self._price(nbytes, self._links, self._gamma * (1 + _LITTLE))
        reduction = min(seconds - latency, max(0.0, slower - seconds) / _LITTLE)
        rounds = self._price(0, replace(self._links, alpha=1.0, node_alpha=1.0), 0)
        busiest = self._clocks.busiest() * nbytes / self._pieces
        return Prediction(seconds, latency, seconds - latency - reduction, reduction, round(rounds), busiest)

    def _price(self, nbytes: float, links: Links, gamma: float) -> float:
        return float(self._clocks.run(nbytes / self._pieces, links, gamma).max())


_LITTLE: Final = 1e-5


def finish_times(
    programs: Sequence[Sequence[Round]], chunk_bytes: float, cluster: Cluster, layout: Layout | None = None
) -> list[float]:
    """Return when each rank is done, in seconds after all have started, with chunks of ``chunk_bytes``.

    Parameters
    ----------
    programs : sequence of sequences of Round
        The schedule of every rank.
    chunk_bytes : float
    cluster : Cluster
    layout : Layout, optional
        Where the ranks are: by default all on one node.
    """
    links = Links.between(layout or Layout.of_ranks(len(programs)), cluster)
    events = list(walk(programs))
    cost = _costs([event for event in events if isinstance(event, Message)], programs, links)
    clock = [0.0] * len(programs)
    latest = [0.0] * len(programs)
    for event in events:
        if isinstance(event, Message):
            both_there = max(clock[event.source], clock[event.target])
            alpha, beta = next(cost)
            done = both_there + alpha + beta * chunk_bytes
            latest[event.source] = max(latest[event.source], done)
            latest[event.target] = max(latest[event.target], done)
        else:
            reduced = sum(step.count for step in event.steps if step.action.reduces)
            clock[event.rank] = max(clock[event.rank], latest[event.rank]) + cluster.gamma * reduced * chunk_bytes
    return clock


def _costs(
    messages: Sequence[Message], programs: Sequence[Sequence[Round]], links: Links
) -> Iterator[tuple[float, float]]:
    """Yield for each message its latency, and its seconds for each byte of a chunk, with those that share its way."""
    number = [[0, *accumulate(bool(a_round.messages) for a_round in program)] for program in programs]
    of, beta = links.of.tolist(), links.beta.tolist()
    load: Counter[tuple[object, ...]] = Counter()
    ways = []
    for message in messages:
        source, target = (message.source, message.source_round), (message.target, message.target_round)
        rounds = tuple(number[rank][index] for rank, index in (source, target))
        ends = of[message.source], of[message.target]
        across = ends[0] != ends[1]
        out, into = ("out", across, *source), ("into", across, *target)
        shared = [("out", ends[0], rounds), ("into", ends[1], rounds)] if across else []
        for way in (out, into, *shared):
            load[way] += sum(step.count for step in message.sent)
        ways.append(([out, *shared[:1]], [into, *shared[1:]], ends))
    for leaving, entering, ends in ways:
        out_load, into_load = (max(load[way] for way in side) for side in (leaving, entering))
        if ends[0] == ends[1]:
            yield links.node_alpha, links.node_beta * max(out_load, into_load)
        else:
            yield links.alpha, max(out_load * beta[ends[0]], into_load * beta[ends[1]])
