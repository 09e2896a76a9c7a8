"""The clocks of all ranks at once: waves of messages are priced by the rules of ``model``, in array operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mpiagg.schedules.cluster import Links, Noise
from mpiagg.schedules.loads import Loads, Side
from mpiagg.schedules.networks import Values
from mpiagg.schedules.posts import Posts
from mpiagg.schedules.ranks import Numbers
from mpiagg.schedules.waves import Wave, Waves

ROUNDING: Final = 8 * float(np.finfo(np.float64).eps)
"""By how much of the clock advances may differ that are the same."""

MOST_ROUNDS: Final = 512
"""How many repeated rounds are carried out with noise; the others advance as those of the later half of these do."""

_LOOKS: Final = 16  # rounds between two looks at whether they go on alike


class Chance:
    """The random times of a run: none, without noise.

    Parameters
    ----------
    noise : Noise
    seed : int
        Equal seeds have equal times.
    """

    def __init__(self, noise: Noise = Noise(), seed: int = 0) -> None:  # noqa: B008 - cannot be changed
        self._noise, self._random = noise, np.random.default_rng(seed)
        self.jitter = noise.jitter > 0

    def starts(self, size: int) -> Values:
        """Return when each rank starts."""
        if not self._noise.stragglers:
            return np.zeros(size)
        return np.where(self._random.permutation(size) < self._noise.stragglers, self._noise.delay, 0.0)

    def longer(self, costs: Values, messages: Any = 1) -> Values:
        """Return what costs become; each is of so many messages at the same time, of which the slowest counts."""
        if not self.jitter:
            return costs
        # Of m random numbers that are all below x with the probability F(x)^m, the largest is drawn at once.
        largest = -np.log1p(-(self._random.random(costs.shape) ** (1 / np.maximum(1, messages))))
        found: Values = costs + self._noise.jitter * largest
        return found


class Clocks:
    """What all ranks post, and how long it takes.

    Parameters
    ----------
    posts : Posts
        What the ranks post.
    links : Links
        Which links they have, and what these cost.

    Raises
    ------
    Irregular
        If posts that stand for many rounds do not fit together, or share links with others; if each stands for itself,
        the schedule is wrong.
    """

    def __init__(self, posts: Posts, links: Links) -> None:
        self._size, self._posts = len(links.of), posts
        waves = Waves(posts, self._size)
        self._loads = Loads(posts, waves, links)
        self._ends, self._times = posts.rank[waves.ends], posts.times[waves.ends[0]]
        reduced = posts.reduced
        self._reduced: Values = np.bincount(waves.post, reduced, len(posts.rank)).astype(np.float64)
        turns = np.flatnonzero(posts.in_turn)  # where one message is reduced before the next one comes
        self._reduced[turns] = reduced[posts.start[turns + 1] - 1] if len(turns) else 0
        self._at_target = reduced[waves.received]
        self._sides: list[Side] = []
        self._steps = [self._step(wave) for wave in waves.waves]
        self._loads.refuse_overlaps()

    def run(
        self, chunk_bytes: float, gamma: float = 0.0, *, latency: float = 1.0, chance: Chance | None = None
    ) -> Values:
        """Return when each rank is done, in seconds after all have started, with chunks of ``chunk_bytes``.

        Reducing a byte takes ``gamma``, and latencies are so many times as long as they are.
        """
        loads = self._loads
        costs = latency * loads.latency + np.maximum(chunk_bytes * loads.pace, latency * loads.occupied)
        met = [
            (latency * side.latency, np.maximum(chunk_bytes * side.pace, latency * side.occupied))
            for side in self._sides
        ]
        return self._run(costs, met, gamma * chunk_bytes, chance or Chance())

    def rounds(self) -> int:
        """Return the most messages that follow one another."""
        met = [(1.0, np.zeros_like(side.pace)) for side in self._sides]
        return int(np.rint(self._run(np.ones_like(self._loads.latency), met, 0, Chance()).max()))

    def busiest(self) -> float:
        """Return the most chunks that leave, or enter, by one link."""
        return float(self._loads.carried.max())

    def crossing(self) -> tuple[float, ...]:
        """Return how many chunks cross each level: the links of nodes, and those of the network."""
        return tuple(self._loads.crossing.tolist())

    def _step(self, wave: Wave) -> tuple[Wave, Any, Numbers, Numbers]:
        """Return a wave, and what is needed of it that does not depend on costs."""
        ends, ranks = self._ends[:, wave.messages], self._posts.rank[wave.posts]
        extra: Any = None
        if wave.meets is not None:
            sides, received = self._loads.with_all(wave.meets)
            self._reduced[wave.posts] = self._posts.meeting.reduces[wave.meets] * received
            extra = range(len(self._sides), len(self._sides) + len(sides))
            self._sides += sides
        elif wave.repeats:
            extra = _repeat(ends, ranks)
        return wave, extra, ranks, ends

    def _run(self, costs: Values, met: Sequence[tuple[float, Values]], reduction: float, chance: Chance) -> Values:
        clock: Values
        clock, latest = chance.starts(self._size), np.zeros(self._size)
        for wave, extra, ranks, ends in self._steps:
            cost = costs[wave.messages]
            reduced = self._reduced[wave.posts] * reduction
            if wave.meets is not None:
                passed = [_exchanged(self._sides[index], met[index], clock[ranks], chance) for index in extra]
                clock[ranks] = np.maximum.reduce([clock[ranks], *passed]) + reduced
            elif wave.repeats:
                times = int(self._times[wave.messages[0]])
                clock[ranks] = _repeated(clock[ranks], extra, cost, reduced, times=times, chance=chance)
            else:
                cost = chance.longer(cost)
                if wave.in_turn:
                    done = _in_turn(clock, ends, cost, reduction * self._at_target[wave.messages])
                else:
                    done = np.maximum(clock[ends[0]], clock[ends[1]]) + cost
                np.maximum.at(latest, ends[0], done)
                np.maximum.at(latest, ends[1], done)
                clock[ranks] = np.maximum(clock[ranks], latest[ranks]) + reduced
        return clock


def _exchanged(side: Side, costs: tuple[float, Values], clock: Values, chance: Chance) -> Values:
    """Return when the last message of each rank has passed that it sends to (receives from) all others.

    It lasts from when the later end has come, at the pace of the slower; both may be this rank or another.
    """
    latency, at_ends = costs
    own, theirs = np.where(side.there, at_ends, -np.inf)
    come = np.where(side.there[1], clock, -np.inf)
    last, slowest, both = (
        _of_others(_most(values, side.cell), side.group)[side.cell] for values in (come, theirs, come + theirs)
    )
    done = latency + np.maximum.reduce([clock + own, clock + slowest, last + own, both])
    own_cell = np.bincount(side.cell)
    messages = np.bincount(side.group, own_cell)[side.group[side.cell]] - own_cell[side.cell]
    return np.where(side.there[0] & (last > -np.inf), chance.longer(done, messages), 0)


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


def _repeated(
    clock: Values, table: tuple[Numbers, ...], costs: Values, reduced: Values, *, times: int, chance: Chance
) -> Values:
    """Let messages pass again and again: each after those of the round before that its two ends had a part in.

    The clocks take maxima and add costs. So the advance of a clock is never above the largest of the round before,
    nor below the smallest; once all are equal they stay so, and what is left of the rounds is that many advances.
    """
    peers, slot, own, messages = table
    each = np.full(peers.shape, -np.inf)
    each[slot, own] = costs[messages]
    halfway = clock
    for left in reversed(range(times)):
        done = times - left
        if chance.jitter:
            each[slot, own] = chance.longer(costs)[messages]
        before, clock = clock, (np.maximum(clock, clock[peers]) + each).max(axis=0) + reduced
        if chance.jitter:
            halfway = clock if done == MOST_ROUNDS // 2 else halfway
            if done == MOST_ROUNDS:
                clock += left * (clock - halfway).mean() / (MOST_ROUNDS // 2)
                return clock
        elif (left % _LOOKS == 0 or left == times - 1) and np.ptp(clock - before) <= ROUNDING * clock.max():
            return clock + left * np.max(clock - before)
    return clock
