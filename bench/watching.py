"""What it costs that ranks are watched over: the recorder, the side channel and the signatures, beside builds without.

    python bench/watching.py [--ranks 2] [--jobs 15] [--before FOLDER] [-o FILE.json]

Jobs with everything on, with all of it off, and with the rounds recorded take turns; with ``--before`` those of another
checkout, too, for instance of a commit that had none of it. Signatures cannot be turned off: where all is off, barriers
are patched to know nothing of them. Each job times the same calls, and takes the median over blocks. What counts are
medians, over the turns, of what the jobs of one turn differ by: the speed of memory changes from minute to minute on
machines that are shared.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from saving import RESULTS, library

from mpiagg.launch import start as launch

HERE = Path(__file__).parent
OFF = {"MPIAGG_RECORD": "off", "MPIAGG_WATCH": "0", "UNSIGNED": "1"}
BLOCKS = 40


def rank_main() -> None:
    """Time the calls, as one rank; rank 0 prints their seconds."""
    import numpy as np  # noqa: PLC0415 - only ranks need it
    from mpi4py import MPI  # noqa: PLC0415 - the parent must not initialise MPI

    import mpiagg  # noqa: PLC0415 - of whichever checkout the parent has named

    def seconds(call: Callable[[], object], repeats: int) -> float:
        found = np.empty(BLOCKS)
        for block in range(BLOCKS):
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            found[block] = (time.perf_counter() - start) / repeats
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return float(np.median(found))

    if os.environ.get("UNSIGNED"):
        from mpiagg.transport.barriers import NodeBarrier, Signatures, SignedBarrier  # noqa: PLC0415 - as above
        from mpiagg.transport.node_memory import NodeMemory  # noqa: PLC0415 - as above

        def enter_and_come(barrier: SignedBarrier, signature: int) -> None:
            del signature
            barrier.enter(0)
            barrier.come()

        SignedBarrier.come, SignedBarrier.passed = NodeBarrier.come, NodeBarrier.passed  # type: ignore[method-assign]  # what it costs is measured without it
        SignedBarrier.enter_and_come = enter_and_come  # type: ignore[method-assign]  # so too
        nothing = Signatures()
        NodeMemory.signatures = lambda _: nothing  # type: ignore[method-assign]  # so too

    short, long, shared = np.zeros(16, np.float32), np.zeros(2**18, np.float32), mpiagg.empty(2**18, np.float32)
    shared[:] = 0
    comm = mpiagg.Comm(MPI.COMM_WORLD)
    with (
        mpiagg.allreduce_init(short, out=short, algorithm="shared") as by_barrier,
        mpiagg.allreduce_init(short, out=short, algorithm="recursive_doubling") as by_message,
        mpiagg.allreduce_init(long, out=long, algorithm="ring") as ring,
        mpiagg.allreduce_init(shared, out=shared, algorithm="shared") as in_place,
    ):
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "64 B, plan, shared memory": (by_barrier, 500),
            "64 B, plan, messages": (by_message, 300),
            "64 B, mpiagg.allreduce": (lambda: mpiagg.allreduce(short, out=short), 300),
            "64 B, Comm.Bcast, the MPI library's own": (lambda: comm.Bcast(short), 300),
            "1 MiB, plan, ring": (ring, 20),
            "1 MiB, plan, registered": (in_place, 20),
        }
        for call, repeats in calls.values():
            seconds(call, repeats // 10)
        found = {name: seconds(call, repeats) for name, (call, repeats) in calls.items()}
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(json.dumps(found))


def run_job(ranks: int, environment: dict[str, str]) -> dict[str, float]:
    """Return what one job has measured."""
    command = launch.command(ranks, ["-m", "mpi4py", str(HERE / "watching.py"), "--rank"])
    done = subprocess.run(  # noqa: S603 - our own Python
        command, env=launch.environment(environment), capture_output=True, text=True, timeout=300, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _costs(on: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Return for each call how many seconds it takes longer, and how many times as long, as with another build."""
    return {
        call: (
            median(a[call] - b[call] for a, b in zip(on, other, strict=True)),
            median(a[call] / b[call] for a, b in zip(on, other, strict=True)),
        )
        for call in on[0]
    }


def main() -> None:
    """Let jobs take turns, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--before", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    builds = {"on": {}, "off": OFF, "rounds": {"MPIAGG_RECORD": "rounds"}}
    if asked.before:
        builds["before"] = {"PYTHONPATH": str(asked.before.resolve())}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in builds}
    for turn in range(asked.jobs):
        for name in sorted(builds, key=lambda name: (turn + list(builds).index(name)) % len(builds)):
            times[name].append(run_job(asked.ranks, builds[name]))
    costs = {name: _costs(times["on"], times[name]) for name in builds if name != "on"}
    for call in times["on"][0]:
        on = median(job[call] for job in times["on"])
        others = ", ".join(f"{cost[call][0] * 1e6:+.2f} us ({cost[call][1]:.3f}) to {it}" for it, cost in costs.items())
        print(f"{call:40} {on * 1e6:8.2f} us  {others}")
    from mpiagg.benchmarks import machine  # noqa: PLC0415 - it imports MPI, which a parent of jobs must not before them

    saved = {"machine": machine.facts(), "ranks": asked.ranks, "jobs": asked.jobs, "costs": costs, "seconds": times}
    path = asked.output or RESULTS / f"watching-n{asked.ranks}-{library()}.json"
    path.write_text(json.dumps(saved, indent=1) + "\n")
    print(f"saved {path}")


if __name__ == "__main__":
    os.environ.setdefault("MPIAGG_RECORD_DIR", "/dev/null")
    if sys.argv[1:] == ["--rank"]:
        rank_main()
    else:
        main()
