"""Run the saved set of measurements on virtual clusters, with the MPI library that mpi4py loads, beside Gloo.

    sudo python bench/network.py [--only NAME] [options of mpiagg bench]

The clusters are made by ``bench/cluster.py``, which says what they need. It saves and draws
``bench/results/<name>-<library>.json``, one file a sweep; further options go to each of them.
"""

import sys
from pathlib import Path

from saving import BENCH, main

from mpiagg.schedules import Collective

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
    f"{collective.value}-{nodes}x{ranks}-any": [
        *[*on(nodes, ranks), *BENCH[:-1], collective.value],
        *["-m", "64:4M" if collective is Collective.ALLTOALL else "1K:16M", "--link-rate", RATE, "--time-limit", "4"],
    ]
    for collective in Collective
    if collective is not Collective.ALLREDUCE
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
