"""Time vectors that lie in no registered memory: through mailboxes, read where they lie, and by messages.

    mpiexec -n 2 python -m mpi4py bench/cache_sharing.py FILE.json [SECONDS]

Which is faster depends on whether the cores of the ranks share a cache, and on a virtual machine that changes: its host
moves it about. So before each turn the ranks reduce 1 MiB through shared memory, which lies in caches. Turns in which
that took more than two and a half times its fastest are counted as apart, the others as together.
The file has the medians of both, and how many turns there were. In a turn each way begins with a call that is not
timed: what the way before it left in the caches is no part of its time.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiagg.benchmarks import machine
from mpiagg.benchmarks.contenders import Task
from mpiagg.benchmarks.tuner import plan_of
from mpiagg.schedules import Collective
from mpiagg.tables import Choice

COMM = MPI.COMM_WORLD
MIB = 2**20
SIZES = (MIB, 2 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
PROBE, PROBE_BYTES = "probe", MIB
APART = 2.5
WAYS = {
    "ring, by messages": Choice("ring"),
    "direct, by messages": Choice("direct"),
    "read from the others' memory": Choice("shared", unregistered="shared"),
    "mailboxes": Choice("shared"),
}


def sum_of(nbytes: int) -> Task:
    """Return the sum of vectors of so many bytes, in place."""
    return Task(Collective.ALLREDUCE, COMM, nbytes // 4, np.dtype(np.float32), "sum", 0)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return how long a call takes, on the slowest rank."""
    call()
    COMM.Barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return COMM.allreduce((time.perf_counter() - start) / repeats, op=MPI.MAX)


def measure(nbytes: int, limit: float) -> dict[str, list[float]]:
    """Return what every turn took, of the probe and of each way, at a size; collective."""
    probe = plan_of(sum_of(PROBE_BYTES), Choice("shared"))
    task = sum_of(nbytes)
    contenders = {"MPI_Allreduce": task.native(), **{name: plan_of(task, choice) for name, choice in WAYS.items()}}
    times: dict[str, list[float]] = {name: [] for name in (PROBE, *contenders)}
    start = time.perf_counter()
    while COMM.bcast(time.perf_counter() - start < limit):
        times[PROBE].append(seconds(probe.call, 3))
        for name, contender in contenders.items():
            times[name].append(seconds(contender.call, max(1, 4 * MIB // nbytes)))
    for contender in (probe, *contenders.values()):
        contender.free()
    return times


def row(nbytes: int, times: dict[str, list[float]], fastest: float) -> dict[str, Any]:
    """Return the medians of turns together and apart, in us."""
    apart = np.array(times[PROBE]) > APART * fastest
    medians = {}
    for name, each in times.items():
        parts = {"together": np.array(each)[~apart], "apart": np.array(each)[apart]}
        medians[name] = {how: round(1e6 * float(np.median(part)), 1) for how, part in parts.items() if part.size}
    turns = {"together": int((~apart).sum()), "apart": int(apart.sum())}
    return {"size": nbytes, "turns": turns, "time_us": medians}


def main() -> None:
    """Measure all sizes, and print and save what came out."""
    limit = float(sys.argv[2]) if sys.argv[2:] else 20.0
    measured = {nbytes: measure(nbytes, limit) for nbytes in SIZES}
    if COMM.rank:
        return
    fastest = min(float(np.percentile(times[PROBE], 5)) for times in measured.values())
    rows = [row(nbytes, times, fastest) for nbytes, times in measured.items()]
    for each in rows:
        print(f"{each['size'] // MIB} MiB: turns {each['turns']}; us")
        for name, medians in each["time_us"].items():
            print(f"  {name:32}" + "".join(f"{how:>10} {us:10.1f}" for how, us in medians.items()))
    saved = {"machine": machine.facts(), "ranks": COMM.size, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
