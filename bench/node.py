"""Run the saved set of measurements on this node, with the MPI library that mpi4py loads.

    python bench/node.py [options of mpiagg bench]

It saves ``bench/results/<name>-<library>.json``, one file a sweep; further options go to each of them.
"""

import subprocess
import sys
from pathlib import Path

from mpiagg.cli import launch

RESULTS = Path(__file__).parent / "results"

SWEEPS = {
    "allreduce-n2": ["allreduce", "-n", "2"],
    "allreduce-n4": ["allreduce", "-n", "4"],
}


def main() -> int:
    """Run all sweeps, and return the worst exit status."""
    library = launch.mpi_vendor().replace(" ", "").lower()
    RESULTS.mkdir(exist_ok=True)
    worst = 0
    for name, arguments in SWEEPS.items():
        path = RESULTS / f"{name}-{library}.json"
        command = [sys.executable, "-m", "mpiagg", "bench", *arguments, "--json", str(path), *sys.argv[1:]]
        print("#", *command, flush=True)
        worst = max(worst, subprocess.call(command))  # noqa: S603 - our own Python
    return worst


if __name__ == "__main__":
    sys.exit(main())
