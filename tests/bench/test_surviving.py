"""``bench/surviving.py``: that its account is right, and that it works."""

import sys
from pathlib import Path

import pytest

from mpiagg.launch import start as launch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench import surviving
from bench.surviving import Step


def steps(*numbers, every=1.0):
    return [Step(every * place, number, 4, 0.0) for place, number in enumerate(numbers, 1)]


def test_steps_that_are_done_again_count_once():
    found = surviving.summary(steps(0, 1, 2, 1, 2, 3), [3.2], 0, 10)
    assert (found["steps"], found["steps_done_again"]) == (4, 2)
    # 1 s each for the second 2 and for 3; the first after a start, and the first after going back, count nothing.
    assert found["training"] == 2 / 10
    assert found["seconds_to_next_step"] == pytest.approx({"median": 0.8, "most": 0.8})


def test_what_passes_between_two_ways_to_train_is_no_training():
    before, after = steps(0, 1, 2), [Step(20.0 + number, number, 3, 0.0) for number in (3, 4)]
    assert surviving.summary([*before, *after], [3.5], 0, 30)["training"] == 3 / 30
    again = [Step(20.0 + number, number, 4, 0.0, job=1) for number in (3, 4)]
    assert surviving.summary([*before, *again], [3.5], 0, 30)["training"] == 3 / 30


def test_training_that_never_goes_on_shows():
    found = surviving.summary(steps(0, 1, 2), [3.5], 0, 100)
    assert found["seconds_to_next_step"]["most"] == 96.5


def test_a_step_that_was_left_out_is_no_training():
    with pytest.raises(ValueError, match="step 3 came after 1"):
        surviving.summary(steps(0, 1, 3), [], 0, 10)
    with pytest.raises(ValueError, match="step 1 came after none"):
        surviving.summary(steps(1), [], 0, 10)


@pytest.mark.skipif(launch.mpi_vendor() != "Open MPI", reason="only Open MPI goes on when a rank dies")
def test_training_goes_on_while_ranks_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(surviving, "FAR", 1.0)  # there is no time to come near
    found = surviving.soak(tmp_path, 20, 3, 1, (1.5, 2.5))
    assert found["problems"] == []
    assert found["steps"] > 0


def test_throughput_is_what_steps_that_count_would_have_taken_undisturbed():
    taken = [*steps(0, 1, 2, 1), *(Step(10.0 + number, number, 3, 0.0) for number in (2, 3))]
    # 0 and 1 by four ranks, 2 and 3 by three; the first 2 was lost.
    assert surviving.throughput(taken, {4: 1.0, 3: 0.5}, 0, 20) == (2 * 1.0 + 2 * 0.5) / 20
    assert surviving.seconds_a_step([Step(9.0, 0, 4, 0.0), *steps(1, 2, 3, 4, every=2.0)]) == 2.0


def test_what_passes_while_a_job_is_stopped_does_not_count():
    stops = [(10.0, 14.0), (20.0, 21.0)]
    assert [surviving.without(stops, at) for at in (9.0, 12.0, 14.0, 16.0, 25.0)] == [9.0, 10.0, 10.0, 12.0, 20.0]


def test_of_a_loss_curve_the_steps_that_count_are_told():
    taken = [Step(at, step, 4, far) for at, step, far in ((1, 0, 1.0), (2, 1, 9.0), (3, 1, 0.5), (4, 2, 0.25))]
    found = surviving.losses(taken)
    assert found["curve"] == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert (found["mean"], found["deviation"]) == (0.375, 0.125)


@pytest.mark.skipif(launch.mpi_vendor() != "Open MPI", reason="only Open MPI goes on when a rank dies")
def test_ranks_that_are_killed_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(surviving, "FAR", 1.0)  # there is no time to come near
    found = surviving.soak(tmp_path, 20, 3, 1, (6, 6), respawn=True)
    assert found["problems"] == []
    assert found["jobs"] == 1
    assert found["kills"] >= 1
    assert found["throughput"] > 0
    assert len(found["undisturbed_runs_s"][3]) == surviving.PARTS + 1
    assert sum(found["steps_by_ranks"].values()) == found["steps"]
