"""Run mlbench's all-reduce benchmark (its task 0a) on this node: auto, MPI_Allreduce, and Gloo where torch is.

    python bench/mlbench.py [--only NAME] [options of mpiagg bench]

The sizes are np.logspace(0, 8, num=80) elements of float32, each as a whole number and once, up to 64 MiB (``-m 400M``
runs all of them). At each there are 100 calls, every one on new random values and timed alone; what is drawn is their
mean. Other than in mlbench, the contenders take turns, the ranks leave a barrier before each call, and a time is that
of the slowest rank; so waiting for a rank that has not finished its random numbers is in no time.

It saves and draws ``bench/results/<name>-<library>.json``.
"""

import sys

from saving import BENCH, main

SWEEPS = {
    f"mlbench-n{ranks}-{buffer}": [
        *[*BENCH, "-n", str(ranks), "--buffer", buffer, "--sizes", "mlbench", "-m", "64M", "-a", "auto"],
        *["--time-limit", "60"],
    ]
    for ranks in (2, 4)
    for buffer in ("any", "registered")
}

if __name__ == "__main__":
    sys.exit(main(SWEEPS))
