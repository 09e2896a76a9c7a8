"""The work of ``mpiagg tune`` on the ranks: what is fastest for each length, and the table that says so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Final, NamedTuple

import click
import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Accelerator, Array
from mpiagg.benchmarks import machine, timing
from mpiagg.benchmarks.contenders import Contender, Task, registered_zeros
from mpiagg.benchmarks.on_device import DeviceTask, take_device
from mpiagg.common.machine import levels
from mpiagg.plans.staging import piece_cost
from mpiagg.schedules import TABLE, Cluster, Collective, Layout, algorithm, comparable
from mpiagg.schedules.model import Pricing
from mpiagg.tables import (
    ANNOUNCED,
    NATIVE,
    SEGMENT,
    Case,
    Choice,
    Memory,
    Origin,
    Row,
    Settings,
    Spread,
    Table,
    settings,
)
from mpiagg.transport import channel_of

TOLERANCE: Final = 1.03
"""By how much another must be faster than what is usual, or simpler, to be taken: less is noise."""

CONTENDERS: Final = 2.0
"""Who takes more than this multiple of the best time in a short first round is out."""

LONG: Final = 2**20
MOST_OF_A_LINK: Final = 1.5
"""From this length on, algorithms that put more than so many times the fewest bytes on a link are not tried."""

OPEN: Final = 4 * 2**20
"""What is best for a vector of this length, or a longer one, is best for all that are still longer."""

SHORTEST_LANE: Final = 64 * 2**10
MORE_LANES: Final = (2, 4, 16, 64)
MORE_SEGMENTS: Final = (SEGMENT // 8, SEGMENT // 4, SEGMENT // 2)

PIECED: Final = 2**24
PIECES: Final = (2, 4, 8, 16)
"""The bytes of the chunks of staged messages that are timed, and in how many pieces."""


class Candidate(NamedTuple):
    """What is measured: a choice, and whether the vectors lie in memory from ``mpiagg.empty``."""

    choice: Choice
    registered: bool = False

    def __str__(self) -> str:
        """Say it in words, as tables do."""
        return f"{self.choice}, registered memory" if self.registered else str(self.choice)


MedianTimes = dict[Candidate, float]  # in seconds


class Tuner:
    """Measures a cluster; making one is collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks of the job.
    collectives : sequence of Collective
    lengths : sequence of int
        The lengths of vectors to measure, in bytes, ascending.
    seconds : float
        What all of it may take, about. When the time is over, longer vectors are left out.
    tell : callable
        Is given a line of text for each length that was measured.
    device : str
        The device of which staged messages are measured, too, if it is not the host.

    Raises
    ------
    click.ClickException
        On all ranks, if a rank cannot use the device.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        collectives: Sequence[Collective],
        lengths: Sequence[int],
        seconds: float,
        tell: Callable[[str], object],
        *,
        device: str = HOST.name,
    ) -> None:
        self.comm, self._tell = comm, tell
        self._channel = channel_of(comm)
        self.layout: Layout = self._channel.layout
        self._device = take_device(self._channel, device)
        self._cells = [(collective, nbytes) for nbytes in lengths for collective in collectives]
        self._seconds = seconds
        self._dtype = np.dtype(np.float32)
        self._memory: Array | None = None
        self._factors = self._agreed_factors()
        if self.layout.widest > 1:
            try:
                self._memory = registered_zeros(comm, max(map(self._count, lengths)), self._dtype)
            except MemoryError as error:  # on all ranks of a node; on the others by the launcher
                raise click.ClickException(f"{error}; or measure shorter vectors, by -m") from None

    def table(self, name: str) -> Table:
        """Measure, and return the table; collective."""
        cost = None if self._device is None else self._piece_cost(self._device, self._seconds / 10)
        times: dict[Collective, dict[int, MedianTimes]] = {}
        start = time.perf_counter()
        for done, (collective, nbytes) in enumerate(self._cells):
            left = self._left(start)
            if left <= 0 and done:
                self._tell(f"# out of time: {len(self._cells) - done} of {len(self._cells)} are left out")
                break
            found = self._measure(collective, nbytes, max(left, 0.1) / (len(self._cells) - done))
            times.setdefault(collective, {})[nbytes] = found
            ours = [_fastest(_able(found, memory, Spread.of(self.layout))) for memory in Memory]
            told = "; by messages ".join(dict.fromkeys(ours))
            if (native := found.get(Candidate(Choice(NATIVE)))) is not None:
                told += f"; {NATIVE} {1e6 * native:.1f} us"
            self._tell(f"{done + 1:3d}/{len(self._cells)} {collective.value:14} {nbytes:10d} B  {told}")
        rows = tuple(
            row
            for collective, measured in times.items()
            for row in rows_of(collective, self.layout, measured, MPI.get_vendor()[0])
        )
        facts = machine.facts()
        return Table(name, rows, Origin(self.layout, facts["mpi"], facts), cost)

    def _left(self, start: float) -> float:
        """Return how many seconds are left, the same on all ranks."""
        left = np.array([self._seconds - (time.perf_counter() - start)])
        self.comm.Bcast(left)
        return float(left[0])

    def _count(self, nbytes: int) -> int:
        """Return about as many elements as are in ``nbytes``, and as many for every rank."""
        size = self.comm.size
        return max(1, nbytes // self._dtype.itemsize // size) * size

    def _agreed_factors(self) -> list[int]:
        """Return the factors of the first rank's machine, on all ranks."""
        factors = np.ones(3, np.int64)
        if self.comm.rank == 0 and len(self.layout.nodes) == 1:
            found = levels(self.comm.size)
            factors[: len(found)] = found
        self.comm.Bcast(factors)
        return [factor for factor in factors.tolist() if factor > 1]

    # -- a device

    def _piece_cost(self, device: Accelerator, seconds: float) -> int | None:
        """Return what a piece of a staged message costs, by the times of chunks in more and fewer; collective."""
        channel, count = self._channel, PIECED // self._dtype.itemsize * self.comm.size
        if channel.aware or self.comm.size == 1:
            self._tell("# no message of the device's memory is staged")
            return None
        task = DeviceTask(Collective.ALLREDUCE, self.comm, count, self._dtype, "sum", 0, device=device)
        plans: list[Contender] = []
        for pieces in PIECES:
            channel.piece_cost = PIECED // pieces**2  # by which so many are best
            plans.append(task.ours("ring", None, planned=True))
        channel.piece_cost = None
        found = timing.run(
            self.comm, [timing.TimedContender(plan.call) for plan in plans], timing.Pace(1000, 2, seconds)
        )
        for plan in plans:
            plan.free()
        times = {pieces: float(np.median(result.seconds)) for pieces, result in zip(PIECES, found, strict=True)}
        cost = piece_cost(PIECED, times)
        told = ", ".join(f"{1e3 * taken:.2f} ms in {pieces}" for pieces, taken in times.items())
        self._tell(f"# staged, chunks of {PIECED // 2**20} MiB: {told}; a piece costs as much as {cost:,} B")
        return cost

    # -- one length

    def _measure(self, collective: Collective, nbytes: int, seconds: float) -> MedianTimes:
        """Return what candidates take; collective."""
        count = self._count(nbytes)
        task = Task(collective, self.comm, count, self._dtype, "sum", 0)
        # What not all ranks get is not reduced in place.
        in_place = collective in (Collective.ALLREDUCE, Collective.BROADCAST, Collective.ALLGATHER, Collective.SCAN)
        registered = in_place and self._memory is not None
        tasks = [task, replace(task, memory=self._memory)] if registered else [task]
        first = [Choice(name) for name in candidates(collective, self.layout, nbytes, self._factors)]
        if Choice("shared") in first and nbytes > ANNOUNCED:
            first.append(Choice("shared", unregistered="shared"))
        times = self._hold(tasks, first, timing.Pace(3, 1, seconds / 4))
        contenders: dict[Choice, None] = {}
        for memory in Memory:
            able = _able(times, memory, Spread.of(self.layout))
            limit = CONTENDERS * min(able.values())
            contenders.update((candidate.choice, None) for candidate, taken in able.items() if taken <= limit)
        second = [more for choice in contenders for more in variants(choice, nbytes, self.layout)]
        second.append(Choice(NATIVE))
        return self._hold(tasks, second, timing.Pace(1000, 10, seconds * 3 / 4))

    def _hold(self, tasks: Sequence[Task], choices: Sequence[Choice], pace: timing.Pace) -> MedianTimes:
        """Return the median seconds of choices: in any memory, and in registered memory where that is another thing."""
        found: dict[Candidate, Contender] = {}
        for choice in choices:
            if choice.algorithm == NATIVE:
                found[Candidate(choice)] = tasks[0].ours(NATIVE, None, planned=False)
                continue
            shares = algorithm(choice.algorithm).owned is not None or _in_memory(choice, self.layout)
            for task in tasks[1:] if choice.segment else tasks[: 1 + (shares and not choice.reads)]:
                found[Candidate(choice, task.memory is not None)] = call_of(task, choice)
        results = timing.run(self.comm, [timing.TimedContender(one.call) for one in found.values()], pace)
        for contender in found.values():
            contender.free()
        return {name: float(np.median(result.seconds)) for name, result in zip(found, results, strict=True)}


def call_of(task: Task, choice: Choice) -> Contender:
    """Return how users call a choice, for short vectors; for others, of which the call is no part, its plan."""
    if choice == Choice(choice.algorithm, choice.lanes) and task.count * task.dtype.itemsize <= ANNOUNCED:
        return task.ours(choice.algorithm, choice.lanes, planned=False)
    return plan_of(task, choice)


def plan_of(task: Task, choice: Choice) -> Contender:
    """Return the plan that ``"auto"`` would make if the choice stood in the table; collective."""
    channel = channel_of(task.comm)
    channel.calls.free()
    case = channel.case(task.collective, task.count * task.dtype.itemsize, native=True)
    with settings().trying(case, choice):
        plan = task.ours("auto", None, planned=True)
    channel.calls.free()
    return plan


def candidates(collective: Collective, layout: Layout, nbytes: int, factors: Sequence[int] = ()) -> list[str]:
    """Return the algorithms to measure on a layout; ``factors`` are those of its ranks on the levels of a machine."""
    spread = Spread.of(layout)
    # By messages, "shared" is "direct".
    nowhere = {"shared"} if spread is not Spread.ONE_NODE or layout.size == 1 else set()
    names = [name for name in comparable(collective, layout) if name not in nowhere]
    if "multi_radix" in names and len(factors) > 1:
        names.append(f"multi_radix-{'x'.join(map(str, factors))}")
    if nbytes < LONG:
        return names
    nodes = Cluster(node_alpha=1e-6, node_beta=1e-10)
    busiest = {name: Pricing(name, collective, layout, nodes).predict(nbytes).busiest for name in names}
    return [name for name in names if busiest[name] <= MOST_OF_A_LINK * min(busiest.values())]


def _in_memory(choice: Choice, layout: Layout) -> bool:
    """Whether all of it goes through memory that ranks share."""
    return len(layout.nodes) == 1 and choice.algorithm != NATIVE and algorithm(choice.algorithm).shares


def variants(choice: Choice, nbytes: int, layout: Layout) -> Iterator[Choice]:
    """Yield a choice, and for long vectors the same with more lanes, or through memory with shorter segments."""
    yield choice
    if choice.reads:
        return
    if _in_memory(choice, layout):
        yield from (choice._replace(segment=segment) for segment in MORE_SEGMENTS if segment * 2 <= nbytes)
    else:
        yield from (choice._replace(lanes=lanes) for lanes in MORE_LANES if nbytes >= lanes * SHORTEST_LANE)


# -- from times to rows


def rows_of(
    collective: Collective, layout: Layout, times: Mapping[int, MedianTimes], library: str | None = None
) -> list[Row]:
    """Return the rows that say what is best by measured times.

    The first rows are for cases in which the MPI library's own collective may be taken.

    Parameters
    ----------
    collective : Collective
    layout : Layout
        Where they were measured.
    times : mapping
        For each length the seconds of candidates.
    library : str, optional
        The MPI library.
    """
    spread, lengths = Spread.of(layout), sorted(times)
    limits: list[int | None] = [math.isqrt(shorter * longer) for shorter, longer in pairwise(lengths)]
    limit_of = dict(zip(lengths, [*limits, None if lengths[-1] >= OPEN else lengths[-1]], strict=True))
    rows: list[Row] = []
    native_rows: list[Row] = []
    # Where no two ranks share a node, it makes no difference whether they could share memory.
    for memory in (Memory.NONE,) if spread is Spread.ONE_EACH else Memory:
        able = {nbytes: _able(times[nbytes], memory, spread) for nbytes in lengths}
        steps: list[tuple[Choice, int]] = []
        for nbytes in lengths:
            usual = Settings().found(Case(collective, nbytes, layout, memory)).choice
            before = [choice for choice, _ in steps[-1:]]
            # Shorter vectors of calls are always copied, and other nodes have other memory.
            apart = spread is Spread.ONE_NODE and nbytes > ANNOUNCED
            steps.append((chosen(able[nbytes], [usual, *before], apart=apart), nbytes))
        where = None if spread is Spread.ONE_EACH else memory
        of_library = [
            (_or_native(choice, times[nbytes], able[nbytes], nbytes, spread), nbytes) for choice, nbytes in steps
        ]
        for found, kept, of in ((steps, rows, None), (of_library, native_rows, library)):
            for choice, group in groupby(found, lambda step: step[0]):
                same = [nbytes for _, nbytes in group]
                # Of other memories nothing is told, and of the MPI library's own where it might be taken.
                told = {
                    nbytes: {
                        str(one): taken
                        for one, taken in times[nbytes].items()
                        if one in able[nbytes] or (of is not None and one.choice.algorithm == NATIVE)
                    }
                    for nbytes in same
                }
                kept.append(Row(collective, choice, limit_of[same[-1]], layout.size, spread, where, told, of))
    return rows if library is None else [*native_rows, *rows]


def _or_native(choice: Choice, times: MedianTimes, able: MedianTimes, nbytes: int, spread: Spread) -> Choice:
    """Return our choice, or the MPI library's own collective in its place where that was faster in other memory."""
    native = times.get(Candidate(Choice(NATIVE)))
    ours = able.get(Candidate(choice.in_other_memory), able.get(Candidate(choice._replace(unregistered=None))))
    if native is None or ours is None or native >= ours / TOLERANCE:
        return choice
    shared = any(one.registered and one.choice == choice._replace(unregistered=None) for one in able)
    if shared and spread is Spread.ONE_NODE and nbytes > ANNOUNCED:
        return choice._replace(unregistered=NATIVE)
    return Choice(NATIVE)


def _able(times: MedianTimes, memory: Memory, spread: Spread) -> MedianTimes:
    """Return the times of our own that can be taken with a memory: without any to share, those of messages."""
    ours = {one: taken for one, taken in times.items() if one.choice.algorithm != NATIVE}
    if memory is Memory.TOGETHER:
        return ours
    one_node = spread is Spread.ONE_NODE
    return {
        one: taken
        for one, taken in ours.items()
        if not one.registered and not (one_node and algorithm(one.choice.algorithm).shares)
    }


def _fastest(times: MedianTimes) -> str:
    best = min(times, key=times.__getitem__)
    return f"{best} {1e6 * times[best]:.1f} us"


def chosen(times: MedianTimes, before_others: Sequence[Choice], *, apart: bool) -> Choice:
    """Return the choice to take: for vectors in registered memory and, if ``apart``, by what messages elsewhere."""
    in_registered = {one.choice: taken for one, taken in times.items()}
    in_registered |= {one.choice: taken for one, taken in times.items() if one.registered}
    if not any(one.registered for one in times):
        # What is taken elsewhere is all there is.
        before_others = [other.in_other_memory for other in before_others]
    else:
        in_registered = {one: taken for one, taken in in_registered.items() if not one.reads}
    usual = [other if other in in_registered else other._replace(unregistered=None) for other in before_others]
    choice = preferred(in_registered, usual)
    if not (apart and any(one.registered and one.choice == choice for one in times)):
        return choice
    messages = {
        one.choice: taken
        for one, taken in times.items()
        if one.choice.unregistered == choice.algorithm
        or (not algorithm(one.choice.algorithm).shares and one.choice.lanes == choice.lanes)
    }
    copied = choice._replace(segment=None)
    usual = [other.in_other_memory if other.unregistered else copied for other in before_others]
    by = preferred({copied: times[Candidate(copied)], **messages}, usual)
    return choice if by == copied else choice._replace(unregistered=by.algorithm)


def preferred(seconds: Mapping[Choice, float], before_others: Sequence[Choice]) -> Choice:
    """Return the first choice that is about as fast as the fastest: of some, or else the simplest."""
    order = list(TABLE)
    simplest = sorted(
        seconds, key=lambda one: (one.lanes, one.segment is not None, order.index(one.algorithm.partition("-")[0]))
    )
    best = min(seconds.values())
    return next(choice for choice in (*before_others, *simplest) if seconds.get(choice, math.inf) <= TOLERANCE * best)
