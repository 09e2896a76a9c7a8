"""``bench/learning.py``: what is asked for and what is there, the goal, and that all of it works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

TOP = Path(__file__).parents[2]
sys.path.insert(0, str(TOP))

from bench import learning  # noqa: E402 - of the checkout
from bench.learning import ALONE, TORCH, Part  # noqa: E402 - so too

LENGTHS = {"characters": (600, 20), "digits": (400, 20)}


def lengths(task, size):
    assert size == 4
    return LENGTHS[task]


def record(way, *, task="characters", link=None, split="iid", ranks=4, seed=0, **more):
    steps, points = LENGTHS[task]
    return {**Part(task, split, ranks, link, seed, steps, points, [way]).settings, "way": way, **more}


def asked(saved, **more):
    usual = {"tasks": ["characters", "digits"], "splits": ["iid", "skewed"], "ranks": [4], "links": []}
    return list(learning.parts(saved, **{**usual, "ways": [ALONE, TORCH], "lengths": lengths, **more}))


def test_what_is_saved_is_not_done_again():
    assert [(part.task, part.split) for part in asked([])] == [
        *(("characters", "iid"), ("characters", "skewed")),
        *(("digits", "iid"), ("digits", "skewed")),
    ]
    first, *others = asked([record(ALONE), record(TORCH, task="digits", split="skewed", ranks=8)])
    assert first.ways == [TORCH]
    assert all(part.ways == [ALONE, TORCH] for part in others)
    assert len(asked([record(ALONE), record(TORCH)])) == 3
    assert [
        part.seed for part in asked([record(ALONE), record(TORCH)], tasks=["characters"], splits=["iid"], seeds=[0, 1])
    ] == [1]
    # Of other lengths it is another training.
    assert asked([record(ALONE)], lengths=lambda *_: (601, 20))[0].ways == [ALONE, TORCH]


def test_those_whose_times_are_compared_take_turns_in_one_job():
    (part,) = asked([record(ALONE, link="1gbit")], tasks=["characters"], links=["1gbit"])
    assert (part.split, part.ways) == ("iid", [ALONE, TORCH])
    assert asked([record(way, link="1gbit") for way in (ALONE, TORCH)], tasks=["characters"], links=["1gbit"]) == []


def trained(way, loss, pace, peak, seed=0):
    curve = record(way, seed=seed, curve=[{"step": 1, "loss": 9.0}, {"step": 600, "loss": loss}], peak_bytes=peak)
    return [curve, record(way, link="100mbit", tokens_a_second=pace, peak_bytes=peak)]


@pytest.mark.parametrize(
    ("way", "met"),
    [
        (("good", 1.61, 95.0, 10), True),
        (("slow", 1.61, 89.0, 10), False),
        (("wrong", 1.62, 95.0, 10), False),
        (("bursts", 1.61, 95.0, 11), False),
        (("diverged", None, 95.0, 10), None),
    ],
)
def test_the_goal_is_held_against_the_references(way, met):
    saved = [*trained(ALONE, 1.9, 100.0, 0), *trained(TORCH, 1.6, 40.0, 1000)]
    found = {row["way"]: row["met"] for row in learning.goal([*saved, *trained(*way)])}
    assert found.pop(TORCH) is False
    assert found == ({} if met is None else {way[0]: met})
    # With another seed the ratio may be another; it counts as much.
    saved += [*trained(TORCH, 1.7, 40.0, 1000, seed=1), *trained(*way, seed=1)]
    mean = [row["loss"] for row in learning.goal([*saved, *trained(*way)]) if row["way"] == way[0]]
    assert mean == ([] if met is None else [pytest.approx((way[1] / 1.6 + way[1] / 1.7) / 2)])
    # Without what it is held against there is nothing to say; nor of another task.
    assert learning.goal(trained(*way)) == []
    assert learning.goal([*saved, *trained(*way)], "characters-16") == []


def test_a_picture_has_eight_curves_at_most_and_all_are_drawn():
    drawn = learning.pages(learning.WAYS)
    assert all(len(page) <= learning.LINES == len(learning.COLOURS) for page in drawn)
    assert {way for page in drawn for way in page} == set(learning.WAYS)


def test_pictures_are_of_the_first_seed(tmp_path):
    output = tmp_path / "learning.json"
    output.write_text(json.dumps({"records": [record(TORCH, seed=3, curve=[{"step": 600, "loss": 1.5}])]}))
    learning.report(output)
    assert [path.name for path in tmp_path.iterdir()] == ["learning.json"]


def quick(output, *options):
    command = [sys.executable, "-m", "bench.learning", "--quick", "-o", str(output), *options]
    env = {**os.environ, "PYTHONPATH": str(TOP)}
    done = subprocess.run(command, cwd=TOP, env=env, capture_output=True, text=True, check=False, timeout=280)
    return done.returncode, done.stdout + done.stderr


def losses(output):
    saved = json.loads(output.read_text())["records"]
    return {each["way"]: [point["loss"] for point in each["curve"]] for each in saved}


@pytest.mark.parametrize(
    "options",
    [
        ["--task", "digits", "--split", "skewed"],
        pytest.param(["--task", "characters", "--split", "iid"], marks=pytest.mark.thorough),
    ],
)
def test_it_trains_in_all_ways_and_goes_on_where_it_was_stopped(tmp_path, options):
    for package in ("torch", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    output = tmp_path / "learning.json"
    status, printed = quick(output, *options, "--way", ALONE, "--way", "allreduce")
    assert status == 0, printed
    first = losses(output)
    assert set(first) == {ALONE, "allreduce"}
    status, printed = quick(output, *options, "--way", TORCH, "--way", "allreduce")
    assert status == 0, printed
    assert "allreduce" not in printed.split("drew")[0]  # it was there
    found = losses(output)
    assert {way: found[way] for way in first} == first
    assert found["allreduce"] == pytest.approx(found[TORCH], rel=1e-5)
    assert found[ALONE] != pytest.approx(found[TORCH], rel=1e-4)
    assert list(tmp_path.glob("*.png"))


def test_what_goes_wrong_is_told_and_the_others_are_trained(tmp_path, monkeypatch):
    output, jobs = tmp_path / "learning.json", []

    def run(part, path):
        jobs.append(list(part.ways))
        going = part.ways[: part.ways.index("allreduce")] if "allreduce" in part.ways else part.ways
        saved = [*learning.records(path), *({**part.settings, "way": way} for way in going)]
        path.write_text(json.dumps({"records": saved}))
        return int(len(going) < len(part.ways))

    monkeypatch.setattr(learning, "run", run)
    monkeypatch.setattr(learning, "report", lambda _: None)
    options = ["--task", "digits", "--split", "iid", "--ranks", "4", "-o", str(output)]
    for way in (ALONE, "allreduce", TORCH):
        options += ["--way", way]
    done = CliRunner().invoke(learning.main, options)
    assert jobs == [[ALONE, "allreduce", TORCH], [TORCH]]
    assert done.exit_code == 1
    assert "these went wrong: digits iid 4 allreduce" in done.output
