"""Ordinary calls beside mpi4py's own and beside prepared plans: every verb, plain and registered arrays.

    mpiexec -n 2 python -m mpi4py bench/calls.py [-o FILE.json] [--verbs Allreduce,Bcast] [--bytes 8,1024]

Each cell is one run of blocks in turn (``mpiagg.benchmarks.timing``): the method of ``mpiagg.Comm``, the array
function with ``out=``, the plan of its ``..._init``, and mpi4py's own method on the same arrays; medians of at most
twenty blocks, in microseconds. Arrays are float32 sums, ``plain`` (NumPy's own, on a communicator without registered
memory), ``registered`` (``mpiagg.empty``), or ``mixed``: plain ones on a communicator that has registered memory, too.
More kinds are for the method alone, with plain arrays in other words: ``typed`` (the datatype is given), ``columns``
(of a matrix, by a derived datatype), ``apart`` (blocks that do not follow one another) and ``own-op`` (an operator of
the user's own); or ``nonblocking`` and ``persistent``: a request is started, and waited for at once. With ``many``
and ``lengths`` each call has another array than the last, one of 300 after the other, as the gradients of a large model
are: of one length, or of as many lengths, each an element longer than the one before.
With ``--all-algorithms`` every algorithm and the MPI library's own collective take part, by the array functions. With
``--changing`` each rank adds 1 to its input before each call, as programs do that have something new to tell: what is
read then comes from the cache of the core that wrote it. That takes part in the times. With ``--beside N`` so many
other processes compute on the machine all the while.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import mpiagg
from mpiagg.benchmarks import machine
from mpiagg.benchmarks.timing import Pace, medians
from mpiagg.tables import settings

Arrays = Callable[[int], Any]
VERBS = ("Allreduce", "Bcast", "Reduce", "Allgather", "Reduce_scatter_block", "Barrier")
MORE = ("Alltoall", "Gather", "Scatter", "Scan", "Exscan", "Allgatherv", "Alltoallv", "Gatherv", "Scatterv")
"""Verbs to be named by ``--verbs``."""

LEARNING = 200
"""With ``MPIAGG_TUNING=learn``: calls by ``"auto"`` before any is timed, in which it learns."""

BYTES = (8, 1024, 16 * 1024, 64 * 1024, 2**20, 16 * 2**20)
KINDS = ("plain", "mixed", "registered")
IN_OTHER_WORDS = ("typed", "columns", "apart", "own-op")
AS_REQUESTS = ("nonblocking", "persistent")
ONE_AFTER_ANOTHER = ("many", "lengths")
"""Kinds to be named by ``--kinds``."""

MANY = 300
"""How many arrays there are of such a kind: more than calls are kept for."""

DTYPE = np.float32


class Cell(NamedTuple):
    """What a verb is called with.

    Attributes
    ----------
    method : tuple
        The arguments of the communicator's method.
    function : str
        The name of the array function; empty where there is none.
    arguments : tuple
        Its arguments.
    out : numpy.ndarray or None
        Its output.
    """

    method: tuple[Any, ...]
    function: str
    arguments: tuple[Any, ...]
    out: Any


def cell(verb: str, nbytes: int, make: Arrays, comm: MPI.Intracomm) -> Cell:
    """Return what a verb is called with; of chunks for all ranks, all together have so many bytes."""
    size, at_root, n = comm.size, comm.rank == 0, max(1, nbytes // np.dtype(DTYPE).itemsize)
    k = max(1, n // size)
    counts = [k] * size

    def gathering() -> tuple[Any, Any]:
        return make(k), make(k * size)

    def whole() -> tuple[Any, Any]:
        return make(k * size), make(k * size)

    def scattering() -> tuple[Any, Any]:
        return make(k * size), make(k)

    def reducing() -> tuple[Any, Any]:
        return make(n), make(n)

    def in_place() -> tuple[Any, Any]:
        x = make(n)
        return x, x

    kinds: dict[str, tuple[Callable[[], tuple[Any, Any]], Callable[[Any, Any], Cell]]] = {
        "Allreduce": (in_place, lambda x, out: Cell((MPI.IN_PLACE, x), "allreduce", (x,), out)),
        "Bcast": (in_place, lambda x, out: Cell((x, 0), "broadcast", (x,), out)),
        "Reduce": (reducing, lambda x, out: Cell((x, out), "reduce", (x,), out)),
        "Scan": (reducing, lambda x, out: Cell((x, out), "scan", (x,), out)),
        "Exscan": (reducing, lambda x, out: Cell((x, out), "exscan", (x,), out)),
        "Reduce_scatter_block": (scattering, lambda x, out: Cell((x, out), "reduce_scatter", (x,), out)),
        "Scatter": (
            scattering,
            lambda x, out: Cell((x if at_root else None, out), "scatter", (x.reshape(size, -1),), out),
        ),
        "Scatterv": (scattering, lambda x, out: Cell(([x, counts] if at_root else None, out), "", (), out)),
        "Gather": (
            gathering,
            lambda x, out: Cell(
                (x, out if at_root else None), "gather", (x,), out.reshape(size, -1) if at_root else None
            ),
        ),
        "Gatherv": (gathering, lambda x, out: Cell((x, [out, counts] if at_root else None), "", (), out)),
        "Allgather": (gathering, lambda x, out: Cell((x, out), "allgather", (x,), out.reshape(size, -1))),
        "Allgatherv": (gathering, lambda x, out: Cell((x, [out, counts]), "allgatherv", (x, counts), out)),
        "Alltoall": (
            whole,
            lambda x, out: Cell((x, out), "alltoall", (x.reshape(size, -1),), out.reshape(size, -1)),
        ),
        "Alltoallv": (
            whole,
            lambda x, out: Cell(([x, counts], [out, counts]), "alltoallv", (x, counts, counts), out),
        ),
    }
    arrays, made = kinds[verb]
    return made(*arrays())


def in_other_words(kind: str, verb: str, method: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a method's arguments, described in other words; None if it has no such ones."""
    reduces = verb.startswith(("Allreduce", "Reduce", "Scan", "Exscan"))
    blocks = verb.endswith("v")
    if kind == "typed" and not blocks:
        return tuple([part, MPI.FLOAT] if isinstance(part, np.ndarray) else part for part in method)
    if kind == "columns" and not blocks and not reduces:
        every_other = MPI.FLOAT.Create_resized(0, 2 * MPI.FLOAT.extent).Commit()
        return tuple([np.repeat(part, 2), every_other] if isinstance(part, np.ndarray) else part for part in method)
    if kind == "apart" and blocks:
        return tuple(spread(*part) if isinstance(part, list) else part for part in method)
    return (*method, MPI.Op.Create(add, commute=True)) if kind == "own-op" and reduces else None


def spread(x: Any, counts: list[int]) -> list[Any]:
    """Return blocks with an element between each and the next."""
    starts = [sum(counts[:rank]) + rank for rank in range(len(counts))]
    return [np.full(x.size + len(counts), 0, DTYPE), (counts, starts)]


def add(left: Any, right: Any, datatype: MPI.Datatype) -> None:
    """Add, as an operator of the user's own."""
    del datatype
    into = np.frombuffer(right, DTYPE)
    into += np.frombuffer(left, DTYPE)


def contenders(verb: str, nbytes: int, kind: str, comms: dict[str, Any], *, every: bool) -> tuple[dict[str, Any], Any]:
    """Return the calls of a cell by their names, with plans that are to be freed; and their input, if they have one."""
    ours, theirs = comms.get(kind, comms["plain"]), comms["mpi"]
    if verb == "Barrier":
        return ({"mpi": theirs.Barrier, "comm": ours.Barrier} if kind in KINDS else {}), None
    if kind in ONE_AFTER_ANOTHER:
        return one_after_another(verb, nbytes, kind, theirs, ours), None
    make = partial(registered, ours) if kind == "registered" else plain
    method, function, arguments, out = cell(verb, nbytes, make, ours)
    if kind in IN_OTHER_WORDS:
        others = in_other_words(kind, verb, method)
        if others is None:
            return {}, None
        method, function = others, ""
    found = {"mpi": as_called(theirs, verb, kind, method), "comm": as_called(ours, verb, kind, method)}
    if not function or kind in AS_REQUESTS:
        arrays = [part[0] if isinstance(part, list) else part for part in method]
        return found, next((array for array in arrays if isinstance(array, np.ndarray)), None)
    run = partial(getattr(mpiagg, function), *arguments, out=out, comm=ours)
    if every:
        names = ["native", "auto", *mpiagg.algorithms(function)]
        return {name: partial(run, algorithm=name) for name in names}, arguments[0]
    plan = getattr(mpiagg, f"{function}_init")(*arguments, out=out, comm=ours)
    return {**found, "function": run, "plan": plan}, arguments[0]


def as_called(comm: MPI.Intracomm, verb: str, kind: str, method: tuple[Any, ...]) -> Callable[[], object]:
    """Return a call of a method, of a kind."""
    if kind == "nonblocking":
        start = getattr(comm, "I" + verb.lower())
        return lambda: start(*method).Wait()
    if kind == "persistent":
        request = getattr(comm, verb + "_init")(*method)
        return lambda: (request.Start(), request.Wait())
    return partial(getattr(comm, verb), *method)


def one_after_another(
    verb: str, nbytes: int, kind: str, theirs: MPI.Intracomm, ours: MPI.Intracomm
) -> dict[str, Callable[[], object]]:
    """Return the calls of a cell by their names, each of which has another array than the last."""
    more = DTYPE().itemsize * ours.size if kind == "lengths" else 0
    cells = [cell(verb, nbytes + more * turn, plain, ours) for turn in range(MANY)]
    found = {
        name: in_turn([as_called(comm, verb, kind, each.method) for each in cells])
        for name, comm in (("mpi", theirs), ("comm", ours))
    }
    if cells[0].function:
        run = partial(getattr(mpiagg, cells[0].function), comm=ours)
        found["function"] = in_turn([partial(run, *each.arguments, out=each.out) for each in cells])
    return found


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """Return a call that makes the next of several calls each time."""
    turns = cycle(calls)

    def call() -> None:
        next(turns)()

    return call


def change_and_call(x: Any, call: Callable[[], object]) -> None:
    """Write new values to an array, and make a call."""
    x += 1
    call()


def plain(length: int) -> Any:
    """Return an array of NumPy's own, written to: the pages of ``np.zeros`` are all one page until then."""
    return np.full(length, 0, DTYPE)


def registered(comm: MPI.Intracomm, length: int) -> Any:
    """Return an array in memory that the ranks of a node share."""
    x = mpiagg.empty(length, DTYPE, comm=comm)
    x.fill(0)
    return x


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--bytes", default=",".join(map(str, BYTES)))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seconds", type=float, default=1.5, help="for each cell")
    parser.add_argument("--all-algorithms", action="store_true")
    parser.add_argument("--changing", action="store_true")
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="other processes that compute meanwhile")
    asked = parser.parse_args()
    world = MPI.COMM_WORLD
    with computing(0 if world.rank else asked.beside):
        rows = measure(world, asked)
    if world.rank == 0 and asked.output:
        saved = {"machine": machine.facts(), "ranks": world.size, "dtype": np.dtype(DTYPE).name, "beside": asked.beside}
        asked.output.write_text(json.dumps({**saved, "rows": rows}, indent=1) + "\n")


@contextmanager
def computing(processes: int) -> Iterator[None]:
    """Have so many other processes compute."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(processes)]  # noqa: S603 - our own Python
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(world: MPI.Intracomm, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each cell, which rank 0 has printed."""
    comms = {"mpi": world.Dup(), **{kind: mpiagg.Comm(world) for kind in KINDS}}
    keep = registered(comms["mixed"], 1)
    pace = Pace(iterations=200_000, warmup=20, seconds=asked.seconds)
    rows = []
    for verb in asked.verbs.split(","):
        for nbytes in [0] if verb == "Barrier" else map(int, asked.bytes.split(",")):
            for kind in asked.kinds.split(","):
                calls, x = contenders(verb, nbytes, kind, comms, every=asked.all_algorithms)
                if not calls:
                    continue
                for _ in range(LEARNING if settings().learns and "auto" in calls else 0):
                    calls["auto"]()
                timed = {name: partial(change_and_call, x, call) for name, call in calls.items()}
                timed = timed if asked.changing and x is not None else calls
                row = {"verb": verb, "bytes": nbytes, "arrays": kind, "us": medians(world, timed, pace)}
                rows.append(row)
                for call in calls.values():
                    if isinstance(call, mpiagg.Plan):
                        call.free()
                if world.rank == 0:
                    times = "  ".join(f"{name} {us:10.2f}" for name, us in row["us"].items())
                    print(f"{verb:21}{nbytes:>9} {kind:10}  {times}", flush=True)
    del keep
    return rows


if __name__ == "__main__":
    main()
