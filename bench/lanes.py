"""Time all-reduces of long vectors in several numbers of lanes, beside what ``"auto"`` takes and the MPI library's own.

    sudo python bench/cluster.py --nodes 2 --rate 1gbit -- python -m mpi4py bench/lanes.py [-o FILE.json]

Between nodes this is what the lanes of the default table are by (``mpiagg/tables/predicted.py``). All take turns
(``mpiagg.benchmarks.timing``): medians, in microseconds.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiagg
from mpiagg.benchmarks import machine
from mpiagg.benchmarks.timing import Pace, medians
from mpiagg.transport import channel_of

COMM = MPI.COMM_WORLD
LANES = (1, 2, 4, 8, 16, 32)


def row(nbytes: int, algorithm: str, seconds: float) -> dict[str, Any]:
    """Return the times of a vector of so many bytes of float32."""
    x, out = (np.zeros(nbytes // 4, np.float32) for _ in range(2))
    here = partial(mpiagg.allreduce, x, out=out, comm=COMM)
    calls = {str(lanes): partial(here, algorithm=algorithm, lanes=lanes) for lanes in LANES}
    calls |= {"auto": here, "mpi": partial(COMM.Allreduce, x, out)}
    return {"bytes": nbytes, "algorithm": algorithm, "us": medians(COMM, calls, Pace(20_000, 1, seconds))}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--algorithm", default="ring")
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--seconds", type=float, default=10, help="for each length")
    asked = parser.parse_args()
    rows = []
    for mib in asked.mib:
        rows.append(row(mib * 2**20, asked.algorithm, asked.seconds))
        if COMM.rank == 0:
            print(mib, "MiB ", "  ".join(f"{name} {us:.0f}" for name, us in rows[-1]["us"].items()), flush=True)
    if COMM.rank == 0 and asked.output:
        nodes = [len(node) for node in channel_of(COMM).layout.nodes]
        saved = {"machine": machine.facts(), "nodes": nodes, "rows": rows}
        asked.output.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
