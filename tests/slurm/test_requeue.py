"""Training that is requeued goes on where it was, and ends with the weights that it would have had anyway."""

import re

import numpy as np
import pytest

STEPS = 300


@pytest.fixture
def submit(slurm, mpi_type):
    """Return a function that submits the training with one rank on each of two nodes."""

    def submit(*arguments, options=(), **environment):
        words = ("requeue.sbatch", "--steps", str(STEPS), *arguments)
        return slurm.submit(*words, options=("--ntasks-per-node=1", *options), MPI_TYPE=mpi_type, **environment)

    return submit


def goes_on(job, restarts):
    """Assert that a training was requeued so often and never began anew."""
    assert job.state == "COMPLETED", job.printed
    assert job.restarts == restarts
    starts = job.printed.split("== start ")[1:]
    assert [int(start.split()[0]) for start in starts] == list(range(restarts + 1))
    assert ["goes on from a checkpoint" in start for start in starts] == [False] + [True] * restarts
    stops = [int(re.search(r"stopped after step (\d+)", start)[1]) for start in starts[:-1]]
    assert stops == sorted(set(stops))
    assert stops[0] > 0
    assert stops[-1] < STEPS
    assert f"ended after step {STEPS}" in starts[-1]


def without_interruption(slurm, submit, folder):
    """Return the weights of a training that nobody interrupts."""
    job = slurm.wait(submit(OUT=str(folder)))
    assert job.state == "COMPLETED", job.printed
    assert "checkpoint" not in job.printed
    return np.load(folder / "weights.npy")


def test_a_signal_of_slurm_requeues_the_training(slurm, submit, tmp_path):
    job = submit("--pause", "0.02")
    checkpoint = tmp_path / "checkpoint"
    # It is in its steps, then: it saves after 100 of them.
    slurm.wait_until(checkpoint.exists, job)
    # What Slurm sends by itself when the time is nearly up: to the ranks, not to the script.
    slurm.run("scancel", "--signal=TERM", job)
    goes_on(slurm.wait(job), restarts=1)
    weights = np.load(tmp_path / "weights.npy")
    np.testing.assert_array_equal(weights, without_interruption(slurm, submit, tmp_path / "other"))


@pytest.mark.slow
def test_the_end_of_the_time_requeues_the_training(slurm, submit, tmp_path):
    # Slurm looks at its clock every 30 s, and this job has a minute: it is told to stop when Slurm first looks.
    job = submit("--pause", "0.12", options=["--time=1"])
    ended = slurm.wait(job)
    goes_on(ended, restarts=ended.restarts)
    assert ended.restarts
    weights = np.load(tmp_path / "weights.npy")
    np.testing.assert_array_equal(weights, without_interruption(slurm, submit, tmp_path / "other"))
