"""Start MPI jobs whose ranks run the tests in tests/mpi; and test the jobs themselves."""

import os
import subprocess
import uuid
from pathlib import Path

import pytest
from jobs import MARK, all_gone, end_processes, run_job
from thorough import thorough

from mpiagg.launch.start import mpi_vendor

HERE = Path(__file__).parent


SMALL_JOBS_ONLY = (
    *("aggregation_errors", "awareness", "checkpoints", "comm_buffers", "ddp_errors", "ddp_interface", "ddp_finite"),
    *("ddp_join", "ddp_shared", "device_sharded", "sharded"),
    *("device_aggregation", "device_collectives", "device_nccl", "errors", "fuzz", "placement"),
    *("gossip_overlap", "leaks", "local_sgd", "loop", "low_precision_errors", "memory"),
    *("power_sgd_state", "requests", "sparsified_state"),
)
"""Tests of what does not depend on how many ranks there are, beyond four."""

CORE = (
    "collectives",
    "comm",
    "barriers",
    "in_step",
    "nodes",
    "plan",
    "sharded",
    "shared",
    "sharing",
    "transport",
    "wire",
)
"""Tests of the algorithms, and of what carries them."""

LARGER_JOBS = {6: CORE, 8: None} if mpi_vendor() == "Open MPI" else {5: CORE, 7: None}
"""Jobs of more than four ranks take long: each MPI library has half of them, and one of them the core alone."""

SMALLER_JOBS = [2, *thorough(4)] if mpi_vendor() == "Open MPI" else [1, 2, *thorough(3, 4)]


@pytest.mark.parametrize("ranks", [*SMALLER_JOBS, *thorough(*LARGER_JOBS)])
def test_all_ranks_pass(tmp_path, ranks):
    folder = HERE / "mpi"
    assert all((folder / f"test_{name}.py").exists() for name in (*SMALL_JOBS_ONLY, *CORE))
    core = LARGER_JOBS.get(ranks)
    left_out = [] if ranks <= 4 else [f"test_{name}.py" for name in SMALL_JOBS_ONLY]
    if core is not None:
        left_out = [path.name for path in folder.glob("test_*.py") if path.stem.removeprefix("test_") not in core]
    only = "not few_ranks" if ranks > 4 else ""
    job = run_job(tmp_path, ranks, folder, leave_out=[folder / name for name in left_out], only=only)
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
