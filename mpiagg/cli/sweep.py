"""The benchmark's work on the ranks: all sizes, at each of them all competitors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiagg.cli import columns, contest, machine
from mpiagg.cli.columns import Row, bus_factor
from mpiagg.cli.competitors import Competitor, Task
from mpiagg.cli.flags import Flags, dtype_of
from mpiagg.schedules import Collective


def sweep(
    comm: MPI.Intracomm, flags: Flags, names: tuple[str, ...], show: Callable[[str], object] | None
) -> Iterator[Row]:
    """Measure all sizes; collective. ``show`` is given lines of text as they come."""
    tell = show or (lambda _: None)
    tell(_title(comm, flags))
    tell(columns.header(full=flags.full))
    for size in flags.sizes.sizes(flags.factor):
        for row in _measure(_task(comm, flags, size), flags, names):
            tell(columns.line(row, full=flags.full))
            yield row


def record(comm: MPI.Intracomm, flags: Flags, rows: list[Row]) -> dict[str, Any]:
    """Return what is saved of a sweep."""
    return {
        "machine": machine.facts(),
        "ranks": comm.size,
        "flags": {**flags._asdict(), "sizes": flags.sizes._asdict()},
        "rows": [asdict(row) for row in rows],
    }


def _title(comm: MPI.Intracomm, flags: Flags) -> str:
    facts = machine.facts()
    how = "persistent plans" if flags.planned else "blocking calls"
    return (
        f"# mpiagg {facts['mpiagg']}, {facts['mpi']}, {comm.size} ranks, {facts['cpu']}, {facts['cores']} cores\n"
        f"# {flags.collective}: {how} beside the MPI library's blocking call"
    )


def _task(comm: MPI.Intracomm, flags: Flags, nbytes: int) -> Task:
    collective, dtype = Collective(flags.collective), dtype_of(flags.dtype)
    count = max(1, nbytes // dtype.itemsize)
    if collective is Collective.ALLGATHER:
        # Every rank gives as much as the others.
        count = max(1, count // comm.size) * comm.size
    return Task(collective, comm, count, dtype, flags.op, flags.root)


def _measure(task: Task, flags: Flags, names: tuple[str, ...]) -> list[Row]:
    """Check and time one task by all competitors; collective."""
    competitors = [task.native(), *(task.ours(name, flags.lanes, planned=flags.planned) for name in names)]
    calls = [competitor.call for competitor in competitors]
    wrong = _wrong(task, competitors)
    pace = contest.Pace(flags.iterations, flags.warmup, flags.time_limit)
    seconds, repeats = contest.hold(task.comm, calls, pace)
    # Once more: a plan may be right when it is new and wrong when it has run.
    wrong += _wrong(task, competitors)
    for competitor in competitors:
        competitor.free()
    times_us = 1e6 * seconds
    iterations = repeats * len(seconds)
    rows = [
        _row(task, name, times_us[:, index], wrong=int(wrong[index]), iterations=iterations)
        for index, (name, *_) in enumerate(competitors)
    ]
    return [replace(row, ratio=row.time_us / rows[0].time_us) for row in rows]


def _wrong(task: Task, competitors: list[Competitor]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return how many elements each competitor gets wrong, over all ranks."""
    mine = np.array([task.check(competitor.call) for competitor in competitors])
    total = np.zeros_like(mine)
    task.comm.Allreduce(mine, total)
    return total


def _row(task: Task, name: str, times_us: contest.Times, *, wrong: int, iterations: int) -> Row:
    nbytes = task.count * task.dtype.itemsize
    median = float(np.median(times_us))
    algbw = nbytes / median / 1e3
    return Row(
        size=nbytes,
        count=task.count,
        type=task.dtype.name,
        redop=task.op if task.collective.reduces else "none",
        root=task.root if task.collective.rooted else -1,
        algorithm=name,
        time_us=median,
        algbw=algbw,
        busbw=algbw * bus_factor(task.collective, task.comm.size),
        wrong=wrong,
        ratio=1.0,
        min_us=float(times_us.min()),
        max_us=float(times_us.max()),
        p50_us=median,
        p99_us=float(np.percentile(times_us, 99)),
        iterations=iterations,
    )
