"""Training that is requeued goes on where it was, and ends with the weights that it would have had anyway."""

import re

import numpy as np
import pytest

pytestmark = pytest.mark.thorough

STEPS = 150


@pytest.fixture
def submit(slurm, mpi_type):
    """Return a function that submits the training, with a rank on each of two nodes unless told otherwise."""

    def submit(*arguments, options=("--ntasks-per-node=1",), **environment):
        words = ("requeue.sbatch", "--steps", str(STEPS), *arguments)
        return slurm.submit(*words, options=options, MPI_TYPE=mpi_type, **environment)

    return submit


@pytest.fixture
def without_interruption(slurm, submit, tmp_path):
    """Return a function that returns the weights of a training that nobody interrupts."""
    folder = tmp_path / "uninterrupted"
    number = submit(OUT=str(folder))

    def without_interruption():
        job = slurm.wait(number)
        assert job.state == "COMPLETED", job.printed
        assert "checkpoint" not in job.printed
        return np.load(folder / "weights.npy")

    return without_interruption


def starts_of(job):
    """Return what each start of a training has printed, having checked that each went on where the last was."""
    assert job.state == "COMPLETED", job.printed
    starts = job.printed.split("== start ")[1:]
    assert [int(start.split()[0]) for start in starts] == list(range(job.restarts + 1))
    assert ["goes on from a checkpoint" in start for start in starts] == [False] + [True] * job.restarts
    assert f"ended after step {STEPS}" in starts[-1]
    return starts


def stop_of(start):
    return int(re.search(r"stopped after step (\d+)", start)[1])


def test_a_signal_of_slurm_requeues_the_training(slurm, submit, tmp_path, without_interruption):
    number = submit("--pause", "0.02")
    # It is in its steps when this is there: it saves after 100 of them.
    slurm.wait_until((tmp_path / "checkpoint").exists, number)
    # What Slurm sends by itself when the time is nearly up: to the ranks, not to the script.
    slurm.run("scancel", "--signal=TERM", number)
    first, _ = starts_of(slurm.wait(number))
    assert 100 <= stop_of(first) < STEPS
    np.testing.assert_array_equal(np.load(tmp_path / "weights.npy"), without_interruption())


START = """
import argparse, os, signal

def parse_args(self, *arguments):
    end()
    return before(self, *arguments)

def end():
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGTERM)

if "SLURM_PROCID" in os.environ:
    if WHEN == "Python starts":
        end()
    else:
        before, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, parse_args
"""


@pytest.mark.parametrize("when", ["Python starts", "arguments are read"])
def test_a_signal_before_there_is_a_loop_requeues_the_training(slurm, submit, tmp_path, when):
    (tmp_path / "sitecustomize.py").write_text(START.replace("WHEN", repr(when)))
    job = slurm.wait(submit(PYTHONPATH=str(tmp_path)))
    assert job.state == "COMPLETED", job.printed
    first, second = job.printed.split("== start ")[1:]
    assert "stopped after step 0" in first
    assert f"ended after step {STEPS}" in second


def test_a_training_that_fails_while_others_start_is_not_requeued(slurm, submit, tmp_path):
    # srun ends the others by SIGTERM then, and its status is the highest: that must not pass for a wish to stop.
    (tmp_path / "sitecustomize.py").write_text("""
import os, sys, time
if os.environ.get("SLURM_PROCID") == "1":
    sys.exit("broken")
if "SLURM_PROCID" in os.environ:
    time.sleep(2)
""")
    job = slurm.wait(submit(PYTHONPATH=str(tmp_path)))
    assert (job.state, job.restarts) == ("FAILED", 0), job.printed


def test_a_training_that_was_killed_goes_on_when_it_is_requeued(slurm, submit, tmp_path):
    number = submit("--pause", "0.02", options=["--nodes=1", "--ntasks-per-node=2"])
    slurm.wait_until((tmp_path / "checkpoint").exists, number)
    slurm.run("scancel", "--signal=KILL", f"{number}.0")
    assert slurm.wait(number).state == "FAILED"
    slurm.run("scontrol", "requeue", number)
    first, _ = starts_of(slurm.wait(number))
    assert "stopped" not in first


@pytest.mark.slow
def test_the_end_of_the_time_requeues_the_training(slurm, submit, tmp_path, without_interruption):
    # Slurm looks at its clock every 30 s, and this job has a minute: it is told to stop when Slurm first looks.
    number = submit("--pause", "0.25", options=["--ntasks-per-node=1", "--time=1"])
    starts = starts_of(slurm.wait(number))
    stops = [stop_of(start) for start in starts[:-1]]
    assert stops
    assert stops == sorted(set(stops))
    np.testing.assert_array_equal(np.load(tmp_path / "weights.npy"), without_interruption())
