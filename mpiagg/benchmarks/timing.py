"""How a benchmark measures: contenders take turns, so that whatever disturbs the machine disturbs all of them.

At a turn, all ranks leave a barrier and make several calls, one right after the other. The time of such a block is
that of the slowest rank, divided by the calls in it. So calls may overlap where the collective lets ranks run ahead
(a broadcast's root need not wait for the others).

Every contender has the same share of the time, and fills it at its own pace: a slow one makes fewer calls in a block,
and where one call is too long for a block, it takes fewer turns. What a neighbour has left behind, in the caches above
all, must not count: a block of many calls begins with a few that are not timed, and in what order contenders take
their turns changes from turn to turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

SecondsArray = npt.NDArray[np.float64]

Laps = tuple[float, ...]
"""Seconds by the processor's clock, and by a device's where there is one."""

BLOCKS: Final = 20
"""How many turns each contender takes, at most: enough for a median."""

FEWEST_BLOCKS: Final = 3
"""How many it takes at least, however long they last."""


UNTIMED: Final = 3
"""How many calls begin a block and are not timed, at most: a quarter as many as are timed, and at least one. The caches
hold what the last contender left, and after a block of Gloo's the first calls take some ten microseconds longer."""


class Pace(NamedTuple):
    """How long to measure.

    Attributes
    ----------
    iterations, warmup : int
        Calls of each contender, and calls before them; at most.
    seconds : float
        For all contenders together, about.
    singly : bool
        Whether every call is timed alone, after a barrier of its own.
    """

    iterations: int
    warmup: int
    seconds: float
    singly: bool = False

    @property
    def blocks(self) -> int:
        """The turns of each contender, at most."""
        return min(BLOCKS, self.iterations)


class TimedContender(NamedTuple):
    """A contender: the call to time, and what is done before a barrier and not timed."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None


class Watch:
    """What a block is timed by: the processor's clock."""

    def start(self) -> None:
        """Begin."""
        self._start = time.perf_counter()

    def stop(self) -> tuple[float, ...]:
        """Return the seconds since then; with a device's, behind them those by its own clock."""
        return (time.perf_counter() - self._start,)


class Result(NamedTuple):
    """What was measured of a contender.

    Attributes
    ----------
    seconds : numpy.ndarray
        Seconds a call, on the slowest rank: of each block, or of each call where they are timed singly.
    repeats : int
        How many calls each of these is the mean of.
    by_device : numpy.ndarray or None
        The same by the device's clock, where that was looked at.
    """

    seconds: SecondsArray
    repeats: int
    by_device: SecondsArray | None = None


class Turns(NamedTuple):
    """How a contender fills its share of the time: calls of a block, and blocks."""

    repeats: int
    blocks: int


def run(
    comm: MPI.Intracomm, entries: Sequence[TimedContender], pace: Pace, make_watch: Callable[[], Watch] = Watch
) -> list[Result]:
    """Time collective calls against each other; collective."""
    watch, share = make_watch(), pace.seconds / len(entries)
    plans = [turns(_seconds_of_a_call(comm, entry, pace, share, watch), share, pace) for entry in entries]
    taken: list[list[Laps]] = [[] for _ in entries]
    order = np.random.default_rng(0)
    start = time.perf_counter()
    for turn in range(pace.blocks):
        for index in order.permutation(len(entries)):
            if takes_part(turn, plans[index].blocks, pace.blocks):
                taken[index] += _block(comm, entries[index], plans[index].repeats, watch, singly=pace.singly)
        late = _worst(comm, time.perf_counter() - start) > pace.seconds
        if late and min(map(len, taken)) >= FEWEST_BLOCKS:
            break
    results = []
    for mine, plan in zip(taken, plans, strict=True):
        seconds, *by_device = _slowest(comm, mine).T
        results.append(Result(seconds, 1 if pace.singly else plan.repeats, *by_device))
    return results


def medians(comm: MPI.Intracomm, calls: Mapping[str, Callable[[], object]], pace: Pace) -> dict[str, float]:
    """Time named calls against each other, and return the median microseconds of each; collective."""
    found = run(comm, [TimedContender(call) for call in calls.values()], pace)
    return {name: float(np.median(result.seconds)) * 1e6 for name, result in zip(calls, found, strict=True)}


def turns(seconds: float, share: float, pace: Pace) -> Turns:
    """Return how a contender whose call takes ``seconds`` fills its share of the time."""
    repeats = max(1, min(pace.iterations // pace.blocks, int(share / (pace.blocks * seconds))))
    blocks = int(share / (repeats * seconds))
    return Turns(repeats, max(min(FEWEST_BLOCKS, pace.blocks), min(pace.blocks, blocks)))


def takes_part(turn: int, blocks: int, turns: int) -> bool:
    """Whether a contender with so many blocks takes part in a turn: in the first one, and evenly from then on."""
    return turn * blocks % turns < blocks


def _seconds_of_a_call(comm: MPI.Intracomm, entry: TimedContender, pace: Pace, share: float, watch: Watch) -> float:
    """Make the warm-up calls, as far as a quarter of the time allows, and return how long one of them took."""
    times: list[float] = []
    while len(times) < max(1, pace.warmup) and _worst(comm, sum(times)) < share / 4:
        times += [laps[0] for laps in _block(comm, entry, 1, watch, singly=True)]
    return max(_worst(comm, float(np.median(times))), 1e-9)


def _block(comm: MPI.Intracomm, entry: TimedContender, repeats: int, watch: Watch, *, singly: bool) -> list[Laps]:
    """Return this rank's seconds: of each call, or a call's mean."""
    if singly:
        return [_mean(comm, entry, 1, watch) for _ in range(repeats)]
    for _ in range(max(1, min(UNTIMED, repeats // 4))):
        entry.call()
    return [_mean(comm, entry, repeats, watch)]


def _mean(comm: MPI.Intracomm, entry: TimedContender, repeats: int, watch: Watch) -> Laps:
    entry.before()
    call = entry.call
    comm.Barrier()
    watch.start()
    for _ in range(repeats):
        call()
    return tuple(seconds / repeats for seconds in watch.stop())


def _slowest(comm: MPI.Intracomm, mine: Sequence[float] | Sequence[Laps]) -> SecondsArray:
    slowest = np.array(mine)
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return slowest


def _worst(comm: MPI.Intracomm, value: float) -> float:
    """Return the slowest rank's value, so that all ranks decide alike."""
    return float(_slowest(comm, [value])[0])
