"""What the messages of all ranks put on links and processors, by the rules of ``model``, in array operations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpiagg.schedules.cluster import Links
from mpiagg.schedules.networks import Level, Values, sums
from mpiagg.schedules.posts import Irregular, Posts
from mpiagg.schedules.ranks import Numbers
from mpiagg.schedules.waves import Waves


class Side(NamedTuple):
    """Messages with all others of a set, of those that go as far as one level and no farther.

    The messages of a rank are with the other cells of its group; ``cell`` is of ranks, ``group`` of cells. The last
    three have two rows: for what a rank does, and for what it does for the others' sake on the other side.

    Attributes
    ----------
    cell, group : numpy.ndarray of int64
    latency : float
        Seconds.
    sends : bool
        Whether these are the messages that ranks send.
    overhead : float
        Seconds for each message at its ends.
    there : numpy.ndarray of bool
        Where there are messages.
    pace : numpy.ndarray
        Seconds for each byte of a chunk.
    occupied : numpy.ndarray
        Seconds in which the rank is occupied by its other messages.
    chunks : numpy.ndarray
        How many there are in each message of a rank.
    """

    cell: Numbers
    group: Numbers
    latency: float
    sends: bool
    overhead: float
    there: npt.NDArray[np.bool_]
    pace: Values
    occupied: Values
    chunks: Values


class Loads:
    """What each message costs.

    Attributes
    ----------
    chunks, latency, overhead, pace, occupied : numpy.ndarray
        Of each message: how many chunks it has; seconds, and those of them that occupy each of its ends; seconds for
        each byte of a chunk; seconds in which other messages occupy its ends.
    carried : numpy.ndarray
        The chunks that leave by each link, and those that enter.
    crossing : numpy.ndarray
        How many chunks cross each level: the nodes' links, and then those of the network.
    """

    def __init__(self, posts: Posts, waves: Waves, links: Links) -> None:
        self._posts, self._links = posts, links
        self._levels: tuple[Level, ...] = (Level(links.of, links.beta), *links.network)
        # Where each rank has a link of its own, what shares it is in one round of that rank.
        self._contended = self._levels[int(links.of.max()) + 1 == len(links.of) :]
        self._ends = posts.rank[waves.ends]
        counts = self.chunks = posts.chunks[waves.sent].astype(np.float64)
        times = posts.times[waves.ends[0]]
        turns = posts.in_turn[waves.post] * (np.arange(len(waves.post)) - posts.start[waves.post])
        numbers = (posts.number[waves.post] + turns)[np.stack([waves.sent, waves.received])]
        passes = [level.crossing(self._ends) for level in self._levels]
        self._across = passes[0] > 0
        self.crossing = np.array([np.sum(counts * times * found) for found in passes])
        leaving = counts * times * self._across
        leaves = [np.bincount(end, leaving, links.of.max() + 1) for end in links.of[self._ends]]
        self.carried = np.array(leaves, np.float64)
        self._uses: list[Numbers] = []
        for level in self._contended:
            crosses = np.stack([passes[self._levels.index(level)] > 0] * 2)
            self._use(level, self._ends, np.stack([*numbers, times, times]), crosses)
        self.latency = np.where(self._across, links.alpha, links.node_alpha)
        self.latency = self.latency + sum(level.latency(self._ends) for level in links.network)
        self.overhead = np.where(self._across, links.overhead, links.node_overhead)
        self.pace = self._paces(numbers, counts)
        self.occupied = self._occupied(waves)

    def _paces(self, numbers: Numbers, counts: Values) -> Values:
        own = np.stack([sums(counts, *pair, self._across) for pair in zip(self._ends, numbers, strict=True)])
        links = self._links
        own *= np.where(self._across, links.beta[links.of[self._ends]], links.node_beta)
        for level in self._contended:
            own = np.maximum(own, level.paces(self._ends, numbers, counts))
        slower: Values = own.max(axis=0)
        return slower

    def _occupied(self, waves: Waves) -> Values:
        """Return for how long a rank is at the other messages of a round that it sends, and at those it receives."""
        kinds = 2 * waves.ends + self._across
        several = [np.maximum(0, np.bincount(kind, minlength=2 * len(self._posts.rank)) - 1) for kind in kinds]
        others = np.where(np.repeat(self._posts.in_turn, 2), 0, np.sum(several, axis=0))
        found: Values = self.overhead * np.maximum(*others[kinds])
        return found

    def with_all(self, here: Numbers) -> tuple[list[Side], Values]:
        """Return what ranks exchange that meet all others of their sets, and how many chunks each of them receives."""
        posts, sets, _, sends, receives, _ = (column[here] for column in self._posts.meeting)
        ranks, numbers = self._posts.rank[posts], self._posts.number[posts]
        whole = np.unique(sets, return_inverse=True)[1]
        parts = [np.arange(len(ranks)), *(_joint(whole, level.of[ranks]) for level in self._levels), whole]
        counts = np.stack([sends, receives])
        # For each part of a set, how many chunks and messages a rank sends within it; and how many it receives.
        chunks, messages = (
            np.array([[_with_others(one, other, part), _with_others(other, one, part)] for part in parts])
            for one, other in (counts, (counts != 0).astype(np.int64))
        )
        crossing = chunks[-1] - chunks[1:-1]
        if np.min(counts.sum(axis=0)) < -1 or (self._contended and np.any(crossing[0]) and np.ptp(numbers)):
            raise Irregular
        for index, level in enumerate(self._levels):
            self.crossing[index] += level.hops_with_all(ranks, whole, crossing[index, 0]).sum()
        for side, leaving in enumerate(crossing[0]):
            self.carried[side] += np.bincount(self._links.of[ranks], leaving, self.carried.shape[1])
        once = np.stack([numbers, numbers, np.ones_like(numbers), np.full(len(ranks), -1 - posts[0])])
        for level in self._contended:
            self._use(level, np.stack([ranks, ranks]), once, crossing[self._levels.index(level)] > 0)
        return list(self._sides(ranks, parts, chunks, messages)), chunks[-1, 1]

    def _sides(self, ranks: Numbers, parts: list[Numbers], chunks: Values, messages: Values) -> Iterator[Side]:
        links, across = self._links, messages[-1] - messages[1]
        pace, latency, overhead = links.node_beta * chunks[1], links.node_alpha, links.node_overhead
        others = np.maximum(0, messages[1] - 1).sum(axis=0)
        each = (chunks[-1] / np.maximum(1, messages[-1])).max(axis=0)
        for depth, (cells, groups) in enumerate(pairwise(parts)):
            if depth:
                level = self._levels[depth - 1]
                paces = [level.paces_with_all(ranks, parts[-1], leaving) for leaving in chunks[-1] - chunks[depth]]
                pace = np.stack(paces) if depth == 1 else np.maximum(pace, paces)
                latency = (links.alpha if depth == 1 else latency) + level.latency_with_all(ranks)
                overhead, others = links.overhead, np.maximum(0, across - 1).sum(axis=0)
            there = chunks[depth + 1] > chunks[depth]
            if np.any(there):
                group = groups[np.unique(cells, return_index=True)[1]]
                for sends, way in ((True, [0, 1]), (False, [1, 0])):
                    costs = latency, sends, overhead, there[way], pace[way], overhead * others, each
                    yield Side(cells, group, *costs)

    def _use(self, level: Level, ends: Numbers, rounds: Numbers, crosses: npt.NDArray[np.bool_]) -> None:
        """Note the rounds in which messages use the links of a level: their numbers, how many, and their kind."""
        for side, pool in enumerate(level.pools(ends)):
            way = 2 * (pool + self._levels.index(level) * 2**32) + side
            self._uses.append(np.stack([way, *rounds])[:, crosses[side]])

    def refuse_overlaps(self) -> None:
        """Refuse messages that share a link with others in some of the rounds that they are repeated in.

        Raises
        ------
        Irregular
            If there are any.
        """
        if not self._uses:
            return
        link, sent, received, times, kind = np.concatenate(self._uses, axis=1)
        order = np.lexsort((kind, times, sent, sent - received, link))
        here = np.stack([link, sent - received, sent, times, kind])[:, order]
        one, following = here[:, :-1], here[:, 1:]
        way = (one[:2] == following[:2]).all(axis=0)
        if np.any(way & (following[2] < one[2] + one[3]) & (one != following).any(axis=0)):
            raise Irregular


def _joint(whole: Numbers, part: Numbers) -> Numbers:
    """Return a number for each two."""
    found: Numbers = np.unique(whole * (int(part.max()) + 1) + part, return_inverse=True)[1]
    return found


def _with_others(own: Numbers, others: Numbers, group: Numbers) -> Values:
    """Return how many chunks pass between each rank and the others of its group, by its own counts or by theirs."""
    there, counts = (np.bincount(group, value)[group] - value for value in (others != 0, others))
    return np.where(own < 0, counts, own * there).astype(np.float64)
