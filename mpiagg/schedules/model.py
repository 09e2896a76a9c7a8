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
many ranks, ``waves`` finds which messages pass together, and ``clocks`` prices them. The walk through the schedules, in
``finish_times``, is what that is held to.

Sources: Hockney, The communication challenge for MPP, Parallel Computing 20 (1994); Alexandrov, Ionescu, Schauser,
Scheiman, LogGP, SPAA 1995; Thakur et al. (2005) for gamma.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from mpiagg.errors import ScheduleError
from mpiagg.schedules.clocks import Chance, Clocks
from mpiagg.schedules.cluster import Cluster, Links, Noise
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.networks import Values
from mpiagg.schedules.posts import Irregular, Together, posts_of
from mpiagg.schedules.steps import Collective, Round
from mpiagg.schedules.table import Algorithm, algorithm
from mpiagg.schedules.walk import Message, walk

__all__ = ["Cluster", "Noise", "Prediction", "Pricing", "finish_times", "price"]


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
    costs = _costs([event for event in events if isinstance(event, Message)], programs, links)
    clock = [0.0] * len(programs)
    latest = [0.0] * len(programs)
    for event in events:
        if isinstance(event, Message):
            cost = next(costs)
            sender, receiver = clock[event.source], clock[event.target]
            at_ends = max(cost.pace * chunk_bytes, cost.occupied)
            if sum(step.count for step in event.sent) * chunk_bytes < cluster.eager:
                sent = sender + cost.overhead + at_ends
                received = max(sender + cost.latency + at_ends, receiver + cost.overhead)
            else:
                sent = received = max(sender, receiver) + cost.latency + at_ends
            latest[event.source] = max(latest[event.source], sent)
            latest[event.target] = max(latest[event.target], received)
        else:
            reduced = sum(step.count for step in event.steps if step.action.reduces)
            clock[event.rank] = max(clock[event.rank], latest[event.rank]) + cluster.gamma * reduced * chunk_bytes
    return clock


class _Cost(NamedTuple):
    """What a message costs.

    Seconds, and those of them at each of its ends; seconds for each byte of a chunk; and seconds in which other
    messages occupy its ends.
    """

    latency: float
    overhead: float
    pace: float
    occupied: float


def _costs(messages: Sequence[Message], programs: Sequence[Sequence[Round]], links: Links) -> Iterator[_Cost]:
    """Yield for each message what it costs, with those that share its way."""
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
        for way in (out, into):
            load["messages", way] += 1
        ways.append(([out, *shared[:1]], [into, *shared[1:]], ends, rounds))
    counts = np.array([sum(step.count for step in message.sent) for message in messages], np.float64)
    pairs = np.array([(message.source, message.target) for message in messages], np.int64).reshape(-1, 2).T
    numbers = np.array([rounds for *_, rounds in ways], np.int64).reshape(-1, 2).T
    network = [np.maximum(*level.paces(pairs, numbers, counts)).tolist() for level in links.network]
    farther = [level.latency(pairs).tolist() for level in links.network]
    for index, (leaving, entering, ends, _) in enumerate(ways):
        out_load, into_load = (max(load[way] for way in side) for side in (leaving, entering))
        across = ends[0] != ends[1]
        others = max(
            sum(max(0, load["messages", (side, *way[1:])] - 1) for side in ("out", "into"))
            for way in (leaving[0], entering[0])
        )
        if across:
            pace = max(out_load * beta[ends[0]], into_load * beta[ends[1]], *(paces[index] for paces in network))
            latency = links.alpha + sum(more[index] for more in farther)
            yield _Cost(latency, links.overhead, pace, links.overhead * others)
        else:
            pace = links.node_beta * max(out_load, into_load)
            yield _Cost(links.node_alpha, links.node_overhead, pace, links.node_overhead * others)
