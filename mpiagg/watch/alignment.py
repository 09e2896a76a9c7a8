"""The clocks of all ranks on one timeline, by what their recordings have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mpiagg.schedules import Collective
from mpiagg.watch.recordings import Recording

MEETINGS: Final = (Collective.ALLREDUCE.value, Collective.ALLGATHER.value)
"""Collectives that no rank can end before all have started: all need something of every other. A rank whose part of a
reduce-scatter is empty need not wait for anybody."""

_LEAST_SLACK: Final = 1_000  # ns

_Meeting = dict[str, tuple[int, int | None]]
"""For each boot whose ranks took part in an operation: when the last started, and when the first ended, if any did."""


@dataclass(frozen=True)
class Offset:
    """What must be added to a rank's clock.

    Attributes
    ----------
    ns : int
    within : int or None
        By how many ns it may be wrong; None, if it goes by the time of day, which may be wrong by anything.
    """

    ns: int
    within: int | None


def align(recordings: Sequence[Recording]) -> dict[int, Offset]:
    """Return for each rank what must be added to its clock, so that all are those of the lowest rank.

    Processes with the same boot id have one clock. Between the clocks of ranks i and j, every all-reduce and allgather
    bounds the offset, since no rank ends before the last has started:
    ``start_i - end_j <= offset_j - offset_i <= end_i - start_j``. So a round trip bounds it in F. Cristian,
    "Probabilistic clock synchronization" (1989). The bounds of all operations are intersected, as intervals are in
    K. Marzullo and S. Owicki, "Maintaining the time in a distributed system" (1983); also those that follow by way of
    other clocks. The middle is taken, which may be wrong by half the width. Then no operation ends before all ranks
    have started it.

    All clocks are taken to run at one rate. If they do not, and no offsets satisfy all bounds, the bounds are loosened
    until some do. A clock that no operation bounds from both sides is placed by the time of day.
    """
    clocks: dict[str, int] = {}  # when they showed zero, by the time of day
    for recording in sorted(recordings, key=lambda each: each.rank):
        clocks.setdefault(recording.boot, recording.wall_ns - recording.clock_ns)
    meetings = _meetings(recordings)
    placed: dict[str, Offset] = {}
    for boot, zero in clocks.items():
        if boot in placed:
            continue
        base = zero - next(iter(clocks.values()))
        bounded = not placed
        for other, (low, high) in _bounds(meetings, boot).items():
            placed[other] = Offset(base + (low + high) // 2, (high - low + 1) // 2 if bounded else None)
    return {recording.rank: placed[recording.boot] for recording in recordings}


def _meetings(recordings: Sequence[Recording]) -> list[_Meeting]:
    found: dict[tuple[str, int, str, int], _Meeting] = {}
    for recording in recordings:
        for each in recording.operations:
            if each.channel is None or each.collective not in MEETINGS or each.nbytes == 0:
                continue
            meeting = found.setdefault((each.channel, each.order, each.collective, each.nbytes), {})
            start, end = meeting.get(recording.boot, (each.start, None))
            ends = [time for time in (end, each.end if each.state == "done" else None) if time is not None]
            meeting[recording.boot] = (max(start, each.start), min(ends, default=None))
    return [meeting for meeting in found.values() if len(meeting) > 1]


def _bounds(meetings: list[_Meeting], reference: str) -> dict[str, tuple[int, int]]:
    """Return the least and the greatest offset from the reference, for those clocks that have both."""
    slack = 0
    while True:
        found = _bounds_within(meetings, reference, slack)
        if found is not None:
            return found
        slack = 2 * slack or _LEAST_SLACK


def _bounds_within(meetings: list[_Meeting], reference: str, slack: int) -> dict[str, tuple[int, int]] | None:
    """Return the bounds, if an operation may end so long before it has started everywhere; None if they contradict."""
    low, high = {reference: 0}, {reference: 0}
    boots = {boot for meeting in meetings for boot in meeting}
    for _ in range(len(boots) + 1):  # a bound goes by way of every other clock at most
        before = dict(low), dict(high)
        for meeting in meetings:
            starts = [low[boot] + start for boot, (start, _) in meeting.items() if boot in low]
            ends = [high[boot] + end for boot, (_, end) in meeting.items() if boot in high and end is not None]
            for boot, (start, end) in meeting.items():
                if ends:
                    bound = min(ends) - start + slack
                    high[boot] = min(high.get(boot, bound), bound)
                if starts and end is not None:
                    bound = max(starts) - end - slack
                    low[boot] = max(low.get(boot, bound), bound)
        both = {boot: (low[boot], high[boot]) for boot in low if boot in high}
        if any(least > greatest for least, greatest in both.values()):
            return None
        if (low, high) == before:
            return both
    return None
