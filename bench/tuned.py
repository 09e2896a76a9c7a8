"""Measure a table for four virtual nodes by ``mpiagg tune``, and run their sweep of ``network.py`` once more with it.

    sudo python bench/tuned.py [options of mpiagg bench]

It saves ``bench/results/tuning-4x1-<library>.json``, the table, and ``allreduce-4x1-tuned-<library>.json``, with its
picture: there ``auto`` is what a user of this cluster gets who has measured a table for it. A table that is there
already is used; delete it to have another one measured. ``allreduce-<ranks>-quick-<library>.json`` are sweeps on
virtual nodes and on this one after ``mpiagg tune --quick``, with ``MPIAGG_TUNING=learn``.
"""

import subprocess
import sys

from network import CLUSTER, OPTIONS, RATE, on
from saving import BENCH, RESULTS, library, main

FOUR_NODES = [*CLUSTER, "--nodes", "4", "--rate", RATE, "--"]
TABLE = RESULTS / f"tuning-4x1-{library()}.json"
TUNE = [
    *[*FOUR_NODES, sys.executable, "-m", "mpiagg", "tune", "--collective", "allreduce"],
    *["-m", "64:16M", "--time", "120", "-o", str(TABLE)],
]

SWEEPS = {"allreduce-4x1-tuned": [*FOUR_NODES, "env", f"MPIAGG_TUNING={TABLE}", *BENCH, *OPTIONS]}

CACHE = RESULTS.parents[1] / "build"
LEARNED = ["env", f"XDG_CACHE_HOME={CACHE}"]
QUICK = [sys.executable, "-m", "mpiagg", "tune", "--quick", "-m", "64:4M"]
BENCH_LEARNED = [*LEARNED, "MPIAGG_TUNING=learn", *BENCH, "-m", "64:4M"]
TABLES = []
for nodes, ranks in ((4, 1), (2, 2)):
    TABLES.append([*on(nodes, ranks), *LEARNED, *QUICK])
    sweep = [*on(nodes, ranks), *BENCH_LEARNED, "--link-rate", RATE, "--time-limit", "4"]
    SWEEPS[f"allreduce-{nodes}x{ranks}-quick"] = sweep
for ranks in (2, 4):
    TABLES.append([*LEARNED, *QUICK, "-n", str(ranks)])
    SWEEPS[f"allreduce-n{ranks}-quick"] = [*BENCH_LEARNED, "-n", str(ranks), "--time-limit", "4"]

if __name__ == "__main__":
    measures = not {"-h", "--help"} & set(sys.argv)
    for measure in TABLES if measures else ():
        if status := subprocess.call(measure):  # noqa: S603 - our own Python
            sys.exit(status)
    if measures and not TABLE.exists():
        RESULTS.mkdir(exist_ok=True)
        if status := subprocess.call(TUNE):  # noqa: S603 - our own Python
            sys.exit(status)
    sys.exit(main(SWEEPS))
