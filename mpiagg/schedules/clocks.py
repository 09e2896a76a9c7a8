"""The clocks of all ranks at once: waves of messages are priced by the rules of ``model``, in array operations."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mpiagg.schedules.cluster import Links
from mpiagg.schedules.posts import Irregular, Posts
from mpiagg.schedules.ranks import Numbers
from mpiagg.schedules.waves import Wave, Waves

Values = npt.NDArray[np.float64]

ROUNDING: Final = 8 * float(np.finfo(np.float64).eps)
"""By how much of the clock advances may differ that are the same."""

_LOOKS: Final = 16  # rounds between two looks at whether they go on alike
_DENSE: Final = 8  # so many times as many keys as values may be counted


class Side(NamedTuple):
    """What ranks send to all others of their sets, or receive from them, within their links or across.

    The messages of a rank are with the other ``cell`` of its ``group``. Loads are in chunks, 0 where there are no
    messages; ``theirs`` is what the rank does for the others on the other side.
    """

    cell: Numbers
    group: Numbers
    own: Values
    theirs: Values
    across: bool


class Clocks:
    """What all ranks post, and the loads that it puts on links.

    Parameters
    ----------
    posts : Posts
        What the ranks post.
    links : Links
        Which links they have. What these cost is asked for with each price: the loads do not depend on it.

    Raises
    ------
    Irregular
        If posts that stand for many rounds do not fit together, or share links with others; if each stands for itself,
        the schedule is wrong.
    """

    def __init__(self, posts: Posts, links: Links) -> None:
        self._of, self._posts = links.of, posts
        self._shared = int(links.of.max()) + 1 < len(links.of)
        waves = Waves(posts, len(links.of))
        self._ends = posts.rank[waves.ends]
        self._times, self._counts = posts.times[waves.ends[0]], posts.chunks[waves.sent]
        turns = posts.in_turn[waves.post] * (np.arange(len(waves.post)) - posts.start[waves.post])
        numbers = (posts.number[waves.post] + turns)[np.stack([waves.sent, waves.received])]
        self._link = link = links.of[self._ends]
        self._across = link[0] != link[1]
        crossing = self._counts * self._times * self._across
        self._carried = np.stack([np.bincount(end, crossing, links.of.max() + 1) for end in link]).astype(np.float64)
        self._uses = [
            np.stack([2 * end + side, *numbers, self._times, self._times])[:, self._across]
            for side, end in enumerate(link)
            if self._shared
        ]
        self._loads = self._weigh(link, numbers)
        reduced = posts.reduced
        self._reduced = np.bincount(waves.post, reduced, len(posts.rank))
        turns = np.flatnonzero(posts.in_turn)  # where one message is reduced before the next one comes
        self._reduced[turns] = reduced[posts.start[turns + 1] - 1] if len(turns) else 0
        self._at_target = reduced[waves.received]
        self._steps = [self._step(wave) for wave in waves.waves]
        if self._shared:
            self._refuse_overlaps()

    def run(self, chunk_bytes: float, links: Links, gamma: float) -> Values:
        """Return when each rank is done, in seconds after all have started, with chunks of ``chunk_bytes``."""
        clock, latest = np.zeros(len(self._of)), np.zeros(len(self._of))
        costs = links.alpha + chunk_bytes * np.maximum(*(self._loads * links.beta[self._link]))
        if self._shared:
            within = links.node_alpha + chunk_bytes * links.node_beta * np.maximum(*self._loads)
            costs = np.where(self._across, costs, within)
        reduction = gamma * chunk_bytes
        for wave, extra, ranks, reduced_chunks, ends in self._steps:
            cost, reduced = costs[wave.messages], reduction * reduced_chunks
            if wave.meets is not None:
                done = np.maximum.reduce(
                    [self._exchanged(side, clock[ranks], ranks, chunk_bytes, links) for side in extra]
                )
                clock[ranks] = np.maximum(clock[ranks], done) + reduced
            elif wave.repeats:
                clock[ranks] = _repeated(clock[ranks], extra, cost, reduced, int(self._times[wave.messages[0]]))
            else:
                if wave.in_turn:
                    done = _in_turn(clock, ends, cost, reduction * self._at_target[wave.messages])
                else:
                    done = np.maximum(clock[ends[0]], clock[ends[1]]) + cost
                np.maximum.at(latest, ends[0], done)
                np.maximum.at(latest, ends[1], done)
                clock[ranks] = np.maximum(clock[ranks], latest[ranks]) + reduced
        return clock

    def busiest(self) -> float:
        """Return the most chunks that leave, or enter, by one link."""
        return float(self._carried.max())

    def _weigh(self, link: Numbers, numbers: Numbers) -> Values:
        """Return for each message how many chunks share its way out, and its way in."""
        loads = np.stack([_sums(self._counts, *pair, self._across) for pair in zip(self._ends, numbers, strict=True)])
        if self._shared:
            on_link = np.stack([_sums(self._counts, end, *numbers, self._across) for end in link])
            loads = np.where(self._across, np.maximum(loads, on_link), loads)
        return loads

    def _step(self, wave: Wave) -> tuple[Wave, Any, Numbers, Any, Numbers]:
        """Return a wave, and what its price needs of it that does not depend on costs."""
        ends, ranks = self._ends[:, wave.messages], self._posts.rank[wave.posts]
        extra = None if wave.meets is None else self._meet(wave.meets)
        return wave, _repeat(ends, ranks) if wave.repeats else extra, ranks, self._reduced[wave.posts], ends

    def _meet(self, here: Numbers) -> list[Side]:
        """Return the loads where ranks exchange messages with all others of their sets."""
        posts, sets, _, sends, receives, reduces = (column[here] for column in self._posts.meeting)
        ranks, numbers = self._posts.rank[posts], self._posts.number[posts]
        link, whole = self._of[ranks], np.unique(sets, return_inverse=True)[1]
        _, cells, part = np.unique(whole * (self._of.max() + 1) + link, return_index=True, return_inverse=True)
        sides = []
        counts = (sends, receives), (receives, sends)
        inner = [_with_others(*both, part) for both in counts]
        outer = [_with_others(*both, whole) - found for both, found in zip(counts, inner, strict=True)]
        if np.min(sends) + np.min(receives) < -1 or (self._shared and np.any(outer) and np.ptp(numbers)):
            raise Irregular
        self._reduced[posts] = reduces * (inner[1] + outer[1])
        for side, crossing in enumerate(outer):
            self._carried[side] += np.bincount(link, crossing, self._carried.shape[1])
            used = np.full(len(link), -1 - posts[0])
            self._uses.append(np.stack([2 * link + side, numbers, numbers, 0 * link + 1, used])[:, crossing > 0])
        outer = [np.where(crossing > 0, np.bincount(link, crossing)[link], 0) for crossing in outer]
        for across, loads, cell, group in (
            (False, inner, np.arange(len(part)), part),
            (True, outer, part, whole[cells]),
        ):
            if np.any(loads):
                sides += [Side(cell, group, own, theirs, across) for own, theirs in (loads, loads[::-1])]
        return sides

    def _exchanged(self, side: Side, clock: Values, ranks: Numbers, chunk_bytes: float, links: Links) -> Values:
        """Return when the last message of each rank has passed that it sends to (receives from) all others.

        It lasts from when the later end has come, at the pace of the slower; both may be this rank or another.
        """
        alpha, beta = (links.alpha, links.beta[self._of[ranks]]) if side.across else (links.node_alpha, links.node_beta)
        own, theirs = (np.where(load > 0, chunk_bytes * load * beta, -np.inf) for load in (side.own, side.theirs))
        come = np.where(theirs > -np.inf, clock, -np.inf)
        last, slowest, both = (
            _of_others(_most(values, side.cell), side.group)[side.cell] for values in (come, theirs, come + theirs)
        )
        done = np.maximum.reduce([clock + own, clock + slowest, last + own, both])
        return np.where((own > -np.inf) & (last > -np.inf), alpha + done, 0)

    def _refuse_overlaps(self) -> None:
        """Refuse messages that share a link with others in some of the rounds that they are repeated in."""
        link, sent, received, times, kind = np.concatenate(self._uses, axis=1)
        order = np.lexsort((kind, times, sent, sent - received, link))
        here = np.stack([link, sent - received, sent, times, kind])[:, order]
        one, following = here[:, :-1], here[:, 1:]
        way = (one[:2] == following[:2]).all(axis=0)
        if np.any(way & (following[2] < one[2] + one[3]) & (one != following).any(axis=0)):
            raise Irregular


def _sums(values: Numbers, *keys: npt.NDArray[Any]) -> Values:
    """Return for each value the sum of those that have the same keys."""
    joint = np.zeros_like(values)
    for key in keys:
        joint = joint * (int(key.max(initial=0)) + 1) + key
    if joint.max(initial=0) > _DENSE * len(joint):  # else counting is faster than sorting
        joint = np.unique(joint, return_inverse=True)[1]
    return np.bincount(joint, values)[joint].astype(np.float64)


def _with_others(own: Numbers, others: Numbers, group: Numbers) -> Values:
    """Return how many chunks pass between each rank and the others of its group, by its own counts or by theirs."""
    there, counts = (np.bincount(group, value)[group] - value for value in (others != 0, others))
    return np.where(own < 0, counts, own * there).astype(np.float64)


def _most(values: Values, group: Numbers) -> Values:
    """Return for each group the largest of its values."""
    most = np.full(group.max() + 1, -np.inf)
    np.maximum.at(most, group, values)
    return most


def _of_others(values: Values, group: Numbers) -> Values:
    """Return for each place the largest value at the other places of its group."""
    largest = _most(values, group)[group]
    best = np.empty(group.max() + 1, np.int64)
    places = np.flatnonzero(values == largest)
    best[group[places]] = places
    rest = values.copy()
    rest[best] = -np.inf
    largest[best] = _most(rest, group)
    return largest


def _in_turn(clock: Values, ends: Numbers, costs: Values, reductions: Any) -> Values:
    """Return when each of the messages has passed that one rank receives (or sends) one after the other."""
    receives = ends[1, 0] == ends[1, 1]
    reductions = reductions * receives
    spent = np.cumsum(costs + reductions)
    before = spent - costs - reductions
    done: Values = spent - reductions + np.maximum.accumulate(np.maximum(*clock[ends]) - before)
    return done


def _repeat(ends: Numbers, ranks: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return a table with a column for each rank: who the peers are; and at which slots in it which messages are."""
    by_rank = np.argsort(ranks)
    own, peer = by_rank[np.searchsorted(ranks[by_rank], np.concatenate([ends, ends[::-1]], axis=1))]
    order = np.argsort(own, kind="stable")
    own = own[order]
    slot = np.arange(len(own)) - np.searchsorted(own, own)
    peers = np.tile(np.arange(len(ranks)), (slot.max() + 1, 1))
    peers[slot, own] = peer[order]
    return peers, slot, own, order % ends.shape[1]


def _repeated(clock: Values, table: tuple[Numbers, ...], costs: Values, reduced: Values, times: int) -> Values:
    """Let messages pass again and again: each after those of the round before that its two ends had a part in.

    The clocks take maxima and add costs. So the advance of a clock is never above the largest of the round before,
    nor below the smallest; once all are equal they stay so, and what is left of the rounds is that many advances.
    """
    peers, slot, own, messages = table
    each = np.full(peers.shape, -np.inf)
    each[slot, own] = costs[messages]
    for left in reversed(range(times)):
        before, clock = clock, (np.maximum(clock, clock[peers]) + each).max(axis=0) + reduced
        if (left % _LOOKS == 0 or left == times - 1) and np.ptp(clock - before) <= ROUNDING * clock.max():
            return clock + left * np.max(clock - before)
    return clock
