"""Run pytest as one rank of an MPI job, and leave what happened in files of its own.

``python -m mpi4py tests/rank.py FOLDER SECONDS PYTEST_ARGUMENTS...`` writes to FOLDER, for rank R, its output to
``R.out`` and ``R.err``, the outcome of every test to ``R.json``, and as they come, for jobs that are cut, to
``R.tests``. After so many seconds in one test it says where it is, and ends.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

import pytest
from mpi4py import MPI


class Outcomes:
    """Collects the outcome of every test, under the test's name."""

    def __init__(self, path, seconds):
        self.outcomes, self.path, self.seconds = {}, path, seconds

    def pytest_runtest_logstart(self):
        # Unlike pytest-timeout, this needs no lock of Python's.
        faulthandler.dump_traceback_later(self.seconds, exit=True)

    def pytest_runtest_logfinish(self):
        faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = report.outcome
            with self.path.open("a") as file:
                file.write(f"{report.nodeid} {report.outcome}\n")


def main(folder, seconds, arguments):
    rank = MPI.COMM_WORLD.Get_rank()
    # The files stay open after pytest: what an MPI library complains of at its end is output as well.
    for stream, ending in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        file = os.open(folder / f"{rank}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, stream.fileno())
        os.close(file)
    outcomes = Outcomes(folder / f"{rank}.tests", seconds)
    # Without capture: what C libraries write while tests run must not vanish with the tests that pass.
    arguments = [*arguments, "--only-mpi", "--capture=no", "-p", "no:cacheprovider"]
    status = pytest.main(arguments, plugins=[outcomes])
    (folder / f"{rank}.json").write_text(json.dumps(outcomes.outcomes))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
