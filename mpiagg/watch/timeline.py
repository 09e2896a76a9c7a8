"""What the recordings of all ranks say together: when what happened, and who kept the others waiting."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from mpiagg.watch.alignment import MEETINGS, align
from mpiagg.watch.recordings import RecordedOperation, RecordedRound, Recording

COMPUTING: Final = "computing"
PACKING: Final = "packing"
WAITING: Final = "waiting"
_IN_A_ROUND: Final = ("posting", WAITING, "reducing")


class Late(NamedTuple):
    """The last rank to enter a collective, and by how many ns after the last but one."""

    rank: int
    ns: int


class Stuck(NamedTuple):
    """An operation that is still running, or has failed: on which ranks, and which of its communicator's are missing.

    A rank is missing that has not entered it.
    """

    operation: RecordedOperation
    ranks: list[int]
    missing: list[int]


class Timeline:
    """Recordings on one timeline, which begins with the first operation.

    Parameters
    ----------
    recordings : sequence of Recording
        Of different ranks of one job; at least one.

    Attributes
    ----------
    recordings : sequence of Recording
    offsets : dict
        For each rank, what is added to its clock.
    names : dict
        Short names of communicators, by channel: ``"comm 0"`` has the first operation of all; None is for what is of
        none.
    last : dict
        Who was the last to enter, by channel and order, for collectives that no rank can end before all have started.
        Only those that all ranks of the communicator, as far as there are recordings, still know.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = recordings
        self.offsets = align(recordings)
        self._origin = min(self._at(each, each.span[0]) for each in recordings)
        entered = [(self._at(each, one.start), each.rank, one) for each in recordings for one in each.operations]
        entered.sort(key=lambda entry: entry[:2])
        channels = dict.fromkeys(operation.channel for _, _, operation in entered if operation.channel is not None)
        self.names: dict[str | None, str] = {None: "some ranks"}
        self.names.update({channel: f"comm {number}" for number, channel in enumerate(channels)})
        self._members: dict[str, dict[int, int]] = defaultdict(dict)  # of each channel: how far each rank has come
        entries: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        for time, rank, operation in entered:
            if operation.channel is None:
                continue
            far = self._members[operation.channel]
            far[rank] = max(operation.order, far.get(rank, 0))
            if operation.collective in MEETINGS and operation.nbytes:
                entries[operation.channel, operation.order].append((time, rank))
        self.last: dict[tuple[str | None, int], Late] = {
            key: Late(times[-1][1], times[-1][0] - times[-2][0])
            for key, times in entries.items()
            if len(times) == len(self._members[key[0]]) > 1
        }

    @property
    def length(self) -> float:
        """How long the timeline is, in us."""
        return max(self.us(each, each.span[1]) for each in self.recordings)

    def us(self, recording: Recording, ns: int) -> float:
        """Return a time of a rank's clock in us since the beginning of the timeline."""
        return (self._at(recording, ns) - self._origin) / 1000

    def _at(self, recording: Recording, ns: int) -> int:
        return ns + self.offsets[recording.rank].ns

    def groups(self) -> list[list[int]]:
        """Return the ranks that communicators connect, as far as is recorded: one group, unless there are several runs.

        Ranks that have no operation of a communicator's are in none.
        """
        groups: list[set[int]] = []
        for members in self._members.values():
            met = [group for group in groups if group & members.keys()]
            groups = [group for group in groups if group not in met] + [set(members).union(*met)]
        return sorted(sorted(group) for group in groups)

    def stuck(self) -> list[Stuck]:
        """Return the operations that still run on some ranks, or have failed and were the last to begin there."""
        found: dict[tuple[str, int, str], Stuck] = {}
        for recording in self.recordings:
            last = max(recording.operations, key=lambda one: one.start, default=None)
            for each in recording.operations:
                far = {} if each.channel is None else self._members[each.channel]
                if each.state != "running" and not (each.state == "failed" and each is last):
                    continue
                missing = sorted(rank for rank, order in far.items() if order < each.order)
                key = (each.channel or f"rank {recording.rank} and others", each.order, each.state)
                stuck = found.setdefault(key, Stuck(each, [], missing))
                stuck.ranks.append(recording.rank)
        return list(found.values())

    def earlier(self, ns: int) -> dict[int, int]:
        """Return the ranks whose recordings were written more than so long before the newest, and how long before."""
        written = {each.rank: self._at(each, each.clock_ns) for each in self.recordings}
        newest = max(written.values())
        return {rank: newest - time for rank, time in written.items() if newest - time > ns}


def parts(a_round: RecordedRound, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield what a round was spent on, from when and until when; a round that has not ended ends with its operation."""
    times = a_round.times if len(a_round.times) == 4 else (*a_round.times, end)
    if a_round.name.startswith("round"):
        for name, (start, stop) in zip(_IN_A_ROUND, pairwise(times), strict=False):
            yield name, start, stop
    else:
        yield PACKING, times[0], times[-1]


def computing(operations: Sequence[tuple[int, int]], until: int) -> Iterator[tuple[int, int]]:
    """Yield the gaps between operations, given by when they started and ended, in the order in which they started."""
    reached = operations[0][0] if operations else until
    for start, end in [*operations, (until, until)]:
        if start > reached:
            yield reached, start
        reached = max(reached, end)


def spent(recording: Recording) -> Counter[str]:
    """Return how many ns a rank spent on what: computing, that is in no operation, and on each part of rounds."""
    spans = sorted((each.start, recording.end_of(each)) for each in recording.operations)
    found = Counter({COMPUTING: sum(end - start for start, end in computing(spans, recording.clock_ns))})
    for each in recording.operations:
        for a_round in each.rounds:
            for name, start, end in parts(a_round, recording.end_of(each)):
                found[name] += end - start
    return found
