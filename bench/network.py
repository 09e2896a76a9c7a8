"""Run the saved set of measurements on virtual clusters, with the MPI library that mpi4py loads, beside Gloo.

    sudo python bench/network.py [--only NAME] [options of mpiagg bench]

The clusters are made by ``bench/cluster.py``, which says what they need. It saves and draws
``bench/results/<name>-<library>.json``, one file a sweep; further options go to each of them.
"""

import sys
from pathlib import Path

from saving import BENCH, main

RATE = "1gbit"
OPTIONS = ["-m", "64:16M", "--link-rate", RATE, "--wire", "bf16", "--wire", "u8", "--time-limit", "12"]
CLUSTER = [sys.executable, str(Path(__file__).with_name("cluster.py"))]


def on(nodes: int, ranks: int) -> list[str]:
    """Return the command that runs another one on so many nodes of so many ranks."""
    return [*CLUSTER, "--nodes", str(nodes), "--ranks", str(ranks), "--rate", RATE, "--"]


SWEEPS = {
    f"allreduce-{nodes}x{ranks}-{buffer}": [*on(nodes, ranks), *BENCH, *OPTIONS, "--buffer", buffer]
    # Registered memory is for ranks that share a node.
    for nodes, ranks, buffer in ((4, 1, "any"), (2, 2, "any"), (4, 2, "any"), (2, 2, "registered"))
}
SWEEPS |= {
    f"{collective}-{nodes}x{ranks}-any": [
        *[*on(nodes, ranks), *BENCH[:-1], collective],
        *["-m", "1K:16M", "--link-rate", RATE, "--time-limit", "4"],
    ]
    for collective, nodes, ranks in (
        *[("broadcast", 4, 1), ("reduce", 4, 1), ("allgather", 4, 1), ("reduce_scatter", 4, 1)],
        *[("broadcast", 2, 2), ("reduce", 2, 2), ("allgather", 2, 2), ("reduce_scatter", 2, 2)],
        *[("gather", 4, 1), ("scatter", 4, 1), ("scan", 4, 1), ("exscan", 4, 1)],
    )
}

SWEEPS |= {
    f"alltoall-{nodes}x{ranks}-any": [
        *[*on(nodes, ranks), *BENCH[:-1], "alltoall"],
        *["-m", "64:4M", "--link-rate", RATE, "--time-limit", "4"],
    ]
    for nodes, ranks in ((4, 1), (2, 2), (4, 2))
}

SWEEPS |= {
    f"exact-{nodes}x{ranks}-any": [
        *[*on(nodes, ranks), *BENCH, "--wire", "exact", "-a", "auto", "-a", "ring"],
        *["-m", "64K:16M", "--link-rate", RATE, "--time-limit", "4"],
    ]
    for nodes, ranks in ((4, 1), (2, 2))
}

if __name__ == "__main__":
    sys.exit(main(SWEEPS))
