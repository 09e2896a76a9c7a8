"""The clocks of all ranks at once: waves of messages are priced by the rules of ``model``, in array operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mpiagg.schedules.cluster import Links, Noise
from mpiagg.schedules.loads import Loads, Side
from mpiagg.schedules.networks import Values
from mpiagg.schedules.posts import Posts
from mpiagg.schedules.ranks import Numbers
from mpiagg.schedules.waves import Wave, Waves

ROUNDING: Final = 8 * float(np.finfo(np.float64).eps)
"""By how much of the clock advances may differ that are the same."""

MOST_ROUNDS: Final = 4096
MOST_NOISY_ROUNDS: Final = 512
"""How many repeated rounds are carried out, without noise and with it, where ranks do not come to repeat themselves."""


class Costs(NamedTuple):
    """What messages cost: latencies, their ends' overheads, and what links or ranks take; and which are waited for."""

    latency: Any
    overhead: Any
    at_ends: Values
    waits: npt.NDArray[np.bool_]


class Ends(NamedTuple):
    """When a message is done at one of its ends: so many seconds after this end, and after its peer, have come to it.

    The later counts. The sender of a short message does not wait for its peer; a receiver who comes late finds it.
    """

    own: Values
    peer: Values

    @classmethod
    def of(cls, costs: Costs, chance: Chance) -> tuple[Ends, Ends]:
        """Return it for the senders and for the receivers of messages."""
        passing = chance.longer(costs.latency + costs.at_ends)
        sent = np.where(costs.waits, passing, costs.overhead + costs.at_ends)
        found = np.where(costs.waits, passing, costs.overhead)
        return cls(sent, np.where(costs.waits, passing, -np.inf)), cls(found, passing)


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
        drawn = np.maximum(self._random.random(costs.shape), np.finfo(np.float64).tiny)
        largest = -np.log(-np.expm1(np.log(drawn) / np.maximum(1, messages)))
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
    overlapping : bool
        Whether repeated rounds may share links with others that are not repeated as often.

    Raises
    ------
    Irregular
        If posts that stand for many rounds do not fit together, or share links with others; if each stands for itself,
        the schedule is wrong.
    """

    def __init__(self, posts: Posts, links: Links, *, overlapping: bool = False) -> None:
        self._size, self._posts, self._eager, self._beta = len(links.of), posts, links.eager, links.beta
        waves = Waves(posts, self._size)
        self._loads = Loads(posts, waves, links)
        self._ends, self._times = posts.rank[waves.ends], posts.times[waves.ends[0]]
        reduced = posts.reduced
        self._reduced: Values = np.bincount(waves.post, reduced, len(posts.rank)).astype(np.float64)
        turns = np.flatnonzero(posts.in_turn)  # where one message is reduced before the next one comes
        self._reduced[turns] = reduced[posts.start[turns + 1] - 1] if len(turns) else 0
        self._at_target: Values = reduced[waves.received].astype(np.float64)
        self._sides: list[Side] = []
        self._steps = [self._step(wave) for wave in waves.waves]
        if not overlapping:
            self._loads.refuse_overlaps()

    def run(
        self,
        chunk_bytes: float,
        gamma: float = 0.0,
        *,
        latency: float = 1.0,
        chance: Chance | None = None,
        start: Values | None = None,
        buffered: bool = False,
    ) -> Values:
        """Return when each rank is done, in seconds, with chunks of ``chunk_bytes``.

        Reducing a byte takes ``gamma``, and latencies are so many times as long as they are. All ranks ``start`` at 0,
        if nothing else is said, or by chance. Where messages are ``buffered``, no sender waits for its receiver.
        """
        eager = math.inf if buffered else self._eager

        def costs(of: Loads | Side) -> Costs:
            waits = of.chunks * chunk_bytes >= eager
            at_ends = np.maximum(chunk_bytes * of.pace, latency * of.occupied)
            return Costs(latency * of.latency, latency * of.overhead, at_ends, waits)

        met = [costs(side) for side in self._sides]
        return self._run(costs(self._loads), met, gamma * chunk_bytes, chance or Chance(), start)

    @cached_property
    def rounds(self) -> int:
        """The most messages that follow one another."""

        def unit(of: Loads | Side) -> Costs:
            return Costs(1.0, 0.0, np.zeros_like(of.pace), np.ones(of.chunks.shape, np.bool_))

        clocks = self._run(unit(self._loads), [unit(side) for side in self._sides], 0, Chance())
        return int(np.rint(clocks.max()))

    def busiest(self) -> float:
        """Return the most chunks that leave, or enter, by one link."""
        return float(self._loads.carried.max())

    def least(self) -> float:
        """Return how many seconds the busiest link takes for a byte of each of its chunks, whenever they are sent."""
        return float((self._loads.carried * self._beta).max())

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

    def _run(
        self, costs: Costs, met: Sequence[Costs], reduction: float, chance: Chance, start: Values | None = None
    ) -> Values:
        clock: Values = chance.starts(self._size) if start is None else start.copy()
        latest = clock.copy()
        each = [np.broadcast_to(cost, costs.at_ends.shape) for cost in costs]
        for wave, extra, ranks, ends in self._steps:
            reduced = self._reduced[wave.posts] * reduction
            if wave.meets is not None:
                passed = [_exchanged(self._sides[index], met[index], clock[ranks], chance) for index in extra]
                clock[ranks] = np.maximum.reduce([clock[ranks], *passed]) + reduced
                continue
            these = Costs(*(cost[wave.messages] for cost in each))
            if wave.repeats:
                times = int(self._times[wave.messages][0])
                clock[ranks] = _repeated(clock[ranks], extra, these, reduced, times=times, chance=chance)
                continue
            done: Sequence[Values]
            if wave.in_turn:
                done = _in_turn(clock, ends, Ends.of(these, chance), self._at_target[wave.messages] * reduction)
            else:
                done = [
                    np.maximum(clock[own] + after.own, clock[peer] + after.peer)
                    for own, peer, after in zip(ends, ends[::-1], Ends.of(these, chance), strict=True)
                ]
            for end, when in zip(ends, done, strict=True):
                np.maximum.at(latest, end, when)
            clock[ranks] = np.maximum(clock[ranks], latest[ranks]) + reduced
        return clock


def _exchanged(side: Side, costs: Costs, clock: Values, chance: Chance) -> Values:
    """Return when the last message of each rank has passed that it sends to (receives from) all others.

    It lasts from when the later end has come, at the pace of the slower; both may be this rank or another.
    """
    own, theirs = np.where(side.there, costs.at_ends, -np.inf)
    come = np.where(side.there[1], clock, -np.inf)
    last, slowest, both = (
        _of_others(_most(values, side.cell), side.group)[side.cell] for values in (come, theirs, come + theirs)
    )
    at_once = clock + np.maximum(own, slowest)
    from_others = np.maximum(last + own, both)
    done = costs.latency + np.maximum(at_once, from_others)
    if side.sends:
        done = np.where(costs.waits, done, costs.overhead + at_once)
    else:
        done = np.where(costs.waits, done, np.maximum(costs.latency + from_others, costs.overhead + clock))
        # A message is late once, where it arrives.
        senders = np.bincount(side.cell, side.there[1])
        done = chance.longer(done, np.bincount(side.group, senders)[side.group[side.cell]] - senders[side.cell])
    return np.where(side.there[0] & (last > -np.inf), done, 0)


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


def _in_turn(clock: Values, ends: Numbers, after: tuple[Ends, Ends], reductions: Values) -> list[Values]:
    """Return when each of the messages is done, at its sender and at its receiver, of which one is the same for all.

    That one sends or receives one after the other; what it receives is reduced before the next message.
    """
    receives = int(ends[1, 0] == ends[1, 1])
    its, peers = after[receives], after[1 - receives]
    reductions, come = reductions * receives, clock[ends[1 - receives]]
    spent = np.cumsum(its.own + reductions)
    start = clock[ends[receives, 0]]
    gone_on = spent + np.maximum(start, np.maximum.accumulate(come + its.peer + reductions - spent))
    theirs = np.maximum(come + peers.own, np.append(start, gone_on[:-1]) + peers.peer)
    done = [theirs, gone_on - reductions]
    return done if receives else done[::-1]


def _repeat(ends: Numbers, ranks: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return a table with a column for each rank: who the peers are; and at which slots in it which ends are.

    The ends are those of the senders, and then those of the receivers.
    """
    by_rank = np.argsort(ranks)
    own, peer = by_rank[np.searchsorted(ranks[by_rank], np.concatenate([ends, ends[::-1]], axis=1))]
    order = np.argsort(own, kind="stable")
    own = own[order]
    slot = np.arange(len(own)) - np.searchsorted(own, own)
    peers = np.tile(np.arange(len(ranks)), (slot.max() + 1, 1))
    peers[slot, own] = peer[order]
    return peers, slot, own, order


def _repeated(
    clock: Values, table: tuple[Numbers, ...], costs: Costs, reduced: Values, *, times: int, chance: Chance
) -> Values:
    """Let messages pass again and again: each after those of the round before that its two ends had a part in.

    The clocks take maxima and add costs, which commutes with adding a number to all of them. So once all clocks are
    what they were some rounds ago, but for one number, such a cycle comes again and again, and what is left of the
    rounds is that many cycles. Cycles are looked for by comparing each round with the last one whose number is a power
    of two (Brent, An improved Monte Carlo factorization algorithm, BIT 20, 1980). If none is found in many rounds, the
    last rank is taken to go on as it did in the later half of them.
    """
    peers, slot, own, order = table
    after_own, after_peer = np.full(peers.shape, -np.inf), np.full(peers.shape, -np.inf)
    most = MOST_NOISY_ROUNDS if chance.jitter else MOST_ROUNDS
    halfway, done, since, earlier = 0.0, 0, 0, clock
    for carried_out in range(1, most + 1):
        if chance.jitter or done == 0:
            both = Ends.of(costs, chance)
            after_own[slot, own] = np.concatenate([end.own for end in both])[order]
            after_peer[slot, own] = np.concatenate([end.peer for end in both])[order]
        clock = np.maximum(clock + after_own, clock[peers] + after_peer).max(axis=0) + reduced
        done += 1
        if carried_out == most // 2:
            halfway = clock.max()
        if not chance.jitter:
            moved = clock - earlier
            if np.ptp(moved) <= ROUNDING * clock.max():
                cycle = done - since
                cycles = (times - done) // cycle
                clock, done = clock + cycles * moved.max(), done + cycles * cycle
            elif done >= 2 * since:
                earlier, since = clock, done
        if done == times:
            return clock
    later: Values = clock + (times - done) * (clock.max() - halfway) / (most - most // 2)
    return later
