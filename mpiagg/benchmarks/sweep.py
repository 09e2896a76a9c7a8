"""The benchmark's work on the ranks: all sizes, at each of them all contenders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from operator import methodcaller
from typing import Any, Final

import click
import numpy as np
from mpi4py import MPI

from mpiagg.arrays import HOST, Array
from mpiagg.benchmarks import machine, timing
from mpiagg.benchmarks.columns import ResultRow, bus_factor, header, line, link_seconds
from mpiagg.benchmarks.contenders import Contender, Task, TimedCall, registered_zeros
from mpiagg.benchmarks.flags import MLBENCH_CALLS, BenchFlags, dtype_of
from mpiagg.benchmarks.on_device import DeviceTask, DeviceWatch, facts, take_device, title
from mpiagg.errors import DeviceError
from mpiagg.plans.choices import NATIVE
from mpiagg.schedules import Collective
from mpiagg.transport import channel_of

COPY: Final = "copy"
"""The limit on a node: every rank copies its vector once, all at the same time."""

LINK: Final = "link"
"""The limit on a network: the busiest link is never idle and carries no byte too much."""

BY_HAND: Final = "by-hand"
"""On a device: a copy to the host, MPI_Allreduce and a copy back, one after the other."""

REGISTERED: Final = "registered"
"""On a device: auto on memory that all ranks of the node have mapped."""

GAINING: Final = (Collective.ALLREDUCE, Collective.BROADCAST, Collective.ALLGATHER)
"""The collectives that gain by such memory."""

Builder = Callable[[Task], Contender]


class Sweep:
    """All sizes, at each of them all contenders; making one is collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    flags : BenchFlags
        What the user has chosen.
    names : tuple of str
        The algorithms to measure. Unless the user has named them, those that refuse are left out.
    show : callable, optional
        Is given lines of text as they come.

    Raises
    ------
    click.ClickException
        On all ranks, if there is no link to give a rate for, or a rank has no such device.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        flags: BenchFlags,
        names: tuple[str, ...],
        show: Callable[[str], object] | None = None,
    ) -> None:
        self.comm, self.flags = comm, flags
        self._tell = show or (lambda _: None)
        self._channel = channel_of(comm)
        self.layout = self._channel.layout
        self.device = take_device(self._channel, flags.device)
        if flags.link_rate is not None and len(self.layout.nodes) == 1:
            raise click.ClickException("--link-rate is for ranks on several nodes; all of these are on one")
        self._collective, self._dtype = Collective(flags.collective), dtype_of(flags.dtype)
        self._memory = self._shared_memory() if flags.buffer == "registered" else None
        self._optional = {*flags.beside, BY_HAND, REGISTERED, *(() if flags.algorithm else names)}
        self._left_out: set[str] = set()
        self._frees: list[TimedCall] = []
        self._builders: dict[str, Builder] = {NATIVE: methodcaller("native")}
        for name in names:
            self._builders[name] = partial(Task.ours, algorithm=name, lanes=flags.lanes, planned=flags.planned)
        for wire in flags.wires:
            self._builders[f"auto-{wire}"] = partial(Task.wired, wire=wire, planned=flags.planned)
        if self.device is not None:
            self._add_of_device()
        if "gloo" in flags.beside:
            self._builders["gloo"] = self._peer()

    def rows(self) -> Iterator[ResultRow]:
        """Measure all sizes; collective.

        Raises
        ------
        click.ClickException
            On all ranks, if an algorithm that the user has named refuses.
        """
        flags = self.flags
        self._tell(self._title())
        self._tell(header(flags.beside, full=flags.full))
        try:
            for nbytes in flags.lengths():
                for row in self._measure(self.task(nbytes)):
                    self._tell(line(row, flags.beside, full=flags.full))
                    yield row
        finally:
            for free in self._frees:
                free()

    def record(self, rows: list[ResultRow]) -> dict[str, Any]:
        """Return what is saved of a sweep."""
        return {
            "machine": {**machine.facts(), "device": None if self.device is None else facts(self.device)},
            "ranks": self.comm.size,
            "layout": str(self.layout),
            "flags": {**self.flags._asdict(), "sizes": self.flags.sizes._asdict()},
            "rows": [asdict(row) for row in rows],
        }

    def task(self, nbytes: int) -> Task:
        """Return the task on a vector of so many bytes, or about as many."""
        count = self._count(nbytes)
        known = self._collective, self.comm, count, self._dtype, self.flags.op, self.flags.root, self._memory
        if self.device is None:
            return Task(*known)
        return DeviceTask(*known, device=self.device, aware=self._channel.aware)

    def _count(self, nbytes: int) -> int:
        count = max(1, nbytes // self._dtype.itemsize)
        if self._collective is Collective.ALLGATHER or self._collective.moves:
            # Every rank gives as much as the others.
            count = max(1, count // self.comm.size) * self.comm.size
        return count

    def _shared_memory(self) -> Array:
        """Return memory for the longest vector."""
        longest = max(map(self._count, self.flags.lengths()))
        if self._collective.moves or self._collective is Collective.EXSCAN:  # of which input and output are two
            longest *= 2
        try:
            return registered_zeros(self.comm, longest, self._dtype, self.device or HOST)
        except (MemoryError, DeviceError) as error:  # on all ranks of a node; on the others by the launcher
            raise click.ClickException(f"--buffer registered: {error}") from None

    def _add_of_device(self) -> None:
        """Add what is measured on a device beside the algorithms."""
        if self._collective is Collective.ALLREDUCE:
            self._builders[BY_HAND] = methodcaller("by_hand")
        if "mpi" in self.flags.beside:
            self._builders["mpi"] = methodcaller("library")
        alone = self.comm.size == 1 or len(self.layout.nodes) > 1
        if alone or self._memory is not None or self._collective not in GAINING:
            return
        try:
            mapped = self._shared_memory()
        except click.ClickException as error:
            self._tell(f"# without {REGISTERED}: {error.message}")
            return

        def registered(task: Task) -> Contender:
            other = replace(task, memory=mapped)
            made = other.ours("auto", self.flags.lanes, planned=self.flags.planned)
            return made._replace(name=REGISTERED, task=other)

        self._builders[REGISTERED] = registered

    def _peer(self) -> Builder:
        # On a node without a name server, torch would warn that it cannot find out the peers' names.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from mpiagg.benchmarks.gloo import Gloo  # noqa: PLC0415 - needs torch, an extra

        gloo = Gloo(self.comm, self.layout)
        self._frees.append(gloo.free)
        return gloo.contender

    def _title(self) -> str:
        flags, known = self.flags, machine.facts()
        how = "persistent plans" if flags.planned else "blocking calls"
        where = "registered memory" if flags.buffer == "registered" else "any memory"
        op = f", {flags.op}" if self._collective.reduces else ""
        root = f", root {flags.root}" if self._collective.rooted else ""
        there = "" if self.device is None else f"\n{title(self.device, self._channel)}"
        return (
            f"# mpiagg {known['mpiagg']}, {known['mpi']}, {self.comm.size} ranks ({self.layout}), "
            f"{known['cpu']}, {known['cores']} cores\n"
            f"# {flags.collective} of {flags.dtype}{op}{root}: {how} in {where}{there}"
        )

    # -- one size

    def _measure(self, task: Task) -> list[ResultRow]:
        """Check and time one task by all contenders; collective."""
        contenders = self._contenders(task)
        entries = {contender.name: self._entry(task, contender) for contender in contenders}
        if self.flags.link_rate is None:
            entries[COPY] = timing.TimedContender(task.copy())
        wrong = self._wrong(task, contenders)
        watch = timing.Watch if self.device is None else partial(DeviceWatch, self.device)
        results = timing.run(task.comm, list(entries.values()), self._pace(), watch)
        # Once more: a plan may be right when it is new and wrong when it has run.
        wrong += self._wrong(task, contenders)
        for contender in contenders:
            contender.free()
        wrong_by_name = dict(zip(entries, wrong.tolist(), strict=False))  # a copy is no result to check
        rows = [
            _row(task, name, result, wrong=wrong_by_name.get(name, 0))
            for name, result in zip(entries, results, strict=True)
        ]
        if self.flags.link_rate is not None:
            rows.append(self._link_row(task, self.flags.link_rate))
        return self._with_ratios(rows)

    def _contenders(self, task: Task) -> list[Contender]:
        """Return those who can carry the task out."""
        found = []
        for name, build in self._builders.items():
            try:
                contender = build(task)
                if not self.flags.planned:
                    contender.call()  # only a call shows what it refuses
            except (ValueError, TypeError, DeviceError) as error:  # on all ranks alike
                if name not in self._optional:
                    raise click.ClickException(f"{name}: {error}") from None
                if name not in self._left_out:
                    self._tell(f"# without {name}: {error}")
                    self._left_out.add(name)
                continue
            found.append(contender)
        return found

    def _entry(self, task: Task, contender: Contender) -> timing.TimedContender:
        """Return what is timed of a contender.

        mlbench's calls all find new random values, and where any memory will do, in new memory.
        """
        call = contender.call
        if self.flags.protocol != "mlbench":
            return timing.TimedContender(call)

        def before() -> None:
            nonlocal call
            new = replace(task)
            new.x[...] = np.random.default_rng().random(new.x.shape, np.float32)
            call = self._builders[contender.name](new).call

        return timing.TimedContender(lambda: call(), before)  # noqa: PLW0108 - another call each time

    def _pace(self) -> timing.Pace:
        flags = self.flags
        if flags.protocol == "mlbench":
            return timing.Pace(min(flags.iterations, MLBENCH_CALLS), flags.warmup, flags.time_limit, singly=True)
        return timing.Pace(flags.iterations, flags.warmup, flags.time_limit)

    def _wrong(self, task: Task, contenders: list[Contender]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return how many elements each contender gets wrong, over all ranks."""
        mine = np.array([(each.task or task).check(each.call, each.off) for each in contenders])
        total = np.zeros_like(mine)
        self.comm.Allreduce(mine, total)
        return total

    def _link_row(self, task: Task, rate: float) -> ResultRow:
        nbytes = task.count * task.dtype.itemsize
        seconds = link_seconds(task.collective, len(self.layout.nodes), nbytes, rate, task.comm.size)
        return _row(task, LINK, timing.Result(np.array([seconds]), 0), wrong=0)

    def _with_ratios(self, rows: list[ResultRow]) -> list[ResultRow]:
        """Return the rows of a size, of which the first is the MPI library's and the last the limit."""
        peers = {row.algorithm: row.time_us for row in rows if row.algorithm in self.flags.beside}
        return [
            replace(
                row,
                ratio=row.time_us / rows[0].time_us,
                over_peers={peer: row.time_us / time_us for peer, time_us in peers.items()},
                over_limit=row.time_us / rows[-1].time_us,
            )
            for row in rows
        ]


def _row(task: Task, name: str, result: timing.Result, *, wrong: int) -> ResultRow:
    nbytes, times_us = task.count * task.dtype.itemsize, 1e6 * result.seconds
    median = float(np.median(times_us))
    algbw = nbytes / median / 1e3
    return ResultRow(
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
        min_us=float(times_us.min()),
        max_us=float(times_us.max()),
        p50_us=median,
        p99_us=float(np.percentile(times_us, 99)),
        mean_us=float(times_us.mean()),
        iterations=result.repeats * len(times_us),
        device_us=None if result.by_device is None else 1e6 * float(np.median(result.by_device)),
    )
