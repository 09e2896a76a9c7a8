"""Run the saved set of measurements on this node, with the MPI library that mpi4py loads, beside Gloo where torch is.

    python bench/node.py [--only NAME] [options of mpiagg bench]

It saves and draws ``bench/results/<name>-<library>.json``, one file a sweep; further options go to each of them.
"""

import sys

from saving import BENCH, main

SWEEPS = {
    f"allreduce-n{ranks}-{buffer}": [*BENCH, "-n", str(ranks), "--buffer", buffer]
    for ranks in (2, 4)
    for buffer in ("any", "registered")
}

if __name__ == "__main__":
    sys.exit(main(SWEEPS))
