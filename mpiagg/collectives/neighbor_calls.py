"""What the arguments of a collective of neighbors mean, and what becomes of it: a call at once, or a plan."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpiagg.arrays import HOST, Array, Form, as_input, check_output, convert, cuts_of, device_of, ranges
from mpiagg.collectives.array_calls import ArrayPlan, to_check
from mpiagg.common.arguments import check_counts
from mpiagg.plans.binding import Run
from mpiagg.plans.bound import STAGED_BYTES
from mpiagg.plans.endpoints import Tag, by_length
from mpiagg.plans.neighbors import Neighbors, bind_neighbors, compare, neighbors_of
from mpiagg.plans.plan import Plan
from mpiagg.transport import Channel, Keepable, channel_of, check_timeout, limited
from mpiagg.watch import Subject


class Given(NamedTuple):
    """The arguments of a call, as they were given; the counts are None where the function has none."""

    name: str
    x: npt.ArrayLike
    comm: MPI.Intracomm | None
    neighbors: Iterable[int] | None
    sources: Iterable[int] | None
    destinations: Iterable[int] | None
    out: Array | None
    sendcounts: Sequence[int] | None = None
    recvcounts: Sequence[int] | None = None


class _Asked(NamedTuple):
    """What is asked for: rows of an array that go to each destination, and how many come from each source.

    Attributes
    ----------
    name : str
        The collective.
    neighbors : Neighbors
    x : numpy.ndarray
        The input, as rows.
    sent : tuple of (int, int)
        For each destination the first of its rows, and the one after the last.
    received : tuple of int or None
        How many rows come from each source, if that is known.
    """

    name: str
    neighbors: Neighbors
    x: Array
    sent: tuple[Run, ...]
    received: tuple[int, ...] | None

    @property
    def description(self) -> str:
        """What all ranks must agree on."""
        return f"{self.name} with rows of {Form(self.x.dtype, self.x.shape[1:], device_of(self.x))}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output."""
        assert self.received is not None
        return (sum(self.received), *self.x.shape[1:])

    def output(self, out: Array | None) -> Array:
        """Return ``out``, if it can be the output, or a new array without it.

        Raises
        ------
        ValueError, TypeError
            If it cannot.
        """
        device = device_of(self.x)
        if out is not None:
            return check_output(out, self.shape, self.x.dtype, device)
        out = device.empty(self.shape, self.x.dtype)
        if self.has_gaps:
            out[...] = 0
        return out

    @property
    def has_gaps(self) -> bool:
        """Whether no neighbor sends some part of the output."""
        return MPI.PROC_NULL in self.neighbors.sources

    def plan(self, channel: Channel, x: Array, out: Array, tag: Tag) -> ArrayPlan:
        """Return the plan from an array to another, which are like the input and the output."""
        assert self.received is not None
        width = math.prod(x.shape[1:])
        sent = [(start * width, stop * width) for start, stop in self.sent]
        received = ranges(cuts_of([rows * width for rows in self.received]))
        program = bind_neighbors(channel, self.neighbors, x, out, sent, received, label=self.name, tag=tag)
        subject = Subject(channel.log, self.description, nbytes=x.nbytes)
        return Plan(channel, program, result=out, label=self.name, subject=subject)


def run(given: Given, timeout: float | None, *, check: bool | None) -> Array:
    """Carry a call out at once, and return its output."""
    with limited(timeout):
        channel = channel_of(given.comm)
        asked, out = _agreed(channel, given, timeout, check=to_check(check))
        _carry_out(channel, asked, out, check_timeout(timeout))
        return out


def planned(given: Given, timeout: float | None) -> ArrayPlan:
    """Return the plan of a call; collective."""
    with limited(timeout):
        channel = channel_of(given.comm)
        asked, out = _agreed(channel, given, timeout, check=True)
        plan = asked.plan(channel, asked.x, out, channel.tags.in_turn())
        plan.timeout = check_timeout(timeout)
        return plan


def _agreed(channel: Channel, given: Given, timeout: float | None, *, check: bool) -> tuple[_Asked, Array]:
    """Return what is asked for, and where the result goes; with ``check`` as all ranks have agreed on it."""
    found: list[_Asked] = []

    def say(asked: _Asked) -> str:
        found.append(asked)
        if given.out is not None and asked.received is not None:
            asked.output(given.out)
        return asked.description

    def read() -> str:
        check_timeout(timeout)
        return say(_read(given))

    if check:
        channel.agree_on(read)
        told = _compared(channel, found[-1])
        channel.agree_on(lambda: say(found[-1]._replace(received=told)))
    else:
        read()
        if found[-1].received is None:
            say(found[-1]._replace(received=_told(channel, found[-1], check_timeout(timeout))))
    return found[-1], found[-1].output(given.out)


def _read(given: Given) -> _Asked:
    """Return what arguments ask for."""
    comm = MPI.COMM_WORLD if given.comm is None else given.comm
    neighbors, x = neighbors_of(comm, given.neighbors, given.sources, given.destinations), as_input(given.x)
    there, here = len(neighbors.destinations), len(neighbors.sources)
    sent: Sequence[Run]
    received: tuple[int, ...] | None = (1,) * here
    if given.name.endswith("v"):
        received = None if given.recvcounts is None else check_counts("recvcounts", given.recvcounts, here, "source")
    elif given.name == "neighbor_allgather":
        x = x[np.newaxis]
    if not x.shape:
        raise ValueError(f"{given.name} takes an array of rows, and this one has no dimensions")
    if "allgather" in given.name:
        sent = [(0, len(x))] * there
    else:
        counts = (1,) * there
        if given.sendcounts is not None:
            counts = check_counts("sendcounts", given.sendcounts, there, "destination")
        if len(x) != sum(counts):
            raise ValueError(f"there are {sum(counts)} rows for {there} destinations, and the array has {x.shape}")
        sent = ranges(cuts_of(counts))
    return _Asked(given.name, neighbors, x, tuple(sent), received)


def _compared(channel: Channel, asked: _Asked) -> tuple[int, ...]:
    """Compare the graph and the rows of all ranks, and return how many rows come from each source; collective."""
    neighbors = asked.neighbors
    ways = zip(neighbors.destinations, asked.sent, strict=True)
    sent = [(peer, stop - start) for peer, (start, stop) in ways if peer != MPI.PROC_NULL]
    # Beyond the border of a grid is nobody who could say it.
    rows = [0] * len(neighbors.sources) if asked.received is None else list(asked.received)
    received = [
        (neighbors.sources[place], -1 if asked.received is None else rows[place]) for place in neighbors.matched
    ]
    for place, coming in zip(neighbors.matched, compare(channel, sent, received), strict=True):
        rows[place] = coming
    return tuple(rows)


def _told(channel: Channel, asked: _Asked, timeout: float) -> tuple[int, ...]:
    """Return how many rows come from each source, as the neighbors tell one another."""
    counts = np.array([stop - start for start, stop in asked.sent], np.int64)
    each = tuple((place, place + 1) for place in range(len(counts)))
    telling = _Asked(f"counts of {asked.name}", asked.neighbors, counts, each, (1,) * len(asked.neighbors.sources))
    told = telling.output(None)
    _carry_out(channel, telling, told, timeout)
    return tuple(told.tolist())


# -- calls at once


class _Kept(Keepable):
    """The plan of a short call, between arrays of its own: it serves all arrays like these, wherever they lie."""

    def __init__(self, plan: ArrayPlan, x: Array, out: Array) -> None:
        self.plan, self.x, self.out = plan, x, out

    @property
    def nbytes(self) -> int:
        """The memory that belongs to it alone."""
        return super().nbytes + self.x.nbytes + self.out.nbytes


def _carry_out(channel: Channel, asked: _Asked, out: Array, timeout: float) -> None:
    """Carry out what is asked for."""
    x, tag = asked.x, by_length(channel, asked.description)
    if device_of(x) is not HOST or max(x.nbytes, out.nbytes) > STAGED_BYTES:
        with asked.plan(channel, x, out, tag) as plan:
            plan.timeout = timeout
            plan()
        return

    def make() -> _Kept:
        own = np.empty_like(x, order="C"), np.empty_like(out, order="C")
        return _Kept(asked.plan(channel, *own, tag), *own)

    key: Hashable = (asked.description, x.shape, asked.neighbors, asked.sent, asked.received)
    call: Any = channel.calls.find(key, make)
    with channel.one_thread:  # the arrays belong to the call
        convert(call.x, x)
        if asked.has_gaps:
            convert(call.out, out)
        call.plan.timeout = timeout
        call.plan()
        convert(out, call.out)
