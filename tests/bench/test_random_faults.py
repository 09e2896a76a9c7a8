"""``bench/random_faults.py``: a few of its runs, and that it complains where something is wrong with one."""

import signal
import sys
from itertools import islice
from pathlib import Path

import pytest

from mpiagg.launch import start as launch

sys.path.append(str(Path(__file__).parents[2]))

from bench import random_faults
from bench.fault_jobs import can_mount
from bench.random_fault_draws import (
    FAULTS,
    OWN_SHM,
    STEPS,
    Draw,
    Job,
    Outcome,
    blamed,
    complaints,
    draws,
    survived,
)

PATIENCE = 4.0
"""The machine may be busy."""

SAMPLE = (
    "exception",
    "SIGTERM",
    "op",
    "NaN",
    "extra",
    "delay",
    "SIGSTOP, SIGCONT",
    "SIGKILL, survived",
    "full /dev/shm",
)


def test_draws_are_the_same_again_and_of_all_kinds():
    one, other = (list(islice(draws(1, 4), 200)) for _ in range(2))
    assert one == other
    assert one != list(islice(draws(2, 4), 200))
    assert {job.draw.fault for job in one} == set(FAULTS)
    assert {job.draw.rank for job in one} == {0, 1, 2, 3}
    assert {job.ranks for job in one} == {3, 4}
    assert "SIGKILL, survived" not in {job.draw.fault for job in islice(draws(1, 4, without=["ULFM"]), 200)}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", SAMPLE)
def test_a_run_ends_well(fault):
    if FAULTS[fault].needs == "ULFM" and launch.mpi_vendor() != "Open MPI":
        pytest.skip("Open MPI alone survives that")
    if FAULTS[fault].needs == OWN_SHM and not can_mount():
        pytest.skip("no file system can be mounted here")
    job = next(job for job in draws(3, 3) if job.draw.fault == fault)
    verdict = random_faults.judge(job._replace(aggregation="allreduce"), PATIENCE)
    assert verdict.complaints == [], verdict.printed


# -- what must be refused

JOB = Job("allreduce", 3, Draw("exception", 1, 5, "in", 0.0, 0.0))
END = {"digest": "good", "step": STEPS, "stopped": False, "size": 3, "first": [0], "lost": []}
RIGHT = Outcome(0, 1.0, dict.fromkeys(range(3), END))
EARLY = {**END, "stopped": True, "step": 6}
STOPPED = Outcome(0, 1.0, dict.fromkeys(range(3), EARLY))
SAID = "mpiagg: rank {} of 3, on node, raised OnPurposeError: \n"
RAISED = Outcome(1, 1.0, {}, SAID.format(1))


def job(fault):
    return JOB._replace(draw=JOB.draw._replace(fault=fault))


@pytest.mark.parametrize("outcome", [RIGHT, RAISED])
def test_good_outcomes(outcome):
    assert complaints(JOB, outcome, RIGHT) == []


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (RAISED._replace(status=None), "it hung"),
        (RIGHT._replace(status=None), "it hung"),
        (RAISED._replace(left=2), "2 processes were left"),
        (RIGHT._replace(left=1), "1 processes were left"),
        (RIGHT._replace(ends={**RIGHT.ends, 2: {**END, "digest": "other"}}), "rank 2 has other weights"),
        (RAISED._replace(printed=SAID.format(2)), "blamed were: [2]"),
        (RAISED._replace(printed=SAID.format(1) + SAID.format(2)), "blamed were: [1, 2]"),
        (RAISED._replace(printed=""), "blamed were: none"),
        (RAISED._replace(status=0), "yet its exit status is 0"),
        (Outcome(0, 1.0, {0: END, 1: END}), "yet its exit status is 0"),
        (STOPPED, "nobody asked it to"),
    ],
)
def test_bad_outcomes(outcome, words):
    assert words in "; ".join(complaints(JOB, outcome, RIGHT))


def test_two_that_disagree_before_the_others_have_come_are_both_named():
    words = (
        "mpiagg: rank {} of 3, on node, raised MismatchError: ranks disagree in operation 5: rank 1: a sum; {}: a max\n"
    )
    assert complaints(job("extra"), RAISED._replace(printed=words.format(1, "rank 0")), RIGHT) == []
    assert complaints(job("extra"), RAISED._replace(printed=words.format(1, "ranks 0, 2")), RIGHT) == []
    assert complaints(job("extra"), RAISED._replace(printed=words.replace("1", "2").format(2, "rank 0")), RIGHT)


def test_what_is_only_late_must_come_to_its_end():
    assert "as it should have" in complaints(job("delay"), RAISED, RIGHT)[0]


def test_runs_that_have_stopped_were_asked_to():
    assert complaints(job("SIGTERM"), STOPPED, RIGHT) == []
    assert complaints(job("SIGTERM"), STOPPED._replace(ends={**STOPPED.ends, 2: {**EARLY, "step": 7}}), RIGHT)


def test_what_launchers_say_of_ranks_that_are_killed():
    prterun = "prterun noticed that process rank {} with PID 7 on node vm exited on\nsignal 9 (Killed).\n"
    assert complaints(job("SIGKILL"), RAISED._replace(status=137, printed=prterun.format(1)), RIGHT) == []
    assert complaints(job("SIGKILL"), RAISED._replace(status=137, printed=prterun.format(2)), RIGHT)
    hydra = RAISED._replace(printed="APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)")
    assert complaints(job("SIGKILL"), hydra._replace(status=int(signal.SIGKILL)), RIGHT) == []
    assert complaints(JOB, hydra._replace(status=int(signal.SIGKILL)), RIGHT)
    gone = hydra.printed + "\nmpiagg: rank 2 is gone"
    assert complaints(job("SIGKILL"), hydra._replace(status=int(signal.SIGKILL), printed=gone), RIGHT)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("ranks disagree in operation 5: rank 1: a sum; ranks 0, 2: a max", {1}),
        ("ranks disagree in operation 5: ranks 0, 2: a sum; rank 1: a max", {1}),
        ("ranks disagree: rank 1: a sum; rank 2: a max", {1, 2}),
        ("rank 1: in it", set()),
    ],
)
def test_the_ranks_that_disagree_with_most_are_blamed(text, ranks):
    assert blamed("op", RAISED._replace(printed=text)) == ranks


def test_survivors_must_have_what_is_right_for_them():
    weights = [each.tolist() for each in survived([(0, range(3)), (6, [0, 2])])]
    end = {**END, "size": 2, "first": [0, 6], "lost": [[1]], "weights": weights}
    killed = JOB._replace(draw=JOB.draw._replace(fault="SIGKILL, survived", step=8))
    assert complaints(killed, Outcome(0, 1.0, {0: end, 2: end}), RIGHT) == []
    for change in ({"first": [0, 5]}, {"first": [0, 0]}, {"lost": [[2]]}):
        assert complaints(killed, Outcome(0, 1.0, {0: end, 2: {**end, **change}}), RIGHT)
