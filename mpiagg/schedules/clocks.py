"""The clocks of all ranks at once: bulks are priced by the rules of ``model``, each in a few array operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mpiagg.schedules.bulk import Around, Bulk, Everyone, Exchange, InTurn, exchange
from mpiagg.schedules.cluster import Links, node_numbers
from mpiagg.schedules.layout import Layout

Numbers = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

ROUNDING: Final = 8 * float(np.finfo(np.float64).eps)
"""By how much of the clock advances may differ that are the same."""

_LOOKS: Final = 16  # rounds between two looks at whether they go on alike
_DENSE: Final = 8  # so many times as many keys as values may be counted


class Load(NamedTuple):
    """For each message: whether it passes between links, and how many chunks share its way out, and its way in."""

    across: npt.NDArray[np.bool_]
    out: Values
    into: Values


class Clocks:
    """Bulks, and the loads that they put on links.

    Parameters
    ----------
    bulks : sequence of Bulk
        What the ranks do.
    layout : Layout
        Where they are.
    links : Links
        Which links they have. What these cost is asked for with each price: the loads do not depend on it.
    """

    def __init__(self, bulks: Sequence[Bulk], layout: Layout, links: Links) -> None:
        self._bulks, self._of, self._size = bulks, links.of, layout.size
        self._node = node_numbers(layout)
        self._on_link = np.bincount(links.of)
        self._apart = len(self._on_link) == self._size
        self._loads = self._weigh()

    def run(self, chunk_bytes: float, links: Links, gamma: float) -> Values:
        """Return when each rank is done, in seconds after all have started, with chunks of ``chunk_bytes``."""
        clock = np.zeros(self._size)
        loads = iter(self._loads)
        reduction = gamma * chunk_bytes
        for bulk in self._bulks:
            if isinstance(bulk, Everyone):
                self._everyone(clock, bulk, chunk_bytes, links, reduction)
                continue
            messages = _messages(bulk)
            costs = _costs(messages, next(loads), chunk_bytes, links)
            if isinstance(bulk, Around):
                _around(clock, bulk, costs, reduction)
            elif isinstance(bulk, InTurn):
                _in_turn(clock, bulk, costs, reduction)
            else:
                _exchange(clock, messages, costs, reduction)
        return clock

    def busiest(self) -> float:
        """Return the most chunks that leave, or enter, by one link."""
        total = np.zeros((2, len(self._on_link)))
        for bulk in self._bulks:
            if isinstance(bulk, Everyone):
                group = self._node if bulk.in_node else np.zeros_like(self._of)
                total += bulk.chunks * np.bincount(self._of, np.bincount(group)[group] - self._on_link[self._of])
                continue
            messages = _messages(bulk)
            ends = self._of[messages.sources], self._of[messages.targets]
            counts = messages.counts * (ends[0] != ends[1]) * _times(bulk)
            total += [np.bincount(end, counts, len(self._on_link)) for end in ends]
        return float(total.max())

    def _weigh(self) -> list[Load]:
        """Find which messages share their way; the rounds with messages are numbered for that."""
        number = np.zeros(self._size, np.int64)
        found = []
        for bulk in self._bulks:
            if isinstance(bulk, Everyone):
                number += 1
                continue
            # In an exchange that is repeated the numbers are others each time, and nothing else has them.
            messages = _messages(bulk)
            sources, targets, counts, _ = messages
            turns = np.arange(len(sources)) if isinstance(bulk, InTurn) else 0
            found.append((sources, targets, counts, number[sources], number[targets] + turns))
            number[np.union1d(sources, targets)] += _times(bulk)
            if isinstance(bulk, InTurn):
                number[targets[:1]] += len(sources) - 1
        if not found:
            return []
        sources, targets, counts, sent, received = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        ends = self._of[sources], self._of[targets]
        across = ends[0] != ends[1]
        out, into = _sums(counts, sources, sent, across), _sums(counts, targets, received, across)
        if not self._apart:
            out, into = (
                np.where(across, np.maximum(own, _sums(counts, end, sent, received, across)), own)
                for own, end in zip((out, into), ends, strict=True)
            )
        cuts = np.cumsum([len(arrays[0]) for arrays in found])[:-1]
        return [Load(*arrays) for arrays in zip(*(np.split(array, cuts) for array in (across, out, into)), strict=True)]

    def _everyone(self, clock: Values, bulk: Everyone, chunk_bytes: float, links: Links, reduction: float) -> None:
        """Let each rank exchange with all: a pair is done when the later of the two has come, at the slower's pace."""
        group = self._node if bulk.in_node else self._of
        size = np.bincount(group)[group]
        alpha, beta = (links.alpha, links.beta[self._of]) if self._apart else (links.node_alpha, links.node_beta)
        cost = alpha + chunk_bytes * bulk.chunks * beta * (size - 1)
        done = np.where(size > 1, _latest(clock, group)[group] + cost, clock)
        peers = size - 1
        if not bulk.in_node and len(self._on_link) > 1:
            weight = chunk_bytes * bulk.chunks * links.beta * self._on_link * (self._size - self._on_link)
            latest = _latest(clock, self._of)
            come = np.maximum(_of_others(latest + weight), _of_others(latest) + weight)
            own = np.maximum(_of_others(weight), weight)
            np.maximum(done, links.alpha + np.maximum(come[self._of], clock + own[self._of]), out=done)
            peers = np.full_like(size, self._size - 1)
        clock[:] = done + (reduction * bulk.chunks * peers if bulk.reduces else 0)


def _messages(bulk: Exchange | Around | InTurn) -> Exchange:
    if isinstance(bulk, Exchange):
        return bulk
    return bulk.one_round() if isinstance(bulk, Around) else exchange(*bulk, reduces=True)


def _times(bulk: Exchange | Around | InTurn) -> int:
    return len(bulk.ranks) - 1 if isinstance(bulk, Around) else 1


def _sums(values: Numbers, *keys: npt.NDArray[Any]) -> Values:
    """Return for each value the sum of those that have the same keys."""
    joint = np.zeros_like(values)
    for key in keys:
        joint = joint * (int(key.max(initial=0)) + 1) + key
    if joint.max(initial=0) > _DENSE * len(joint):  # else counting is faster than sorting
        joint = np.unique(joint, return_inverse=True)[1]
    return np.bincount(joint, values)[joint].astype(np.float64)


def _costs(messages: Exchange, load: Load, chunk_bytes: float, links: Links) -> Values:
    beta = links.beta[links.of]
    slower = np.maximum(load.out * beta[messages.sources], load.into * beta[messages.targets])
    within = links.node_beta * np.maximum(load.out, load.into)
    return np.where(load.across, links.alpha + chunk_bytes * slower, links.node_alpha + chunk_bytes * within)


def _exchange(clock: Values, messages: Exchange, costs: Values, reduction: float) -> None:
    done = np.maximum(clock[messages.sources], clock[messages.targets]) + costs
    np.maximum.at(clock, messages.sources, done)
    np.maximum.at(clock, messages.targets, done)
    if messages.reduces:
        clock += reduction * np.bincount(messages.targets, messages.counts, len(clock))


def _around(clock: Values, bulk: Around, costs: Values, reduction: float) -> None:
    """Let messages go around: each is done after those of the round before that its two ends had a part in.

    Their clocks take maxima and add costs. So the advance of a clock is never above the largest of the round before,
    nor below the smallest; once all are equal they stay so, and what is left of the rounds is that many advances.
    """
    ranks, width, rounds = bulk.ranks.ravel(), bulk.ranks.shape[1], _times(bulk)
    if not rounds:
        return
    reduced = reduction * bulk.chunks * bulk.reduces
    done = np.maximum(clock[ranks], np.roll(clock[ranks], -width)) + costs
    each = costs + reduced
    for left in reversed(range(rounds - 1)):
        beside = np.concatenate([done[-width:], done, done[:width]])
        after = np.maximum(np.maximum(beside[: -2 * width], beside[2 * width :]), done) + each
        before, done = done, after
        if left % _LOOKS == 0 and np.ptp(after - before) <= ROUNDING * done.max():
            done += left * np.max(after - before)
            break
    clock[ranks] = np.maximum(np.roll(done, width), done) + reduced


def _in_turn(clock: Values, bulk: InTurn, costs: Values, reduction: float) -> None:
    for source, target, cost in zip(bulk.sources.tolist(), bulk.targets.tolist(), costs.tolist(), strict=True):
        clock[source] = max(clock[source], clock[target]) + cost
        clock[target] = clock[source] + reduction


def _latest(clock: Values, group: Numbers) -> Values:
    """Return for each group the last of its ranks' clocks."""
    latest = np.zeros(group.max() + 1)
    np.maximum.at(latest, group, clock)
    return latest


def _of_others(values: Values) -> Values:
    """Return for each place the largest value at the other places."""
    best = values.argmax()
    largest = np.full_like(values, values[best])
    largest[best] = np.delete(values, best).max()
    return largest
