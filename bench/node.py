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
SWEEPS["exact-n2-any"] = [*BENCH, "-n", "2", "-m", "64K:64M", "--wire", "exact", "-a", "auto", "-a", "ring"]

if __name__ == "__main__":
    sys.exit(main(SWEEPS))
