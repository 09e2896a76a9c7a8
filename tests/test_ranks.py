"""Start MPI jobs whose ranks run the tests in tests/mpi; and test the jobs themselves."""

import os
import subprocess
import uuid
from pathlib import Path

import pytest
from jobs import MARK, all_gone, end_processes, run_job
from thorough import slow, thorough

from mpiagg.launch.start import mpi_vendor

HERE = Path(__file__).parent


CORE = (
    *("collectives", "comm", "barriers", "in_step", "nodes", "plan", "sharded", "shared", "sharing", "transport"),
    "wire",
)
"""Tests of the algorithms, and of what carries them: all that jobs of many ranks run."""

STAND_INS = tuple(path.stem.removeprefix("test_") for path in (HERE / "mpi").glob("test_device_*.py"))
"""Tests of devices that the CPU stands in for: they need no second MPI library."""

OPEN_MPI = mpi_vendor() == "Open MPI"
FEW, MORE, MOST = ((2,), (4,), (8,)) if OPEN_MPI else ((2,), (1, 3, 5), (4,))
"""How many ranks the jobs have. They take long on few cores: so ``MOST`` are left to the slow lane."""


@pytest.mark.parametrize("ranks", [*FEW, *thorough(*MORE), *slow(*MOST)])
def test_all_ranks_pass(tmp_path, ranks):
    folder = HERE / "mpi"
    assert all((folder / f"test_{name}.py").exists() for name in CORE)
    names = {path.stem.removeprefix("test_") for path in folder.glob("test_*.py")}
    left_out = names - set(CORE) if ranks > (2 if OPEN_MPI else 4) else set(STAND_INS) if OPEN_MPI else set()
    paths = [folder / f"test_{name}.py" for name in sorted(left_out)]
    job = run_job(tmp_path, ranks, folder, leave_out=paths, only="not few_ranks" if ranks > 4 else "")
    if complaints := job.complaints():
        pytest.fail(complaints, pytrace=False)


SCRIPT = """
import sys, time
import pytest
from mpi4py import MPI
pytestmark = pytest.mark.mpi
rank = MPI.COMM_WORLD.rank
def test_first(): pass
def test_second(): {}
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("assert rank == 0, 'the one that fails'", "the one that fails"),
        ("pytest.skip('no reason')", "or skipped"),
        ("sys.stderr.write('a library speaks')", "a library speaks"),
    ],
)
def test_a_job_with_a_fault_is_not_passed(tmp_path, body, words):
    path = tmp_path / "test_fault.py"
    path.write_text(SCRIPT.format(body))
    assert words in run_job(tmp_path, 2, path).complaints()


def test_a_job_that_hangs_is_ended(tmp_path):
    path = tmp_path / "test_hang.py"
    path.write_text(SCRIPT.format("time.sleep(1000)"))
    job = run_job(tmp_path, 2, path, seconds=5)
    # MPICH's launcher ends ranks that have no more time, and its own status has been 0 then, though seldom.
    assert "-- rank 1" in job.complaints()


def test_a_rank_that_keeps_the_lock_of_python_says_where_it_is(tmp_path):
    path = tmp_path / "test_stuck.py"
    path.write_text("import ctypes\n" + SCRIPT.format("rank and ctypes.PyDLL(None).sleep(1000)"))
    # MPICH's launcher has once not noticed the rank's end, while the other one waited for it in MPI_Finalize.
    told = run_job(tmp_path, 2, path, stuck=3, seconds=120).complaints()
    assert "Timeout (0:00:03)!" in told
    assert "test_stuck.py" in told


def test_processes_that_outlive_their_launcher_are_found_and_ended():
    mark = uuid.uuid4().hex
    # The shell ends at once and leaves another behind, in a session of its own, which says when it is there.
    left = "setsid sh -c 'echo there; sleep 1000; :' &"
    with subprocess.Popen(["/bin/sh", "-c", left], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE) as shell:
        shell.stdout.readline()
    assert not all_gone(mark, seconds=0.5)
    end_processes(mark)
    assert all_gone(mark, seconds=20)


def test_ranks_that_run_other_tests_are_not_passed(tmp_path):
    path = tmp_path / "test_fault.py"
    path.write_text(SCRIPT.format("pass") + "if rank: test_third = test_first\n")
    told = run_job(tmp_path, 2, path).complaints()
    assert "rank 1 ran other tests than rank 0" in told
    assert "test_third" in told
