"""Where the microseconds of a small plan go: a plan of 64 bytes on two ranks, and the pieces that it is made of.

    mpiexec -n 2 python -m mpi4py bench/overhead.py [FILE.json]

The pieces are timed alone, on one rank while the other waits; so they do not contain what the processors need to tell
each other of a store, nor what a rank waits for the other.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpiagg
from mpiagg.benchmarks import machine
from mpiagg.plans.compiled import compile_rounds

LENGTH = 16
REPEATS = 3_000
BLOCKS = 15


def ns(call: Callable[[], object], *, together: bool = False) -> float:
    """Return the nanoseconds of a call: the median over blocks; together with the other rank, the slower one's."""
    found = np.empty(BLOCKS)
    for block in range(BLOCKS):
        if together:
            MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(REPEATS):
            call()
        found[block] = (time.perf_counter() - start) / REPEATS * 1e9
    if together:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    return float(np.median(found))


def pieces(send: MPI.Prequest, receive: MPI.Prequest) -> dict[str, Callable[[], object]]:
    """Return what a plan calls, each alone."""
    x, y = np.zeros(LENGTH, np.float32), np.zeros(LENGTH, np.float32)
    source, target = x.data.cast("B"), y.data.cast("B")
    line = np.zeros(8, np.int64).data

    def copy() -> None:
        target[:] = source

    def count() -> None:
        line[0] = 1

    def look() -> bool:
        return line[0] < 1

    def add() -> None:
        np.add(x, y, x)

    waiting = type("Nobody", (), {"wait_for": None})()
    nothing = compile_rounds(())

    def message() -> None:
        receive.Start()
        send.Start()
        while not receive.Test():
            pass
        while not send.Test():
            pass

    return {
        "a Python call that does nothing": lambda: None,
        "the compiled program of a plan without rounds": lambda: nothing(waiting),
        "copy of 64 bytes into a mailbox": copy,
        "counting at a barrier": count,
        "looking at a counter": look,
        "np.add of 16 numbers": add,
        "a persistent message to oneself: two Start, two Test": message,
    }


def there_and_back() -> float:
    """Return the nanoseconds in which a core goes from one of two ranks to the other, and back."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {MPI.COMM_WORLD.bcast(min(allowed))})
    found = ns(os.sched_yield, together=True)
    os.sched_setaffinity(0, allowed)
    return found


def main() -> None:
    """Measure, print and save."""
    world = MPI.COMM_WORLD
    x = np.zeros(LENGTH, np.float32)
    whole: dict[str, float] = {}
    for name in ("shared", "recursive_doubling"):
        with mpiagg.allreduce_init(x, out=x, algorithm=name) as plan:
            whole[f"plan of 64 bytes by {name}"] = ns(plan, together=True)
    whole["mpiagg.allreduce(x, out=x), 64 bytes"] = ns(lambda: mpiagg.allreduce(x, out=x), together=True)
    whole["MPI_Allreduce by mpi4py, 64 bytes"] = ns(lambda: world.Allreduce(MPI.IN_PLACE, x), together=True)
    whole["two ranks on one core: to the other and back"] = there_and_back()
    send, receive = MPI.COMM_SELF.Send_init(x, 0), MPI.COMM_SELF.Recv_init(np.empty_like(x), 0)
    parts = {name: ns(call) for name, call in pieces(send, receive).items()} if world.rank == 0 else {}
    send.Free()
    receive.Free()
    world.Barrier()
    if world.rank == 0:
        for name, nanoseconds in {**whole, **parts}.items():
            print(f"{nanoseconds:8.0f} ns  {name}")
        if len(sys.argv) > 1:
            saved = {"machine": machine.facts(), "ranks": world.size, "ns": {**whole, **parts}}
            Path(sys.argv[1]).write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
