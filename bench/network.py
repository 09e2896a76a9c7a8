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

SWEEPS = {
    f"allreduce-{nodes}x{ranks}-{buffer}": [
        *[*CLUSTER, "--nodes", str(nodes), "--ranks", str(ranks), "--rate", RATE, "--"],
        *[*BENCH, *OPTIONS, "--buffer", buffer],
    ]
    # Registered memory is for ranks that share a node.
    for nodes, ranks, buffer in ((4, 1, "any"), (2, 2, "any"), (2, 2, "registered"))
}

if __name__ == "__main__":
    sys.exit(main(SWEEPS))
