"""Ranks that die under Open MPI's user-level failure mitigation, and others that go on."""

import json
import os
import pickle
import subprocess
import sys
import uuid
from itertools import groupby
from pathlib import Path

import pytest
from jobs import MARK, all_gone, end_processes

import mpiagg
from mpiagg.launch import start as launch

HERE = Path(__file__).parent

ulfm = pytest.mark.skipif(launch.mpi_vendor() != "Open MPI", reason="only Open MPI goes on when a rank dies")


def run(command, seconds=150):
    """Run a job within so many seconds; no process of it may be left."""
    mark = uuid.uuid4().hex
    env = launch.environment({MARK: mark, "MPIAGG_RECORD_DIR": os.devnull})
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=seconds)
    finally:
        gone = all_gone(mark, seconds=20)
        end_processes(mark)
        assert gone


def survive(folder, ranks, case):
    """Run a case of survivors.py, and return what each rank has seen that has come to the end."""
    arguments = ["-m", "mpi4py", str(HERE / "survivors.py"), str(folder), case]
    done = run(launch.command(ranks, arguments, launch.SURVIVING))
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


@ulfm
def test_all_that_are_left_are_told_who_has_died_and_go_on(tmp_path):
    seen = survive(tmp_path, 5, "calls")
    # Of 0, 1, 2, 3, 4 first 3 dies, of 0, 1, 2, 4 then the first and the third, and of 1 and 4 the first.
    assert set(seen) == {4}
    (only,) = seen.values()
    assert [found["size"] for found in only] == [4, 2, 1]
    for found, dead in zip(only, ([3], [0, 2], [0]), strict=True):
        for name, told in found["told"].items():
            assert all(told), name
            assert {rank for ranks in told for rank in ranks} <= set(dead), name
        assert found["seconds"] < 20


@ulfm
def test_training_goes_on_with_every_aggregation(tmp_path):
    seen = survive(tmp_path, 4, "training")
    assert set(seen) == {0, 2}
    for found in seen.values():
        assert (found["steps"], found["size"], found["lost"]) == (20, 2, [[1], [2]])
        assert found["same"]
        assert found["difference"] < 1e-12
        assert max(found["spreads"].values()) < 1e-2


@ulfm
def test_ranks_may_die_before_a_loop_takes_its_first_step(tmp_path):
    seen = survive(tmp_path, 6, "making")
    assert set(seen) == {4, 5}
    for found in seen.values():
        assert found["sizes"] == [2.0] * 6
        assert found["lost"][0] == [0]
        assert len(found["lost"]) >= 4


@ulfm
def test_a_rank_may_die_that_has_a_part_of_the_parameters(tmp_path):
    seen = survive(tmp_path, 3, "keeping")
    assert seen == {rank: {"weights": [0.0] * 8, "lost": [[1]]} for rank in (0, 2)}


@ulfm
def test_what_a_death_has_left_is_saved_when_the_others_are_to_stop(tmp_path):
    seen = survive(tmp_path, 3, "asking")
    assert seen == {rank: {"stopped": True, "step": 6, "saved": 6} for rank in (0, 2)}


@ulfm
def test_ranks_are_started_in_the_places_of_the_dead_and_join(tmp_path):
    seen = survive(tmp_path, 3, "growing")
    assert len(seen) == 3
    assert sorted(found["new"] for found in seen.values()) == [False, True, True]
    for found in seen.values():
        assert found["same"]
        assert found["stopped"]
        # Between ranks of several worlds the MPI library would send by TCP, though they are on one node.
        assert found["native"] == [True, False]
        runs = [(size, len(list(run))) for size, run in groupby(found["sizes"])]
        assert [size for size, _ in runs] == [3, 2, 3, 2, 3]
        assert sum(length for _, length in runs) == found["step"]
        # What was lost with a death goes back to a commit, after every third step, or to where ranks joined.
        assert sum(length for size, length in runs if size == 3) == 19


@ulfm
def test_the_demo_goes_on_without_a_rank(tmp_path):
    path = tmp_path / "demo.json"
    options = ["--kill-rank", "2", "--at-step", "50", "--json", str(path), "--plot", str(tmp_path / "loss.png")]
    done = run([sys.executable, "-m", "mpiagg", "demo", *options])
    assert done.returncode == 0, done.stderr
    assert "Rank 2 died in step 50. The other 3 finished that step" in done.stdout
    told = json.loads(path.read_text())
    assert told["ranks"] == 3
    assert told["test_accuracy"] >= 0.96
    # Of the epoch that was over before, too, though the dead rank has taken its share of it along.
    assert told["losses"][0] == pytest.approx(told["serial_losses"][0], rel=0.15)
    assert 0 < told["bytes_by_epoch"][0] < told["bytes_by_epoch"][1]
    assert told["difference_from_serial"] <= 1e-8
    assert told["difference_between_ranks"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kill-rank", "4"], "--kill-rank 4: that rank and another one are needed; -n is 4"),
        (["--kill-rank", "0", "-n", "1"], "that rank and another one are needed"),
    ],
)
def test_a_rank_that_is_not_there_cannot_die(options, words):
    done = run([sys.executable, "-m", "mpiagg", "demo", *options])
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.skipif(launch.mpi_vendor() == "Open MPI", reason="Open MPI can do it")
def test_other_libraries_are_refused():
    done = run([sys.executable, "-m", "mpiagg", "demo", "--kill-rank", "2"])
    assert done.returncode == 1
    assert "needs ULFM" in done.stderr


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(mpiagg.RankFailedError("rank 2 has died", (2,))))  # noqa: S301 - our own
    assert (str(error), error.ranks) == ("rank 2 has died", (2,))
