"""The price of a schedule under the alpha-beta-gamma model.

A message of b bytes takes ``alpha + beta * b`` seconds from when both of its ends have come to it, and reducing b
bytes takes ``gamma * b``. Messages that a rank sends (or receives) in one round share its link.

Source: Hockney, The communication challenge for MPP, Parallel Computing 20 (1994); Thakur et al. (2005) for gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpiagg.schedules.layout import Layout
from mpiagg.schedules.steps import Action, Collective, Round
from mpiagg.schedules.table import algorithm, schedules
from mpiagg.schedules.walk import Message, walk


@dataclass(frozen=True)
class Cluster:
    """What messages and reductions cost.

    Attributes
    ----------
    alpha : float
        Seconds for a message, however short.
    beta : float
        Seconds for each byte on a link.
    gamma : float
        Seconds for each byte reduced.
    """

    alpha: float = 2e-6
    beta: float = 1 / 10e9
    gamma: float = 1 / 20e9


def price(
    name: str, collective: Collective | str, ranks: Layout | int, nbytes: float, cluster: Cluster, *, root: int = 0
) -> float:
    """Return the seconds that an algorithm of the table takes for a vector of ``nbytes``."""
    programs = schedules(name, Collective(collective), ranks, root)
    return max(finish_times(programs, nbytes / algorithm(name).chunks(ranks), cluster))


def finish_times(programs: Sequence[Sequence[Round]], chunk_bytes: float, cluster: Cluster) -> list[float]:
    """Return when each rank is done, in seconds after all have started, with chunks of ``chunk_bytes``."""
    outward = [[_load(a_round, Action.SEND) for a_round in program] for program in programs]
    inward = [
        [_load(a_round, Action.RECEIVE, Action.REDUCE, Action.HOLD) for a_round in program] for program in programs
    ]
    clock = [0.0] * len(programs)
    latest = [0.0] * len(programs)
    for event in walk(programs):
        if isinstance(event, Message):
            load = max(outward[event.source][event.source_round], inward[event.target][event.target_round])
            both_there = max(clock[event.source], clock[event.target])
            done = both_there + cluster.alpha + cluster.beta * load * chunk_bytes
            latest[event.source] = max(latest[event.source], done)
            latest[event.target] = max(latest[event.target], done)
        else:
            reduced = _load(event.steps, Action.REDUCE, Action.HOLD) * chunk_bytes
            clock[event.rank] = max(clock[event.rank], latest[event.rank]) + cluster.gamma * reduced
    return clock


def _load(a_round: Round, *actions: Action) -> int:
    return sum(step.count for step in a_round if step.action in actions)
