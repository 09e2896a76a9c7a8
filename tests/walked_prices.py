"""What schedules cost, by a walk through them, message by message: the model that prices are held to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mpiagg.schedules.cluster import Cluster, Links
from mpiagg.schedules.layout import Layout
from mpiagg.schedules.steps import Round
from mpiagg.schedules.walk import Message, walk


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
